"""Drive an adapter into the log: small batches, heartbeats, cancel, honest ends, retries by a new attempt.

The log is the truth and its `append` may be repeated, so the pump repeats it for as long as the database is away.
The calls of a turn are written in one append, last, when the model has said all of it: a log never holds half of a
turn's calls, so "are there calls?" answers "was the turn complete?" after any crash.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Literal
from uuid import UUID

from channels.db import database_sync_to_async
from django.db import InterfaceError, OperationalError

from streams import doorbell, log, retry
from streams.adapters.base import Adapter, Request
from streams.models import Generation
from streams.problems import Conflict, NotFound, Problem
from streams.protocol import (
    Actor,
    BadChunk,
    Chunk,
    Done,
    Error,
    Text,
    ToolCall,
    decode_chunk,
    encode,
    error_chunk,
)

logger = logging.getLogger(__name__)

BATCH_CHUNKS = 64
BATCH_SECONDS = 0.05
# What the adapter may be ahead of the log: memory is bounded, and a slow database slows the provider's socket.
MOST_AHEAD = 1_024
# A doorbell that rings for our own appends too is looked after at most so often.
LOOK_SECONDS = 0.25

Kind = Literal["ended", "calls", "broken", "replaced"]


@dataclass
class Place:
    """Where the next append stands, and what is void when it begins a new attempt.

    `superseded_from` counts for the first append of an attempt that is new to the log only.
    """

    generation_id: UUID
    writer: str
    actor: Actor
    attempt: int
    seq: int
    superseded_from: int | None = None
    heartbeat_seconds: float = 15.0


@dataclass(frozen=True)
class Played:
    """How one attempt went.

    `ended`: the log has its `done` (`reason`). `calls`: the turn made calls and the log stays open. `broken`: the
    log's newest chunk is the error, whether it may be tried again is to be decided. `replaced`: another writer or
    the server went on with this log (or it is gone); nothing more may be written.
    """

    kind: Kind
    reason: str = ""
    error: Error | None = None


class _Replaced(Exception):
    """The log has gone on without us."""


@dataclass
class _Player:
    place: Place
    adapter: Adapter
    request: Request
    leave_open_on_calls: bool
    heard: asyncio.Queue[Chunk | None] = field(default_factory=lambda: asyncio.Queue(MOST_AHEAD))
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    held_back: list[Chunk] = field(default_factory=list)

    async def play(self) -> Played:
        reader = asyncio.create_task(self._read())
        watcher = asyncio.create_task(self._watch())
        try:
            return await self._write(reader)
        except _Replaced:
            return Played("replaced")
        finally:
            # Cancelling the reader closes the adapter's stream, and with it the provider's connection.
            await _stop(reader)
            await _stop(watcher)

    async def _read(self) -> None:
        """Put the adapter's chunks where the writer finds them, then None. A bug in the adapter is an error chunk."""
        try:
            stream: AsyncGenerator[Chunk, None] = self.adapter.stream(self.request)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    await self._hear(chunk)
                    if isinstance(chunk, Done | Error):
                        break
        except Exception as error:
            # The traceback stays on this machine: a message may quote a prompt or a key.
            logger.exception("the adapter of generation %s failed", self.place.generation_id)
            text = f"the adapter failed ({type(error).__name__})"
            await self._hear(error_chunk("adapter_failed", text, recoverable=False))
        await self._hear(None)

    async def _hear(self, chunk: Chunk | None) -> None:
        await self.heard.put(chunk)
        self.news.set()

    async def _watch(self) -> None:
        """Learn of a cancel, or of the log's end, while the model is silent."""
        async with doorbell.listen(f"g:{self.place.generation_id}") as bell:
            while True:
                try:
                    cancelled, gone = await database_sync_to_async(_look)(self.place)
                except (OperationalError, InterfaceError):
                    cancelled = gone = False
                if gone:
                    self.gone.set()
                if cancelled:
                    self.cancelled.set()
                if gone or cancelled:
                    self.news.set()
                    return
                await asyncio.sleep(LOOK_SECONDS)
                await bell.wait(0.75)

    async def _write(self, reader: asyncio.Task[None]) -> Played:
        first = True
        while True:
            batch, over = await self._next_batch(first)
            if self.gone.is_set():
                raise _Replaced
            if self.cancelled.is_set():
                await _stop(reader)
                return await self._end_cancelled(batch)
            if not batch and not over:
                await self._heartbeat()
                continue
            first = False
            played = await self._place_batch(batch, over)
            if played is not None:
                return played

    async def _place_batch(self, batch: list[Chunk], over: bool) -> Played | None:
        """Append what may be appended now; return how the attempt went when this was its end."""
        last = batch[-1] if batch else None
        ready: list[Chunk] = []
        for chunk in batch:
            keep = bool(self.held_back) or isinstance(chunk, ToolCall)
            (self.held_back if keep and not isinstance(chunk, Done | Error) else ready).append(chunk)
        if isinstance(last, Error):
            # Calls of a turn that broke off were never made.
            self.held_back.clear()
            if last.recoverable:
                await self._append(ready)
                return Played("broken", error=last)
            await self._append([*ready, Done(reason="error")])
            return Played("ended", reason="error", error=last)
        if isinstance(last, Done):
            ready.pop()
            # Words the model said beside its calls come before them: a text after a call begins the next turn.
            ready += sorted(self.held_back, key=lambda chunk: isinstance(chunk, ToolCall))
            if self.held_back and self.leave_open_on_calls:
                return await self._append_calls(ready)
            await self._append([*ready, last])
            return Played("ended", reason="cancel" if self.cancelled.is_set() else last.reason)
        if over:
            lost = error_chunk("connection_lost", "the answer broke off before its end", recoverable=True)
            await self._append([*ready, lost])
            return Played("broken", error=lost)
        if ready:
            await self._append(ready)
        return None

    async def _append_calls(self, chunks: list[Chunk]) -> Played:
        try:
            for chunk in chunks:
                if isinstance(chunk, ToolCall):
                    decode_chunk(encode(chunk))
            await self._append(chunks)
        except (Problem, BadChunk) as refusal:
            if isinstance(refusal, Conflict):
                raise
            # The model made a call the log can't keep (arguments that are no JSON object, a name too long):
            # what it said so far stands, and it may try again.
            logger.info("a call was refused: %s", refusal.detail)
            refused = error_chunk("bad_tool_call", f"a tool call was refused: {refusal.code}", recoverable=True)
            await self._append([refused])
            return Played("broken", error=refused)
        if self.cancelled.is_set():
            # The cancel came first: what was asked for in the same breath is cancelled by the log's end.
            await self._append([Done(reason="cancel")])
            return Played("ended", reason="cancel")
        return Played("calls")

    async def _next_batch(self, first: bool) -> tuple[list[Chunk], bool]:
        """Wait for chunks, a cancel, the log's end or the time of a heartbeat; return chunks and whether it is over.

        The first token goes at once; later ones wait for company, at most BATCH_SECONDS.
        """
        batch: list[Chunk] = []
        timeout = self.place.heartbeat_seconds
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while len(batch) < BATCH_CHUNKS:
            if self.heard.empty():
                limit = timeout if deadline is None else max(0.0, deadline - loop.time())
                await self._wait(limit)
            if self.heard.empty():
                return batch, False
            chunk = self.heard.get_nowait()
            if chunk is None:
                return batch, True
            batch.append(chunk)
            if isinstance(chunk, Done | Error):
                return batch, True
            if self.cancelled.is_set() or self.gone.is_set():
                return batch, False
            if first and self.heard.empty():
                return batch, False
            deadline = deadline or loop.time() + BATCH_SECONDS
        return batch, False

    async def _wait(self, seconds: float) -> None:
        """Wait until the adapter said something, a cancel or the log's end is known, or the time is over."""
        self.news.clear()
        if self.heard.empty() and not self.cancelled.is_set() and not self.gone.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), seconds)

    async def _end_cancelled(self, batch: list[Chunk]) -> Played:
        """Keep the text that was already on its way, make no more calls, and say that it was cancelled."""
        batch = [*self.held_back, *batch]
        while not self.heard.empty():
            chunk = self.heard.get_nowait()
            if chunk is not None:
                batch.append(chunk)
        said = [chunk for chunk in batch if isinstance(chunk, Text)]
        await self._append([*said, Done(reason="cancel")])
        return Played("ended", reason="cancel")

    async def _heartbeat(self) -> None:
        # Before the first chunk of a new attempt the log still has the old one.
        await self._append([])

    async def _append(self, chunks: list[Chunk]) -> None:
        answer = await append(place=self.place, chunks=chunks)
        if answer is None:
            raise _Replaced
        if answer.cancel_requested:
            self.cancelled.set()
            self.news.set()


async def append(*, place: Place, chunks: list[Chunk]) -> log.Appended | None:
    """Append at `place` and move it on, repeating while the database is away. None: another writer has gone on."""
    pause = 0.05
    while True:
        try:
            answer: log.Appended = await database_sync_to_async(_append_once)(place, chunks)
        except (OperationalError, InterfaceError):
            # Whether it was stored is not known; the same seq tells, so the same append goes again.
            logger.warning("the database is away; append to %s is repeated", place.generation_id)
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)
            continue
        except (
            log.StaleAttempt,
            log.AttemptTaken,
            log.AttemptGap,
            log.GenerationClosed,
            NotFound,
        ) as refusal:
            logger.info("generation %s went on without this writer: %s", place.generation_id, refusal.code)
            return None
        place.seq += len(chunks)
        return answer


def _append_once(place: Place, chunks: list[Chunk]) -> log.Appended:
    attempt, seq, writer = place.attempt, place.seq, place.writer
    if not chunks:
        # A heartbeat raises no attempt: until the first chunk of ours is there, it beats for the one the log has.
        known = Generation.objects.filter(pk=place.generation_id).values_list("attempt", "next_seq", "writer").first()
        if known is not None and known[0] < attempt:
            attempt, seq, writer = known
    return log.append(
        generation_id=place.generation_id,
        attempt=attempt,
        seq=seq,
        chunks=chunks,
        writer=writer or place.writer,
        actor=place.actor,
        superseded_from=place.superseded_from if seq == 0 else None,
    )


def _look(place: Place) -> tuple[bool, bool]:
    """Return whether a cancel was asked and whether the log has gone on without this writer."""
    row = (
        Generation.objects.filter(pk=place.generation_id)
        .values_list("cancel_requested", "finish_reason", "attempt")
        .first()
    )
    if row is None:
        return False, True
    cancel_requested, finish_reason, attempt = row
    return bool(cancel_requested), bool(finish_reason) or attempt > place.attempt


async def play(*, place: Place, adapter: Adapter, request: Request, leave_open_on_calls: bool = False) -> Played:
    """Play one attempt at one turn. `place` moves with what was appended."""
    return await _Player(place, adapter, request, leave_open_on_calls).play()


async def finish_with_error(*, place: Place) -> Played:
    """Give up: the newest chunk is an error already, so only `done` `error` is missing."""
    if await append(place=place, chunks=[Done(reason="error")]) is None:
        return Played("replaced")
    return Played("ended", reason="error")


async def pause(*, place: Place, seconds: float) -> Played | None:
    """Wait between two attempts, heartbeats going on. A cancel ends the log at once: then how it ended is returned."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    beat = loop.time() + place.heartbeat_seconds
    async with doorbell.listen(f"g:{place.generation_id}") as bell:
        while True:
            cancelled, gone = await database_sync_to_async(_look)(place)
            if gone:
                return Played("replaced")
            if cancelled:
                ended = await append(place=place, chunks=[Done(reason="cancel")])
                return Played("replaced") if ended is None else Played("ended", reason="cancel")
            now = loop.time()
            if now >= until:
                return None
            if now >= beat:
                await append(place=place, chunks=[])
                beat = now + place.heartbeat_seconds
            await bell.wait(min(1.0, until - now))


async def run(
    *,
    generation_id: UUID,
    adapter: Adapter,
    request: Request,
    writer: str,
    actor: Actor,
    policy: retry.RetryPolicy = retry.DEFAULT,
    leave_open_on_calls: bool = False,
    jitter: Callable[[], float] = random.random,
) -> Played:
    """Play one whole turn from the log's end on; every retry is a new attempt that voids the broken one."""
    generation = await database_sync_to_async(Generation.objects.get)(pk=generation_id)
    place = Place(
        generation_id=generation_id,
        writer=writer,
        actor=actor,
        attempt=generation.attempt,
        seq=generation.next_seq,
        heartbeat_seconds=generation.producer_timeout_seconds / 3,
    )
    began_at = generation.next_offset
    failures = 0
    while True:
        played = await play(
            place=place,
            adapter=adapter,
            request=replace(request, attempt=failures + 1),
            leave_open_on_calls=leave_open_on_calls,
        )
        if played.kind != "broken" or played.error is None:
            return played
        failures += 1
        wait_ms = retry.pause_ms(played.error, failures=failures, policy=policy, random=jitter)
        if wait_ms is None:
            return await finish_with_error(place=place)
        stopped = await pause(place=place, seconds=wait_ms / 1000)
        if stopped is not None:
            return stopped
        next_attempt(place, superseded_from=began_at)


def next_attempt(place: Place, *, superseded_from: int) -> None:
    """Let the next append begin a new attempt that voids everything from `superseded_from` on."""
    place.attempt += 1
    place.seq = 0
    place.superseded_from = superseded_from


async def _stop(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it is over, so that what it held is closed."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
    except Exception:
        logger.exception("a task failed while it was stopped")
