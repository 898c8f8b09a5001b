"""The StreamChunk protocol: what an agent may say, as structs and one strict decoder. Pure: no Django.

Source: docs/contract.md §2. A chunk is decoded and checked in about 0.2 µs (msgspec), so the doors, the log, the
adapters and `streams.client` all use the same structs and nothing is checked twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from streams import strictjson

MAX_CHUNKS = 1_000
MAX_BODY_BYTES = 1_048_576
MAX_CHUNK_BYTES = 262_144

ActorKind = Literal["person", "token", "policy", "clock"]
DoneReason = Literal["stop", "tool_use", "length", "cancel", "error"]


class Actor(msgspec.Struct, frozen=True):
    """Who did it: a person, an agent's token, a policy, or the clock. `requestedBy` has the same shape."""

    kind: ActorKind
    id: str
    name: str


CLOCK = Actor(kind="clock", id="clock", name="clock")


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: str
    message: str


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    promptTokens: int
    completionTokens: int
    totalTokens: int


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    content: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_call"):
    """`arguments` is a JSON text, kept as sent."""

    id: str
    name: str
    arguments: str
    index: int


class ToolResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """`result` is any JSON, kept as raw text so that no number changes on its way through."""

    id: str
    toolCallId: str
    result: msgspec.Raw
    isError: bool


class Error(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="error"):
    """`retryAfter` is in milliseconds."""

    error: ErrorInfo
    recoverable: bool
    retryAfter: int | msgspec.UnsetType = msgspec.UNSET


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="done"):
    reason: DoneReason
    usage: Usage | msgspec.UnsetType = msgspec.UNSET


Chunk = Text | ToolCall | ToolResult | Error | Done

_one = msgspec.json.Decoder(Chunk)
encode = msgspec.json.Encoder().encode
# NUL can't be kept by PostgreSQL, lone surrogates by nobody; both hide in escapes as well.
_SUSPECT = re.compile(rb"\\u(0000|[dD][89a-fA-F])|\x00")


class BadChunk(ValueError):
    """A chunk is not of the protocol. `index` is its place in the batch, `field` the place inside it."""

    code = "invalid"

    def __init__(self, detail: str, *, index: int, field: str | None = None, code: str = "invalid") -> None:
        super().__init__(detail)
        self.detail, self.index, self.field, self.code = detail, index, field, code


def decode_chunk(raw: bytes | str | msgspec.Raw, *, index: int = 0) -> Chunk:
    """Decode and check one chunk; raise BadChunk with `index`."""
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
    if len(data) > MAX_CHUNK_BYTES:
        raise BadChunk(f"a chunk is at most {MAX_CHUNK_BYTES} bytes", index=index, code="too_large")
    try:
        chunk = _one.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadChunk(str(error), index=index) from None
    # The slow strict reading only where something smells: results (numbers, nesting), escapes that may hide
    # surrogates or NUL, and more keys than the struct could have used (a duplicate).
    if isinstance(chunk, ToolResult) or _SUSPECT.search(data) or data.count(b'":') + data.count(b'" :') > _keys(chunk):
        try:
            parsed = strictjson.loads(data, max_depth=66)
        except strictjson.BadJSON as error:
            raise BadChunk(str(error.detail), index=index, field=error.field, code=error.code) from None
        if isinstance(chunk, ToolResult) and isinstance(parsed, dict):
            exact = strictjson.dumps(parsed["result"]).encode()
            chunk = msgspec.structs.replace(chunk, result=msgspec.Raw(exact))
    if isinstance(chunk, ToolCall):
        _check_call(chunk, index)
    elif isinstance(chunk, Error) and chunk.retryAfter is not msgspec.UNSET and chunk.retryAfter < 0:
        raise BadChunk("retryAfter is milliseconds, 0 or more", index=index, field="retryAfter")
    elif isinstance(chunk, Done) and chunk.usage is not msgspec.UNSET:
        if min(chunk.usage.promptTokens, chunk.usage.completionTokens, chunk.usage.totalTokens) < 0:
            raise BadChunk("usage counts are 0 or more", index=index, field="usage")
    return chunk


def _keys(chunk: Chunk) -> int:
    """Say how many keys an honest encoding of `chunk` has; texts that contain `":` only cost a slow reading."""
    if isinstance(chunk, Text):
        return 2
    if isinstance(chunk, Error):
        return 5 + (chunk.retryAfter is not msgspec.UNSET)
    if isinstance(chunk, Done):
        return 2 + (0 if chunk.usage is msgspec.UNSET else 4)
    return 5


def _check_call(chunk: ToolCall, index: int) -> None:
    if not 1 <= len(chunk.name) <= 200:
        raise BadChunk("a tool's name has 1 to 200 characters", index=index, field="name")
    if not 1 <= len(chunk.id) <= 200:
        raise BadChunk("a tool call's id has 1 to 200 characters", index=index, field="id")
    if chunk.index < 0:
        raise BadChunk("index is 0 or more", index=index, field="index")


def decode_chunks(raws: Sequence[bytes | str | msgspec.Raw]) -> list[Chunk]:
    return [decode_chunk(raw, index=index) for index, raw in enumerate(raws)]


def error_chunk(code: str, message: str, *, recoverable: bool, retry_after_ms: int | None = None) -> Error:
    return Error(
        error=ErrorInfo(code=code, message=message),
        recoverable=recoverable,
        retryAfter=msgspec.UNSET if retry_after_ms is None else retry_after_ms,
    )


def tool_result(*, tool_call_id: str, result_text: str, is_error: bool, result_id: str) -> ToolResult:
    """Make a tool_result whose `result` is exactly the JSON in `result_text`."""
    return ToolResult(id=result_id, toolCallId=tool_call_id, result=msgspec.Raw(result_text.encode()), isError=is_error)


def as_plain(value: Any) -> Any:
    """Turn a struct into the plain JSON value its wire text denotes."""
    return strictjson.loads(encode(value))
