"""The StreamChunk protocol: what an agent may say, as structs and one strict decoder. Pure: no Django.

Source: docs/contract.md §2. A chunk is decoded and checked in about 0.2 µs (msgspec), so the doors, the log, the
adapters and `streams.client` all use the same structs and nothing is checked twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from streams import shape, strictjson

MAX_CHUNKS = 1_000
MAX_BODY_BYTES = 1_048_576
MAX_CHUNK_BYTES = 262_144
# What a browser still counts exactly; every counter on the wire stays below it.
MAX_COUNT = 2**53 - 1

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
# Every member of an object has one; texts may hold more of them, which only costs a slow reading.
MEMBER = re.compile(rb'"[ \t\r\n]*:')


class BadChunk(ValueError):
    """A chunk is not of the protocol. `index` is its place in the batch, `field` the place inside it."""

    code = "invalid"

    def __init__(
        self, detail: str, *, index: int, field: str | None = None, code: str = "invalid", limit: int | None = None
    ) -> None:
        super().__init__(detail)
        self.detail, self.index, self.field, self.code, self.limit = detail, index, field, code, limit


def decode_chunk(raw: bytes | str | msgspec.Raw, *, index: int = 0) -> Chunk:
    """Decode and check one chunk; raise BadChunk with `index`."""
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
    if len(data) > MAX_CHUNK_BYTES:
        raise BadChunk(
            f"a chunk is at most {MAX_CHUNK_BYTES} bytes", index=index, code="too_large", limit=MAX_CHUNK_BYTES
        )
    try:
        chunk = _one.decode(data)
    except RecursionError:
        raise BadChunk("the chunk is nested too deep", index=index) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        told = shape.refusal(str(error))
        raise BadChunk(told.detail, index=index, field=told.fields.get("field")) from None
    # The slow strict reading only where something smells: results (numbers, nesting), escapes that may hide
    # surrogates or NUL, and more keys than the struct could have used (a duplicate).
    if isinstance(chunk, ToolResult) or _SUSPECT.search(data) or len(MEMBER.findall(data)) > _keys(chunk):
        try:
            parsed = strictjson.loads(data, max_depth=strictjson.MAX_DEPTH + 1)
        except strictjson.BadJSON as error:
            raise BadChunk(error.detail, index=index, field=error.field, code=error.code, limit=error.limit) from None
        if isinstance(chunk, ToolResult) and isinstance(parsed, dict):
            exact = strictjson.dumps(parsed["result"]).encode()
            chunk = msgspec.structs.replace(chunk, result=msgspec.Raw(exact))
    if not isinstance(chunk, Text):
        _check(chunk, index)
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


def _check(chunk: Chunk, index: int) -> None:
    """Refuse what the types let through: names without letters, counts below zero or past what a browser counts."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    if isinstance(chunk, ToolCall):
        names, counts = {"id": chunk.id, "name": chunk.name}, {"index": chunk.index}
    elif isinstance(chunk, ToolResult):
        names = {"id": chunk.id, "toolCallId": chunk.toolCallId}
    elif isinstance(chunk, Error) and isinstance(chunk.retryAfter, int):
        counts = {"retryAfter": chunk.retryAfter}
    elif isinstance(chunk, Done) and isinstance(chunk.usage, Usage):
        counts = {f"usage.{name}": value for name, value in msgspec.structs.asdict(chunk.usage).items()}
    for field, name in names.items():
        if not 1 <= len(name) <= 200:
            raise BadChunk(f"{field} has 1 to 200 characters", index=index, field=field, limit=200)
    for field, count in counts.items():
        if not 0 <= count <= MAX_COUNT:
            raise BadChunk(f"{field} is a count from 0 to {MAX_COUNT}", index=index, field=field, limit=MAX_COUNT)


def stored_chunk(body: str) -> Chunk:
    """Decode a chunk of the log. It was checked when it was stored, and the server's own may pass a producer's limits:
    the result of an edited call carries the arguments beside it."""
    return _one.decode(body)


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
