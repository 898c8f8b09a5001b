"""Run approved server tools: claim in one transaction, the effect in none, the report in another.

The work list is the approvals table; the doorbell and the engine only say when to look. The tool gets the effect
key, the lease is renewed while it runs, and only the newest fence can report. What can't be reported is not lost:
its lease runs out and the reaper decides by what the tool declared.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar

from channels.db import database_sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, connections

from approvals import canonical, claims, faults, refusals, running, sweeps, tools
from streams import doorbell, strictjson
from streams.problems import Problem, TryAgain

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_CLAIMS = 10
SWEEP_SECONDS = 1.0


@dataclass(frozen=True)
class Report:
    """What a run comes to: `done`, `failed`, `not_started`, or `not_known` with what is `known` all the same.

    `result_text` is JSON; None where there is none to report.
    """

    outcome: str
    result_text: str | None
    known: str = ""


@dataclass
class Executor:
    """One process's executor. `run()` works until `stop` is set, then lets what runs finish for `grace_seconds`."""

    name: str
    concurrency: int = 4
    only: tuple[str, ...] = ()
    each_second: tuple[Callable[[], object], ...] = (sweeps.sweep,)
    grace_seconds: float = 25.0
    lease_seconds: int | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _claim_ids: dict[tuple[int, int], str] = field(default_factory=dict)

    async def run(self) -> None:
        sweeper = asyncio.create_task(self._sweep())
        try:
            async with doorbell.listen("work") as bell:
                while not self.stop.is_set():
                    claimed = await self._claim()
                    if claimed and len(self._running) < self.concurrency:
                        continue
                    await self._pause(bell)
            if self._running:
                await asyncio.wait(self._running, timeout=self.grace_seconds)
        finally:
            left = [*self._running, sweeper]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _pause(self, bell: doorbell.Bell) -> None:
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self.stop.wait()), *self._running]
        if len(self._running) < self.concurrency:
            waits.append(asyncio.create_task(bell.wait(1.0)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                if task not in self._running:
                    task.cancel()

    async def _claim(self) -> int:
        """Claim as much as there are hands for; start it; return how many."""
        started = 0
        for lease_seconds, names in _by_lease(self.only, self.lease_seconds).items():
            free = self.concurrency - len(self._running)
            if free <= 0 or self.stop.is_set():
                break
            # The same id until something came: if the answer to a claim is lost, asking again brings those claims.
            # An id belongs to one body, so how many are asked for is part of its name.
            asked = (lease_seconds, min(free, MOST_CLAIMS))
            claim_id = self._claim_ids.setdefault(asked, uuid.uuid4().hex)
            try:
                claimed = await database_sync_to_async(claims.claim)(
                    claimant=claims.Claimant.server(self.name),
                    claim_id=claim_id,
                    tools=names,
                    max_claims=asked[1],
                    lease_seconds=lease_seconds,
                )
            except (OperationalError, InterfaceError) as error:
                logger.warning("the database is away, claims wait: %s", type(error).__name__)
                await asyncio.sleep(0.5)
                continue
            except (refusals.ClaimOver, refusals.ClaimIdReused):
                # What this id took has ended while its answer was lost; the reaper has seen to it.
                del self._claim_ids[asked]
                continue
            except (refusals.InFlight, TryAgain):
                continue
            except Exception:
                # Whatever it was, an executor that ends helps nobody; the work list stays as it is.
                logger.exception("a claim failed; the next one comes in a second")
                await asyncio.sleep(1)
                continue
            if claimed:
                del self._claim_ids[asked]
            for one in claimed:
                task = asyncio.create_task(self.run_claimed(one))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            started += len(claimed)
        return started

    async def run_claimed(self, claimed: claims.Claimed) -> None:
        """Run one claimed action and report it. Never raises but for cancellation."""
        faults.point("after_claim")
        cancel = threading.Event()
        beat = asyncio.create_task(self._beat(claimed, cancel))
        try:
            if self.stop.is_set():
                report = Report("not_started", None)
            else:
                report = await _in_thread(lambda: run_tool(claimed, cancel))
            faults.point("before_complete")
            await self._report(claimed, report)
            faults.point("after_complete")
        except Exception:
            logger.exception("the run of action %s could not be reported", claimed.action_id)
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)

    async def _beat(self, claimed: claims.Claimed, cancel: threading.Event) -> None:
        while True:
            await asyncio.sleep(claimed.lease_seconds / 3)
            try:
                beat = await database_sync_to_async(claims.heartbeat)(
                    claim_token=claimed.claim_token,
                    lease_seconds=claimed.lease_seconds,
                    claimant=claims.Claimant.server(self.name),
                )
            except Problem as refusal:
                # A thread can't be stopped from outside, and its effect may have happened: it ends, and reports late.
                logger.warning("the lease of action %s is lost: %s", claimed.action_id, refusal.code)
                cancel.set()
                return
            except DatabaseError:
                logger.warning("a heartbeat of action %s did not reach the database", claimed.action_id)
                continue
            if beat.cancel_requested:
                cancel.set()

    async def _report(self, claimed: claims.Claimed, report: Report) -> None:
        """Report until it is answered: both reports are repeatable, and the effect has happened."""
        token, claimant = claimed.claim_token, claims.Claimant.server(self.name)

        def say() -> None:
            if report.outcome == "not_known":
                claims.give_up(claim_token=token, claimant=claimant, known=report.known)
            else:
                claims.complete(
                    claim_token=token, outcome=report.outcome, result_text=report.result_text, claimant=claimant
                )

        pause = 0.05
        while True:
            try:
                await database_sync_to_async(say)()
            except (OperationalError, InterfaceError, refusals.InFlight, TryAgain):
                logger.warning("the database is away or busy; the report of action %s is repeated", claimed.action_id)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
                continue
            except Problem as refusal:
                logger.warning("the report of action %s was refused: %s", claimed.action_id, refusal.code)
            return

    async def _sweep(self) -> None:
        while True:
            for sweep in self.each_second:
                try:
                    await database_sync_to_async(sweep)()
                except Exception:
                    logger.exception("a sweep failed; the next one comes in %s s", SWEEP_SECONDS)
            await asyncio.sleep(SWEEP_SECONDS)


def _by_lease(only: tuple[str, ...], lease_seconds: int | None) -> dict[int, tuple[str, ...]]:
    """Group the tools of this process by their lease: one claim asks for one lease."""
    groups: dict[int, list[str]] = {}
    for tool in tools.all_tools():
        if not only or tool.name in only:
            groups.setdefault(lease_seconds or tool.lease_seconds, []).append(tool.name)
    return {lease: tuple(names) for lease, names in groups.items()}


def run_tool(claimed: claims.Claimed, cancel: threading.Event) -> Report:
    """Run the tool and say what is known. Opens no transaction.

    Only `running.ToolFailed` proves that nothing happened. Any other exception may have come after the effect (an
    answer that was lost), so it is reported as failed only for a transactional tool, whose effect went with it.
    """
    tool = tools.registered(claimed.tool)
    if tool is None:
        return Report("not_started", None)
    running.bind_cancel(cancel)
    arguments = strictjson.loads(claimed.arguments_text)
    assert isinstance(arguments, dict)
    faults.point("before_effect")
    try:
        result = tool.run(arguments, claimed.effect_key)
    except running.NotStarted:
        return Report("not_started", None)
    except running.OutcomeUnknown as doubt:
        logger.warning("the tool %s can't tell what became of action %s", claimed.tool, claimed.action_id)
        return Report("not_known", None, known=str(doubt) or "the tool says it can't tell")
    except running.ToolFailed as failure:
        return Report("failed", _result_text({"code": failure.code, "message": failure.message, **failure.more}))
    except Exception as error:
        # The traceback stays in this process's log: an exception's text may hold what nobody should read.
        logger.exception("the tool %s broke in action %s", claimed.tool, claimed.action_id)
        message = f"The tool raised {type(error).__name__}; the executor's log has the rest."
        if tool.effects != "transactional":
            return Report("not_known", None, known=message)
        return Report("failed", _result_text({"code": "tool_failed", "message": message}))
    faults.point("after_effect")
    try:
        return Report("done", _result_text(result))
    except (TypeError, ValueError, RecursionError) as error:
        detail = error.detail if isinstance(error, strictjson.BadJSON) else f"it is of {type(result).__name__}"
        logger.warning("the result of %s in action %s is no JSON: %s", claimed.tool, claimed.action_id, detail)
        message = f"The tool ran to its end and its effect happened, but its result can't be kept: {detail}"
        # Done, not failed: a model that hears of a failure asks for the same thing again.
        return Report("done", _result_text({"code": "result_not_json", "message": message, "effectHappened": True}))


def _result_text(result: Any) -> str:
    return canonical.canonical_result(_exact(result)).text


def _exact(value: Any) -> Any:
    """Take a tool's floats as the decimals Python shows, tuples as lists; anything else stays for the JSON rules."""
    if isinstance(value, float):
        number = Decimal(repr(value))
        if not number.is_finite():
            raise ValueError(f"{value} is not a JSON number")
        return number
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    return value


async def _in_thread(work: Callable[[], T]) -> T:
    """Run blocking work on its own thread: tools may take long and must not queue behind the ORM's one thread."""
    context = copy_context()

    def body() -> T:
        try:
            return context.run(work)
        finally:
            # Connections a tool opened belong to this thread.
            connections.close_all()

    return await asyncio.to_thread(body)


def run_one(*, name: str, action_id: uuid.UUID, lease_seconds: int | None = None) -> str:
    """Claim this one action and run it, in this thread; return the outcome, or the code of why not.

    What a distributed engine's task calls (approvals.engine). A redelivered task is refused by the claim.
    """
    from approvals.models import ApprovalRequest

    row = ApprovalRequest.objects.filter(pk=action_id).values_list("tool", flat=True).first()
    tool = tools.registered(row) if row is not None else None
    if row is None or tool is None:
        return "not_found"
    executor = Executor(name=name)
    try:
        claimed = claims.claim(
            claimant=claims.Claimant.server(name),
            claim_id=uuid.uuid4().hex,
            action_id=action_id,
            lease_seconds=lease_seconds or tool.lease_seconds,
        )
    except Problem as refusal:
        return refusal.code
    for one in claimed:
        asyncio.run(executor.run_claimed(one))
    return str(ApprovalRequest.objects.values_list("state", flat=True).get(pk=action_id))
