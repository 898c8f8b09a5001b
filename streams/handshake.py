"""hello → welcome, and whether `from` can be honoured (contract §4). Doors and tails do the talking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from streams import access, represent, shape
from streams.access import Caller
from streams.models import Generation
from streams.problems import Invalid, Problem
from streams.protocol import MAX_COUNT

PROTOCOL = 1

ResetReason = Literal["epoch", "pruned", "ahead"]


class UnknownProtocol(Problem):
    """A hello of a protocol this server does not speak; the socket is closed with 4400."""

    code = "unknown_protocol"


class Hello(shape.Shape, frozen=True):
    type: Literal["hello"]
    protocol: int
    epoch: str | None = None
    from_: int = msgspec.field(default=0, name="from")
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """What a log was when a reader came: the welcome, and where the reader starts."""

    welcome: dict[str, Any]
    reset: dict[str, Any] | None
    cursor: int
    next_offset: int


def read_hello(frame: dict[str, Any]) -> Hello:
    """Check a hello. Raises Invalid with the field, or UnknownProtocol, which is looked at first."""
    protocol = frame.get("protocol")
    if isinstance(protocol, int) and not isinstance(protocol, bool) and protocol != PROTOCOL:
        raise UnknownProtocol(f"this server speaks protocol {PROTOCOL}", field="protocol", limit=PROTOCOL)
    hello = shape.read(frame, Hello)
    if not 0 <= hello.from_ <= MAX_COUNT:
        raise Invalid(f"from is a whole number from 0 to {MAX_COUNT}", field="from", limit=MAX_COUNT)
    return hello


def open_log(*, caller: Caller, generation_id: str, hello: Hello, heartbeat_seconds: int) -> Opening:
    """Read the head and the actions and judge `from`; raise NotFound when the caller may not see it.

    The actions are read after the head, so they are as new as it or newer; a client knows by `version`.
    """
    generation = access.find_generation(caller, generation_id)
    shown = represent.generation_json(generation)
    reason = reset_reason(generation, hello)
    cursor = hello.from_ if reason is None else generation.first_offset
    return Opening(
        welcome={
            "type": "welcome",
            "epoch": generation.epoch,
            "generation": shown,
            "actions": shown["actions"],
            "firstOffset": generation.first_offset,
            "nextOffset": generation.next_offset,
            "heartbeatSeconds": heartbeat_seconds,
        },
        reset=None
        if reason is None
        else {
            "type": "reset",
            "reason": reason,
            "epoch": generation.epoch,
            "firstOffset": generation.first_offset,
        },
        cursor=cursor,
        next_offset=generation.next_offset,
    )


def reset_reason(generation: Generation, hello: Hello) -> ResetReason | None:
    """Say why `from` can't be honoured: another life of the log, a part that is gone, or a part that never was."""
    if hello.epoch is not None and hello.epoch != generation.epoch:
        return "epoch"
    if hello.from_ < generation.first_offset:
        return "pruned"
    if hello.from_ > generation.next_offset:
        return "ahead"
    return None
