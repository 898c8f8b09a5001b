"""The executor: claims what is approved, runs the tool once and between transactions, says what is known."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.db import OperationalError, connection, transaction

from approvals import claims, decisions, engine, executor, running, tools
from approvals.executor import Executor
from approvals.models import ApprovalRequest, AuditEvent, Claim
from streams import access
from tests.support import factories
from tests.support.polling import eventually_async

pytestmark = pytest.mark.django_db(transaction=True)
db = database_sync_to_async


@pytest.fixture(autouse=True)
def _no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_tools", {})


def approved(tool: str = "t", arguments: str = '{"n":1}') -> ApprovalRequest:
    """Ask for a call that policy allows, so that it can be claimed at once."""
    if not factories.Policy.objects.filter(active=True).exists():
        factories.policy(("*", "allow"))
    _, secret = factories.agent_token()
    asked = decisions.request(
        caller=access.caller_for_token(secret=secret, door="http"),
        idempotency_key="key-12345678",
        tool=tool,
        arguments_text=arguments,
    )
    assert asked.action.state == "approved"
    return asked.action


async def finished(action: ApprovalRequest, *states: str) -> ApprovalRequest:
    async def look() -> ApprovalRequest | None:
        return await db(ApprovalRequest.objects.filter(pk=action.pk, state__in=states).first)()

    found = await eventually_async(look, within_seconds=15)
    assert found is not None
    return found


class Running:
    """An executor in this loop: `async with Running() as one`."""

    def __init__(self, **fields: Any) -> None:
        self.executor = Executor(name="e", **fields)

    async def __aenter__(self) -> Executor:
        self.task = asyncio.create_task(self.executor.run())
        return self.executor

    async def __aexit__(self, *_: object) -> None:
        self.executor.stop.set()
        async with asyncio.timeout(20):
            await self.task


def seen_result(action: ApprovalRequest) -> Any:
    return json.loads(action.result_text)


async def test_an_approved_call_runs_once_with_its_effect_key_outside_any_transaction() -> None:
    runs: list[tuple[Any, str, bool]] = []

    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        runs.append((arguments, effect_key, transaction.get_connection().in_atomic_block))
        return {"sum": 0.1, "big": 2**60}

    action = await db(approved)()
    async with Running():
        done = await finished(action, "done")
    assert runs == [({"n": 1}, action.effect_key, False)]
    assert done.result_text == '{"big":1152921504606846976,"sum":0.1}'
    assert done.executor_name == "server:e"
    kinds = await db(lambda: list(AuditEvent.objects.filter(action=action).values_list("kind", flat=True)))()
    assert kinds.count("claimed") == 1


async def test_several_tools_run_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=10)

    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        together.wait()
        return None

    actions = [await db(approved)() for _ in range(3)]
    async with Running(concurrency=3):
        for action in actions:
            await finished(action, "done")


async def test_two_executors_share_the_work_and_nothing_runs_twice() -> None:
    runs: list[str] = []

    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        runs.append(effect_key)

    actions = [await db(approved)() for _ in range(20)]
    async with Running(concurrency=2), Running(concurrency=2):
        for action in actions:
            await finished(action, "done")
    assert sorted(runs) == sorted(action.effect_key for action in actions)


async def test_only_registered_tools_are_claimed() -> None:
    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        return None

    other = await db(approved)("somebody_elses")
    mine = await db(approved)()
    async with Running():
        await finished(mine, "done")
    assert (await db(ApprovalRequest.objects.get)(pk=other.pk)).state == "approved"


async def test_a_transactional_tool_that_raises_ends_failed_and_its_words_stay_here() -> None:
    @tools.tool(name="t", effects="transactional", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        raise RuntimeError("password=hunter2")

    action = await db(approved)()
    async with Running():
        failed = await finished(action, "failed")
    assert seen_result(failed)["code"] == "tool_failed"
    assert "RuntimeError" in seen_result(failed)["message"]
    assert "hunter2" not in failed.result_text
    assert failed.is_error


async def test_an_unexpected_exception_proves_nothing_so_a_person_must_look() -> None:
    """A refund whose answer timed out may have happened: `failed` would make a model ask for it again."""
    runs: list[str] = []

    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        runs.append(effect_key)
        raise TimeoutError("password=hunter2")

    action = await db(approved)()
    async with Running():
        unknown = await finished(action, "unknown")
    assert len(runs) == 1
    assert unknown.result_text == ""
    known = await db(lambda: AuditEvent.objects.get(action=action, kind="outcome_not_known").detail)()
    assert "TimeoutError" in known
    assert "hunter2" not in known


async def test_an_idempotent_tool_that_raises_runs_again_with_the_same_effect_key() -> None:
    runs: list[str] = []

    @tools.tool(name="t", effects="idempotent", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        runs.append(effect_key)
        if len(runs) == 1:
            raise TimeoutError
        return "second"

    action = await db(approved)()
    async with Running():
        done = await finished(action, "done")
    assert runs == [action.effect_key] * 2
    assert done.fence == 2


async def test_a_tool_that_says_why_it_failed_is_quoted() -> None:
    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        raise running.ToolFailed("no_such_order", "There is no order 7.", order=7)

    action = await db(approved)()
    async with Running():
        failed = await finished(action, "failed")
    assert seen_result(failed) == {"code": "no_such_order", "message": "There is no order 7.", "order": 7}


@pytest.mark.parametrize("result", [{1, 2}, float("nan"), {"a": object()}, "\ud800", {1: 2}])
async def test_a_result_that_is_no_json_says_that_the_effect_happened(result: Any) -> None:
    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        return result

    action = await db(approved)()
    async with Running():
        done = await finished(action, "done", "failed")
    assert done.state == "done"
    assert seen_result(done)["code"] == "result_not_json"
    assert seen_result(done)["effectHappened"] is True


async def test_what_was_not_started_may_run_again() -> None:
    runs: list[str] = []

    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        runs.append(effect_key)
        if len(runs) == 1:
            raise running.NotStarted
        return "second"

    action = await db(approved)()
    async with Running():
        done = await finished(action, "done")
    assert (len(runs), done.fence) == (2, 2)


async def test_a_tool_that_can_not_tell_leaves_the_action_to_people_at_once() -> None:
    @tools.tool(name="t", effects="at_most_once", risk="low", lease_seconds=3_600)
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        raise running.OutcomeUnknown

    action = await db(approved)()
    async with Running():
        unknown = await finished(action, "unknown")
    assert unknown.result_text == ""


async def test_the_lease_is_kept_while_a_tool_runs_longer_than_it() -> None:
    beats: list[int] = []
    go_on = threading.Event()

    @tools.tool(name="t", effects="at_most_once", risk="low", lease_seconds=1)
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        assert go_on.wait(15)
        return "long"

    real = claims.heartbeat

    def counted(**fields: Any) -> claims.Beat:
        beat = real(**fields)
        beats.append(1)
        if len(beats) == 5:
            go_on.set()
        return beat

    action = await db(approved)()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "heartbeat", counted)
        async with Running():
            done = await finished(action, "done", "unknown")
    assert (done.state, done.fence) == ("done", 1)


async def test_a_cancel_reaches_a_running_tool_and_what_did_not_happen_is_cancelled() -> None:
    begun = threading.Event()

    @tools.tool(name="t", effects="at_most_once", risk="low", lease_seconds=1)
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        begun.set()
        looking = threading.Event()
        for _ in range(1000):
            if running.cancel_requested():
                raise running.NotStarted
            looking.wait(0.01)
        return "too late"

    action = await db(approved)()
    async with Running():
        await eventually_async(lambda: db(begun.is_set)())
        user = await db(factories.operator)()
        await db(decisions.cancel)(
            caller=access.caller_for_user(user=user, door="page"), action_id=action.pk, reason="stop"
        )
        await finished(action, "cancelled")


async def test_stopping_lets_a_running_tool_finish_and_claims_no_more() -> None:
    begun, go_on = threading.Event(), threading.Event()
    runs: list[str] = []

    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        runs.append(effect_key)
        begun.set()
        assert go_on.wait(15)
        return "whole"

    first = await db(approved)()
    async with Running(concurrency=1) as one:
        await eventually_async(lambda: db(begun.is_set)())
        second = await db(approved)()
        one.stop.set()
        go_on.set()
    assert (await db(ApprovalRequest.objects.get)(pk=first.pk)).state == "done"
    assert (await db(ApprovalRequest.objects.get)(pk=second.pk)).state == "approved"
    assert len(runs) == 1


async def test_a_claim_whose_answer_was_lost_is_asked_again_and_runs_once() -> None:
    runs: list[str] = []

    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        runs.append(effect_key)

    real, lost = claims.claim, []

    def losing(**fields: Any) -> list[claims.Claimed]:
        answer = real(**fields)
        if answer and not lost:
            lost.append(1)
            raise OperationalError("the server closed the connection")
        return answer

    action = await db(approved)()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "claim", losing)
        async with Running():
            done = await finished(action, "done")
    assert lost
    assert (len(runs), done.fence) == (1, 1)
    assert await db(Claim.objects.filter(action=action).count)() == 1


async def test_a_report_whose_answer_was_lost_is_repeated() -> None:
    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        return 1

    real, calls = claims.complete, []

    def losing(**fields: Any) -> ApprovalRequest:
        answer = real(**fields)
        calls.append(fields["outcome"])
        if len(calls) < 3:
            raise OperationalError("the server closed the connection")
        return answer

    action = await db(approved)()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "complete", losing)
        async with Running():
            await eventually_async(lambda: db(lambda: len(calls) == 3)())
    assert (await db(ApprovalRequest.objects.get)(pk=action.pk)).state == "done"


def test_an_engine_that_delivers_twice_runs_once() -> None:
    runs: list[str] = []

    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        runs.append(effect_key)

    handed: list[Any] = []
    action = approved()
    engine.install(engine.Engine(hand_over=handed.append))
    try:
        assert engine.announce() == 1
        assert engine.announce() == 1
    finally:
        engine.install(None)
    assert [engine.run(action_id) for action_id in handed] == ["done", "already_terminal"]
    assert runs == [action.effect_key]
    connection.close()


def test_an_engine_that_breaks_loses_nothing() -> None:
    @tools.tool(name="t", effects="at_most_once", risk="low")
    def run(arguments: dict[str, Any], effect_key: str) -> Any:
        return None

    def broken(action_id: object) -> None:
        raise ConnectionError("no broker")

    action = approved()
    engine.install(engine.Engine(hand_over=broken))
    try:
        engine.announce()
    finally:
        engine.install(None)
    assert ApprovalRequest.objects.get(pk=action.pk).state == "approved"
    assert engine.announce() == 0
    assert executor.run_one(name="e", action_id=action.pk) == "done"
