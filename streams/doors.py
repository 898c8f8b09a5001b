"""What every HTTP door does alike: who calls, strict JSON in, exact JSON out, problems.

Doors parse, call one verb and map its answer. Whatever is sent, the answer is a 4xx that names the place; only a
fault of ours is a 500.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import wraps
from http import HTTPStatus
from typing import IO, Any, ParamSpec
from uuid import UUID

from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, UnreadablePostError
from django.middleware.csrf import CsrfViewMiddleware
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions as drf
from rest_framework.authentication import BaseAuthentication
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from streams import access, strictjson
from streams.access import Caller
from streams.problems import Invalid, NotAllowed, NotFound, NotSignedIn, Problem, TooLarge, TryAgain
from streams.protocol import BadChunk

log = logging.getLogger(__name__)

P = ParamSpec("P")

PROBLEM_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 1


# --- who calls ----------------------------------------------------------------------------------------------------


class CsrfFailed(NotAllowed):
    """A page is stale or a request was forged: a fresh CSRF token helps the one and not the other."""

    code = "csrf_failed"


class OriginRefused(NotAllowed):
    code = "origin_refused"


def caller_of(request: HttpRequest) -> Caller:
    """Return who makes this request; raise NotSignedIn, CsrfFailed or OriginRefused.

    A bearer token counts alone: cookies beside it are not looked at. Without one the session counts, if a browser
    of this very origin sent it; whatever may change something needs the CSRF token as well.
    """
    address = request.META.get("REMOTE_ADDR", "")[:64]
    request_id = _request_id(request)
    header = request.META.get("HTTP_AUTHORIZATION", "")
    if header:
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer":
            raise NotSignedIn("the authorization scheme is Bearer")
        return access.caller_for_token(secret=secret.strip(), door="http", address=address, request_id=request_id)
    if not hasattr(request, "session"):
        # The shortcut came past the middleware that would have looked.
        SessionMiddleware(lambda _: HttpResponse()).process_request(request)
        request.user = get_user(request)
    caller = access.caller_for_user(user=request.user, door="http", address=address, request_id=request_id)
    _check_origin(request)
    return caller


def caller_again(request: HttpRequest) -> Caller:
    """Look anew at who makes a long request: a revoked token, an ended session or a lost right shows here."""
    if "HTTP_AUTHORIZATION" not in request.META:
        store = type(request.session)(request.session.session_key)
        again = HttpRequest()
        again.session = store
        again.user = get_user(again)
        address = request.META.get("REMOTE_ADDR", "")[:64]
        return access.caller_for_user(user=again.user, door="http", address=address, request_id=_request_id(request))
    return caller_of(request)


def _check_origin(request: HttpRequest) -> None:
    origin = request.META.get("HTTP_ORIGIN")
    if origin is not None and not access.origin_allowed(
        origin=origin, host=request.get_host(), scheme=request.scheme or "http"
    ):
        raise OriginRefused("this origin may not use a session here")
    check = _CsrfCheck(lambda _: HttpResponse())
    check.process_request(request)
    reason = check.process_view(request, lambda _: HttpResponse(), (), {})
    if reason is not None:
        raise CsrfFailed(f"CSRF: {reason}")


class _CsrfCheck(CsrfViewMiddleware):
    """Django's own check, which says why instead of answering a page."""

    def _reject(self, request: HttpRequest, reason: str) -> Any:
        return reason


_REQUEST_ID = re.compile(r"[!-~]{1,64}")


def _request_id(request: HttpRequest) -> str:
    given = request.META.get("HTTP_X_REQUEST_ID", "")
    return given if _REQUEST_ID.fullmatch(given) else ""


class ActorAuthentication(BaseAuthentication):
    """Put the Caller into `request.auth`."""

    def authenticate(self, request: Request) -> tuple[Any, Caller]:
        caller = caller_of(request._request)
        return caller.user, caller

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


# --- JSON in and out ----------------------------------------------------------------------------------------------


def read_body(request: HttpRequest | IO[bytes], *, limit: int, declared: object = None) -> bytes:
    """Read a body of at most `limit` bytes; TooLarge beyond it, before the rest is read."""
    if isinstance(declared, str) and declared.isascii() and declared.isdigit() and int(declared[:12]) > limit:
        raise TooLarge(f"a body is at most {limit} bytes here", limit=limit)
    data: bytes = request.read(limit + 1)
    if len(data) > limit:
        raise TooLarge(f"a body is at most {limit} bytes here", limit=limit)
    return data


class StrictJSONParser(BaseParser):
    media_type = "application/json"

    def parse(
        self,
        stream: Any,
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        limit: int = settings.DATA_UPLOAD_MAX_MEMORY_SIZE or 0
        # A body that came in pieces was read already, and the stream is then no request.
        declared = getattr(stream, "META", {}).get("CONTENT_LENGTH")
        data = read_body(stream, limit=limit, declared=declared)
        return strictjson.loads(data, max_depth=strictjson.MAX_BODY_DEPTH) if data else {}


class ExactJSONRenderer(BaseRenderer):
    """Write ints and Decimals digit for digit. Bytes are JSON already."""

    media_type = "application/json"
    format = "json"
    charset = None

    def render(
        self,
        data: Any,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        if data is None:
            return b""
        return data if isinstance(data, bytes) else strictjson.dumps_bytes(data)


# --- problems -----------------------------------------------------------------------------------------------------

_FRAMEWORK_CODES: dict[int, str] = {
    400: "invalid",
    401: "not_signed_in",
    403: "not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "too_large",
    415: "unsupported_media_type",
    429: "rate_limited",
}


class _Framework(Problem):
    """A refusal the framework made, with its own status."""

    def __init__(self, detail: str, status: int) -> None:
        super().__init__(detail, code=_FRAMEWORK_CODES.get(status, "invalid"))
        self.http_status = status


def as_problem(error: BaseException) -> Problem | None:
    """Name the situation an exception tells of; None for what is a fault of ours."""
    match error:
        case Problem():
            return error
        case strictjson.BadJSON():
            kind = TooLarge if error.code == "too_large" else Invalid
            return kind(error.detail, code=error.code, field=error.field, limit=error.limit)
        case BadChunk():
            kind = TooLarge if error.code == "too_large" else Invalid
            return kind(error.detail, code=error.code, index=error.index, field=error.field, limit=error.limit)
        case drf.APIException():
            return _Framework(str(error.detail), error.status_code)
        case Http404():
            return NotFound("there is nothing here")
        case PermissionDenied():
            return NotAllowed("this is not allowed")
        case RequestDataTooBig():
            return TooLarge("the body is too large", limit=settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
        case SuspiciousOperation() | UnreadablePostError():
            return Invalid("the request can't be read")
        case OperationalError() | InterfaceError():
            # Nobody knows whether it was committed: the same request, sent again, learns the truth.
            log.warning("the database is out of reach: %s", error)
            return TryAgain("the database can't be reached; send the same request again")
        case DataError():
            log.warning("the database refused a value a door let through: %s", error)
            return Invalid("a value can't be kept")
    return None


def status_of(problem: Problem) -> int:
    return getattr(problem, "http_status", problem.status)


def problem_document(problem: Problem) -> dict[str, Any]:
    status = status_of(problem)
    return {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": problem.code,
        "detail": problem.detail,
        **problem.fields,
    }


def problem_headers(problem: Problem) -> dict[str, str]:
    headers = {"Cache-Control": "no-store"}
    status = status_of(problem)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503) or problem.code == "in_flight":
        headers["Retry-After"] = str(problem.fields.get("retryAfterSeconds", RETRY_AFTER_SECONDS))
    return headers


def problem_http(problem: Problem) -> HttpResponse:
    """Answer a problem from a plain Django view."""
    return HttpResponse(
        strictjson.dumps_bytes(problem_document(problem)),
        status=status_of(problem),
        content_type=PROBLEM_TYPE,
        headers=problem_headers(problem),
    )


class WrongMediaType(Problem):
    code, status = "unsupported_media_type", 415


def method_not_allowed(allow: str) -> HttpResponse:
    answer = problem_http(_Framework("this address is not called so", 405))
    answer["Allow"] = allow
    return answer


def answering(view: Callable[P, HttpResponse]) -> Callable[P, HttpResponse]:
    """Let a plain sync view raise what it means: problems become answers, faults of ours stay faults."""

    @wraps(view)
    def answer(*args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        try:
            return view(*args, **kwargs)
        except Exception as error:
            problem = as_problem(error)
            if problem is None:
                raise
            return problem_http(problem)

    return answer


def problem_response(error: Exception, context: Mapping[str, Any]) -> Response | None:
    """Be DRF's exception handler."""
    problem = as_problem(error)
    if problem is None:
        return None
    response = problem_answer(problem)
    if isinstance(error, drf.MethodNotAllowed):
        response["Allow"] = ", ".join(context["view"].allowed_methods)
    return response


def problem_answer(problem: Problem) -> Response:
    """Answer a problem from a DRF view that does not raise it."""
    headers = problem_headers(problem)
    return Response(problem_document(problem), status=status_of(problem), headers=headers, content_type=PROBLEM_TYPE)


@csrf_exempt
def unknown_address(request: HttpRequest, rest: str = "") -> HttpResponse:
    """Answer what is under /api/ and no call."""
    return problem_http(NotFound("there is no such call"))


def path_uuid(text: str, *, what: str) -> UUID:
    """Read an id from the address; one that can't exist is one that does not."""
    if re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text):
        return UUID(text)
    raise NotFound(f"no such {what}")
