"""The content policy of every answer: nothing but this site's own files runs, loads or frames.

Django has one built in from 6.0 on; this one serves 5.2 too. No page needs an exception, so there is no way to ask
for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

POLICY: Final = "; ".join(
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
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


@sync_and_async_middleware
def content_security_policy(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], object]:
    """Put the policy on every answer, static files and errors included."""
    from asgiref.sync import iscoroutinefunction

    if iscoroutinefunction(get_response):

        async def async_middleware(request: HttpRequest) -> HttpResponseBase:
            response: HttpResponseBase = await get_response(request)
            response.headers["Content-Security-Policy"] = POLICY
            return response

        return async_middleware

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response

    return middleware
