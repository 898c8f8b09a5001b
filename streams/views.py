"""The base of the JSON doors. Apart from `doors`, which DRF's settings name and so may not import DRF's views."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from django.conf import settings
from django.http import HttpRequest
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from streams import shape
from streams.access import Caller
from streams.doors import ActorAuthentication
from streams.problems import NotSignedIn

S = TypeVar("S", bound=msgspec.Struct)


class ActorAuthenticationScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = ActorAuthentication
    name = ["bearer", "session"]

    def get_security_requirement(self, auto_schema: Any) -> list[dict[str, list[Any]]]:
        return [{"bearer": []}, {"session": []}]

    def get_security_definition(self, auto_schema: Any) -> list[dict[str, Any]]:
        return [
            {"type": "http", "scheme": "bearer", "description": "An agent's token: ags_PREFIX_SECRET"},
            {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME},
        ]


class View(APIView):
    """A door of the JSON API. `caller` is set; OPTIONS is no call."""

    metadata_class = None

    @property
    def caller(self) -> Caller:
        caller = self.request.auth
        if not isinstance(caller, Caller):
            raise NotSignedIn("sign in first")
        return caller

    def initialize_request(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Request:
        # DRF takes a body without Content-Length (chunked) for an empty one, which would lose it in silence.
        if not request.META.get("CONTENT_LENGTH") and request.META.get("HTTP_TRANSFER_ENCODING"):
            request.META["CONTENT_LENGTH"] = str(len(request.body))
        return super().initialize_request(request, *args, **kwargs)

    def body(self, wanted: type[S]) -> S:
        """Return the request's body as `wanted`."""
        return shape.read(self.request.data, wanted)

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        final = super().finalize_response(request, response, *args, **kwargs)
        if "Cache-Control" not in final:
            final["Cache-Control"] = "no-store"
        return final
