"""The pump writes what an adapter says into a real log, and ends it honestly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from channels.db import database_sync_to_async

from streams import log, pump, strictjson
from streams.adapters import Message, Request
from streams.adapters.scripted import ScriptedAdapter
from streams.models import Generation
from streams.protocol import Actor, Chunk, Done, Text, error_chunk
from streams.retry import RetryPolicy
from tests.support import factories
from tests.support.polling import eventually_async

pytestmark = pytest.mark.django_db(transaction=True)
ACTOR = Actor(kind="token", id="t", name="t")
ASK = Request(messages=(Message(role="user", content="go"),))
QUICK = RetryPolicy(base_ms=1, longest_ms=2)


def script(*steps: dict[str, Any], **turn: Any) -> ScriptedAdapter:
    return ScriptedAdapter({"turns": [{"steps": list(steps), **turn}]})


async def open_generation(**fields: Any) -> Generation:
    return await database_sync_to_async(factories.generation)(**fields)


async def play(generation: Generation, adapter: Any, **fields: Any) -> pump.Played:
    return await pump.run(
        generation_id=generation.pk, adapter=adapter, request=ASK, writer="w", actor=ACTOR, policy=QUICK, **fields
    )


@database_sync_to_async
def entries(generation: Generation) -> list[dict[str, Any]]:
    rows = log.read(generation_id=generation.pk, from_offset=0, limit=10_000)
    assert [row.offset for row in rows] == list(range(len(rows)))
    return [{"attempt": row.attempt, **strictjson.loads(row.body)} for row in rows]  # type: ignore[dict-item]


@database_sync_to_async
def reread(generation: Generation) -> Generation:
    return Generation.objects.get(pk=generation.pk)


async def test_a_turn_without_calls_is_text_and_done_with_usage() -> None:
    generation = await open_generation()
    usage = {"promptTokens": 1, "completionTokens": 2, "totalTokens": 3}
    played = await play(generation, script({"text": "one two three"}, usage=usage))
    assert (played.kind, played.reason) == ("ended", "stop")
    told = await entries(generation)
    assert "".join(entry.get("content", "") for entry in told) == "one two three"
    assert told[-1] == {"attempt": 1, "type": "done", "reason": "stop", "usage": usage}
    assert (await reread(generation)).state == "done"


async def test_the_first_token_is_stored_while_the_model_is_still_silent() -> None:
    generation = await open_generation()
    playing = asyncio.create_task(play(generation, script({"text": "first"}, {"forever": True})))

    async def stored() -> bool:
        return [entry.get("content") for entry in await entries(generation)] == ["first"]

    await eventually_async(stored, within_seconds=5)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


async def test_a_burst_is_stored_in_batches_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = await open_generation()
    batches: list[int] = []
    real = log.append

    def counted(**fields: Any) -> log.Appended:
        batches.append(len(fields["chunks"]))
        return real(**fields)

    monkeypatch.setattr(log, "append", counted)
    await play(generation, script({"text": "w ", "burst": 1000}))
    told = await entries(generation)
    assert sum(1 for entry in told if entry["type"] == "text") == 2000
    assert max(batches) <= pump.BATCH_CHUNKS + 1
    assert len(batches) < 100, "chunk by chunk would be 2001 transactions"


async def test_a_broken_attempt_is_retried_and_its_text_is_void() -> None:
    generation = await open_generation()
    played = await play(generation, script({"text": "a b c d"}, faults=[{"kind": "drop", "at": 2}]))
    assert played.kind == "ended"
    told = await entries(generation)
    kinds = [(entry["attempt"], entry["type"]) for entry in told]
    assert (1, "error") in kinds
    restart = next(entry for entry in told if entry["type"] == "restart")
    assert (restart["attempt"], restart["supersededFrom"]) == (2, 0)
    after = [entry["content"] for entry in told if entry["attempt"] == 2 and entry["type"] == "text"]
    assert "".join(after) == "a b c d"
    assert told[-1]["reason"] == "stop"


async def test_when_three_attempts_broke_the_log_ends_in_error_after_the_error_chunk() -> None:
    generation = await open_generation()
    played = await play(generation, script({"text": "a b"}, faults=[{"kind": "error", "at": 1, "attempts": 9}]))
    assert (played.kind, played.reason) == ("ended", "error")
    told = await entries(generation)
    assert [entry["type"] for entry in told].count("error") == 3
    assert [entry["type"] for entry in told][-2:] == ["error", "done"]
    assert told[-1]["reason"] == "error"
    assert (await reread(generation)).attempt == 3


async def test_an_unrecoverable_error_ends_the_log_at_once() -> None:
    generation = await open_generation()
    step = {"error": {"code": "not_authorised", "message": "no"}, "recoverable": False}
    await play(generation, script({"text": "a"}, step))
    told = await entries(generation)
    assert [entry["type"] for entry in told] == ["text", "error", "done"]
    assert (await reread(generation)).state == "error"


async def test_a_bug_in_an_adapter_becomes_an_error_without_its_words() -> None:
    class Broken:
        async def aclose(self) -> None: ...

        async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
            yield Text(content="so")
            raise RuntimeError("sk-secret")

    generation = await open_generation()
    await play(generation, Broken())
    told = await entries(generation)
    assert told[-2]["error"] == {"code": "adapter_failed", "message": "the adapter failed (RuntimeError)"}
    assert told[-1]["reason"] == "error"


async def test_stop_reaches_a_silent_model_within_a_second_and_closes_its_stream() -> None:
    closed = asyncio.Event()

    class Silent:
        async def aclose(self) -> None: ...

        async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
            try:
                yield Text(content="half")
                await asyncio.Event().wait()
            finally:
                closed.set()

    generation = await open_generation()
    playing = asyncio.create_task(play(generation, Silent()))

    async def begun() -> bool:
        return len(await entries(generation)) == 1

    await eventually_async(begun)
    assert await database_sync_to_async(log.request_cancel)(generation_id=generation.pk, actor=ACTOR)
    async with asyncio.timeout(1.5):
        played = await playing
    assert (played.kind, played.reason) == ("ended", "cancel")
    assert closed.is_set()
    told = await entries(generation)
    assert [entry["type"] for entry in told] == ["text", "cancel_requested", "done"]
    assert told[-1]["reason"] == "cancel"
    assert not await database_sync_to_async(log.request_cancel)(generation_id=generation.pk, actor=ACTOR)


async def test_a_silent_model_is_beaten_for() -> None:
    generation = await open_generation(producer_timeout_seconds=5)
    place = pump.Place(generation.pk, "w", ACTOR, attempt=1, seq=0, heartbeat_seconds=0.05)
    playing = asyncio.create_task(pump.play(place=place, adapter=script({"forever": True}), request=ASK))

    async def beaten() -> bool:
        return (await reread(generation)).producer_seen_at > generation.producer_seen_at

    await eventually_async(beaten)
    assert await entries(generation) == []
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


async def test_a_writer_that_was_replaced_stops_and_writes_nothing_more() -> None:
    generation = await open_generation()
    playing = asyncio.create_task(play(generation, script({"text": "half"}, {"pauseMs": 300}, {"text": " more"})))

    async def begun() -> bool:
        return len(await entries(generation)) == 1

    await eventually_async(begun)
    await database_sync_to_async(log.append)(
        generation_id=generation.pk, attempt=2, seq=0, chunks=[Text(content="new")], writer="other", actor=ACTOR
    )
    async with asyncio.timeout(5):
        played = await playing
    assert played.kind == "replaced"
    assert [entry.get("content") for entry in await entries(generation)] == ["half", None, "new"]


async def test_an_append_whose_answer_was_lost_is_repeated_and_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    real, lost = log.append, []

    def losing(**fields: Any) -> log.Appended:
        answer = real(**fields)
        if len(lost) < 3:
            lost.append(1)
            raise OperationalError("the server closed the connection")
        return answer

    monkeypatch.setattr(log, "append", losing)
    generation = await open_generation()
    played = await play(generation, script({"text": "a b c"}))
    assert played.kind == "ended"
    told = await entries(generation)
    assert "".join(entry.get("content", "") for entry in told) == "a b c"
    assert len(lost) == 3


async def test_the_calls_of_a_turn_are_stored_together_after_its_words() -> None:
    await database_sync_to_async(factories.policy)()
    generation = await open_generation()
    first = {"call": {"id": "a", "name": "pay", "arguments": {"n": 1}}}
    second = {"call": {"id": "b", "name": "tell", "arguments": {}}}
    played = await play(
        generation, script({"text": "I will"}, first, {"text": " do both"}, second), leave_open_on_calls=True
    )
    assert played.kind == "calls"
    told = [entry for entry in await entries(generation) if entry["type"] in ("text", "tool_call", "done")]
    assert [entry["type"] for entry in told] == ["text"] * 4 + ["tool_call"] * 2
    assert (await reread(generation)).state == "waiting"


async def test_a_turn_that_breaks_after_a_call_makes_no_call() -> None:
    await database_sync_to_async(factories.policy)()
    generation = await open_generation()
    call = {"call": {"id": "a", "name": "pay", "arguments": {"n": 1}}}
    step = {"error": {"code": "oops", "message": "no"}, "recoverable": False}
    await play(generation, script({"text": "x"}, call, step), leave_open_on_calls=True)
    assert [entry["type"] for entry in await entries(generation)] == ["text", "error", "done"]


async def test_a_call_the_log_refuses_is_an_error_and_the_turn_is_tried_again() -> None:
    await database_sync_to_async(factories.policy)()
    generation = await open_generation()
    bad = {"call": {"id": "a", "name": "pay", "arguments": "{not json"}}
    played = await play(generation, script({"text": "x"}, bad), leave_open_on_calls=True)
    assert (played.kind, played.reason) == ("ended", "error")
    told = await entries(generation)
    assert [entry["error"]["code"] for entry in told if entry["type"] == "error"] == ["bad_tool_call"] * 3
    assert not any(entry["type"] == "tool_call" for entry in told)


def test_an_error_chunk_is_not_a_done() -> None:
    assert error_chunk("a", "b", recoverable=True) != Done(reason="error")
