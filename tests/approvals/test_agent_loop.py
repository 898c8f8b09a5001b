"""The agent loop: turns, calls, people, crashes. Its memory is the log and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.db import connection

from approvals import agent, claims, decisions, history, tools
from approvals.agent import Worker
from approvals.executor import Executor
from approvals.models import AgentRun, ApprovalRequest
from streams import access, clock, log, strictjson
from streams.adapters import Message
from streams.adapters.scripted import ScriptedAdapter
from streams.models import Generation
from streams.protocol import Text
from streams.retry import RetryPolicy
from tests.support import factories
from tests.support.polling import eventually_async

pytestmark = pytest.mark.django_db(transaction=True)
db = database_sync_to_async
PAY = {"call": {"id": "pay", "name": "pay", "arguments": {"amount": 4900}}}
TELL = {"call": {"id": "tell", "name": "tell", "arguments": {"text": "é"}}}
STORY = [
    {"steps": [{"text": "I will pay and tell"}, PAY, TELL]},
    {"steps": [{"text": "Paid.", "ifOk": "pay"}, {"text": "Not paid.", "ifError": "pay"}]},
]


@pytest.fixture
def effects(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """Every effect of the server tools `pay` and `tell`, with the key it came with."""
    happened: list[tuple[str, str, Any]] = []
    monkeypatch.setattr(tools, "_tools", {})

    @tools.tool(name="pay", effects="at_most_once", risk="high")
    def pay(arguments: dict[str, Any], effect_key: str) -> Any:
        happened.append(("pay", effect_key, arguments))
        return {"paid": arguments["amount"]}

    @tools.tool(name="tell", effects="idempotent", risk="low")
    def tell(arguments: dict[str, Any], effect_key: str) -> Any:
        happened.append(("tell", effect_key, arguments))
        return "told"

    return happened


def _begin(turns: list[dict[str, Any]], **fields: Any) -> Generation:
    _, secret = factories.agent_token()
    caller = access.caller_for_token(secret=secret, door="loop")
    return agent.start(
        caller=caller,
        adapter="scripted",
        config={"turns": turns},
        messages=[Message(role="user", content="refund")],
        tool_names=["pay", "tell"],
        title="story",
        **fields,
    )


async def begin(turns: list[dict[str, Any]] = STORY, **fields: Any) -> Generation:
    return await db(_begin)(turns, **fields)


@asynccontextmanager
async def working(*services: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(service.run()) for service in services]
    try:
        yield
    finally:
        for service in services:
            service.stop.set()
        async with asyncio.timeout(15):
            await asyncio.gather(*tasks)


def worker(**fields: Any) -> Worker:
    return Worker(
        name="w",
        makers={"scripted": ScriptedAdapter},
        policy=RetryPolicy(base_ms=1, longest_ms=2),
        **fields,
    )


@db
def told(generation: Generation) -> list[dict[str, Any]]:
    rows = history.read(generation_id=generation.pk)
    assert [row.offset for row in rows] == list(range(len(rows)))
    return [{"offset": row.offset, "attempt": row.attempt, **strictjson.loads(row.body)} for row in rows]  # type: ignore[dict-item]


@db
def standing_text(generation: Generation) -> str:
    rows = history.standing(history.read(generation_id=generation.pk))
    return "".join(json.loads(row.body).get("content", "") for row in rows)


@db
def reread(generation: Generation) -> Generation:
    return Generation.objects.get(pk=generation.pk)


async def in_phase(generation: Generation, phase: str) -> AgentRun:
    async def look() -> AgentRun | None:
        return await db(AgentRun.objects.filter(pk=generation.pk, phase=phase).first)()

    run = await eventually_async(look, within_seconds=15)
    assert run is not None
    return run


@db
def actions(generation: Generation) -> dict[str, ApprovalRequest]:
    return {row.tool: row for row in ApprovalRequest.objects.filter(generation=generation, superseded=False)}


def _decide(action: ApprovalRequest, decision: str = "approve", arguments: str | None = None) -> None:
    caller = access.caller_for_user(user=factories.operator(), door="page")
    decisions.decide(
        caller=caller,
        action_id=action.pk,
        idempotency_key=f"key-{action.pk}",
        decision=decision,  # type: ignore[arg-type]
        reason="because" if decision == "reject" else "",
        arguments_text=arguments,
        digest=action.digest,
    )


async def decide(action: ApprovalRequest, decision: str = "approve", arguments: str | None = None) -> None:
    await db(_decide)(action, decision, arguments)


async def test_two_parallel_calls_each_decided_alone_and_the_next_turn_follows_when_both_are_settled(
    effects: list[Any],
) -> None:
    await db(factories.policy)()
    generation = await begin()
    async with working(worker(), Executor(name="e")):
        await in_phase(generation, "waiting")
        assert (await reread(generation)).state == "waiting"
        open_now = await actions(generation)
        assert {row.state for row in open_now.values()} == {"pending"}
        await decide(open_now["pay"])
        await eventually_async(lambda: db(lambda: effects and effects[0][0] == "pay")())
        assert (await reread(generation)).state == "waiting", "the other call still waits for a person"
        await decide(open_now["tell"], "reject")
        await in_phase(generation, "ended")
    assert [(name, arguments) for name, _, arguments in effects] == [("pay", {"amount": 4900})]
    entries = await told(generation)
    results = {entry["toolCallId"]: entry for entry in entries if entry["type"] == "tool_result"}
    assert results["pay"]["result"] == {"paid": 4900}
    assert results["tell"]["result"] == {"code": "rejected", "reason": "because"}
    assert await standing_text(generation) == "I will pay and tellPaid."
    assert entries[-1]["reason"] == "stop"
    assert {entry["attempt"] for entry in entries} == {1}, "nobody crashed, so no attempt was raised"
    assert (await reread(generation)).state == "done"


async def test_no_done_is_written_while_a_person_thinks(effects: list[Any]) -> None:
    await db(factories.policy)()
    generation = await begin()
    async with working(worker()):
        await in_phase(generation, "waiting")
    assert not any(entry["type"] == "done" for entry in await told(generation))


async def test_a_refused_call_makes_the_model_say_so_and_has_no_effect(effects: list[Any]) -> None:
    await db(factories.policy)(("pay", "deny"), ("tell", "deny"))
    generation = await begin()
    async with working(worker(), Executor(name="e")):
        await in_phase(generation, "ended")
    assert effects == []
    assert await standing_text(generation) == "I will pay and tellNot paid."


async def test_an_allowed_call_runs_without_a_person(effects: list[Any]) -> None:
    await db(factories.policy)(("*", "allow"))
    generation = await begin()
    async with working(worker(), Executor(name="e")):
        await in_phase(generation, "ended")
    assert sorted(name for name, _, _ in effects) == ["pay", "tell"]
    assert await standing_text(generation) == "I will pay and tellPaid."


async def test_an_edited_call_tells_the_model_what_really_ran(effects: list[Any]) -> None:
    await db(factories.policy)(("tell", "deny"))
    heard: list[tuple[Message, ...]] = []

    class Listening(ScriptedAdapter):
        def stream(self, request: Any) -> Any:
            heard.append(request.messages)
            return super().stream(request)

    generation = await begin()
    listening = worker()
    listening.makers = {"scripted": Listening}
    async with working(listening, Executor(name="e")):
        await in_phase(generation, "waiting")
        await decide((await actions(generation))["pay"], arguments='{"amount":100}')
        await in_phase(generation, "ended")
    assert effects[0][2] == {"amount": 100}
    answers = {message.tool_call_id: message for message in heard[-1] if message.role == "tool"}
    assert json.loads(answers["pay"].content) == {
        "edited": True,
        "arguments": {"amount": 100},
        "result": {"paid": 100},
    }
    assert answers["tell"].is_error
    asked = next(message for message in heard[-1] if message.role == "assistant")
    assert [call.id for call in asked.tool_calls] == ["pay", "tell"]


async def test_a_worker_that_died_in_mid_turn_is_followed_by_one_that_voids_only_that_turn(effects: list[Any]) -> None:
    await db(factories.policy)(("*", "allow"))
    slow = [{"steps": [{"text": "first"}, PAY]}, {"steps": [{"text": "half said"}, {"text": " and done"}]}]
    generation = await begin(slow)
    async with working(worker(), Executor(name="e")):
        await in_phase(generation, "ended")
    await db(_die_in_second_turn)(generation)
    async with working(worker(lease_seconds=0.3)):
        await in_phase(generation, "ended")
    entries = await told(generation)
    restart = next(entry for entry in entries if entry["type"] == "restart")
    void_from = next(entry["offset"] for entry in entries if entry.get("content") == "half")
    assert restart["supersededFrom"] == void_from
    assert await standing_text(generation) == "firsthalf said and done"
    assert [name for name, _, _ in effects] == ["pay"], "the first turn's call was not made again"
    assert (await db(ApprovalRequest.objects.filter(generation=generation).count)()) == 1


def _die_in_second_turn(generation: Generation) -> None:
    """Put the rows where kill -9 in the middle of the second turn's words leaves them."""
    first_of_two = generation.entries.filter(body__contains='"half"').get()
    generation.entries.filter(offset__gt=first_of_two.offset).delete()
    Generation.objects.filter(pk=generation.pk).update(
        finish_reason="",
        finished_at=None,
        next_offset=first_of_two.offset + 1,
        next_seq=first_of_two.seq + 1,
        newest="text",
        producer_seen_at=clock.now(),
    )
    AgentRun.objects.filter(pk=generation.pk).update(
        phase="running", worker="dead", lease_expires_at=clock.now() - timedelta(seconds=1)
    )


async def test_a_worker_that_died_right_after_its_calls_is_followed_without_asking_twice(effects: list[Any]) -> None:
    await db(factories.policy)()
    generation = await begin()
    async with working(worker()):
        await in_phase(generation, "waiting")
    before = await told(generation)
    expired = await db(clock.now)() - timedelta(seconds=1)
    await db(AgentRun.objects.filter(pk=generation.pk).update)(
        phase="running", worker="dead", lease_expires_at=expired, turns=0
    )
    async with working(worker()):
        await in_phase(generation, "waiting")
    assert await told(generation) == before
    assert (await db(AgentRun.objects.get)(pk=generation.pk)).turns == 1


async def test_two_workers_never_play_the_same_turn(effects: list[Any]) -> None:
    await db(factories.policy)(("*", "allow"))
    runs = [await begin() for _ in range(6)]
    async with working(worker(), worker(), Executor(name="e")):
        for generation in runs:
            await in_phase(generation, "ended")
    for generation in runs:
        assert await standing_text(generation) == "I will pay and tellPaid."
        assert {entry["attempt"] for entry in await told(generation)} == {1}
    assert len(effects) == 12


async def test_stop_while_a_person_thinks_ends_the_run_and_cancels_what_was_asked(effects: list[Any]) -> None:
    await db(factories.policy)()
    generation = await begin()
    async with working(worker()):
        await in_phase(generation, "waiting")
        run = await reread(generation)
        caller = await db(factories.operator)()
        actor = access.caller_for_user(user=caller, door="page").actor
        await db(log.request_cancel)(generation_id=run.pk, actor=actor)
        await in_phase(generation, "ended")
    assert (await reread(generation)).state == "cancelled"
    assert {row.state for row in (await actions(generation)).values()} == {"cancelled"}
    assert effects == []


async def test_a_run_that_never_ends_its_calling_is_ended_by_its_number_of_turns(effects: list[Any]) -> None:
    await db(factories.policy)(("*", "allow"))
    turns = [{"steps": [{"call": {"id": f"c{n}", "name": "tell", "arguments": {"n": n}}}]} for n in range(5)]
    generation = await begin(turns, max_turns=2)
    async with working(worker(), Executor(name="e")):
        await in_phase(generation, "ended")
    entries = await told(generation)
    assert [entry["error"]["code"] for entry in entries if entry["type"] == "error"] == ["too_many_turns"]
    assert entries[-1]["reason"] == "error"
    assert len(effects) == 2


async def test_an_id_the_model_uses_twice_gets_a_name_of_its_own(effects: list[Any]) -> None:
    await db(factories.policy)(("*", "allow"))
    again = {"call": {"id": "tell", "name": "tell", "arguments": {"text": "again"}}}
    generation = await begin([{"steps": [TELL]}, {"steps": [again]}, {"steps": [{"text": "ok"}]}])
    async with working(worker(), Executor(name="e")):
        await in_phase(generation, "ended")
    ids = [entry["id"] for entry in await told(generation) if entry["type"] == "tool_call"]
    assert ids == ["tell", "tell-1-0"]
    assert len(effects) == 2


async def test_a_broken_provider_is_retried_and_the_retry_voids_what_was_said(effects: list[Any]) -> None:
    await db(factories.policy)(("*", "deny"))
    turns = [{"steps": [{"text": "a b c"}, PAY], "faults": [{"kind": "drop", "at": 2}]}, {"steps": [{"text": "."}]}]
    generation = await begin(turns)
    async with working(worker()):
        await in_phase(generation, "ended")
    assert await standing_text(generation) == "a b c."
    assert (await reread(generation)).attempt == 2
    assert (await db(AgentRun.objects.get)(pk=generation.pk)).failures == 0


async def test_a_worker_that_stops_gives_its_run_back_and_the_next_one_goes_on(effects: list[Any]) -> None:
    await db(factories.policy)(("*", "deny"))
    turns = [{"steps": [{"text": "so"}, {"pauseMs": 600_000}]}]
    generation = await begin(turns)
    async with working(worker()):

        async def said() -> bool:
            return await standing_text(generation) == "so"

        await eventually_async(said)
    run = await db(AgentRun.objects.get)(pk=generation.pk)
    assert (run.phase, run.worker) == ("ready", "")
    await db(AgentRun.objects.filter(pk=generation.pk).update)(
        config=json.dumps({"turns": [{"steps": [{"text": "so it goes"}]}]})
    )
    async with working(worker()):
        await in_phase(generation, "ended")
    assert await standing_text(generation) == "so it goes"


async def test_an_unknown_outcome_keeps_the_log_open_until_a_person_has_looked(effects: list[Any]) -> None:
    await db(factories.policy)(("tell", "deny"), ("pay", "allow"))
    generation = await begin(producer_timeout_seconds=6)
    async with working(worker()):
        await in_phase(generation, "waiting")
        taken = await db(claims.claim)(
            claimant=claims.Claimant.server("gone"), claim_id="claim-gone", tools=["pay"], lease_seconds=1
        )
        assert len(taken) == 1
        await db(ApprovalRequest.objects.filter(tool="pay").update)(
            lease_expires_at=await db(clock.now)() - timedelta(seconds=1)
        )
        await db(claims.reap_lost)()
        assert (await actions(generation))["pay"].state == "unknown"
        seen = (await reread(generation)).producer_seen_at

        async def beaten() -> bool:
            return (await reread(generation)).producer_seen_at > seen

        await eventually_async(beaten, within_seconds=10)
        chief = await db(factories.chief)()
        await db(decisions.reconcile)(
            caller=access.caller_for_user(user=chief, door="page"),
            action_id=(await actions(generation))["pay"].pk,
            idempotency_key="reconcile-1",
            outcome="done",
            note="I looked: it was paid",
            result_text='{"paid":4900}',
        )
        await in_phase(generation, "ended")
    assert await standing_text(generation) == "I will pay and tellPaid."
    assert effects == []


def test_the_fold_leaves_out_what_was_superseded(db: None) -> None:
    assert connection is not None
    generation = factories.generation()
    token = generation.token
    assert token is not None
    actor = access.Actor(kind="token", id=token.prefix, name=token.name)
    say = {"generation_id": generation.pk, "writer": "w", "actor": actor}
    log.append(attempt=1, seq=0, chunks=[Text(content="void")], **say)
    log.append(attempt=2, seq=0, chunks=[Text(content="kept")], **say)
    told = history.tell(before=(), rows=history.read(generation_id=generation.pk))
    assert told.messages == ()
    assert told.unfinished_from == 2
    assert told.next_offset == 3
