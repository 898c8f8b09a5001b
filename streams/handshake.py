"""hello → welcome, and whether `from` can be honoured (contract §4). Doors and tails do the talking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

import msgspec

from streams import represent, shape, strictjson
from streams.models import Generation
from streams.problems import Invalid, NotFound, Problem
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
class Snapshot:
    """What a log is to whoever may see it: the encoded welcome, and what is asked of it. The same for all readers."""

    generation_id: UUID
    token_id: int | None
    epoch: str
    first_offset: int
    next_offset: int
    welcome: str
    # A lease is the one thing that changes without an entry (contract §2).
    lasts: bool

    @property
    def head(self) -> tuple[str, int, int]:
        return self.epoch, self.first_offset, self.next_offset


def read_hello(frame: dict[str, Any]) -> Hello:
    """Check a hello. Raises Invalid with the field, or UnknownProtocol, which is looked at first."""
    protocol = frame.get("protocol")
    if isinstance(protocol, int) and not isinstance(protocol, bool) and protocol != PROTOCOL:
        raise UnknownProtocol(f"this server speaks protocol {PROTOCOL}", field="protocol", limit=PROTOCOL)
    hello = shape.read(frame, Hello)
    if not 0 <= hello.from_ <= MAX_COUNT:
        raise Invalid(f"from is a whole number from 0 to {MAX_COUNT}", field="from", limit=MAX_COUNT)
    return hello


def take(generation_id: UUID, *, heartbeat_seconds: int) -> Snapshot:
    """Read the head, then the actions, so that these are as new as it or newer; a client knows by `version`.

    Raises NotFound. Nobody was asked who wants it: `access.may_read` is.
    """
    try:
        generation = Generation.objects.get(pk=generation_id)
    except Generation.DoesNotExist:
        raise NotFound("no such generation") from None
    shown = represent.generation_json(generation)
    welcome = {
        "type": "welcome",
        "epoch": generation.epoch,
        "generation": shown,
        "actions": shown["actions"],
        "firstOffset": generation.first_offset,
        "nextOffset": generation.next_offset,
        "heartbeatSeconds": heartbeat_seconds,
    }
    return Snapshot(
        generation_id=generation.pk,
        token_id=generation.token_id,
        epoch=generation.epoch,
        first_offset=generation.first_offset,
        next_offset=generation.next_offset,
        welcome=strictjson.dumps(welcome),
        lasts=not any(action.get("state") == "executing" for action in shown["actions"]),
    )


def take_all(known: dict[UUID, Snapshot | None], *, heartbeat_seconds: int) -> dict[UUID, Snapshot | Exception]:
    """Return a snapshot of each of these logs as it is now; one that is known and has the same head is that still."""
    heads = {
        pk: head
        for pk, *head in Generation.objects.filter(pk__in=list(known)).values_list(
            "pk", "epoch", "first_offset", "next_offset"
        )
    }
    found: dict[UUID, Snapshot | Exception] = {}
    for key, snapshot in known.items():
        if snapshot is not None and list(snapshot.head) == heads.get(key):
            found[key] = snapshot
            continue
        try:
            if key not in heads:
                raise NotFound("no such generation")
            found[key] = take(key, heartbeat_seconds=heartbeat_seconds)
        except Exception as error:  # noqa: BLE001 - whoever asked for this one gets it, not those of the others
            found[key] = error
    return found


def reset_frame(snapshot: Snapshot, reason: ResetReason) -> dict[str, Any]:
    return {"type": "reset", "reason": reason, "epoch": snapshot.epoch, "firstOffset": snapshot.first_offset}


def reset_reason(generation: Generation | Snapshot, hello: Hello) -> ResetReason | None:
    """Say why `from` can't be honoured: another life of the log, a part that is gone, or a part that never was."""
    if hello.epoch is not None and hello.epoch != generation.epoch:
        return "epoch"
    if hello.from_ < generation.first_offset:
        return "pruned"
    if hello.from_ > generation.next_offset:
        return "ahead"
    return None
