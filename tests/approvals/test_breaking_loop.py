"""A worker that was asleep, or lost the database, while another one (or itself) went on with its run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.db import OperationalError

from approvals import agent
from approvals.executor import Executor
from approvals.models import AgentRun, ApprovalRequest
from streams import log
from streams.protocol import Text
from tests.approvals.desk import call
from tests.approvals.test_agent_loop import PAY, _begin, begin, db, effects, in_phase, told, worker, working
from tests.support import factories
from tests.support.polling import eventually_async

__all__ = ["effects"]
pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_that_was_asleep_makes_no_call_after_its_run_was_taken_over(effects: list[Any]) -> None:
    factories.policy(("*", "allow"))
    generation = _begin([{"steps": [PAY]}])
    asleep = agent.take(worker="a", adapters=["scripted"], lease_seconds=0)
    assert asleep is not None
    place = {"generation_id": generation.pk, "attempt": 1, "writer": asleep.run.worker, "actor": asleep.actor}
    log.append(seq=0, chunks=[Text(content="I pay")], **place)  # type: ignore[arg-type]
    awake = agent.take(worker="b", adapters=["scripted"])
    assert awake is not None
    assert awake.taken_over
    for late in ([call()], [Text(content=" now")], []):
        with pytest.raises(log.AttemptTaken):
            log.append(seq=1, chunks=late, **place)  # type: ignore[arg-type]
    assert not ApprovalRequest.objects.filter(generation=generation).exists()


def test_one_process_that_took_its_own_run_again_holds_it_once(effects: list[Any]) -> None:
    generation = _begin([{"steps": [PAY]}])
    first = agent.take(worker="w", adapters=["scripted"], lease_seconds=0)
    second = agent.take(worker="w", adapters=["scripted"])
    assert first is not None
    assert second is not None
    assert not agent._keep(taken=first, lease_seconds=10)
    assert not agent._release(taken=first, phase="ready")
    assert AgentRun.objects.get(pk=generation.pk).phase == "running"
    assert agent._release(taken=second, phase="ready")


async def test_a_lease_that_could_not_be_kept_makes_no_call_twice(
    effects: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await db(factories.policy)(("*", "allow"))
    kept, away = agent._keep, asyncio.Event()

    def keep(**fields: Any) -> bool:
        if not away.is_set():
            raise OperationalError("the database is away for this one")
        return kept(**fields)

    monkeypatch.setattr(agent, "_keep", keep)
    generation = await begin([{"steps": [{"text": "well"}, {"pauseMs": 2_500}, PAY]}, {"steps": [{"text": "Paid."}]}])
    async with working(worker(lease_seconds=0.3), Executor(name="e")):
        first = await in_phase(generation, "running")

        others = AgentRun.objects.filter(pk=generation.pk).exclude(worker=first.worker)
        await eventually_async(lambda: db(others.exists)())
        away.set()
        await in_phase(generation, "ended")
    assert [name for name, _, _ in effects] == ["pay"]
    texts = [entry["content"] for entry in await told(generation) if entry["type"] == "text"]
    assert texts.count("Paid.") == 1
