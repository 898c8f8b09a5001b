"""What changed among all actions: one reader a process, for every inbox socket.

Every change of an action writes one audit event with the version it made, in its own transaction, so the events are
the list of changes. Their ids are given before the commit, so on PostgreSQL 11 may be seen before 10 is: a missing id
is waited for as long as any transaction that could still bring it is running.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from uuid import UUID
from weakref import WeakKeyDictionary

from django.db import connection
from django.db.models import Count, Q

from approvals import access, represent
from approvals.models import ApprovalRequest, AuditEvent
from approvals.states import State
from streams import doorbell, strictjson
from streams.access import Caller
from streams.tail import in_database

log = logging.getLogger("approvals.feed")

EVENTS_A_READ = 500
_LINGER_SECONDS = 2.0
_REMEMBERED = 10_000
# Between taking its id and showing as a transaction an event is on nobody's list; that is microseconds, not this.
_GRACE_SECONDS = 5.0
_MOST_GAPS = 10_000
# How many events below the newest may be uncommitted when a feed starts.
_LOOK_BACK = 5_000


@dataclass
class Place:
    """How far the events were read: all up to `after`, but for the `gaps`, each with when it may be given up.

    A gap maps to the transaction id that was next when it was seen, and the feed's time of that moment.
    """

    after: int = 0
    gaps: dict[int, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """An action as it is now, as frames: with the numbers of all actions for those who see all, and without."""

    action_id: UUID
    version: int
    frame: str
    frame_with_counts: str


@dataclass(frozen=True)
class News:
    """`seen_by` says for each token that doesn't see everything which of the changed actions it sees."""

    changes: list[Change]
    seen_by: dict[int, set[UUID]]
    more: bool


def counts(caller: Caller | None = None) -> dict[str, int]:
    """Count what is not settled, by state; without a caller all there is."""
    rows = ApprovalRequest.objects.all() if caller is None else access.visible(caller)
    live = [State.PENDING, State.APPROVED, State.EXECUTING, State.UNKNOWN]
    numbers = {str(state): 0 for state in live}
    found = rows.filter(state__in=live).order_by().values_list("state").annotate(Count("pk", distinct=True))
    numbers.update({str(state): number for state, number in found})
    return numbers


def start(now: float) -> Place:
    """Return the place of this moment: what a snapshot taken later may not show yet is ahead of it, or a gap."""
    newest = AuditEvent.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    place = Place(after=newest)
    if connection.vendor == "postgresql":
        low = max(1, newest - _LOOK_BACK)
        there = set(AuditEvent.objects.filter(pk__gte=low, pk__lte=newest).values_list("pk", flat=True))
        _note_gaps(place, (pk for pk in range(low, newest) if pk not in there), now)
    return place


def read(place: Place, now: float, callers: list[Caller]) -> News:
    """Read the events after `place`, move it on, and return the actions they changed as they are now."""
    known = sorted(place.gaps)
    # Before the events: whatever had ended by then is seen by them.
    oldest_running = _snapshot()[0] if known else 0
    events = list(
        AuditEvent.objects.filter(Q(pk__gt=place.after) | Q(pk__in=known))
        .order_by("pk")
        .values_list("pk", "action_id", "version")[: EVENTS_A_READ + len(known)]
    )
    seen = {pk for pk, _, _ in events}
    highest = max(place.after, max(seen, default=0))
    for pk in known:
        bound, since = place.gaps[pk]
        if pk in seen or (oldest_running >= bound and now - since >= _GRACE_SECONDS):
            del place.gaps[pk]
    if connection.vendor == "postgresql":
        _note_gaps(place, (pk for pk in range(place.after + 1, highest) if pk not in seen), now)
    place.after = highest
    changed = {action_id for _, action_id, version in events if action_id is not None and version is not None}
    numbers = strictjson.dumps(dict(counts())) if changed else ""
    rows = ApprovalRequest.objects.filter(pk__in=changed).prefetch_related("decisions").order_by("requested_at", "pk")
    changes = []
    for row in rows:
        shown = strictjson.dumps(represent.summary_json(row))
        frame = f'{{"type":"action","action":{shown}'
        changes.append(Change(row.pk, row.version, frame + "}", f'{frame},"counts":{numbers}}}'))
    seen_by = {
        caller.token.pk: set(access.visible(caller).filter(pk__in=changed).values_list("pk", flat=True))
        for caller in callers
        if changed and caller.token is not None
    }
    return News(changes, seen_by, more=len(events) >= EVENTS_A_READ)


def _note_gaps(place: Place, missing: Iterable[int], now: float) -> None:
    found = list(islice(missing, _MOST_GAPS - len(place.gaps)))
    if found:
        # After the events: whoever holds one of these ids is running, and so below this bound.
        bound = _snapshot()[1]
        place.gaps.update(dict.fromkeys(found, (bound, now)))


def _snapshot() -> tuple[int, int]:
    """Return PostgreSQL's oldest running transaction and the id the next one gets."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint FROM pg_current_snapshot() s"
        )
        oldest, following = cursor.fetchone()
    return int(oldest), int(following)


Told = Callable[[list[Change]], None]


class Feed:
    """One event loop's reader of the changes, and the sockets it tells."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # What to call, and for whom when that one doesn't see everything.
        self._listeners: dict[Told, Caller | None] = {}
        self._place = Place()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        # Versions that were told: an event may be met twice (a gap that filled), a version is told once.
        self._told: OrderedDict[UUID, int] = OrderedDict()
        self._task = asyncio.create_task(self._run())

    async def join(self, told: Told, *, only_for: Caller | None) -> None:
        """Call `told` with every change that commits from now on; read a snapshot after this returns.

        `only_for` is a caller who doesn't see everything: it is told of what it sees.
        """
        self._listeners[told] = only_for
        await asyncio.shield(self._ready)

    def leave(self, told: Told) -> None:
        self._listeners.pop(told, None)

    async def _run(self) -> None:
        empty_since: float | None = None
        try:
            async with doorbell.listen("inbox") as bell:
                while True:
                    await self._read()
                    await bell.wait(doorbell.SLOW_POLL_SECONDS)
                    bell.take()
                    now = self._loop.time()
                    if self._listeners:
                        empty_since = None
                    elif empty_since is None:
                        empty_since = now
                    elif now - empty_since >= _LINGER_SECONDS:
                        return
        finally:
            if _feeds.get(self._loop) is self:
                del _feeds[self._loop]
            if not self._ready.done():
                self._ready.cancel()

    async def _read(self) -> None:
        try:
            if not self._ready.done():
                self._place = await in_database(start, self._loop.time())
                self._ready.set_result(None)
            more = True
            while more:
                callers = {one.token.pk: one for one in self._listeners.values() if one is not None and one.token}
                news = await in_database(read, self._place, self._loop.time(), list(callers.values()))
                more = news.more
                fresh = [one for one in news.changes if self._told.get(one.action_id, 0) < one.version]
                for one in fresh:
                    self._told[one.action_id] = one.version
                    self._told.move_to_end(one.action_id)
                while len(self._told) > _REMEMBERED:
                    self._told.popitem(last=False)
                for told, caller in tuple(self._listeners.items()):
                    sees = None if caller is None or caller.token is None else news.seen_by.get(caller.token.pk, set())
                    mine = fresh if sees is None else [one for one in fresh if one.action_id in sees]
                    if mine:
                        told(mine)
        except Exception:
            log.warning("the changes could not be read", exc_info=log.isEnabledFor(logging.DEBUG))


_feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, Feed] = WeakKeyDictionary()


def feed() -> Feed:
    """Return the running loop's feed; it ends two seconds after its last socket."""
    loop = asyncio.get_running_loop()
    found = _feeds.get(loop)
    if found is None:
        found = _feeds[loop] = Feed()
    return found
