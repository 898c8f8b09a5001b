"""What a key is bound to, and the answer it gives whenever it comes again."""

from __future__ import annotations

from dataclasses import dataclass

from approvals import refusals
from approvals.models import ApprovalRequest, Decision


@dataclass(frozen=True)
class Decided:
    """The decision and the action as it is now. `already_decided`: a new key for the person's own earlier answer."""

    replayed: bool
    already_decided: bool
    decision: Decision
    action: ApprovalRequest


def replayed(*, person_id: int, key: str, body: str, action: ApprovalRequest) -> Decided | None:
    """Return the first answer to this key; None for a new key. Raises KeyReused when it was bound to another body."""
    known = Decision.objects.filter(person_id=person_id, idempotency_key=key).first()
    if known is None:
        return None
    if known.body_sha256 != body:
        raise refusals.KeyReused("this key was used for another decision")
    return Decided(replayed=True, already_decided=False, decision=known, action=action)
