"""The only writer of entries: create, append, note, close; and the reader every door uses.

Each verb is one transaction. Offsets come from the generation's own row, whose lock is held until the commit, so a
reader can never see offset 13 before 12 and there is no gap to wait for. Lock order: generation, then its actions.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from django.db import connection, transaction
from django.db.models import Q

from streams import clock, doorbell, gate, strictjson
from streams.models import AgentToken, Entry, Generation
from streams.problems import Conflict, Invalid, NotFound, Problem
from streams.protocol import (
    CLOCK,
    Actor,
    Chunk,
    Done,
    DoneReason,
    Error,
    Text,
    ToolCall,
    ToolResult,
    encode,
    error_chunk,
)

MAX_READ_BYTES = 1_048_576


class GenerationExists(Conflict):
    code = "generation_exists"


class GenerationClosed(Conflict):
    code = "generation_closed"


class ChunkConflict(Conflict):
    code = "chunk_conflict"


class SeqGap(Conflict):
    code = "seq_gap"


class StaleAttempt(Conflict):
    code = "stale_attempt"


class AttemptGap(Conflict):
    code = "attempt_gap"


class AttemptTaken(Conflict):
    code = "attempt_taken"


class OffsetGone(Problem):
    """What the reader asks for was pruned; `firstOffset` is where the log begins now."""

    code, status = "offset_gone", 410


@dataclass(frozen=True)
class PlacedCall:
    """A tool_call chunk and where it stands."""

    call: ToolCall
    offset: int
    index: int


@dataclass(frozen=True)
class PlacedResult:
    """A tool_result chunk a producer sent and where it stands."""

    result: ToolResult
    offset: int
    index: int


class Row(NamedTuple):
    """An entry as readers want it: `body` is the exact JSON text of the chunk or notice."""

    offset: int
    attempt: int
    kind: str
    body: str
    at: datetime

    @property
    def text(self) -> str:
        """The entry as the wire has it."""
        at = clock.rfc3339(self.at)
        return f'{{"offset":{self.offset},"attempt":{self.attempt},"at":"{at}","{self.kind}":{self.body}}}'


@dataclass(frozen=True)
class Appended:
    """`duplicate` means every chunk was already stored; `actions` are those of the tool calls in this batch."""

    next_seq: int
    next_offset: int
    cancel_requested: bool
    duplicate: bool
    actions: list[dict[str, Any]]


@dataclass
class Held:
    """A generation whose row this transaction has locked, and what it is about to add to the log.

    Nothing is in the database before the `hold` block ends; it then takes one INSERT and one UPDATE.
    """

    generation: Generation
    at: datetime
    _entries: list[Entry] = field(default_factory=list)

    @property
    def next_offset(self) -> int:
        return self.generation.next_offset

    def chunk(self, chunk: Chunk, *, seq: int | None = None) -> int:
        """Add a chunk and return its offset. Without `seq` the server is its writer. Not after `done`."""
        generation = self.generation
        if generation.finish_reason:
            raise GenerationClosed("the log has its done", state=generation.state)
        offset = self._add("chunk", str(chunk.__struct_config__.tag), encode(chunk).decode(), seq)
        generation.chunk_count += 1
        generation.first_chunk_at = generation.first_chunk_at or self.at
        generation.newest = newest_name(chunk)
        if isinstance(chunk, ToolCall):
            generation.tool_call_count += 1
        elif isinstance(chunk, Done):
            generation.finish_reason = chunk.reason
            generation.finished_at = self.at
            generation.usage = "" if chunk.usage is msgspec.UNSET else encode(chunk.usage).decode()
        return offset

    def notice(self, body: dict[str, Any]) -> int:
        """Add a notice (`body` has its `type`) and return its offset. Allowed after `done` too."""
        return self._add("notice", str(body["type"]), strictjson.dumps(body), None)

    def _add(self, kind: str, type_name: str, body: str, seq: int | None) -> int:
        generation = self.generation
        offset = generation.next_offset
        self._entries.append(
            Entry(
                generation_id=generation.pk,
                offset=offset,
                attempt=generation.attempt,
                seq=seq,
                kind=kind,
                type=type_name,
                body=body,
                at=self.at,
            )
        )
        generation.next_offset = offset + 1
        return offset


def newest_name(chunk: Chunk) -> str:
    """Name the chunk's type as `Generation.newest` keeps it: a recoverable error is its own name."""
    if isinstance(chunk, Error):
        return "recoverable" if chunk.recoverable else "error"
    return str(chunk.__struct_config__.tag)


@contextmanager
def hold(generation_id: UUID) -> Iterator[Held]:
    """Lock the generation's row, yield it, write what was added. Needs an open transaction; NotFound if there is none.

    On SQLite the transaction is IMMEDIATE and so already alone; on PostgreSQL the row is locked until the commit.
    """
    try:
        generation = Generation.objects.select_for_update(of=("self",)).get(pk=generation_id)
    except Generation.DoesNotExist:
        raise NotFound("no such generation") from None
    held = Held(generation=generation, at=clock.now())
    waited = generation.state == "waiting"
    yield held
    if waited and generation.state != "waiting":
        # Nobody expected a word of the producer while a person thought: its silence counts from now.
        generation.producer_seen_at = held.at
    if held._entries:
        Entry.objects.bulk_create(held._entries)
    generation.save(force_update=True)
    # A hint: whoever misses it finds the entries by polling.
    transaction.on_commit(lambda: doorbell.ring(f"g:{generation_id}"))


def create(
    *,
    actor_token: AgentToken | None,
    user_id: int | None,
    id: UUID | None = None,
    title: str = "",
    conversation: str = "",
    model: str = "",
    metadata_text: str = "{}",
    producer_timeout_seconds: int = 60,
) -> tuple[Generation, bool]:
    """Open a generation; return it and whether it is new. The same `id` with the same body is the same generation.

    Raise GenerationExists when `id` was taken with another body or by somebody else.
    """
    parts = [title, conversation, model, metadata_text, producer_timeout_seconds]
    body_sha256 = hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
    fields = {
        "epoch": secrets.token_hex(8),
        "title": title,
        "conversation": conversation,
        "model": model,
        "metadata": metadata_text,
        "create_sha256": body_sha256,
        "token": actor_token,
        "user_id": user_id,
        "producer_timeout_seconds": producer_timeout_seconds,
    }
    with transaction.atomic():
        if id is None:
            generation, created = Generation.objects.create(**fields), True
        else:
            generation, created = Generation.objects.get_or_create(id=id, defaults=fields)
        now = clock.now()
        if created:
            Generation.objects.filter(pk=generation.pk).update(created_at=now, producer_seen_at=now)
            generation.created_at = generation.producer_seen_at = now
        elif (generation.create_sha256, generation.token_id, generation.user_id) != (
            body_sha256,
            actor_token.pk if actor_token else None,
            user_id,
        ):
            raise GenerationExists("a generation with this id was created with another body")
    return generation, created


def append(
    *,
    generation_id: UUID,
    attempt: int,
    seq: int,
    chunks: Sequence[Chunk],
    writer: str,
    actor: Actor,
    superseded_from: int | None = None,
) -> Appended:
    """Append chunks, all or nothing; without chunks it is the producer's heartbeat.

    Chunks already stored are skipped when equal and refused when not (ChunkConflict). `writer` is bound by the first
    append of an attempt. Raises SeqGap, StaleAttempt, AttemptGap, AttemptTaken, GenerationClosed, Invalid, NotFound
    and what the gate raises about tool calls.
    """
    for index, chunk in enumerate(chunks[:-1]):
        if isinstance(chunk, Done):
            raise Invalid("no chunk follows done", index=index + 1)
    if chunks and all(isinstance(chunk, Text) for chunk in chunks):
        quick = _append_texts(generation_id, attempt, seq, chunks, writer)
        if quick is not None:
            return quick
    with transaction.atomic(), hold(generation_id) as held:
        return _append(held, attempt, seq, chunks, writer, actor, superseded_from)


def hand_over(*, generation_id: UUID, writer: str) -> None:
    """Let `writer` alone go on with the newest attempt: whoever wrote it before is refused, repeats included."""
    with transaction.atomic(), hold(generation_id) as held:
        if not held.generation.finish_reason:
            held.generation.writer = writer


def _append_texts(generation_id: UUID, attempt: int, seq: int, chunks: Sequence[Chunk], writer: str) -> Appended | None:
    """Take the hot path: one guarded UPDATE … RETURNING and one INSERT. None: a guard missed, look again slowly."""
    moment, moment_parameters = clock.sql()
    count = len(chunks)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"""UPDATE streams_generation SET next_offset = next_offset + %s, next_seq = next_seq + %s,
                   chunk_count = chunk_count + %s, newest = 'text', writer = %s, producer_seen_at = {moment},
                   first_chunk_at = COALESCE(first_chunk_at, {moment})
                 WHERE id = %s AND attempt = %s AND next_seq = %s AND finish_reason = ''
                   AND (writer = %s OR (writer = '' AND next_seq = 0))
                RETURNING next_offset, cancel_requested, producer_seen_at""",  # noqa: S608 - no value is interpolated
            [
                *(count, count, count, writer),
                *moment_parameters,
                *moment_parameters,
                *(_db_uuid(generation_id), attempt, seq, writer),
            ],
        )
        row = cursor.fetchone()
        if row is None:
            return None
        next_offset, cancel_requested, at = row
        first = next_offset - count
        values: list[Any] = []
        for place, chunk in enumerate(chunks):
            values += (_db_uuid(generation_id), first + place, attempt, seq + place, encode(chunk).decode(), at)
        row_sql = "(%s, %s, %s, %s, 'chunk', 'text', %s, %s)"
        insert = 'INSERT INTO streams_entry (generation_id, "offset", attempt, seq, kind, type, body, at) VALUES '
        cursor.execute(insert + ", ".join([row_sql] * count), values)
        transaction.on_commit(lambda: doorbell.ring(f"g:{generation_id}"))
    return Appended(
        next_seq=seq + count,
        next_offset=next_offset,
        cancel_requested=bool(cancel_requested),
        duplicate=False,
        actions=[],
    )


def _db_uuid(value: UUID) -> UUID | str:
    return value if connection.vendor == "postgresql" else value.hex


def _append(
    held: Held,
    attempt: int,
    seq: int,
    chunks: Sequence[Chunk],
    writer: str,
    actor: Actor,
    superseded_from: int | None,
) -> Appended:
    generation = held.generation
    if attempt < generation.attempt:
        raise StaleAttempt("a newer attempt has begun", attempt=generation.attempt)
    if attempt > generation.attempt + 1 or (attempt > generation.attempt and not chunks):
        raise AttemptGap("attempts are raised by one, with the first chunk", attempt=generation.attempt)
    if attempt > generation.attempt:
        _restart(held, seq, writer, actor, superseded_from)
    elif generation.writer and generation.writer != writer:
        raise AttemptTaken("another writer has begun this attempt", attempt=generation.attempt)
    if seq > generation.next_seq:
        raise SeqGap("chunks before these are missing", nextSeq=generation.next_seq)
    stored = min(len(chunks), generation.next_seq - seq)
    _compare(held, seq, chunks[:stored])
    fresh = chunks[stored:]
    if not fresh and chunks:
        return _answer(held, duplicate=True, actions=_known(held, chunks))
    if generation.finish_reason:
        raise GenerationClosed("the log has its done", state=generation.state)
    generation.producer_seen_at = held.at
    if not fresh:
        return _answer(held, duplicate=False, actions=[])
    generation.writer = writer
    actions = _known(held, chunks[:stored])
    for index, chunk in enumerate(fresh, start=stored):
        actions += _place(held, chunk, index, actor)
    return _answer(held, duplicate=False, actions=actions)


def _restart(held: Held, seq: int, writer: str, actor: Actor, superseded_from: int | None) -> None:
    generation = held.generation
    if generation.finish_reason:
        raise GenerationClosed("the log has its done", state=generation.state)
    if seq != 0:
        raise SeqGap("an attempt begins at seq 0", nextSeq=0)
    from_offset = generation.attempt_from if superseded_from is None else superseded_from
    if not generation.first_offset <= from_offset <= generation.next_offset:
        raise Invalid("supersededFrom lies outside the log", field="supersededFrom")
    generation.attempt += 1
    generation.next_seq = 0
    generation.writer = writer
    generation.attempt_from = held.notice(
        {"type": "restart", "attempt": generation.attempt, "supersededFrom": from_offset}
    )
    gate.installed().superseded(held, from_offset=from_offset, actor=actor)


def _compare(held: Held, seq: int, chunks: Sequence[Chunk]) -> None:
    """Refuse chunks that differ from what is stored at their seq. A `done` that a cancel renamed is equal."""
    if not chunks:
        return
    generation = held.generation
    bodies = dict(
        Entry.objects.filter(
            generation=generation, attempt=generation.attempt, seq__range=(seq, seq + len(chunks) - 1)
        ).values_list("seq", "body")
    )
    for index, chunk in enumerate(chunks):
        sent = _as_cancelled(chunk) if generation.cancel_requested else chunk
        if bodies.get(seq + index) not in (encode(chunk).decode(), encode(sent).decode()):
            raise ChunkConflict("another chunk is stored at this seq", index=index, nextSeq=generation.next_seq)


def _as_cancelled(chunk: Chunk) -> Chunk:
    return msgspec.structs.replace(chunk, reason="cancel") if isinstance(chunk, Done) else chunk


def _place(held: Held, chunk: Chunk, index: int, actor: Actor) -> list[dict[str, Any]]:
    """Add one new chunk of the producer, and what the gate makes of it."""
    generation = held.generation
    if generation.cancel_requested:
        # A cancel was asked before the agent said how it ends: the log says so, whatever the agent thought.
        chunk = _as_cancelled(chunk)
    offset = held.chunk(chunk, seq=generation.next_seq)
    generation.next_seq += 1
    if isinstance(chunk, ToolCall):
        return [gate.installed().call(held, PlacedCall(chunk, offset, index), actor=actor)]
    if isinstance(chunk, ToolResult):
        gate.installed().result(held, PlacedResult(chunk, offset, index), actor=actor)
    elif isinstance(chunk, Done):
        gate.installed().closing(held, reason=chunk.reason, actor=actor)
    return []


def _known(held: Held, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    ids = [chunk.id for chunk in chunks if isinstance(chunk, ToolCall)]
    return gate.installed().known_calls(held.generation.pk, ids) if ids else []


def _answer(held: Held, *, duplicate: bool, actions: list[dict[str, Any]]) -> Appended:
    generation = held.generation
    return Appended(
        next_seq=generation.next_seq,
        next_offset=generation.next_offset,
        cancel_requested=generation.cancel_requested,
        duplicate=duplicate,
        actions=actions,
    )


def request_cancel(*, generation_id: UUID, actor: Actor) -> bool:
    """Ask the producer to stop and cancel what is pending or approved; False when already asked or ended."""
    with transaction.atomic(), hold(generation_id) as held:
        generation = held.generation
        if generation.cancel_requested or generation.finish_reason:
            return False
        generation.cancel_requested = True
        held.notice({"type": "cancel_requested", "actor": msgspec.to_builtins(actor)})
        gate.installed().cancel_requested(held, actor=actor)
    return True


def lost_producers(*, limit: int = 100) -> list[UUID]:
    """List open generations whose producer has been silent too long; `end_lost` looks again under the lock."""
    now = clock.now()
    # The same words as Generation.state `waiting`; a waiting one times out only when a cancel was asked.
    waiting = Q(newest__in=["tool_call", "tool_result"], open_gated__gt=0, cancel_requested=False)
    rows = (
        Generation.objects.filter(~waiting, finish_reason="", producer_seen_at__lt=now - timedelta(seconds=5))
        .order_by("producer_seen_at")
        .values_list("id", "producer_seen_at", "producer_timeout_seconds")
    )
    return [pk for pk, seen, timeout in rows.iterator() if now - seen >= timedelta(seconds=timeout)][:limit]


def end_lost(*, generation_id: UUID) -> bool:
    """End a log whose producer fell silent: `done` `cancel` if that was asked, else `producer_lost`. False: not so."""
    with transaction.atomic(), hold(generation_id) as held:
        generation = held.generation
        silence = held.at - generation.producer_seen_at
        if generation.finish_reason or silence < timedelta(seconds=generation.producer_timeout_seconds):
            return False
        reason: DoneReason = "error"
        if generation.cancel_requested:
            reason = "cancel"
        elif generation.state == "waiting":
            return False
        else:
            seconds = generation.producer_timeout_seconds
            held.chunk(error_chunk("producer_lost", f"the producer was silent for {seconds} s", recoverable=False))
        held.chunk(Done(reason=reason))
        gate.installed().closing(held, reason=reason, actor=CLOCK)
    return True


def read(*, generation_id: UUID, from_offset: int, limit: int = 1_000, max_bytes: int = MAX_READ_BYTES) -> list[Row]:
    """Return entries from `from_offset` on, in order, at most `limit` and about `max_bytes` of bodies (at least one).

    A thousand entries of 256 KiB are never fetched, nor read to be measured: PostgreSQL knows the size of what it
    stores apart without looking at it, and SQLite reads row by row.
    """
    where = [_db_uuid(generation_id), from_offset, from_offset + limit]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(
                """SELECT "offset", attempt, kind, body, at FROM streams_entry
                    WHERE generation_id = %s AND "offset" >= %s AND "offset" < %s ORDER BY "offset" """,
                where,
            )
            return list(_until_enough(cursor, max_bytes))
        cursor.execute(
            """SELECT "offset", attempt, kind, body, at FROM (
                 SELECT "offset", attempt, kind, body, at, SUM(OCTET_LENGTH(body)) OVER (ORDER BY "offset") AS total
                   FROM streams_entry WHERE generation_id = %s AND "offset" >= %s AND "offset" < %s
               ) AS page WHERE total - OCTET_LENGTH(body) < %s ORDER BY "offset" """,
            [*where, max_bytes],
        )
        return [Row(offset, attempt, kind, body, _moment(at)) for offset, attempt, kind, body, at in cursor.fetchall()]


def _until_enough(rows: Iterable[Any], max_bytes: int) -> Iterator[Row]:
    total = 0
    for offset, attempt, kind, body, at in rows:
        yield Row(offset, attempt, kind, body, _moment(at))
        total += len(body)
        if total >= max_bytes:
            return


def _moment(value: datetime | str) -> datetime:
    """Read a time as a bare cursor gives it: SQLite keeps UTC as text."""
    return value if isinstance(value, datetime) else datetime.fromisoformat(value).replace(tzinfo=UTC)
