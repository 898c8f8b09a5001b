"""Which actions a caller may see, and which it may run. What one may not see is NotFound."""

from __future__ import annotations

from uuid import UUID

from django.db.models import Q, QuerySet

from approvals import deadlines, policy
from approvals.models import ApprovalRequest
from streams.access import SEE, Caller
from streams.problems import NotFound


def visible(caller: Caller) -> QuerySet[ApprovalRequest]:
    """The actions this caller may see, as the rows stand: a list calls `decisions.expire_due` first.

    People see all with the permission and nothing without. A token sees what it asked for or what was born in its
    generations, with `read:all` everything.
    """
    rows = ApprovalRequest.objects.all()
    if caller.token is not None:
        if caller.can("read:all"):
            return rows
        if any(map(caller.can, ("approvals:read", "approvals:request", "generations:read", "generations:write"))):
            return rows.filter(Q(token=caller.token) | Q(generation__token=caller.token))
        return rows.none()
    if caller.user is None:
        return rows.none()
    return rows if caller.can(SEE) else rows.none()


def find(caller: Caller, action_id: UUID | str) -> ApprovalRequest:
    """Return the action as this caller may see it, settled when its time is over; NotFound otherwise.

    Takes no lock. It does write when it is the first to touch a row past its time, so call it outside a transaction
    that holds locks.
    """
    key = as_id(action_id)
    found = visible(caller).filter(pk=key).first()
    if found is None:
        raise NotFound("no such approval request")
    if deadlines.settle_if_due(found):
        found = ApprovalRequest.objects.get(pk=key)
    return found


def as_id(action_id: UUID | str) -> UUID:
    try:
        return action_id if isinstance(action_id, UUID) else UUID(action_id)
    except (ValueError, AttributeError, TypeError):
        raise NotFound("no such approval request") from None


def asked_by(caller: Caller, action: ApprovalRequest) -> bool:
    """Say whether this caller is the requester itself."""
    return (caller.actor.kind, caller.actor.id) == (action.requested_by_kind, action.requested_by_id)


def may_run(caller: Caller, tool: str) -> bool:
    """Say whether a token with `claims` may run this tool for anybody."""
    return (
        caller.token is not None
        and caller.can("claims")
        and any(policy.matches(str(pattern), tool) for pattern in caller.token.claim_tools)
    )
