"""Every entry once and in order, whatever the network, the clock or the doorbell do (faults C40 – C50)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from streams import doorbell, log, tail
from tests.sockets.conftest import ENV
from tests.sockets.logs import story
from tests.sockets.wire import Wire, drained, never_reads
from tests.support.polling import eventually, eventually_async
from tests.support.processes import Child, Server, free_port


def peak_kib(server: Server) -> int:
    """Return the most memory the server has held."""
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError("no VmHWM")


def test_the_same_client_twice_gets_each_text_once_on_each_socket(uvicorn: Server) -> None:  # C40
    told = story("a", "b")
    with Wire(uvicorn, told.path, secret=told.secret) as one, Wire(uvicorn, told.path, secret=told.secret) as two:
        one.hello(**{"from": 1})
        two.hello(**{"from": 1})
        told.write("c", "d")
        for wire in (one, two):
            assert wire.until_offset(3).offsets() == [1, 2, 3]


def test_what_is_appended_while_readers_join_arrives_once(server: Server) -> None:  # C41 on the wire
    told = story(*"abc")
    stop = threading.Event()

    def write() -> None:
        with contextlib.closing(_own_connection()):
            while not stop.is_set():
                told.write("x")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wires = []
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                wire = stack.enter_context(Wire(server, told.path, secret=told.secret)).hello()
                wire.until("caught_up")
                wires.append(wire)
            stop.set()
            writer.join()
            last = told.seq - 1
            for wire in wires:
                assert wire.until_offset(last).offsets() == list(range(last + 1))
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("ringing", [True, False])
def test_what_is_appended_in_the_gap_before_going_live_arrives_once(  # C41, the gap held open
    transactional_db: None, monkeypatch: pytest.MonkeyPatch, ringing: bool
) -> None:
    told = story(*"abc")
    if not ringing:
        monkeypatch.setattr(doorbell, "ring", lambda *topics: None)
    read, reads = log.read, 0

    def read_and_append(**where: Any) -> list[log.Row]:
        nonlocal reads
        rows = read(**where)
        reads += 1
        if reads <= 4:
            # After the history was read, before anybody hears of it.
            told.write(f"gap {reads}")
        return rows

    monkeypatch.setattr(tail, "read_log", read_and_append)
    frames: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        frames.append(json.loads(message["text"]))

    def offsets() -> list[int]:
        return [entry["offset"] for frame in frames if frame["type"] == "entries" for entry in frame["entries"]]

    async def listen() -> None:
        reader = tail.Reader(send=send, cursor=0, target=3, lost=lambda code: None)
        joined = await tail.hub().tail(told.generation.pk)
        joined.join(reader)

        async def all_there() -> bool:
            return len(offsets()) >= 7

        await eventually_async(all_there)
        joined.leave(reader)

    asyncio.run(listen())
    assert offsets() == list(range(7))
    assert [frame["type"] for frame in frames].count("caught_up") == 1


class _own_connection:
    """Close this thread's database connection at its end."""

    def close(self) -> None:
        from django.db import connection

        connection.close()


def test_a_reader_comes_back_after_the_end_and_gets_the_rest_once(uvicorn: Server) -> None:  # C43
    told = story("a", "b", "c", "d", "e")
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello().until_offset(4)
    told.write("f", "g", "h", "i")
    end = told.end()
    for _ in range(2):
        with Wire(uvicorn, told.path, secret=told.secret) as wire:
            welcome = wire.hello(**{"from": 5}).until("welcome")
            assert welcome["generation"]["state"] == "done"
            wire.until("caught_up")
            assert wire.offsets() == [5, 6, 7, 8, 9]
            assert wire.entries[-1]["chunk"] == {"type": "done", "reason": "stop"}
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello(**{"from": end}).until("caught_up")
        assert [frame["type"] for frame in wire.frames] == ["welcome", "caught_up"]


def test_a_long_log_is_replayed_whole_within_the_window(server: Server) -> None:
    told = story()
    for _ in range(12):
        told.write(*[f"{place}," for place in range(500)])
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello().until_offset(5_999)
        assert wire.offsets() == list(range(6_000))
        wire.until("caught_up")


def test_without_an_ack_no_more_than_the_window_comes(server: Server) -> None:
    told = story()
    for _ in range(6):
        told.write(*["x"] * 500)
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello()
        assert wire.close_code() == 4408
        assert wire.offsets() == list(range(2_000))


def test_without_an_ack_no_more_than_a_mebibyte_comes(uvicorn: Server) -> None:
    told = story()
    for _ in range(12):
        told.write("x" * 200_000)
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello()
        assert wire.close_code() == 4408
        assert wire.offsets() == list(range(5))


def test_an_ack_opens_the_window_again(uvicorn: Server) -> None:
    told = story()
    for _ in range(6):
        told.write(*["x"] * 500)
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello()
        wire.until_offset(1_999, ack=False)
        wire.send(type="ack", offset=1_999)
        wire.until_offset(2_999, ack=False)
        assert wire.offsets() == list(range(3_000))


@pytest.mark.slow
def test_a_reader_that_never_reads_costs_a_window_and_nobody_else(server: Server) -> None:  # C45
    told = story("a")

    def write_and_read(rounds: int) -> float:
        """Append a megabyte a round; return the longest that the healthy ones waited for theirs."""
        longest = 0.0
        for _ in range(rounds):
            last = told.write(*["y" * 200_000] * 5) - 1
            written = time.monotonic()
            for wire in healthy:
                wire.skip_to(last)
            longest = max(longest, time.monotonic() - written)
        return longest

    with contextlib.ExitStack() as stack:
        healthy = [stack.enter_context(Wire(server, told.path, secret=told.secret)).hello() for _ in range(10)]
        # What ten readers of large entries cost is not what the eleventh does.
        usual = write_and_read(10)
        before = peak_kib(server)
        lazy = stack.enter_context(never_reads(server, told.path, f"Authorization: Bearer {told.secret}"))
        longest = write_and_read(60)
        assert peak_kib(server) - before < 5_120
        assert longest < 2 * usual + 1
        told_why, size = drained(lazy)
        assert size < 1_100_000
        # daphne drops a line that does not answer its close within a second, and what is in its buffer with it.
        assert told_why or "daphne" in server.command
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello().skip_to(told.seq - 1)


def test_a_blocked_server_loses_nothing(uvicorn: Server) -> None:  # C46
    told = story("a")
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        os.kill(uvicorn.pid, signal.SIGSTOP)
        try:
            for _ in range(500):
                told.write("x")
        finally:
            os.kill(uvicorn.pid, signal.SIGCONT)
        assert wire.until_offset(500, seconds=3).offsets() == list(range(501))


def test_lost_rings_cost_the_poll_and_no_entry(uvicorn: Server, monkeypatch: pytest.MonkeyPatch) -> None:  # C46
    monkeypatch.setattr(doorbell, "ring", lambda *topics: None)
    told = story("a")
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        for count in range(3):
            told.write("x")
            written = time.monotonic()
            wire.until_offset(count + 1)
            assert time.monotonic() - written < 2


@pytest.mark.redis
def test_redis_may_be_emptied_die_and_come_back(transactional_db: None) -> None:  # C46
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    env = {**ENV, "REDIS_URL": f"redis://127.0.0.1:{port}/0"}
    with Child(command) as redis, Server("uvicorn", env=env) as server, Server("daphne", env=env) as other:
        eventually(lambda: "Ready to accept connections" in redis.output())
        told = story("a")

        def seconds_for_five() -> float:
            """Append by way of the other server, each when the one before has arrived; by poll that takes four."""
            began = time.monotonic()
            for _ in range(5):
                told.post(other, "x")
                wire.until_offset(told.seq - 1, seconds=5)
            return time.monotonic() - began

        with Wire(server, told.path, secret=told.secret) as wire:
            wire.hello().until("caught_up")
            eventually(lambda: seconds_for_five() < 2, within_seconds=30)
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(b"FLUSHALL\r\n")
                assert line.recv(100).startswith(b"+OK")
            eventually(lambda: seconds_for_five() < 2, within_seconds=30)
            redis.kill()
            for _ in range(500):
                told.write("x")
            wire.until_offset(told.seq - 1, seconds=5)
            told.post(other, "x")
            wire.until_offset(told.seq - 1, seconds=5)
            redis.start()
            eventually(lambda: seconds_for_five() < 2, within_seconds=30)
            assert wire.offsets() == list(range(told.seq))


@pytest.mark.parametrize("character", ["é", "你", "👩‍👩‍👧"])
def test_a_character_cut_between_chunks_and_resumed_is_the_same_text(uvicorn: Server, character: str) -> None:  # C48
    for cut in range(len(character) + 1):
        told = story(character[:cut], character[cut:], "|")
        for resume_at in range(4):
            with Wire(uvicorn, told.path, secret=told.secret) as before:
                before.hello().until_offset(2)
            with Wire(uvicorn, told.path, secret=told.secret) as after:
                after.hello(**{"from": resume_at}).until("caught_up")
            kept = "".join(entry["chunk"]["content"] for entry in before.entries[:resume_at])
            assert kept + after.text() == f"{character}|"


def test_stop_is_accepted_told_and_the_same_twice(server: Server) -> None:  # C50
    told = story("a")
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        asked = time.monotonic()
        wire.send(type="cancel")
        wire.until("cancel_accepted")
        wire.until_offset(1)
        assert time.monotonic() - asked < 1
        assert wire.entries[1]["notice"]["type"] == "cancel_requested"
        assert wire.entries[1]["notice"]["actor"]["kind"] == "token"
        wire.send(type="cancel")
        wire.until("cancel_accepted")
        told.end()
        wire.until_offset(2)
        assert wire.entries[2]["chunk"] == {"type": "done", "reason": "cancel"}
        assert len(wire.entries) == 3


def test_the_agent_goes_on_when_the_reader_closes(uvicorn: Server) -> None:  # C50
    told = story("a")
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
    told.write("b")
    told.end()
    told.generation.refresh_from_db()
    assert told.generation.state == "done"


def test_the_demo_cuts_one_socket_once_at_the_eighth_text(transactional_db: None) -> None:
    from tests.support import factories

    cookie = factories.session_cookie(factories.operator())
    with Server("daphne", env={**ENV, "AGENTSITE_DROP_AT": "8"}) as server:
        told = story(*"abcde")
        with Wire(server, told.path, cookie=cookie, origin=server.url) as wire:
            wire.hello().until("caught_up")
            told.write(*"fghijkl")
            assert wire.close_code() == 4012
            assert wire.text() == "abcdefgh"
        with Wire(server, told.path, cookie=cookie, origin=server.url) as wire:
            wire.hello(**{"from": 8}).until("caught_up")
            told.write(*"mnopqrstuv")
            wire.until_offset(21)
            assert wire.text() == "ijklmnopqrstuv"
