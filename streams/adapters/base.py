"""What an adapter is given and what it must give. Pure: no Django.

An adapter's stream is text and tool_call chunks, then exactly one `done`, or one `error` instead of it. A provider's
fault is never raised: it is the `error` chunk, whose message is made here and never quotes the provider, since
providers quote keys. Only bugs and cancellation leave a stream as exceptions. Closing the stream (`aclose`) closes
the provider's connection.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from streams.protocol import Chunk, Done, DoneReason, Error, Text, ToolCall, Usage

# A chunk is at most 256 KiB of JSON, and JSON may need six bytes for one character.
MAX_TEXT_CHARACTERS = 32_768


@dataclass(frozen=True)
class Message:
    """One message of the conversation. `content` of a tool message is the exact JSON text of its result."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    is_error: bool = False


@dataclass(frozen=True)
class ToolSpec:
    """A tool the model is told of; `schema_text` is a JSON Schema as JSON text."""

    name: str
    description: str = ""
    schema_text: str = '{"type":"object"}'


@dataclass(frozen=True)
class Request:
    """One model turn. `turn` counts from 0, `attempt` from 1; a real provider needs neither, a script does."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    turn: int = 0
    attempt: int = 1


class Adapter(Protocol):
    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]: ...

    async def aclose(self) -> None:
        """Give back what it holds; it plays no more."""


@dataclass
class Completion:
    """A whole turn: the fold of its stream. `error` is set instead of a `reason` when it broke off."""

    text: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    reason: DoneReason | None = None
    usage: Usage | None = None
    error: Error | None = None


async def complete(adapter: Adapter, request: Request) -> Completion:
    """Play a whole turn and fold it; nothing is known that `stream` did not say."""
    folded = Completion()
    parts: list[str] = []
    async with aclosing(adapter.stream(request)) as chunks:
        async for chunk in chunks:
            if isinstance(chunk, Text):
                parts.append(chunk.content)
            elif isinstance(chunk, ToolCall):
                folded.tool_calls.append(chunk)
            elif isinstance(chunk, Error):
                folded.error = chunk
            elif isinstance(chunk, Done):
                folded.reason = chunk.reason
                folded.usage = None if chunk.usage is msgspec.UNSET else chunk.usage
    folded.text = "".join(parts)
    return folded


def mend(text: str) -> str:
    """Join surrogate pairs that stand as halves, and put U+FFFD for what no log can keep (lone halves, NUL)."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", "\ufffd")


class TextMender:
    """Mend text that comes in pieces: a pair may be cut between two of them, so the first half waits."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, piece: str) -> list[Text]:
        piece = self._half + piece
        self._half = ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            piece, self._half = piece[:-1], piece[-1]
        return self._chunks(piece)

    def end(self) -> list[Text]:
        piece, self._half = self._half, ""
        return self._chunks(piece)

    def _chunks(self, piece: str) -> list[Text]:
        text = mend(piece)
        return [
            Text(content=text[start : start + MAX_TEXT_CHARACTERS])
            for start in range(0, len(text), MAX_TEXT_CHARACTERS)
        ]
