"""Carry the doorbell's rings between processes, on one thread a process that lives only while it is needed.

A thread with an event loop of its own, because the loops that listen come and go (a synchronous view makes one a
request) and may be blocked, and because a ring is made on threads that must not wait for a network.

- With a channel layer (Redis): one channel in one group a process; rings are gathered and sent together. Redis may be
  down or restart: nothing raises, nothing waits, the slow poll of the readers bridges the time.
- On PostgreSQL without one: NOTIFY on the connection that has just committed, LISTEN on one connection of the thread.
- On SQLite: `PRAGMA data_version` (5 µs) each 20 ms tells that somebody committed, not what; everybody looks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from channels.layers import get_channel_layer
from django.conf import settings
from django.db import connection, connections

log = logging.getLogger("streams.doorbell")

Wake = Callable[[tuple[str, ...] | None], None]
Way = Literal["layer", "postgresql", "sqlite", "none"]

NAME = "agentsite_doorbell"
LINGER_SECONDS = 2.0
DATA_VERSION_SECONDS = 0.02
SEND_SECONDS = 2.0
MAX_BACKOFF_SECONDS = 5.0
MAX_PENDING = 1_000
# NOTIFY takes payloads below 8,000 bytes.
MAX_PAYLOAD = 7_900

_lock = threading.Lock()
_tower: _Tower | None = None
_listeners = 0
_pending: set[str] = set()
_wake: Wake | None = None
_me = secrets.token_hex(6)


def way() -> Way:
    """Say how rings leave this process."""
    if settings.CHANNEL_LAYERS:
        return "layer"
    engine = settings.DATABASES["default"]["ENGINE"]
    if engine.endswith("postgresql"):
        return "postgresql"
    return "sqlite" if engine.endswith("sqlite3") and _sqlite_path() else "none"


def wakes_everybody() -> bool:
    """Say whether each write of anybody wakes every listener, so that readers should calm down a little."""
    return way() == "sqlite"


def send(topics: tuple[str, ...]) -> None:
    """Ring in the other processes; never raises, never waits for Redis."""
    how = way()
    if how == "layer":
        with _lock:
            _pending.update(topics)
            _start()
    elif how == "postgresql":
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            _notify(topics)
        else:
            asyncio.get_running_loop().run_in_executor(None, _notify_and_close, topics)


def listeners(change: int, wake: Wake) -> None:
    """Count a listener in or out; the thread runs while there is one."""
    global _listeners, _wake
    with _lock:
        _wake = wake
        _listeners += change
        if _listeners > 0 and way() != "none":
            _start()
        elif _tower is not None:
            _tower.nudge()


def close() -> None:
    """End the thread and wait for it."""
    with _lock:
        tower = _tower
    if tower is not None:
        tower.stop()


def _start() -> None:
    """Have a thread that knows of what has just changed. Needs `_lock`."""
    global _tower
    if _tower is None:
        _tower = _Tower()
        _tower.start()
    else:
        _tower.nudge()


def _after_fork() -> None:
    global _lock, _tower, _listeners, _me
    _lock, _tower, _listeners, _me = threading.Lock(), None, 0, secrets.token_hex(6)
    _pending.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(close)


def _notify(topics: tuple[str, ...]) -> None:
    payload = " ".join((_me, *topics))
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [NAME, payload if len(payload) <= MAX_PAYLOAD else _me])
    except Exception as error:  # noqa: BLE001 - a ring is a hint and must not fail what has been committed
        log.info("a ring could not be sent: %s", error)


def _notify_and_close(topics: tuple[str, ...]) -> None:
    try:
        _notify(topics)
    finally:
        connection.close()


def _sqlite_path() -> Path | None:
    name = str(settings.DATABASES["default"]["NAME"])
    return None if ":memory:" in name or "mode=memory" in name else Path(name)


class _Tower(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="doorbell", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudged: asyncio.Event | None = None
        self._stopping = False

    # From other threads

    def nudge(self) -> None:
        loop, nudged = self._loop, self._nudged
        if loop is not None and nudged is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(nudged.set)

    def stop(self) -> None:
        self._stopping = True
        self.nudge()
        if threading.current_thread() is not self:
            self.join(timeout=5)

    # On the thread

    def run(self) -> None:
        global _tower
        try:
            asyncio.run(self._main())
        except Exception:
            log.exception("the doorbell's thread broke; readers go on by polling until the next ring")
        finally:
            with _lock:
                if _tower is self:
                    _tower = None

    async def _main(self) -> None:
        global _tower
        self._nudged = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        receiver: asyncio.Task[None] | None = None
        idle_since: float | None = None
        failures = 0
        try:
            while not self._stopping:
                with _lock:
                    topics = tuple(_pending)
                    _pending.clear()
                    wanted = _listeners > 0
                if wanted and receiver is None:
                    receiver = asyncio.create_task(self._receive())
                if topics:
                    failures = 0 if await self._send(topics) else failures + 1
                    if failures:
                        await self._pause(min(MAX_BACKOFF_SECONDS, 0.25 * 2**failures))
                        continue
                now = self._loop.time()
                if wanted or topics:
                    idle_since = None
                elif idle_since is None:
                    idle_since = now
                elif now - idle_since >= LINGER_SECONDS:
                    with _lock:
                        if not _listeners and not _pending:
                            _tower = None
                            return
                await self._pause(LINGER_SECONDS / 4 if not wanted else 60)
        finally:
            if receiver is not None:
                receiver.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await receiver
            if way() == "layer":
                await self._flush()

    async def _pause(self, seconds: float) -> None:
        assert self._nudged is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._nudged.wait()
        self._nudged.clear()

    async def _receive(self) -> None:
        ways = {"layer": self._layer, "postgresql": self._postgresql, "sqlite": self._sqlite}
        failures = 0
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await ways[way()]()
            except Exception as error:  # noqa: BLE001 - whatever it is, the way out is to connect anew
                log.info("the doorbell lost its line: %s", error)
            # Whatever rang while nobody heard it.
            _wake_here(None)
            failures = 1 if asyncio.get_running_loop().time() - started > 10 else failures + 1
            await asyncio.sleep(min(MAX_BACKOFF_SECONDS, 0.1 * 2**failures))

    async def _send(self, topics: tuple[str, ...]) -> bool:
        if len(topics) > MAX_PENDING:
            topics = ()
        try:
            async with asyncio.timeout(SEND_SECONDS):
                message = {"type": "doorbell.ring", "from": _me, "topics": list(topics)}
                await _layer().group_send(NAME, message)
        except Exception as error:  # noqa: BLE001 - Redis is down: the rings are lost and the poll finds the rows
            log.info("rings could not be sent: %s", error)
            return False
        return True

    async def _flush(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(SEND_SECONDS):
                await _layer().flush()

    async def _layer(self) -> None:
        layer = _layer()
        try:
            async with asyncio.timeout(MAX_BACKOFF_SECONDS):
                channel = await layer.new_channel("doorbell.")
                await layer.group_add(NAME, channel)
            _wake_here(None)
            while True:
                message = await layer.receive(channel)
                if message.get("from") != _me:
                    _wake_here(tuple(message.get("topics", ())) or None)
        except BaseException:
            # The layer keeps the channel and its own task otherwise.
            await self._flush()
            raise

    async def _postgresql(self) -> None:
        import psycopg  # an extra

        parameters: dict[str, Any] = connections["default"].get_connection_params()
        for name in ("cursor_factory", "context", "prepare_threshold", "pool"):
            parameters.pop(name, None)
        parameters = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, **parameters}
        parameters["application_name"] = "agentsite-doorbell"
        line = await psycopg.AsyncConnection.connect(**parameters, autocommit=True, connect_timeout=5)
        async with line:
            await line.execute(f"LISTEN {NAME}")
            _wake_here(None)
            async for note in line.notifies():
                sender, *topics = note.payload.split(" ")
                if sender != _me:
                    _wake_here(tuple(topics) or None)

    async def _sqlite(self) -> None:
        path = _sqlite_path()
        if path is None:
            await asyncio.sleep(60)
            return
        line = sqlite3.connect(f"file:{path}?mode=rw", uri=True, isolation_level=None, timeout=0.1)
        try:
            known, inode, polls = None, path.stat().st_ino, 0
            while True:
                with contextlib.suppress(sqlite3.OperationalError):  # locked for a moment, by a checkpoint
                    version = line.execute("PRAGMA data_version").fetchone()[0]
                    if version != known:
                        known = version
                        _wake_here(None)
                polls += 1
                if polls % 50 == 0 and path.stat().st_ino != inode:
                    return  # another file stands there now
                await asyncio.sleep(DATA_VERSION_SECONDS)
        finally:
            line.close()


def _layer() -> Any:
    layer = get_channel_layer()
    if layer is None:
        raise RuntimeError("no channel layer is configured")
    return layer


def _wake_here(topics: tuple[str, ...] | None) -> None:
    wake = _wake
    if wake is not None:
        wake(topics)
