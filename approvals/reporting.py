"""What whoever runs an action says about it: still at it, and how it ended (contract §5)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q

from approvals import audit, claimtokens, deadlines, refusals, shapes, transitions, waiting
from approvals.claimants import Claimant
from approvals.models import ApprovalRequest, Claim
from approvals.states import MAX_FENCES_A_DECISION, State
from streams import clock
from streams.log import Held
from streams.problems import Invalid, NotFound, Problem

MAX_LEASE_SECONDS = 3_600
RETRIES = 5
OUTCOMES = ("done", "failed", "not_started")


@dataclass(frozen=True)
class Beat:
    lease_seconds: int
    cancel_requested: bool


def heartbeat(*, claim_token: str, lease_seconds: int, claimant: Claimant) -> Beat:
    """Keep the lease for `lease_seconds` from now. LeaseLost when it is over or somebody has a newer fence.

    Raises no version and writes no notice: the lease is no part of the story.
    """
    shapes.whole(lease_seconds, field="leaseSeconds", least=1, most=MAX_LEASE_SECONDS)
    row = _find(claim_token, claimant)
    now = clock.now()
    kept = ApprovalRequest.objects.filter(
        pk=row.action_id, state=State.EXECUTING, fence=row.fence, lease_expires_at__gt=now
    ).update(lease_expires_at=now + timedelta(seconds=lease_seconds))
    if kept:
        asked_to_stop = ApprovalRequest.objects.values_list("cancel_requested", flat=True).get(pk=row.action_id)
        return Beat(lease_seconds=lease_seconds, cancel_requested=asked_to_stop)
    deadlines.settle(action_id=row.action_id)
    action = ApprovalRequest.objects.get(pk=row.action_id)
    raise refusals.with_action(refusals.LeaseLost, "the lease is over", action)


def complete(*, claim_token: str, outcome: str, result_text: str | None = None, claimant: Claimant) -> ApprovalRequest:
    """Report how a run ended; repeatable. The newest fence may also report after its lease was lost.

    `failed` says that it surely did not happen or surely went wrong. Raises NotFound, OutcomeConflict, StaleClaim,
    LeaseLost (a late `not_started` where nobody knows any more).
    """
    shapes.one_of(outcome, OUTCOMES, field="outcome")
    if result_text is not None:
        if outcome == "not_started":
            raise Invalid("what was not started has no result", field="result")
        result_text = shapes.result(result_text)
    row = _find(claim_token, claimant)
    for _ in range(RETRIES):
        try:
            with waiting.briefly(), transitions.lock_one(row.action_id) as (action, held):
                return _complete(claimant, row.pk, action, held, outcome, result_text or "")
        except transitions.Missed:
            continue
        except refusals.InFlight:
            raise
        except Problem as refusal:
            _record_refusal(claimant, row, outcome, result_text, refusal)
            raise
    raise refusals.InFlight


def _complete(
    claimant: Claimant,
    claim_pk: int,
    action: ApprovalRequest,
    held: Held | None,
    outcome: str,
    result_text: str,
) -> ApprovalRequest:
    row = Claim.objects.get(pk=claim_pk)
    result_sha256 = claimtokens.sha256(result_text) if result_text else ""
    if row.outcome in OUTCOMES:
        if (row.outcome, row.result_sha256) == (outcome, result_sha256):
            return action
        raise refusals.with_action(refusals.OutcomeConflict, f"it was reported as {row.outcome} before", action)
    if action.fence != row.fence:
        raise refusals.with_action(refusals.StaleClaim, "somebody has claimed it since", action)
    at = transitions.moment(held)
    changes: dict[str, Any] = {}
    if outcome != "not_started":
        if action.state in (State.DONE, State.FAILED):  # a person said so meanwhile
            raise refusals.with_action(refusals.OutcomeConflict, f"it was settled as {action.state}", action)
        if action.state not in (State.EXECUTING, State.APPROVED, State.UNKNOWN):
            raise refusals.with_action(refusals.StaleClaim, f"it is {action.state}", action)
        to = State.DONE if outcome == "done" else State.FAILED
        changes = {"result_text": result_text, "is_error": to == State.FAILED, "finished_at": at}
    elif action.state == State.APPROVED:  # the lease was lost, and it waits for another run already
        to = None
    elif action.state != State.EXECUTING:
        raise refusals.with_action(refusals.LeaseLost, "the lease is over", action)
    elif action.fence - action.fence_base >= MAX_FENCES_A_DECISION:
        to = State.FAILED
        changes = {"result_text": '"not started in five runs"', "is_error": True, "finished_at": at}
    else:
        to = State.CANCELLED if action.cancel_requested else State.APPROVED
    if outcome == "not_started" and to in (State.FAILED, State.CANCELLED) and deadlines.may_have_run(action):
        # This run did nothing; an earlier one lost its lease, and of that nobody knows.
        to, changes = State.UNKNOWN, {}
    late = action.state != State.EXECUTING
    Claim.objects.filter(pk=row.pk).update(ended_at=at, outcome=outcome, result_sha256=result_sha256)
    if to is None:
        return action
    return transitions.move(
        held=held,
        action=action,
        to=to,
        who=claimant.who,
        kind="reported_late" if late else outcome,
        reason="it was cancelled before it started" if to == State.CANCELLED else "",
        detail={"fence": row.fence, "outcome": outcome},
        **changes,
    )


def give_up(*, claim_token: str, claimant: Claimant, known: str) -> ApprovalRequest:
    """Say that this run ended and that nobody can tell whether its effect happened; `known` is kept in the audit.

    The lease ends early and the rest is what a lost lease does: `unknown` for at_most_once, else another run with the
    same effect key, 2, 4, 8 and 16 seconds later. Nothing happens when the lease is over already.
    """
    row = _find(claim_token, claimant)
    action = ApprovalRequest.objects.get(pk=row.action_id)
    pause = 0 if action.effects == "at_most_once" else 2 ** min(action.fence - action.fence_base, 6)
    with transaction.atomic():
        now = clock.now()
        ends = now + timedelta(seconds=pause)
        shortened = ApprovalRequest.objects.filter(
            pk=row.action_id, state=State.EXECUTING, fence=row.fence, lease_expires_at__gt=ends
        ).update(lease_expires_at=ends)
        if shortened:
            detail = {"fence": row.fence, "known": known}
            audit.record(kind="outcome_not_known", who=claimant.who, action=action, detail=detail)
    if not pause:
        deadlines.settle(action_id=row.action_id)
    action.refresh_from_db()
    return action


def reap_lost(*, limit: int = 100) -> int:
    """End the runs whose lease is over; return how many."""
    return deadlines.settle_all(Q(state=State.EXECUTING), limit=limit)


def _find(claim_token: str, claimant: Claimant) -> Claim:
    if not isinstance(claim_token, str) or not claim_token:
        raise Invalid("a claimToken is needed", field="claimToken")
    row = Claim.objects.filter(token_sha256=claimtokens.sha256(claim_token), request__claimant=claimant.name).first()
    if row is None:
        raise NotFound("no such claim")
    return row


def _record_refusal(claimant: Claimant, row: Claim, outcome: str, result_text: str | None, refusal: Problem) -> None:
    """Keep a report that came too late with what it said: it may be all that is known about an effect."""
    with transaction.atomic():
        audit.record(
            kind="report_refused",
            who=claimant.who,
            action=ApprovalRequest.objects.get(pk=row.action_id),
            reason=refusal.code,
            detail={"fence": row.fence, "outcome": outcome, "resultText": result_text},
        )
