"""Wake whoever waits for a topic. A ring carries no data and may be lost: readers poll under it.

Topics: `g:<generation id>` its log has something new, `a:<action id>` it changed, `inbox` any action changed,
`work` something may be claimed, `runs` an agent run may go on.

Inside a process a ring goes straight to the event loops that listen. Between processes it goes over the channel
layer (Redis), else PostgreSQL's NOTIFY, else SQLite's `data_version`; `streams.belltower` runs those on one thread
a process, only while somebody listens or a ring waits to be sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from channels.db import database_sync_to_async

from streams import belltower

T = TypeVar("T")

# Under every bell: a reader that misses all rings is at most this late.
SLOW_POLL_SECONDS = 1.0
# SQLite's data_version wakes everybody for every write; a waiting reader asks at most this often.
_CALM_SECONDS = 0.02


class Bell:
    """What one listener on one event loop holds. Rings between two waits are kept, so none falls between them."""

    __slots__ = ("_event", "_everything", "_loop", "_rung", "_told", "_topics")

    def __init__(self, topics: tuple[str, ...], loop: asyncio.AbstractEventLoop) -> None:
        self._topics = set(topics)
        self._loop = loop
        self._event = asyncio.Event()
        self._rung: set[str] = set()
        self._everything = False
        self._told = False

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait for a ring; True when one came since the last wait, False when the time is up."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def take(self) -> tuple[set[str], bool]:
        """Return and forget which topics rang, and whether a ring without a topic came: look at everything."""
        with _lock:
            rung, everything = self._rung, self._everything
            self._rung, self._everything, self._told = set(), False, False
        return rung, everything

    def add(self, topic: str) -> None:
        with _lock:
            self._topics.add(topic)
            _bells.setdefault(topic, set()).add(self)

    def discard(self, topic: str) -> None:
        with _lock:
            self._topics.discard(topic)
            _forget(self, topic)

    def poke(self) -> None:
        """Wake the listener from its own loop, without a topic having rung."""
        self._event.set()


_lock = threading.Lock()
_bells: dict[str, set[Bell]] = {}
_all: set[Bell] = set()


def _forget(bell: Bell, topic: str) -> None:
    bells = _bells.get(topic)
    if bells is not None:
        bells.discard(bell)
        if not bells:
            del _bells[topic]


def ring(*topics: str) -> None:
    """Wake listeners of these topics, in this process and in the others. Call it after the commit; never raises."""
    wake_here(topics)
    belltower.send(topics)


def wake_here(topics: tuple[str, ...] | None) -> None:
    """Wake this process's listeners of these topics; None wakes all of them. Any thread."""
    tell: list[Bell] = []
    with _lock:
        if topics is None:
            for bell in _all:
                bell._everything = True
                if not bell._told:
                    bell._told = True
                    tell.append(bell)
        else:
            for topic in topics:
                for bell in _bells.get(topic, ()):
                    bell._rung.add(topic)
                    if not bell._told:
                        bell._told = True
                        tell.append(bell)
    for bell in tell:
        try:
            bell._loop.call_soon_threadsafe(_strike, bell)
        except RuntimeError:
            # Its loop was closed under it: nobody waits there any more.
            _drop(bell)


def _strike(bell: Bell) -> None:
    with _lock:
        bell._told = False
    bell._event.set()


def _drop(bell: Bell) -> None:
    with _lock:
        _all.discard(bell)
        for topic in bell._topics:
            _forget(bell, topic)


@asynccontextmanager
async def listen(*topics: str) -> AsyncIterator[Bell]:
    """Hold a bell for these topics while the block runs. Read after entering it and after each wait."""
    bell = Bell(topics, asyncio.get_running_loop())
    with _lock:
        _all.add(bell)
        for topic in topics:
            _bells.setdefault(topic, set()).add(bell)
    belltower.listeners(1, wake_here)
    try:
        yield bell
    finally:
        _drop(bell)
        belltower.listeners(-1, wake_here)


async def wait_until(read: Callable[[], T | None], *topics: str, seconds: float) -> T | None:
    """Call `read` (synchronous, may use the ORM) until it returns something or the time is up; then None.

    It is read at once, after every ring and at least each second, and a last time when the time is up. No database
    connection is held in between.
    """
    ends = time.monotonic() + seconds
    reader = database_sync_to_async(read)
    async with listen(*topics) as bell:
        while True:
            value: T | None = await reader()
            left = ends - time.monotonic()
            if value is not None or left <= 0:
                return value
            if await bell.wait(min(left, SLOW_POLL_SECONDS)):
                bell.take()
                await asyncio.sleep(min(left, _CALM_SECONDS) if belltower.wakes_everybody() else 0)


def close() -> None:
    """Stop the thread that carries rings between processes and wait for it. The next listener starts it again.

    For tests, which drop their database, and for the end of a process.
    """
    belltower.close()
