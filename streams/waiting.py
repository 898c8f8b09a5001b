"""Run a door's sync work in threads, and let an answer wait without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from asgiref.sync import SyncToAsync, sync_to_async
from channels.db import DatabaseSyncToAsync
from django.http import HttpRequest, HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from rest_framework.response import Response

from streams import doorbell, doors
from streams.access import Caller
from streams.problems import NotSignedIn

P = ParamSpec("P")
R = TypeVar("R")

MAX_WAIT_SECONDS = 30
CALM_SECONDS = 0.02

# Long-lived, so that SQLite keeps its connections (0.4 ms an append against 2.5): Django's ASGI handler would make
# a thread, and with it a connection, for every request.
_threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="door")


async def run(verb: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run sync work with the ORM in a thread; its connection goes back to the pool when it is done.

    Under a real server it runs in the door's own threads. Elsewhere (test client, scripts) it runs where Django
    expects it, so that a test's open transaction is seen.
    """
    on_server = SyncToAsync.thread_sensitive_context.get(None) is not None
    if on_server:
        return cast(R, await DatabaseSyncToAsync(verb, thread_sensitive=False, executor=_threads)(*args, **kwargs))
    # No closing of old connections here: it would end a test's transaction under it.
    return await sync_to_async(verb, thread_sensitive=True)(*args, **kwargs)


@dataclass(frozen=True)
class Wait:
    """How a response may still change: `again` reads anew in a thread; None means nothing is new.

    It gets the caller as it is by then: a token may be revoked and a right taken away while an answer waits.
    """

    seconds: float
    topics: tuple[str, ...]
    again: Callable[[Caller], Response | None]


def waiting(response: Response, wait: Wait | None) -> Response:
    """Let `hold` keep this response back until `again` gives another or the time is up; at most 30 s."""
    if wait is not None and wait.seconds > 0:
        response.wait = wait  # type: ignore[attr-defined]
    return response


def hold(view: Callable[..., HttpResponseBase]) -> Callable[..., Coroutine[Any, Any, HttpResponseBase]]:
    """Make a sync DRF view async: it runs in a thread, and waits, if it wants to, without one.

    A client that goes away ends the wait: Django's ASGI handler cancels the request's task.
    """

    # `wraps` also keeps `cls`, by which OpenAPI finds the view.
    @csrf_exempt
    @wraps(view)
    async def held(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response = await run(view, request, *args, **kwargs)
        wait: Wait | None = getattr(response, "wait", None)
        if wait is None or not isinstance(response, Response):
            return response

        def again() -> Response | None:
            try:
                caller = doors.caller_again(request)
            except NotSignedIn:
                # Whoever waited is a stranger now: the answer stays what it was while it was not.
                return response
            try:
                return wait.again(caller)
            except Exception as error:
                late = doors.problem_response(error, cast(Any, response).renderer_context)
                if late is None:
                    raise
                return late

        late = await _until(again, wait)
        if late is None:
            return response
        for name in ("accepted_renderer", "accepted_media_type", "renderer_context"):
            setattr(late, name, getattr(response, name))
        if "Cache-Control" not in late:
            late["Cache-Control"] = "no-store"
        return late

    return held


async def _until(again: Callable[[], Response | None], wait: Wait) -> Response | None:
    """Look at once, after every ring and at least each second, and a last time when the time is up."""
    ends = time.monotonic() + min(wait.seconds, MAX_WAIT_SECONDS)
    async with doorbell.listen(*wait.topics) as bell:
        while True:
            late = await run(again)
            left = ends - time.monotonic()
            if late is not None or left <= 0:
                return late
            if await bell.wait(min(left, doorbell.SLOW_POLL_SECONDS)):
                bell.take()
                # A burst of rings is one look.
                await asyncio.sleep(min(left, CALM_SECONDS))
