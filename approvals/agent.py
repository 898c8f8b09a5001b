"""The agent loop: model turn → calls into the log → the loop ends → results come → next turn. Nobody waits in memory.

A run is a row (`AgentRun`) with a lease; its memory is the log. `take` gives a worker one run that can go on, `drive`
plays turns until the run ends or waits for people. After kill -9 the lease runs out, another worker takes the run,
raises the attempt and voids only the turn that had no end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
from channels.db import database_sync_to_async
from django.db import DatabaseError, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from approvals import faults, history, tools
from approvals.models import AgentRun, ApprovalRequest
from streams import clock, doorbell, log, pump, retry, strictjson
from streams.access import Caller
from streams.adapters import Adapter, Message, Request, ToolSpec
from streams.models import Generation
from streams.problems import Invalid, Problem
from streams.protocol import Actor, Chunk, Done, ToolCall, error_chunk

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
# A supervised worker that was killed is back long before this; a person's screen shows the silence at once.
PRODUCER_TIMEOUT_SECONDS = 300
MakeAdapter = Callable[[dict[str, Any]], Adapter]


def start(
    *,
    caller: Caller,
    adapter: str,
    config: dict[str, Any] | None = None,
    messages: Sequence[Message],
    tool_names: Sequence[str] = (),
    title: str = "",
    conversation: str = "",
    model: str = "",
    max_turns: int = 20,
    producer_timeout_seconds: int = PRODUCER_TIMEOUT_SECONDS,
    id: UUID | None = None,
) -> Generation:
    """Open a generation that this site's own workers drive; it is the caller's, and so are the requests it makes.

    `config` is the script (adapter `scripted`) or settings of the endpoint (`openai`). With an `id` that is known,
    the run that has it is returned.
    """
    if caller.token is None and caller.user is None:
        raise Invalid("a run belongs to a token or to a person", field="caller")
    with transaction.atomic():
        generation, created = log.create(
            actor_token=caller.token,
            user_id=caller.user.pk if caller.user is not None else None,
            id=id,
            title=title,
            conversation=conversation,
            model=model,
            producer_timeout_seconds=producer_timeout_seconds,
        )
        if created:
            AgentRun.objects.create(
                generation=generation,
                adapter=adapter,
                config=strictjson.dumps(config or {}),
                messages=strictjson.dumps([_plain(message) for message in messages]),
                tools=list(tool_names),
                max_turns=max_turns,
            )
        transaction.on_commit(lambda: doorbell.ring("runs"))
    return generation


def _plain(message: Message) -> Any:
    return {
        "role": message.role,
        "content": message.content,
        "toolCalls": [strictjson.loads(msgspec.json.encode(call)) for call in message.tool_calls],
        "toolCallId": message.tool_call_id,
        "isError": message.is_error,
    }


def _message(plain: Any) -> Message:
    return Message(
        role=plain["role"],
        content=plain["content"],
        tool_calls=tuple(msgspec.convert(call, ToolCall) for call in plain["toolCalls"]),
        tool_call_id=plain["toolCallId"],
        is_error=plain["isError"],
    )


@dataclass(frozen=True)
class Taken:
    """A run somebody holds, under the name `run.worker`, which is new with every taking. `taken_over` means that its
    last holder never gave it back, and can't write to its log any more."""

    run: AgentRun
    generation: Generation
    actor: Actor
    taken_over: bool


def _due(adapters: Sequence[str]) -> QuerySet[AgentRun]:
    """Runs that somebody can go on with now."""
    now = clock.now()
    unsettled = ApprovalRequest.objects.filter(
        generation=OuterRef("generation"),
        call_offset__isnull=False,
        superseded=False,
        state__in=["pending", "approved", "executing", "unknown"],
    )
    over = ~Q(generation__finish_reason="") | Q(generation__cancel_requested=True)
    return AgentRun.objects.filter(
        Q(phase="ready") & (Q(not_before__isnull=True) | Q(not_before__lte=now))
        | Q(phase="running", lease_expires_at__lte=now)
        | Q(phase="waiting") & (over | ~Exists(unsettled)),
        adapter__in=adapters,
    )


def take(*, worker: str, adapters: Sequence[str], lease_seconds: float = LEASE_SECONDS) -> Taken | None:
    """Take one run that can go on, or None. On PostgreSQL workers pass by what another one is just taking."""
    with transaction.atomic():
        run = (
            _due(adapters).order_by("lease_expires_at", "pk").select_for_update(of=("self",), skip_locked=True).first()
        )
        if run is None:
            return None
        taken_over = run.phase == "running"
        # A process may lose a run and take it again while it is still playing it: the two holders are not one.
        run.phase, run.worker = "running", f"{worker[:90]}#{secrets.token_hex(4)}"
        run.lease_expires_at = clock.now() + timedelta(seconds=lease_seconds)
        run.save(update_fields=["phase", "worker", "lease_expires_at"])
        if taken_over:
            # The last holder may only be asleep. Its calls must not come between this reading of the log and the
            # first word of the new attempt: they would be made, and then made again.
            log.hand_over(generation_id=run.pk, writer=run.worker)
    generation = Generation.objects.select_related("token", "user").get(pk=run.generation_id)
    return Taken(run=run, generation=generation, actor=_actor(generation), taken_over=taken_over)


def _actor(generation: Generation) -> Actor:
    """The run speaks for whom it belongs to: the same actor its owner is at a door."""
    if generation.token is not None:
        return Actor(kind="token", id=generation.token.prefix, name=generation.token.name)
    assert generation.user is not None
    return Actor(kind="person", id=str(generation.user.pk), name=generation.user.get_username())


def _held(taken: Taken) -> QuerySet[AgentRun]:
    """The run's row, as long as it is held by this taking."""
    return AgentRun.objects.filter(pk=taken.run.pk, phase="running", worker=taken.run.worker)


def _keep(*, taken: Taken, lease_seconds: float) -> bool:
    """Renew the lease; False: somebody else holds the run."""
    until = clock.now() + timedelta(seconds=lease_seconds)
    return _held(taken).update(lease_expires_at=until) == 1


def _release(*, taken: Taken, phase: str, **fields: Any) -> bool:
    """Give the run back in a phase; False: somebody else holds it."""
    rows = _held(taken)
    return rows.update(**{"phase": phase, "worker": "", "lease_expires_at": None, "not_before": None, **fields}) == 1


def beat_waiting() -> int:
    """Beat for runs that wait although no person has to act (an allowed call runs, a person must look at `unknown`).

    Their logs would otherwise end as those of a lost producer. Returns how many were beaten for.
    """
    now = clock.now()
    rows = Generation.objects.filter(
        run__phase__in=["waiting", "ready"], finish_reason="", open_gated=0, cancel_requested=False
    ).select_related("token", "user")
    beaten = 0
    for generation in rows:
        if now - generation.producer_seen_at < timedelta(seconds=generation.producer_timeout_seconds / 3):
            continue
        try:
            log.append(
                generation_id=generation.pk,
                attempt=generation.attempt,
                seq=generation.next_seq,
                chunks=[],
                writer=generation.writer or "loop",
                actor=_actor(generation),
            )
            beaten += 1
        except Problem as refusal:
            logger.info("no heartbeat for generation %s: %s", generation.pk, refusal.code)
    return beaten


class _UniqueIds:
    """Give a call an id of its own when the model used one twice in a run: the log knows calls by their ids."""

    def __init__(self, adapter: Adapter, taken_ids: frozenset[str]) -> None:
        self._adapter, self._taken = adapter, set(taken_ids)

    async def aclose(self) -> None:
        return None

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._adapter.stream(request)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, ToolCall):
                    if chunk.id in self._taken:
                        chunk = msgspec.structs.replace(chunk, id=f"{chunk.id}-{request.turn}-{chunk.index}")
                    self._taken.add(chunk.id)
                yield chunk


@dataclass
class Worker:
    """One process's share of the runs. `run()` works until `stop` is set, then gives back what it holds."""

    name: str
    makers: dict[str, MakeAdapter]
    concurrency: int = 16
    lease_seconds: float = LEASE_SECONDS
    policy: retry.RetryPolicy = retry.DEFAULT
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _driving: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        # A name is used by one process life only: a zombie must not be taken for its successor.
        self.name = f"{self.name}:{secrets.token_hex(4)}"[:100]

    async def run(self) -> None:
        beats = asyncio.create_task(self._beat())
        try:
            async with doorbell.listen("runs") as bell:
                while not self.stop.is_set():
                    await self._take_all()
                    waits = [
                        asyncio.create_task(self.stop.wait()),
                        asyncio.create_task(bell.wait(1.0)),
                    ]
                    await asyncio.wait([*waits, *self._driving], return_when=asyncio.FIRST_COMPLETED)
                    for wait in waits:
                        wait.cancel()
        finally:
            left = [*self._driving, beats]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def settle(self, *, seconds: float) -> None:
        """Wait until the turns that are being played are given back, at most `seconds`."""
        if self._driving:
            await asyncio.wait(self._driving, timeout=seconds)

    async def _take_all(self) -> None:
        while len(self._driving) < self.concurrency and not self.stop.is_set():
            try:
                taken = await database_sync_to_async(take)(
                    worker=self.name, adapters=list(self.makers), lease_seconds=self.lease_seconds
                )
            except DatabaseError as error:
                logger.warning("the database is away, runs wait: %s", type(error).__name__)
                return
            if taken is None:
                return
            task = asyncio.create_task(self.drive(taken))
            self._driving.add(task)
            task.add_done_callback(self._driving.discard)

    async def _beat(self) -> None:
        while True:
            try:
                await database_sync_to_async(beat_waiting)()
            except DatabaseError as error:
                logger.warning("the database is away, heartbeats wait: %s", type(error).__name__)
            await asyncio.sleep(1.0)

    async def drive(self, taken: Taken) -> None:
        """Play the run's next turn and give the run back; while it plays, keep its lease."""
        playing = asyncio.create_task(self._turn(taken))
        keeping = asyncio.create_task(self._keep(taken, playing))
        phase: str = "ready"
        fields: dict[str, Any] = {}
        try:
            phase, fields = await playing
        except asyncio.CancelledError:
            # This worker stops, or the lease was lost; in the second case giving back changes nothing.
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            if not playing.cancelled() and playing.exception() is None:
                phase, fields = playing.result()
        except Exception:
            logger.exception("the turn of run %s failed", taken.run.pk)
            # Not at once again: a bug must not spin.
            fields = {"not_before": await database_sync_to_async(clock.now)() + timedelta(seconds=5)}
        finally:
            keeping.cancel()
            giving = asyncio.create_task(self._give_back(taken, phase, fields))
            try:
                await asyncio.shield(giving)
            except asyncio.CancelledError:
                # Stopped while giving back: a run that is not given back waits for its lease.
                await giving
                raise

    async def _give_back(self, taken: Taken, phase: str, fields: dict[str, Any]) -> None:
        faults.point("before_release")
        try:
            await database_sync_to_async(_release)(taken=taken, phase=phase, **fields)
        except DatabaseError as error:
            logger.warning("run %s is given back by its lease: %s", taken.run.pk, type(error).__name__)
        doorbell.ring("runs")

    async def _keep(self, taken: Taken, playing: asyncio.Task[Any]) -> None:
        while True:
            await asyncio.sleep(self.lease_seconds / 3)
            try:
                kept = await database_sync_to_async(_keep)(taken=taken, lease_seconds=self.lease_seconds)
            except DatabaseError:
                continue
            if not kept:
                playing.cancel()
                return

    async def _turn(self, taken: Taken) -> tuple[str, dict[str, Any]]:
        """Play one turn; return the phase the run is in then, and what else changes in its row."""
        run, generation = taken.run, taken.generation
        before = tuple(_message(plain) for plain in _list(run.messages))
        rows = await database_sync_to_async(history.read)(generation_id=generation.pk)
        told = history.tell(before=before, rows=rows)
        faults.point("turn_begins")
        generation = await database_sync_to_async(
            Generation.objects.only("attempt", "next_seq", "writer", "cancel_requested", "finish_reason").get
        )(pk=generation.pk)
        if generation.finish_reason:
            return "ended", {}
        place = self._place(taken, generation, told)
        if generation.cancel_requested:
            await pump.append(place=place, chunks=[Done(reason="cancel")])
            return "ended", {"turns": told.turns}
        if told.open_calls:
            return "waiting", {"turns": told.turns}
        if told.turns >= run.max_turns:
            limit = error_chunk("too_many_turns", f"the run has taken its {run.max_turns} turns", recoverable=False)
            await pump.append(place=place, chunks=[limit, Done(reason="error")])
            return "ended", {"turns": told.turns}
        played = await self._play(taken, place, told)
        if played.kind == "calls":
            faults.point("after_calls")
            return "waiting", {"turns": told.turns + 1, "failures": 0}
        if played.kind == "ended":
            return "ended", {"turns": told.turns + 1}
        finished = await database_sync_to_async(Generation.objects.values_list("finish_reason", flat=True).get)(
            pk=generation.pk
        )
        return ("ended" if finished else "ready"), {}

    def _place(self, taken: Taken, generation: Generation, told: history.Told) -> pump.Place:
        """Go on where the log is; begin a new attempt after a crash, or over a turn that has no end."""
        place = pump.Place(
            generation_id=generation.pk,
            writer=generation.writer or taken.run.worker,
            actor=taken.actor,
            attempt=generation.attempt,
            seq=generation.next_seq,
            heartbeat_seconds=min(15.0, taken.generation.producer_timeout_seconds / 3),
        )
        if generation.next_seq and (taken.taken_over or told.unfinished_from is not None):
            began_at = told.next_offset if told.unfinished_from is None else told.unfinished_from
            pump.next_attempt(place, superseded_from=began_at)
            place.writer = taken.run.worker
        return place

    async def _play(self, taken: Taken, place: pump.Place, told: history.Told) -> pump.Played:
        """Play attempts until one comes to an end or the retries are used up."""
        run = taken.run
        adapter = _UniqueIds(self.makers[run.adapter](_dict(run.config)), told.call_ids)
        request = Request(messages=told.messages, tools=_specs(run.tools), turn=told.turns)
        began_at = told.next_offset if told.unfinished_from is None else told.unfinished_from
        failures = run.failures
        while True:
            played = await pump.play(
                place=place,
                adapter=adapter,
                request=replace(request, attempt=failures + 1),
                leave_open_on_calls=True,
            )
            if played.kind != "broken" or played.error is None:
                return played
            failures += 1
            await database_sync_to_async(_held(taken).update)(failures=failures)
            wait_ms = retry.pause_ms(played.error, failures=failures, policy=self.policy, random=random.random)
            if wait_ms is None:
                return await pump.finish_with_error(place=place)
            stopped = await pump.pause(place=place, seconds=wait_ms / 1000)
            if stopped is not None:
                return stopped
            pump.next_attempt(place, superseded_from=began_at)


def _specs(names: Sequence[str]) -> tuple[ToolSpec, ...]:
    specs = []
    for name in names:
        tool = tools.registered(name)
        if tool is None:
            specs.append(ToolSpec(name=name))
            continue
        schema = msgspec.json.encode(tool.schema or {"type": "object"}).decode()
        specs.append(ToolSpec(name=name, description=tool.description, schema_text=schema))
    return tuple(specs)


def _list(text: str) -> list[Any]:
    value = strictjson.loads(text)
    assert isinstance(value, list)
    return value


def _dict(text: str) -> dict[str, Any]:
    value = strictjson.loads(text)
    assert isinstance(value, dict)
    return value
