"""Record who did what, in the transaction that did it. Rows are added, never changed."""

from __future__ import annotations

from typing import Any

from approvals.models import ApprovalRequest, AuditEvent
from streams import strictjson
from streams.access import Caller
from streams.protocol import Actor

Who = Caller | Actor


def actor_of(who: Who) -> Actor:
    return who if isinstance(who, Actor) else who.actor


def record(
    *,
    kind: str,
    who: Who,
    action: ApprovalRequest | None,
    idempotency_key: str = "",
    from_state: str = "",
    to_state: str = "",
    version: int | None = None,
    digest: str = "",
    reason: str = "",
    detail: dict[str, Any] | None = None,
) -> AuditEvent:
    """Add one event to the caller's transaction.

    `version` is set when the event changed the action, and is then the version it made; there is one event a version.
    """
    actor = actor_of(who)
    door, address, request_id = ("", "", "") if isinstance(who, Actor) else (who.door, who.address, who.request_id)
    return AuditEvent.objects.create(
        action=action,
        kind=kind,
        actor_kind=actor.kind,
        actor_id=actor.id[:64],
        actor_name=actor.name[:150],
        door=door[:20],
        address=address[:64],
        request_id=request_id[:64],
        idempotency_key=idempotency_key[:255],
        from_state=from_state,
        to_state=to_state,
        version=version,
        digest=digest,
        reason=reason,
        detail=strictjson.dumps(detail or {}),
    )
