"""Rebuild a run from its log: the conversation for the model, and where the run stands. Nothing else remembers it.

Superseded entries are void. A turn's calls are one append (streams.pump), and all entries of one append carry the
same time, so calls with one time are one turn; text after a call begins the next turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from streams import log, strictjson
from streams.adapters import Message
from streams.protocol import Done, Text, ToolCall, ToolResult, stored_chunk


@dataclass(frozen=True)
class Told:
    """What a log says. `open_calls` have no result yet; `unfinished_from` is where a turn without an end began."""

    messages: tuple[Message, ...]
    turns: int
    open_calls: tuple[str, ...]
    call_ids: frozenset[str]
    unfinished_from: int | None
    finished: bool
    next_offset: int


@dataclass
class _Turn:
    at: datetime | None = None
    words: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


def read(*, generation_id: UUID) -> list[log.Row]:
    """Read a whole log, page by page."""
    rows: list[log.Row] = []
    while True:
        page = log.read(generation_id=generation_id, from_offset=rows[-1].offset + 1 if rows else 0)
        if not page:
            return rows
        rows += page


def standing(rows: list[log.Row]) -> list[log.Row]:
    """Leave out what a later attempt superseded, and the notices."""
    kept: list[log.Row] = []
    for row in rows:
        if row.kind == "chunk":
            kept.append(row)
        elif row.body.startswith('{"type":"restart"'):
            notice = strictjson.loads(row.body)
            assert isinstance(notice, dict)
            superseded_from = notice["supersededFrom"]
            assert isinstance(superseded_from, int)
            kept = [before for before in kept if before.offset < superseded_from]
    return kept


def tell(*, before: tuple[Message, ...], rows: list[log.Row]) -> Told:
    """Fold a log into messages; `before` is what was said before it began."""
    turns: list[_Turn] = [_Turn()]
    results: dict[str, ToolResult] = {}
    unfinished_from: int | None = None
    finished = False
    for row in standing(rows):
        chunk: Any = stored_chunk(row.body)
        if isinstance(chunk, ToolResult):
            results[chunk.toolCallId] = chunk
            continue
        turn = turns[-1]
        if isinstance(chunk, ToolCall):
            unfinished_from = None
            if turn.at not in (None, row.at):
                turn = _Turn()
                turns.append(turn)
            turn.at = row.at
            turn.calls.append(chunk)
            continue
        if turn.calls:
            turn = _Turn()
            turns.append(turn)
        if unfinished_from is None:
            unfinished_from = row.offset
        if isinstance(chunk, Text):
            turn.words.append(chunk.content)
        elif isinstance(chunk, Done):
            finished, unfinished_from = True, None
    call_ids = [call.id for turn in turns for call in turn.calls]
    return Told(
        messages=(*before, *_messages(turns, results, with_last=finished)),
        turns=sum(1 for turn in turns if turn.calls),
        open_calls=tuple(call_id for call_id in call_ids if call_id not in results),
        call_ids=frozenset(call_ids),
        unfinished_from=unfinished_from,
        finished=finished,
        next_offset=rows[-1].offset + 1 if rows else 0,
    )


def _messages(turns: list[_Turn], results: dict[str, ToolResult], *, with_last: bool) -> list[Message]:
    """Write turns as messages. A last turn without an end is left out: it will be said anew."""
    messages = []
    for turn in turns:
        if not turn.calls and not (with_last and turn.words):
            continue
        messages.append(Message(role="assistant", content="".join(turn.words), tool_calls=tuple(turn.calls)))
        for call in turn.calls:
            result = results.get(call.id)
            if result is not None:
                content = bytes(result.result).decode()
                messages.append(Message(role="tool", tool_call_id=call.id, content=content, is_error=result.isError))
    return messages
