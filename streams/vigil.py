"""One task a process that keeps all its sockets honest: heartbeats, deadlines, and rights that have ended.

A socket has no timer of its own. Every two seconds one grouped query asks which credentials are no longer good;
contract §4 promises that the sockets they opened close within five.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol
from weakref import WeakKeyDictionary

from streams.sockets import Credential, ended
from streams.tail import in_database

log = logging.getLogger("streams.sockets")

TICK_SECONDS = 0.25
RECHECK_SECONDS = 2.0
_LINGER_SECONDS = 2.0


class Watched(Protocol):
    """What the vigil needs of a socket."""

    credential: Credential | None

    def tick(self, now: float) -> None:
        """Do what is due at `now` (the loop's time); called each quarter of a second, must not wait."""
        ...

    def shut(self, code: int, detail: str) -> None:
        """Close the socket with this code."""
        ...


class Vigil:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets: set[Watched] = set()
        self._task = asyncio.create_task(self._run())
        self._check: asyncio.Task[None] | None = None

    def add(self, socket: Watched) -> None:
        self._sockets.add(socket)

    def discard(self, socket: Watched) -> None:
        self._sockets.discard(socket)

    async def _run(self) -> None:
        checked = empty_since = self._loop.time()
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                now = self._loop.time()
                for socket in tuple(self._sockets):
                    socket.tick(now)
                if self._sockets:
                    empty_since = now
                elif now - empty_since >= _LINGER_SECONDS:
                    return
                if now - checked >= RECHECK_SECONDS and (self._check is None or self._check.done()):
                    checked = now
                    self._check = asyncio.create_task(self._close_ended())
        finally:
            if _vigils.get(self._loop) is self:
                del _vigils[self._loop]

    async def _close_ended(self) -> None:
        held = {one.credential for one in self._sockets if one.credential is not None}
        if not held:
            return
        try:
            codes = await in_database(ended, held)
        except Exception:
            # The database is away: nobody can say, and nothing new is told either. The next round asks again.
            log.warning("credentials could not be checked", exc_info=log.isEnabledFor(logging.DEBUG))
            return
        for socket in tuple(self._sockets):
            code = codes.get(socket.credential) if socket.credential is not None else None
            if code is not None:
                socket.shut(code, "what this socket was opened with is no longer valid")


_vigils: WeakKeyDictionary[asyncio.AbstractEventLoop, Vigil] = WeakKeyDictionary()


def vigil() -> Vigil:
    """Return the running loop's vigil; it ends two seconds after its last socket."""
    loop = asyncio.get_running_loop()
    found = _vigils.get(loop)
    if found is None:
        found = _vigils[loop] = Vigil()
    return found
