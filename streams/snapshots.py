"""What sockets are welcomed with, read once for all who come at the same time.

Five hundred readers come back together after a restart. Those who ask while a read runs share the next one, which
begins after they asked, so nobody is shown anything older than their hello; and what it reads is one head, as long as
the snapshot of that head is at hand.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from uuid import UUID
from weakref import WeakKeyDictionary

from streams import handshake
from streams.handshake import Snapshot
from streams.tail import in_database

_KEPT = 32
_KEPT_CHARS = 262_144


class Snapshots:
    """Those of one event loop. It has a task only while somebody waits."""

    def __init__(self) -> None:
        self._waiting: dict[UUID, list[asyncio.Future[Snapshot]]] = {}
        self._kept: OrderedDict[UUID, Snapshot] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    async def fresh(self, generation_id: UUID, *, heartbeat_seconds: int) -> Snapshot:
        """Return the log as it is at some moment after this call. Raises NotFound, and what a database raises."""
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(generation_id, []).append(answer)
        if self._task is None:
            self._task = asyncio.create_task(self._read(heartbeat_seconds))
        return await answer

    async def _read(self, heartbeat_seconds: int) -> None:
        asked: dict[UUID, list[asyncio.Future[Snapshot]]] = {}
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, {}
                known = {key: self._kept.get(key) for key in asked}
                try:
                    found = await in_database(handshake.take_all, known, heartbeat_seconds=heartbeat_seconds)
                except Exception as error:  # noqa: BLE001 - those who asked get it
                    found = dict.fromkeys(asked, error)
                for key, answers in asked.items():
                    self._keep(key, found[key])
                    _answer(answers, found[key])
        finally:
            self._task = None
            # Only when the loop ends under it.
            for answers in (*asked.values(), *self._waiting.values()):
                for answer in answers:
                    answer.cancel()

    def _keep(self, key: UUID, found: Snapshot | Exception) -> None:
        self._kept.pop(key, None)
        if isinstance(found, Snapshot) and found.lasts and len(found.welcome) <= _KEPT_CHARS:
            self._kept[key] = found
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


def _answer(answers: list[asyncio.Future[Snapshot]], found: Snapshot | Exception) -> None:
    for answer in answers:
        if answer.done():
            continue
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)


_all: WeakKeyDictionary[asyncio.AbstractEventLoop, Snapshots] = WeakKeyDictionary()


def snapshots() -> Snapshots:
    """Return the running loop's."""
    loop = asyncio.get_running_loop()
    found = _all.get(loop)
    if found is None:
        found = _all[loop] = Snapshots()
    return found
