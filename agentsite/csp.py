"""The content policy of every answer: nothing but this site's own files runs, loads or frames.

Django has one built in from 6.0 on; this one serves 5.2 too. No page can ask for an exception. The one there is, is
Django's own admin, whose jQuery writes `innerHTML` as it starts: it goes without trusted types, and with all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

ADMIN_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
POLICY: Final = f"{ADMIN_POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"


def _with_policy(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    in_admin = request.resolver_match is not None and request.resolver_match.app_name == "admin"
    response.headers["Content-Security-Policy"] = ADMIN_POLICY if in_admin else POLICY
    return response


@sync_and_async_middleware
def content_security_policy(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], object]:
    """Put the policy on every answer, static files and errors included."""
    from asgiref.sync import iscoroutinefunction

    if iscoroutinefunction(get_response):

        async def async_middleware(request: HttpRequest) -> HttpResponseBase:
            response: HttpResponseBase = await get_response(request)
            return _with_policy(request, response)

        return async_middleware

    def middleware(request: HttpRequest) -> HttpResponseBase:
        return _with_policy(request, get_response(request))

    return middleware
