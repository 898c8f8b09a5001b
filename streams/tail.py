"""One live reader per generation per process: read each entry once, encode it once, hand it to every socket.

A socket is a `Reader`: one cursor, one window. At the live edge it is given the shared frame the tail made of what it
has just read; behind the edge it pumps, from the tail's ring or from pages of the database, until its cursor meets
the edge. Looking at the edge and joining it is one step without an await, and joining asks for one more read, so
nothing can fall between history and live.

Nothing here keeps a task or a database read per socket: only a socket that is behind, or whose transport is full, has
a task. What the window does not allow is not read for it, so a reader that never reads costs one window.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from channels.db import database_sync_to_async

from streams import doorbell
from streams.log import Row
from streams.log import read as read_log
from streams.models import Generation

log = logging.getLogger("streams.tail")

P = ParamSpec("P")
T = TypeVar("T")
Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]

# Contract §4: what a socket may be sent past its last ack.
WINDOW_ENTRIES = 2_000
WINDOW_BYTES = 1_048_576
# A full window opens again when this much is free, or a reader that acks singly would cost a read an entry.
_REOPEN_ENTRIES = WINDOW_ENTRIES // 4
_REOPEN_BYTES = WINDOW_BYTES // 4
# Python's websockets refuses frames over 1 MiB unless told otherwise; one entry may take half of that.
FRAME_BYTES = 262_144
PAGE_ENTRIES = 1_000
RING_ENTRIES = 1_000
RING_BYTES = 262_144
_YIELD_EVERY = 256
_LINGER_SECONDS = 2.0
# After a round that took longer than this, rest as long as it took, times this, at most so long.
_PACE_FROM_SECONDS, _PACE, _PACE_SECONDS = 0.005, 2.0, 0.06
_IDS_A_QUERY = 500

# Reads are few and short; four threads serve thousands of sockets and can't drain a pool of connections.
_reads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="tail")
_verbs = ThreadPoolExecutor(max_workers=4, thread_name_prefix="socket-verb")


async def in_database(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a short read on a thread of its own kind, so that no view's or verb's wait stands before it."""
    call = database_sync_to_async(function, thread_sensitive=False, executor=_reads)
    value: T = await call(*args, **kwargs)
    return value


async def run_verb(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run what may write and wait (a decision waits up to 2 s for its key's first call)."""
    call = database_sync_to_async(function, thread_sensitive=False, executor=_verbs)
    value: T = await call(*args, **kwargs)
    return value


# --- sending without a task ---------------------------------------------------------------------


def offer(sending: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None] | None:
    """Run an ASGI `send` up to its first wait. None: it is done; else await what is returned.

    Servers send at once while the transport takes it, so 1,000 sockets need no task and no turn of the loop each.
    """
    try:
        waits_for = sending.send(None)
    except StopIteration:
        return None
    return _finish(sending, waits_for)


# Said by hand because the two overloads of types.coroutine confuse mypy.
_awaitable: Callable[[Callable[P, Generator[Any, Any, T]]], Callable[P, Awaitable[T]]] = types.coroutine


async def _finish(sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _rest(sending, waits_for)


@_awaitable
def _rest(sending: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    # The future has been told already that it is waited for (asyncio marks it when it is yielded), so it is handed
    # on as it is.
    while True:
        try:
            value = yield waits_for
        except BaseException as error:  # noqa: BLE001 - a cancel goes to where the wait is
            try:
                waits_for = sending.throw(error)
            except StopIteration:
                return
        else:
            try:
                waits_for = sending.send(value)
            except StopIteration:
                return


# --- frames -------------------------------------------------------------------------------------


class Frame:
    """Entries `first` … `next - 1` as one message, shared by all sockets that get it."""

    __slots__ = ("first", "mark", "message", "next", "size")

    def __init__(self, first: int, texts: list[str], size: int) -> None:
        self.first, self.next, self.size = first, first + len(texts), size
        self.mark = (self.next, size)
        self.message = {"type": "websocket.send", "text": f'{{"type":"entries","entries":[{",".join(texts)}]}}'}


class Stretch:
    """Encoded entries from `start` on, with their sizes in bytes."""

    __slots__ = ("sizes", "start", "texts", "total")

    def __init__(self, start: int, rows: list[Row] | None = None) -> None:
        self.start = start
        self.texts: deque[str] = deque()
        self.sizes: deque[int] = deque()
        self.total = 0
        for row in rows or ():
            self.add(row)

    @property
    def end(self) -> int:
        return self.start + len(self.texts)

    def add(self, row: Row) -> None:
        text = row.text
        size = len(text) if text.isascii() else len(text.encode())
        self.texts.append(text)
        self.sizes.append(size)
        self.total += size

    def trim(self, entries: int, size: int) -> None:
        while self.texts and (len(self.texts) > entries or self.total > size):
            self.texts.popleft()
            self.total -= self.sizes.popleft()
            self.start += 1

    def frame(self, first: int, entries: int, size: int) -> Frame | None:
        """Make a frame from `first` on within these limits; None when not even one entry fits or is here."""
        texts: list[str] = []
        total = 0
        for place in range(first - self.start, min(first - self.start + entries, len(self.texts))):
            total += self.sizes[place]
            if total > size or (texts and total > FRAME_BYTES):
                total -= self.sizes[place]
                break
            texts.append(self.texts[place])
        return Frame(first, texts, total) if texts else None


# --- one socket ---------------------------------------------------------------------------------


class Reader:
    """A socket's place in a log: its cursor is the only thing that says what it has been sent."""

    __slots__ = (
        "acked",
        "busy",
        "closed",
        "cursor",
        "full_since",
        "live",
        "lost",
        "marks",
        "send",
        "target",
        "texts_left",
        "unacked",
    )

    def __init__(self, *, send: Send, cursor: int, target: int, lost: Callable[[int | None], None]) -> None:
        self.send = send
        self.cursor = cursor
        # It is caught up when it has all that was there when it came; None afterwards.
        self.target: int | None = target
        # Called once when the socket is of no use any more: with a close code, or None when it is gone already.
        self.lost = lost
        self.acked = cursor - 1
        self.unacked = 0
        self.marks: list[tuple[int, int]] = []
        self.live = self.busy = self.closed = False
        # Since when it could not be given what there is; the vigil closes it for that (contract §4: 30 s).
        self.full_since: float | None = None
        # The demo's cut: so many text chunks may still be sent. None: no such thing.
        self.texts_left: int | None = None

    def room(self) -> tuple[int, int]:
        """How many entries and bytes it may be sent now."""
        return WINDOW_ENTRIES - (self.cursor - 1 - self.acked), WINDOW_BYTES - self.unacked

    def charge(self, frame: Frame) -> None:
        self.cursor = frame.next
        self.unacked += frame.size
        self.marks.append(frame.mark)

    def ack(self, offset: int) -> None:
        """Free what is acknowledged; bytes come free frame by frame."""
        self.acked = offset
        freed = 0
        for after, size in self.marks:
            if after > offset + 1:
                break
            self.unacked -= size
            freed += 1
        del self.marks[:freed]


# --- one generation -----------------------------------------------------------------------------


class Tail:
    """Everything this process knows of one log: the sockets, the ring, and `edge`, the offset the live ones want."""

    def __init__(self, hub: Hub, generation_id: UUID) -> None:
        self._hub = hub
        self.generation_id = generation_id
        self.readers: set[Reader] = set()
        self.live: dict[Reader, None] = {}
        self.ring = Stretch(0)
        self._reading = self._again = False
        self._pumps = 0
        self._pages: OrderedDict[int, asyncio.Task[Stretch]] = OrderedDict()
        self._frames: OrderedDict[tuple[int, int], Frame] = OrderedDict()

    @property
    def edge(self) -> int:
        return self.ring.end

    def join(self, reader: Reader) -> None:
        """Take a reader in; it is sent everything from its cursor on."""
        self.readers.add(reader)
        self._start_pump(reader)

    def leave(self, reader: Reader) -> None:
        reader.closed = True
        self.readers.discard(reader)
        self.live.pop(reader, None)
        reader.live = False
        if not self.readers:
            for page in self._pages.values():
                page.cancel()
            self._pages.clear()
            self._hub.forget(self)

    def ack(self, reader: Reader, offset: int) -> None:
        reader.ack(offset)
        entries, size = reader.room()
        if reader.live or reader.busy:
            return
        reader.full_since = None
        if (entries >= _REOPEN_ENTRIES and size >= _REOPEN_BYTES) or offset == reader.cursor - 1:
            self._start_pump(reader)
        else:
            reader.full_since = self._hub.now()

    # Reading for those at the edge

    def look(self) -> None:
        """Read what is new, if anybody is at the edge to want it."""
        self._again = True
        if self.live and not self._reading:
            self._reading = True
            self._hub.spawn(self._read())

    async def _read(self) -> None:
        try:
            while self.live and self._again:
                self._again = False
                # The slowest of the live ones leads: it may have been alone when it joined far behind.
                lead = next(iter(self.live)).cursor
                if lead != self.edge and (lead := min(one.cursor for one in self.live)) > self.edge:
                    self.ring = Stretch(lead)
                rows = await in_database(
                    read_log,
                    generation_id=self.generation_id,
                    from_offset=self.edge,
                    limit=PAGE_ENTRIES,
                    max_bytes=FRAME_BYTES,
                )
                rows = [row for row in rows if row.offset >= self.edge]
                if rows and rows[0].offset == self.edge:
                    # Whether or not the page was full, something may have come while it was read.
                    full = len(rows) == PAGE_ENTRIES or _bytes(rows) >= FRAME_BYTES
                    self._again = self._again or full
                    began = self._hub.now()
                    await self._fan_out(rows)
                    took = self._hub.now() - began
                    if took > _PACE_FROM_SECONDS and not full:
                        # Telling a thousand sockets costs the same for one entry as for five: let some more come.
                        await asyncio.sleep(min(took * _PACE, _PACE_SECONDS))
        except Exception:
            # The database is away: the slow poll comes back to it.
            log.warning("the log of %s could not be read", self.generation_id, exc_info=log.isEnabledFor(logging.DEBUG))
        finally:
            self._reading = False

    async def _fan_out(self, rows: list[Row]) -> None:
        first = self.edge
        for row in rows:
            self.ring.add(row)
        while (frame := self.ring.frame(first, PAGE_ENTRIES, WINDOW_BYTES)) is not None:
            first = frame.next
            for count, reader in enumerate(tuple(self.live)):
                if count % _YIELD_EVERY == _YIELD_EVERY - 1:
                    await asyncio.sleep(0)
                if not reader.live or reader.cursor >= frame.next:
                    continue
                if reader.cursor == frame.first and reader.texts_left is None and self._fits(reader, frame):
                    self._give(reader, frame)
                else:
                    self._fall_behind(reader)
        self.ring.trim(RING_ENTRIES, RING_BYTES)

    def _fits(self, reader: Reader, frame: Frame) -> bool:
        return frame.next - 1 - reader.acked <= WINDOW_ENTRIES and reader.unacked + frame.size <= WINDOW_BYTES

    def _give(self, reader: Reader, frame: Frame) -> None:
        reader.charge(frame)
        try:
            rest = offer(reader.send(frame.message))
        except Exception:  # noqa: BLE001 - servers raise what they like on a dead line
            self.leave(reader)
            reader.lost(None)
            return
        if rest is not None:
            # The transport is full: this one goes on by itself.
            self._fall_behind(reader, rest)

    def _fall_behind(self, reader: Reader, rest: Coroutine[Any, Any, None] | None = None) -> None:
        self.live.pop(reader, None)
        reader.live = False
        self._start_pump(reader, rest)

    # Reading for those behind it

    def _start_pump(self, reader: Reader, rest: Coroutine[Any, Any, None] | None = None) -> None:
        if reader.busy or reader.closed:
            return
        if rest is None and self._go_live(reader):
            return
        reader.busy = True
        self._pumps += 1
        self._hub.spawn(self._pump(reader, rest))

    async def _pump(self, reader: Reader, rest: Awaitable[None] | None) -> None:
        try:
            if rest is not None:
                await self._patiently(reader, rest)
            while not reader.closed and not self._go_live(reader):
                room = entries, size = reader.room()
                if entries <= 0 or (frame := await self._frame_for(reader, entries, size)) is None:
                    if reader.room() != room:
                        # An ack came while a page was read; none may follow it.
                        continue
                    # The window is full; the next ack starts this again.
                    reader.full_since = reader.full_since or self._hub.now()
                    return
                reader.charge(frame)
                await self._patiently(reader, reader.send(frame.message))
                if reader.texts_left is not None:
                    _count_texts(reader, frame)
        except Gone:
            self.leave(reader)
            reader.lost(4404)
        except (OSError, RuntimeError, asyncio.CancelledError):
            self.leave(reader)
            reader.lost(None)
        except Exception:
            # The server's own kind of "disconnected", or the database is away: either way it comes back by offset.
            log.info("a reader of %s was given up", self.generation_id, exc_info=True)
            self.leave(reader)
            reader.lost(4503)
        finally:
            reader.busy = False
            self._pumps -= 1
            if not self._pumps:
                # Pages and frames are for those who come back together, not for ever.
                self._pages.clear()
                self._frames.clear()

    async def _patiently(self, reader: Reader, sending: Awaitable[None]) -> None:
        reader.full_since = reader.full_since or self._hub.now()
        await sending
        reader.full_since = None

    def _go_live(self, reader: Reader) -> bool:
        """Join the edge if the cursor is there. No await in here: nothing can come between looking and joining."""
        cursor = reader.cursor
        if cursor < (reader.target or 0) or cursor < self.edge:
            return False
        if not self.live and cursor > self.edge:
            self.ring = Stretch(cursor)
        self.live[reader] = None
        reader.live = True
        reader.full_since = None
        if reader.target is not None:
            reader.target = None
            text = f'{{"type":"caught_up","nextOffset":{cursor}}}'
            try:
                rest = offer(reader.send({"type": "websocket.send", "text": text}))
            except Exception:  # noqa: BLE001 - as in _give
                self.leave(reader)
                reader.lost(None)
                return True
            if rest is not None:
                # What is sent after it waits behind it: servers wake their waiters in order.
                self._hub.spawn(_quietly(rest))
        self.look()
        return True

    async def _frame_for(self, reader: Reader, entries: int, size: int) -> Frame | None:
        first = reader.cursor
        stretch = self.ring
        if not stretch.start <= first < stretch.end:
            stretch = await self._page(first)
            if first >= stretch.end:
                raise Gone
        if reader.texts_left is not None:
            entries = min(entries, _until_cut(stretch, first, reader.texts_left))
        frame = stretch.frame(first, entries, size)
        if frame is None:
            return None
        # The same stretch for the next one who comes with this offset: 500 come back at once after a restart.
        key = (frame.first, frame.next)
        shared = self._frames.setdefault(key, frame)
        while len(self._frames) > 4:
            self._frames.popitem(last=False)
        return shared

    async def _page(self, first: int) -> Stretch:
        """Read a page, once for all who want it at the same time."""
        page = self._pages.get(first)
        if page is None:
            page = self._pages[first] = asyncio.ensure_future(self._read_page(first))
            while len(self._pages) > 4 and (oldest := next(iter(self._pages.values()))).done():
                self._pages.popitem(last=False)
                del oldest
        try:
            stretch = await asyncio.shield(page)
        except BaseException:
            self._pages.pop(first, None)
            raise
        if not stretch.texts:
            self._pages.pop(first, None)
        return stretch

    async def _read_page(self, first: int) -> Stretch:
        rows = await in_database(
            read_log,
            generation_id=self.generation_id,
            from_offset=first,
            limit=PAGE_ENTRIES,
            max_bytes=FRAME_BYTES,
        )
        if rows and rows[0].offset != first:
            raise Gone
        return Stretch(first, rows)


async def _quietly(rest: Awaitable[None]) -> None:
    with contextlib.suppress(Exception):
        await rest


# The close code of the demo's cut; a client comes back from it.
CUT = 4012


class Gone(Exception):
    """The log no longer has what this reader wants next."""


def _bytes(rows: list[Row]) -> int:
    return sum(len(row.body) for row in rows)


_TEXT = '"chunk":{"type":"text"'


def _until_cut(stretch: Stretch, first: int, texts_left: int) -> int:
    """Count the entries up to and with the one that uses up `texts_left`."""
    for place in range(first - stretch.start, len(stretch.texts)):
        texts_left -= _TEXT in stretch.texts[place]
        if texts_left <= 0:
            return place - (first - stretch.start) + 1
    return PAGE_ENTRIES


def _count_texts(reader: Reader, frame: Frame) -> None:
    assert reader.texts_left is not None
    reader.texts_left -= frame.message["text"].count(_TEXT)
    if reader.texts_left <= 0:
        reader.lost(CUT)


# --- one event loop -----------------------------------------------------------------------------


class Hub:
    """The tails of one event loop, and the one task that wakes them: by bell, and by one grouped poll a second."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.tails: dict[UUID, Tail] = {}
        self._bell: doorbell.Bell | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    def now(self) -> float:
        return self._loop.time()

    async def tail(self, generation_id: UUID) -> Tail:
        """Return the tail of this generation. Join it without an await in between, or an empty one is forgotten."""
        await self._ready.wait()
        tail = self.tails.get(generation_id)
        if tail is None:
            tail = self.tails[generation_id] = Tail(self, generation_id)
            assert self._bell is not None
            self._bell.add(f"g:{generation_id}")
        return tail

    def forget(self, tail: Tail) -> None:
        if self.tails.get(tail.generation_id) is tail:
            del self.tails[tail.generation_id]
            if self._bell is not None:
                self._bell.discard(f"g:{tail.generation_id}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        polled = self.now()
        empty_since: float | None = None
        try:
            async with doorbell.listen() as bell:
                self._bell = bell
                self._ready.set()
                while True:
                    await bell.wait(max(0.0, polled + doorbell.SLOW_POLL_SECONDS - self.now()))
                    rung, everything = bell.take()
                    for topic in rung:
                        tail = self.tails.get(UUID(topic[2:]))
                        if tail is not None:
                            tail.look()
                    now = self.now()
                    if everything or now - polled >= doorbell.SLOW_POLL_SECONDS:
                        polled = now
                        await self._poll()
                    if self.tails:
                        empty_since = None
                    elif empty_since is None:
                        empty_since = now
                    elif now - empty_since >= _LINGER_SECONDS:
                        return
        finally:
            # From here to the end nothing waits, so nobody can be given a hub that is about to end.
            if _hubs.get(self._loop) is self:
                del _hubs[self._loop]

    async def _poll(self) -> None:
        """Ask for all heads at once; who has less is told to look."""
        tails = [tail for tail in self.tails.values() if tail.live]
        for start in range(0, len(tails), _IDS_A_QUERY):
            some = tails[start : start + _IDS_A_QUERY]
            try:
                heads = await in_database(_heads, [tail.generation_id for tail in some])
            except Exception:
                log.warning("the heads of the logs could not be read", exc_info=log.isEnabledFor(logging.DEBUG))
                return
            for tail in some:
                if heads.get(tail.generation_id, 0) > tail.edge:
                    tail.look()


def _heads(ids: list[UUID]) -> dict[UUID, int]:
    return dict(Generation.objects.filter(pk__in=ids).values_list("pk", "next_offset"))


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub() -> Hub:
    """Return the running loop's hub; it ends by itself two seconds after its last tail."""
    loop = asyncio.get_running_loop()
    found = _hubs.get(loop)
    if found is None:
        found = _hubs[loop] = Hub()
    return found
