"""Lead what is for programs straight to its door, past the middleware that is for browsers.

Django's middleware is synchronous inside: under ASGI every layer crosses into a thread and back, and the thread of a
request stays as long as the request. A door of /api/ needs none of it (`doors.caller_of` asks for the session itself),
so an answer that waits half a minute holds no thread, and an append costs a fraction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.http import HttpRequest, HttpResponseBase
from django.urls import resolve
from django.utils.decorators import sync_and_async_middleware

from streams import doors
from streams.problems import Invalid
from streams.waiting import run

PREFIX = "/api/"


@sync_and_async_middleware
def shortcut(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Be a middleware, the first of all. On a synchronous server it does nothing."""
    if not iscoroutinefunction(get_response):
        return get_response

    async def lead(request: HttpRequest) -> HttpResponseBase:
        # What must first become https is told so by Django's own middleware.
        if not request.path_info.startswith(PREFIX) or (settings.SECURE_SSL_REDIRECT and not request.is_secure()):
            answer: HttpResponseBase = await get_response(request)
            return answer
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

    return lead
