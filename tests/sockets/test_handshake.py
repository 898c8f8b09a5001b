"""hello → welcome, [reset], entries, caught_up, live; and what is refused with which code (contract §4)."""

from __future__ import annotations

import uuid
from contextlib import suppress

import pytest
from websockets.exceptions import ConnectionClosed

from streams.models import Entry, Generation
from tests.sockets.logs import story
from tests.sockets.wire import Wire
from tests.support.processes import Server


def test_hello_is_answered_with_welcome_entries_caught_up_then_live(server: Server) -> None:
    told = story("a", "b", "c")
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello()
        welcome = wire.next()
        assert welcome["type"] == "welcome"
        assert welcome["epoch"] == told.generation.epoch
        assert (welcome["firstOffset"], welcome["nextOffset"], welcome["heartbeatSeconds"]) == (0, 3, 1)
        assert welcome["generation"]["id"] == str(told.generation.pk)
        assert welcome["generation"]["state"] == "open"
        assert welcome["actions"] == []
        caught_up = wire.until("caught_up")
        assert caught_up == {"type": "caught_up", "nextOffset": 3}
        assert [frame["type"] for frame in wire.frames] == ["welcome", "entries", "caught_up"]
        assert wire.offsets() == [0, 1, 2]
        told.write("d")
        wire.until_offset(3)
        assert wire.text() == "abcd"
        assert wire.entries[3]["chunk"] == {"type": "text", "content": "d"}
        assert wire.entries[3]["attempt"] == 1
        assert wire.entries[3]["at"].endswith("Z")


def test_from_starts_where_it_says(server: Server) -> None:
    told = story("a", "b", "c")
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello(**{"from": 2, "epoch": told.generation.epoch}).until("caught_up")
        assert wire.offsets() == [2]
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello(**{"from": 3}).until("caught_up")
        assert [frame["type"] for frame in wire.frames] == ["welcome", "caught_up"]


@pytest.mark.parametrize(
    ("hello", "reason", "first"),
    [
        ({"from": 1, "epoch": "another-life"}, "epoch", 2),
        ({"from": 1}, "pruned", 2),
        ({"from": 9}, "ahead", 2),
    ],
)
def test_what_cannot_be_honoured_is_reset_with_its_reason(
    uvicorn: Server, hello: dict[str, object], reason: str, first: int
) -> None:
    told = story("a", "b", "c", "d")
    Generation.objects.filter(pk=told.generation.pk).update(first_offset=first)
    Entry.objects.filter(generation=told.generation, offset__lt=first).delete()
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello(**hello).until("caught_up")
        assert wire.frames[1] == {
            "type": "reset",
            "reason": reason,
            "epoch": told.generation.epoch,
            "firstOffset": first,
        }
        assert wire.offsets() == [2, 3]


def test_heartbeats_come_between_entries_and_move_no_cursor(server: Server) -> None:
    told = story("a")
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        assert wire.until("heartbeat", seconds=4) == {"type": "heartbeat", "nextOffset": 1}
        told.write("b")
        wire.until_offset(1)
        assert wire.until("heartbeat", seconds=4) == {"type": "heartbeat", "nextOffset": 2}
        assert wire.offsets() == [0, 1]


def test_a_hello_of_another_protocol_is_an_error_and_4400(server: Server) -> None:
    told = story()
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello(protocol=2)
        error = wire.next()
        assert (error["type"], error["code"]) == ("error", "unknown_protocol")
        assert wire.close_code() == 4400


def test_a_second_hello_is_4400(server: Server) -> None:
    told = story()
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        wire.hello()
        assert wire.until("error")["code"] == "second_hello"
        assert wire.close_code() == 4400


@pytest.mark.parametrize(
    "bad",
    [
        "no json",
        "[1]",
        "{}",
        '{"type":7}',
        '{"type":"dance"}',
        '{"type":"ack","offset":"1"}',
        '{"type":"ack","offset":99}',
        '{"type":"ack","offset":0,"offset":1}',
        '{"type":"hello","type":"hello"}',
        '{"type":"cancel","x":"\\ud800"}',
        '{"type":"cancel","force":true}',
        "[" * 5000,
        b"bytes",
    ],
)
def test_a_bad_frame_gets_an_error_and_the_socket_lives_on(uvicorn: Server, bad: str | bytes) -> None:
    told = story("a")
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        wire.connection.send(bad)
        assert wire.until("error")["code"] in ("invalid", "unknown_frame")
        told.write("b")
        wire.until_offset(1)


@pytest.mark.parametrize(
    "hello",
    [{"from": -1}, {"from": "0"}, {"from": True}, {"from": 1.5}, {"protocol": "1"}, {"epoch": 4}, {"more": 1}],
)
def test_a_bad_hello_gets_an_error_and_may_be_said_again(uvicorn: Server, hello: dict[str, object]) -> None:
    told = story("a")
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello(**hello)
        error = wire.next()
        assert (error["type"], error["code"]) == ("error", "invalid")
        wire.hello().until("caught_up")


def test_nothing_is_answered_before_hello(uvicorn: Server) -> None:
    told = story("a")
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.send(type="cancel")
        assert wire.next()["code"] == "invalid"
        told.generation.refresh_from_db()
        assert not told.generation.cancel_requested


def test_a_frame_over_64_kib_is_4429(server: Server) -> None:
    told = story()
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        wire.send(type="cancel", requestId="é" * 33_000)
        assert wire.until("error")["code"] == "too_large"
        assert wire.close_code() == 4429


def test_more_than_twenty_frames_a_second_is_4429(server: Server) -> None:
    told = story()
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        # Closed while we still speak, as it should.
        with suppress(ConnectionClosed):
            for _ in range(60):
                wire.send(type="dance")
        assert wire.until_that(lambda frame: frame.get("code") != "unknown_frame")["code"] == "rate_limited"
        assert wire.close_code() == 4429


def test_acks_do_not_count(uvicorn: Server) -> None:
    told = story("a")
    with Wire(uvicorn, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        for _ in range(200):
            wire.send(type="ack", offset=0)
        told.write("b")
        wire.until_offset(1)
        assert not [frame for frame in wire.frames if frame["type"] == "error"]


@pytest.mark.parametrize("path", [f"/ws/generations/{uuid.uuid4()}/", "/ws/generations/nonsense/"])
def test_what_does_not_exist_is_4404(server: Server, path: str) -> None:
    told = story()
    with Wire(server, path, secret=told.secret) as wire:
        wire.hello()
        assert wire.next()["code"] == "not_found"
        assert wire.close_code() == 4404
