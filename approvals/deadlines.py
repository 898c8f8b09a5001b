"""What the clock does to one action: a question nobody answered, an approval nobody used, a lease nobody kept.

Whoever touches a row first after its time settles it, so that no answer ever depends on when a sweep came by.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import Q

from approvals import audit, transitions
from approvals.models import ApprovalRequest, Claim
from approvals.states import MAX_FENCES_A_DECISION, State
from streams import clock
from streams.log import Held
from streams.protocol import CLOCK

logger = logging.getLogger(__name__)


class Due(Exception):
    """A locked row was found past its time. The caller leaves its transaction, calls `settle` and looks again."""


def due(*, at: datetime) -> Q:
    """Select the rows that are past their time at `at`."""
    return (
        Q(state=State.PENDING, expires_at__lte=at)
        | Q(state=State.APPROVED, approved_until__lte=at)
        | Q(state=State.EXECUTING, lease_expires_at__lte=at)
    )


def is_due(action: ApprovalRequest, *, at: datetime) -> bool:
    limit = {
        State.PENDING: action.expires_at,
        State.APPROVED: action.approved_until,
        State.EXECUTING: action.lease_expires_at,
    }.get(State(action.state))
    return limit is not None and limit <= at


def refuse_if_due(action: ApprovalRequest, held: Held | None) -> datetime:
    """Raise Due for a locked row past its time; return the moment it was judged by."""
    at = transitions.moment(held)
    if is_due(action, at=at):
        raise Due
    return at


def settle(*, action_id: UUID) -> bool:
    """Do what the clock has to do to this action, in a transaction of its own; False when nothing was due."""
    with transaction.atomic(), transitions.lock(action_id) as found:
        if action_id not in found:
            return False
        action, held = found[action_id]
        at = transitions.moment(held)
        if not is_due(action, at=at):
            return False
        if action.state == State.EXECUTING:
            lose_lease(held, action, at=at)
        else:
            expire(held, action)
    return True


def expire(held: Held | None, action: ApprovalRequest) -> None:
    """End a locked question nobody answered, or an approval nobody used."""
    reason = "nobody decided in time" if action.state == State.PENDING else "it was approved but not run in time"
    end_unused(held, action, to=State.EXPIRED, who=CLOCK, kind="expired", reason=reason)


def end_unused(
    held: Held | None, action: ApprovalRequest, *, to: State, who: audit.Who, kind: str, reason: str
) -> ApprovalRequest:
    """End a locked, open action that will not run: expired or cancelled, but `unknown` where it may have run.

    After a lost lease an approved action may have had its effect; whoever reads "cancelled" would ask for it again.
    """
    if not may_have_run(action):
        return transitions.move(held=held, action=action, to=to, who=who, kind=kind, reason=reason)
    asked: dict[str, Any] = {"cancel_requested": True} if to == State.CANCELLED else {}
    return transitions.move(
        held=held, action=action, to=State.UNKNOWN, who=who, kind="may_have_run", reason=reason, **asked
    )


def may_have_run(action: ApprovalRequest) -> bool:
    """Say whether a run since the newest decision lost its lease and never said that it had not started."""
    if action.fence == action.fence_base:
        return False
    return Claim.objects.filter(action=action, fence__gt=action.fence_base, outcome="lease_lost").exists()


def settle_if_due(action: ApprovalRequest) -> bool:
    """Settle a row that was read without a lock, asking the database's clock only when a deadline is set."""
    if action.state not in (State.PENDING, State.APPROVED, State.EXECUTING):
        return False
    return is_due(action, at=clock.now()) and settle(action_id=action.pk)


def lose_lease(held: Held | None, action: ApprovalRequest, *, at: datetime) -> None:
    """End the run nobody has heard of: run it again only where that can't do harm (contract §5)."""
    Claim.objects.filter(action=action, fence=action.fence, ended_at__isnull=True).update(
        ended_at=at, outcome="lease_lost"
    )
    again = (
        action.effects != "at_most_once"
        and not action.cancel_requested
        and action.fence - action.fence_base < MAX_FENCES_A_DECISION
    )
    transitions.move(
        held=held,
        action=action,
        to=State.APPROVED if again else State.UNKNOWN,
        who=CLOCK,
        kind="lease_lost",
        detail={"fence": action.fence, "executor": action.executor_name},
    )


def settle_all(states: Q, *, limit: int) -> int:
    """Settle up to `limit` due rows among `states`, each in a transaction of its own: no log holds up another.

    A row that can't be settled is a fault of ours; it is logged, and the rows behind it are not kept waiting.
    """
    now = clock.now()
    ids = ApprovalRequest.objects.filter(states & due(at=now)).order_by("requested_at").values_list("pk", flat=True)
    settled = 0
    for pk in list(ids[:limit]):
        try:
            settled += settle(action_id=pk)
        except (OperationalError, InterfaceError):
            raise
        except Exception:
            logger.exception("action %s is past its time and can't be settled", pk)
    return settled
