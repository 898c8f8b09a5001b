"""Many readers: they come back together after a restart (C47), idle on few connections, and leave nothing (C52)."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from websockets.asyncio.client import ClientConnection, connect

from streams import doorbell, handshake, snapshots
from streams.problems import NotFound
from tests.sockets.conftest import ENV
from tests.sockets.logs import Story, story
from tests.support import factories
from tests.support.polling import eventually, eventually_async
from tests.support.processes import Server


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count how often heads and whole snapshots are read."""
    counts = {"heads": 0, "whole": 0}
    take_all, take = handshake.take_all, handshake.take

    def count_heads(*args: Any, **kwargs: Any) -> Any:
        counts["heads"] += 1
        return take_all(*args, **kwargs)

    def count_whole(*args: Any, **kwargs: Any) -> Any:
        counts["whole"] += 1
        return take(*args, **kwargs)

    monkeypatch.setattr(handshake, "take_all", count_heads)
    monkeypatch.setattr(handshake, "take", count_whole)
    return counts


def test_five_hundred_who_come_together_cost_two_reads(transactional_db: None, counted: dict[str, int]) -> None:
    told = story("a")

    async def together() -> None:
        one = snapshots.snapshots()
        await asyncio.gather(*(one.fresh(told.generation.pk, heartbeat_seconds=15) for _ in range(500)))

    asyncio.run(together())
    assert counted["heads"] <= 2
    assert counted["whole"] == 1


def test_a_snapshot_is_never_older_than_the_question(transactional_db: None, counted: dict[str, int]) -> None:
    told = story("a")

    async def ask(generation_id: Any = None) -> handshake.Snapshot:
        return await snapshots.snapshots().fresh(generation_id or told.generation.pk, heartbeat_seconds=15)

    async def talk() -> None:
        first = await ask()
        assert (first.next_offset, json.loads(first.welcome)["nextOffset"]) == (1, 1)
        assert await ask() is first
        await asyncio.to_thread(write, told)
        second = await ask()
        assert (second.next_offset, json.loads(second.welcome)["generation"]["nextOffset"]) == (2, 2)
        with pytest.raises(NotFound):
            await ask(uuid4())
        assert (await ask()).next_offset == 2

    asyncio.run(talk())
    assert counted["whole"] == 2


def write(told: Story, text: str = "x") -> None:
    try:
        told.write(text)
    finally:
        connection.close()


class Crowd:
    """Readers of one log on one event loop, each with what it was given."""

    def __init__(self, server: Server, told: Story, size: int) -> None:
        self.server, self.told, self.size = server, told, size
        self.given: list[list[int]] = [[] for _ in range(size)]
        self.lines: list[ClientConnection | None] = [None] * size

    async def come(self) -> None:
        await asyncio.gather(*(self._come(number) for number in range(self.size)))

    async def _come(self, number: int) -> None:
        line = await connect(
            self.server.ws_url + self.told.path,
            additional_headers=factories.bearer(self.told.secret),
            compression=None,
            ping_interval=None,
            open_timeout=60,
            proxy=None,
        )
        self.lines[number] = line
        await line.send(json.dumps({"type": "hello", "protocol": 1, "from": len(self.given[number])}))
        while True:
            frame = json.loads(await line.recv())
            self._take(number, frame)
            if frame["type"] == "caught_up":
                return

    async def until(self, offset: int) -> None:
        await asyncio.gather(*(self._until(number, offset) for number in range(self.size)))

    async def _until(self, number: int, offset: int) -> None:
        line = self.lines[number]
        assert line is not None
        while not self.given[number] or self.given[number][-1] < offset:
            self._take(number, json.loads(await line.recv()))

    def _take(self, number: int, frame: dict[str, Any]) -> None:
        if frame["type"] == "entries":
            self.given[number] += [entry["offset"] for entry in frame["entries"]]

    async def leave(self) -> None:
        await asyncio.gather(*(line.close() for line in self.lines if line is not None))


def test_a_crowd_comes_back_after_a_restart_and_each_gets_the_rest_once(transactional_db: None) -> None:  # C47
    told = story(*"abc")

    async def all_day(server: Server) -> list[list[int]]:
        crowd = Crowd(server, told, 200)
        await crowd.come()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(write, told)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(60):
            await crowd.come()
            await asyncio.to_thread(write, told)
            await crowd.until(4)
        await crowd.leave()
        return crowd.given

    with Server("uvicorn", env={**ENV, "SOCKET_HEARTBEAT_SECONDS": "15"}) as server:
        assert asyncio.run(all_day(server)) == [[0, 1, 2, 3, 4]] * 200


@pytest.mark.postgres
def test_idle_readers_hold_no_connections_and_leave_no_listener(transactional_db: None) -> None:  # C52
    told = story("a")

    def connections(name: str = "") -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND (%s = '' OR application_name = %s)",
                [name, name],
            )
            return int(cursor.fetchone()[0])

    async def idle(server: Server) -> None:
        crowd = Crowd(server, told, 300)
        await crowd.come()
        for count in range(5):
            await asyncio.to_thread(write, told)
            await crowd.until(count + 1)
        # Four that read, four that would write, one that listens, and what http has used before; not one a reader.
        assert await asyncio.to_thread(counted_apart) - before <= 10
        await crowd.leave()

    def counted_apart() -> int:
        try:
            return connections()
        finally:
            connection.close()

    doorbell.close()
    before = connections()
    with Server("uvicorn", env={**ENV, "SOCKET_HEARTBEAT_SECONDS": "15", "REDIS_URL": ""}) as server:
        asyncio.run(idle(server))
        # The thread that listens ends when nobody does; nothing of the readers is left within five seconds.
        eventually(lambda: connections("agentsite-doorbell") == 0, within_seconds=6)


async def test_the_doorbells_thread_ends_when_nobody_listens(transactional_db: None) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "doorbell"]

    async with doorbell.listen("inbox"):
        await eventually_async(lambda: _value(bool(threads())))
    await eventually_async(lambda: _value(not threads()), within_seconds=6)


async def _value(it: bool) -> bool:
    return it
