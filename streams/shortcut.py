"""Lead what is for programs straight to its door, past the middleware that is for browsers.

Django's middleware is synchronous inside, and some of ours (WhiteNoise) altogether: under ASGI a request holds a
thread as long as it lasts. A door of /api/ needs none of it (`doors.caller_of` asks for the session itself), so an
answer that waits half a minute holds no thread, and an append costs a fraction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import SyncToAsync, iscoroutinefunction
from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.exception import convert_exception_to_response
from django.http import HttpRequest, HttpResponseBase
from django.urls import resolve, set_urlconf

from streams import doors
from streams.problems import Invalid
from streams.waiting import run

PREFIX = "/api/"


class Handler(ASGIHandler):
    """Django's own handler, but for /api/."""

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        # What must first become https is told so by Django's own middleware.
        if not request.path_info.startswith(PREFIX) or (settings.SECURE_SSL_REDIRECT and not request.is_secure()):
            return await super().get_response_async(request)
        _let_go_of_thread()
        set_urlconf(settings.ROOT_URLCONF)
        response: HttpResponseBase = await _lead(request)
        response._resource_closers.append(request.close)  # type: ignore[attr-defined]
        return response


def _let_go_of_thread() -> None:
    """End the thread that Django has taken for this request's signals; it makes another when the answer is closed.

    asgiref keeps it until the request is over, which for an answer that waits is half a minute of one thread.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        threads = SyncToAsync.context_to_thread_executor.pop(context, None)
        if threads is not None:
            threads.shutdown(wait=False)


async def _answer(request: HttpRequest) -> HttpResponseBase:
    try:
        request.get_host()
    except SuspiciousOperation:
        return doors.problem_http(Invalid("this host is not served here", field="Host"))
    match = request.resolver_match = resolve(request.path_info)
    if iscoroutinefunction(match.func):
        response: HttpResponseBase = await match.func(request, *match.args, **match.kwargs)
    else:
        response = await run(match.func, request, *match.args, **match.kwargs)
    if callable(render := getattr(response, "render", None)):
        response = await run(render)
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    return response


# A fault of ours is logged and answered 500 as anywhere in Django.
_lead = cast(Callable[[HttpRequest], Awaitable[HttpResponseBase]], convert_exception_to_response(_answer))
