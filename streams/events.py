"""The SSE door (contract §3): a generation's log as server-sent events, one entry an event, its offset the id.

Only entries carry an id, so a heartbeat never moves a reader's cursor. A reader holds no thread and no database
connection between two looks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.views.decorators.csrf import csrf_exempt
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from streams import access, docs, doorbell, doors, log, queries
from streams.models import Generation
from streams.problems import Invalid, NotFound, NotSignedIn
from streams.protocol import MAX_COUNT
from streams.views import View
from streams.waiting import run

RECHECK_SECONDS = 3.0
PAGE_ENTRIES = 500


@dataclass(frozen=True)
class Reading:
    """Where a reader starts, and how to ask whether it still may."""

    generation_id: UUID
    from_offset: int
    allowed: Callable[[], bool]


class Page(NamedTuple):
    data: bytes
    next_offset: int
    over: bool


def read_page(generation_id: UUID, from_offset: int) -> Page:
    """Return the next entries as events; `over` when nothing will follow them."""
    # The head first: an end seen here is an end whose entries are all there to be read.
    head = Generation.objects.filter(pk=generation_id).first()
    if head is None or from_offset < head.first_offset:
        return Page(b"", from_offset, over=True)
    rows = log.read(generation_id=generation_id, from_offset=from_offset, limit=PAGE_ENTRIES)
    next_offset = rows[-1].offset + 1 if rows else from_offset
    data = "".join(f"id: {row.offset}\ndata: {row.text}\n\n" for row in rows).encode()
    return Page(data, next_offset, over=_ended(head) and next_offset >= head.next_offset)


def _ended(head: Generation) -> bool:
    return bool(head.finish_reason) and head.open_actions == 0


async def stream(reading: Reading) -> AsyncIterator[bytes]:
    """Yield events until the log is over, the reader goes away, or it may no longer read."""
    offset = reading.from_offset
    spoke_at = checked_at = time.monotonic()
    yield b": open\n\n"
    async with doorbell.listen(f"g:{reading.generation_id}") as bell:
        while True:
            page = await run(read_page, reading.generation_id, offset)
            if page.data:
                yield page.data
                offset, spoke_at = page.next_offset, time.monotonic()
            if page.over:
                return
            now = time.monotonic()
            if now - checked_at >= RECHECK_SECONDS:
                if not await run(reading.allowed):
                    return
                checked_at = now
            if page.data:
                continue
            if now - spoke_at >= settings.SOCKET_HEARTBEAT_SECONDS:
                yield b": heartbeat\n\n"
                spoke_at = now
            if await bell.wait(doorbell.SLOW_POLL_SECONDS):
                bell.take()


def _from(request: HttpRequest, head: Generation) -> int:
    """Read where to start: `Last-Event-ID: N` means after N and wins over `from=N`."""
    last = request.META.get("HTTP_LAST_EVENT_ID")
    if last:
        if not (last.isascii() and last.isdigit() and len(last) <= 19 and int(last) <= MAX_COUNT):
            raise Invalid("Last-Event-ID is an offset", field="Last-Event-ID")
        first = int(last) + 1
    else:
        first = queries.whole(request, "from", low=0, high=MAX_COUNT, default=head.first_offset)
    if first < head.first_offset:
        raise log.OffsetGone("these entries were pruned", firstOffset=head.first_offset)
    if first > head.next_offset:
        # Waiting here would pass over entries in silence: the reader counts in another log.
        raise Invalid("there is no such offset yet", field="from", nextOffset=head.next_offset)
    return first


@doors.answering
def opening(request: HttpRequest, generation_id: str) -> HttpResponse:
    """Check everything that can be refused; the answer carries `reading` when there is something to stream."""
    caller = doors.caller_of(request)
    head = access.find_generation(caller, doors.path_uuid(generation_id, what="generation"))
    first = _from(request, head)
    if _ended(head) and first >= head.next_offset:
        return HttpResponse(status=204)

    def allowed() -> bool:
        try:
            access.find_generation(doors.caller_again(request), head.pk)
        except (NotFound, NotSignedIn):
            return False
        return True

    answer = HttpResponse()
    answer.reading = Reading(head.pk, first, allowed)  # type: ignore[attr-defined]
    return answer


class Events(View):
    """Follow the log as server-sent events: one entry an event, its offset the id; ends when nothing will follow."""

    @extend_schema(
        operation_id="generations_events",
        parameters=[
            docs.ID,
            docs.query("from", "offset of the first entry wanted", int),
            docs.header("Last-Event-ID", "the last offset seen; wins over from"),
        ],
        responses={
            **docs.answers({204: None}, 404, 410),
            (200, "text/event-stream"): OpenApiResponse(response=docs.TEXT, description="Entries, until the end"),
        },
    )
    def get(self, request: Request, generation_id: str) -> Response:
        raise NotImplementedError("only described: `events` answers")


@csrf_exempt
async def events(request: HttpRequest, generation_id: str) -> HttpResponseBase:
    if request.method not in ("GET", "HEAD"):
        return doors.method_not_allowed("GET, HEAD")
    answer = await run(opening, request, generation_id)
    reading: Reading | None = getattr(answer, "reading", None)
    if reading is None:
        return answer
    # Said to every box on the way: do not hold back, do not change, do not compress.
    headers = {
        "Cache-Control": "no-cache, no-store, no-transform",
        "X-Accel-Buffering": "no",
        "Content-Encoding": "identity",
    }
    if request.method == "HEAD":
        return HttpResponse(content_type="text/event-stream", headers=headers)
    return StreamingHttpResponse(stream(reading), content_type="text/event-stream", headers=headers)


events.cls, events.initkwargs = Events, {}  # type: ignore[attr-defined]
