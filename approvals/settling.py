"""Withdraw a question, stop a run, and say what happened when no machine knows (contract §5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from django.db import IntegrityError, transaction

from approvals import access, audit, deadlines, refusals, shapes, transitions, waiting
from approvals.models import ApprovalRequest
from approvals.states import State
from approvals.voted import Decided, replayed
from streams.access import DECIDE, Caller
from streams.log import Held
from streams.problems import Invalid, NotAllowed, Problem

RECONCILE = "approvals.reconcile"
RETRIES = 5
T = TypeVar("T")


@dataclass(frozen=True)
class Cancelled:
    """`requested`: it runs, and whoever runs it is told, or it may have run and is `unknown` (202); else cancelled."""

    action: ApprovalRequest
    requested: bool


def cancel(*, caller: Caller, action_id: UUID | str, reason: str = "") -> Cancelled:
    """Withdraw one's own request, or as a person who may decide revoke anybody's. Repeatable.

    Raises NotFound, NotAllowed, AlreadyTerminal and Unknown. Of something that runs nobody says it was cancelled
    before the executor said that nothing happened.
    """
    shapes.reason(reason)

    def work() -> Cancelled:
        action = access.find(caller, action_id)
        if not (access.asked_by(caller, action) or (caller.user is not None and caller.can(DECIDE))):
            raise refusals.with_action(NotAllowed, "only the requester or a person who may decide cancels", action)
        with waiting.briefly(), transitions.lock_one(action.pk) as (locked, held):
            return _cancel(caller, locked, held, reason)

    return _noting_refusals(caller, action_id, "cancel_refused", "", work)


def _cancel(caller: Caller, action: ApprovalRequest, held: Held | None, reason: str) -> Cancelled:
    deadlines.refuse_if_due(action, held)
    if action.state == State.CANCELLED:
        return Cancelled(action, requested=False)
    if action.state == State.UNKNOWN:
        raise refusals.not_claimable(action)
    if action.state in (State.PENDING, State.APPROVED):
        said = reason or f"withdrawn by {caller.actor.name}"
        deadlines.end_unused(held, action, to=State.CANCELLED, who=caller, kind="cancelled", reason=said)
        return Cancelled(action, requested=action.state != State.CANCELLED)
    if action.state != State.EXECUTING:
        raise refusals.with_action(refusals.AlreadyTerminal, f"it is {action.state} already", action)
    if not action.cancel_requested:
        transitions.move(
            held=held,
            action=action,
            to=State.EXECUTING,
            who=caller,
            kind="cancel_requested",
            reason=reason,
            cancel_requested=True,
        )
    return Cancelled(action, requested=True)


def reconcile(
    *,
    caller: Caller,
    action_id: UUID | str,
    idempotency_key: str,
    outcome: str,
    note: str,
    result_text: str | None = None,
) -> Decided:
    """Say, as a person with that permission, what became of an `unknown` action, or order another run.

    `outcome` is done, failed or retry; `note` says how one knows. Keys are those of decisions: one person, one use.
    Raises NotFound, KeyReused, PeopleOnly, NotAllowed, NotUnknown, and Cancelled for another run in a cancelled
    generation.
    """
    shapes.key(idempotency_key)
    shapes.one_of(outcome, ("done", "failed", "retry"), field="outcome")
    shapes.text(note, field="note", min_chars=1, max_chars=shapes.MAX_REASON_CHARS)
    if result_text is not None:
        if outcome == "retry":
            raise Invalid("another run has no result yet", field="result")
        result_text = shapes.result(result_text)

    def work() -> Decided:
        action = access.find(caller, action_id)
        if caller.user is None:
            raise refusals.with_action(refusals.PeopleOnly, "only a person says what happened", action)
        person_id = caller.user.pk
        body = shapes.sha256("reconcile", str(action.pk), outcome, note, result_text)

        def replay(seen: ApprovalRequest) -> Decided | None:
            known = replayed(person_id=person_id, key=idempotency_key, body=body, action=seen)
            if known is not None:
                with transaction.atomic():
                    audit.record(kind="decision_replayed", who=caller, action=seen, idempotency_key=idempotency_key)
            return known

        known = replay(action)
        if known is not None:
            return known
        if not caller.can(RECONCILE):
            raise refusals.with_action(NotAllowed, f"this needs the permission {RECONCILE}", action)
        with waiting.briefly(), transitions.lock_one(action.pk) as (locked, held):
            return replay(locked) or _reconcile(
                caller, person_id, locked, held, idempotency_key, body, outcome, note, result_text
            )

    return _noting_refusals(caller, action_id, "reconcile_refused", idempotency_key, work)


def _reconcile(
    caller: Caller,
    person_id: int,
    action: ApprovalRequest,
    held: Held | None,
    idempotency_key: str,
    body: str,
    outcome: str,
    note: str,
    result_text: str | None,
) -> Decided:
    at = deadlines.refuse_if_due(action, held)
    if action.state != State.UNKNOWN:
        raise refusals.with_action(refusals.NotUnknown, f"it is {action.state}", action)
    changes: dict[str, Any]
    if outcome == "retry":
        to = State.APPROVED
        if held is not None and (held.generation.cancel_requested or held.generation.finish_reason == "cancel"):
            raise refusals.with_action(refusals.Cancelled, "its run was cancelled: nothing runs in it again", action)
        # A new decision: its own time, its own fences, and an old cancel was about the old run.
        changes = {
            "approved_until": at + timedelta(seconds=action.approval_valid_seconds),
            "fence_base": action.fence,
            "cancel_requested": False,
        }
    else:
        to = State.DONE if outcome == "done" else State.FAILED
        changes = {"result_text": result_text or "", "is_error": to == State.FAILED, "finished_at": at}
    decision = transitions.new_decision(
        action=action,
        who=caller,
        decision=f"reconcile_{outcome}",
        at=at,
        reason=note,
        person_id=person_id,
        idempotency_key=idempotency_key,
        body_sha256=body,
    )
    moved = transitions.move(
        held=held,
        action=action,
        to=to,
        who=caller,
        kind="reconciled",
        decision=decision,
        reason=note,
        **changes,
    )
    return Decided(replayed=False, already_decided=False, decision=decision, action=moved)


def _noting_refusals(
    caller: Caller, action_id: UUID | str, kind: str, idempotency_key: str, work: Callable[[], T]
) -> T:
    """Do the work again after a race, and keep a refusal in the audit."""
    try:
        for _ in range(RETRIES):
            try:
                return work()
            except (deadlines.Due, transitions.Missed, IntegrityError):
                continue
        raise refusals.InFlight
    except refusals.InFlight:
        raise
    except Problem as refusal:
        with transaction.atomic():
            action = ApprovalRequest.objects.filter(pk=access.as_id(action_id)).first()
            audit.record(kind=kind, who=caller, action=action, idempotency_key=idempotency_key, reason=refusal.code)
        raise
