"""A person's answer, exactly once (contract §5, "The decision"); and the other verbs about questions.

`request` lives in `requesting`, `cancel` and `reconcile` in `settling`; doors find them all here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Q

from approvals import access, audit, deadlines, policies, refusals, represent, shapes, tools, transitions, waiting
from approvals.models import ApprovalRequest
from approvals.requesting import Requested, request
from approvals.settling import Cancelled, cancel, reconcile
from approvals.states import State
from approvals.voted import Decided, replayed
from streams.access import DECIDE, Caller
from streams.log import Held
from streams.problems import Invalid, NotAllowed, NotFound, Problem

MAX_BATCH = 100
RETRIES = 5
T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """One answer. `arguments_text` replaces the arguments of an approval; `digest` says what the person saw."""

    action_id: UUID | str
    idempotency_key: str
    decision: str
    reason: str = ""
    arguments_text: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one item of a batch: `decided`, or `code` and `problem`."""

    action_id: str
    status: int
    code: str | None
    decided: Decided | None
    problem: Problem | None


def decide(
    *,
    caller: Caller,
    action_id: UUID | str,
    idempotency_key: str,
    decision: str,
    reason: str = "",
    arguments_text: str | None = None,
    digest: str | None = None,
) -> Decided:
    """Record a person's approve or reject once a key; return the decision and the action as it is now.

    Raises, in this order: Invalid, KeyRequired, KeyInvalid; NotFound; KeyReused; PeopleOnly, NotAllowed, SelfApproval;
    DigestRequired; Expired, Cancelled, AlreadyDecided; DigestMismatch; ArgumentsInvalid; PolicyDenies,
    NeedsMoreApprovals. InFlight when a first call with the key is still being worked on.
    """
    item = _shape(Item(action_id, idempotency_key, decision, reason, arguments_text, digest))
    try:
        return _again(lambda: _decide(caller, item))
    except refusals.InFlight:
        raise  # nothing was refused: the same key learns the answer in a moment
    except Problem as refusal:
        _record_refusal(caller, item, refusal)
        raise


def decide_many(*, caller: Caller, all_or_nothing: bool, items: Sequence[Item]) -> list[Outcome]:
    """Decide 1 to 100 actions, in the order given; each on its own, or all in one transaction.

    With `all_or_nothing` a refusal raises BatchRefused, whose field `outcomes` has the same list (424 for those that
    were not refused themselves), and nothing is decided. Raises Invalid for an empty or too long list and for an
    action named twice.
    """
    if not 1 <= len(items) <= MAX_BATCH:
        raise Invalid(f"a batch has 1 to {MAX_BATCH} decisions", field="decisions", limit=MAX_BATCH)
    ids = [_same_id(item.action_id) for item in items]
    if len(set(ids)) < len(ids):
        raise Invalid("a batch decides about an action once", field="decisions")
    if not all_or_nothing:
        return [_attempt(caller, item) for item in items]
    try:
        return _again(lambda: _decide_together(caller, items))
    except _TogetherRefused as refused:
        for item, outcome in zip(items, refused.outcomes, strict=True):
            if outcome.problem is not None:
                _record_refusal(caller, item, outcome.problem)
        raise refusals.BatchRefused("nothing was decided", outcomes=refused.outcomes) from None


def expire_due(*, limit: int = 100) -> int:
    """Expire questions nobody answered and approvals nobody used; return how many."""
    return deadlines.settle_all(Q(state__in=[State.PENDING, State.APPROVED]), limit=limit)


def _same_id(action_id: UUID | str) -> str:
    try:
        return access.as_id(action_id).hex
    except NotFound:
        return str(action_id)


def _shape(item: Item) -> Item:
    shapes.key(item.idempotency_key)
    shapes.one_of(item.decision, ("approve", "reject"), field="decision")
    shapes.reason(item.reason)
    if item.digest is not None:
        shapes.text(item.digest, field="digest", max_chars=200)
    if item.arguments_text is None:
        return item
    if item.decision == "reject":
        raise Invalid("a rejection has no arguments", field="arguments")
    return replace(item, arguments_text=shapes.arguments(item.arguments_text))


def _body(item: Item, action_id: UUID) -> str:
    """Name what the key is bound to; the digest is no part of it."""
    return shapes.sha256("decide", str(action_id), item.decision, item.reason, item.arguments_text)


def _again(work: Callable[[], T]) -> T:
    """Do it again when the row or the key turned out to be somebody else's in between: look, then say which."""
    for _ in range(RETRIES):
        try:
            return work()
        except (deadlines.Due, transitions.Missed, IntegrityError):
            continue
    raise refusals.InFlight


def _decide(caller: Caller, item: Item) -> Decided:
    action = access.find(caller, item.action_id)
    known = _replay(caller, item, action)
    if known is not None:
        return known
    _may_answer(caller, action)
    try:
        with waiting.briefly(), transitions.lock_one(action.pk) as (locked, held):
            return _answer(caller, item, locked, held)
    except refusals.InFlight:
        # Behind many others the time ran out, and one of them has decided: say that, not "in flight".
        action = access.find(caller, item.action_id)
        settled = _replay(caller, item, action) or _settled(caller, item, action)
        if settled is None:
            raise
        return settled


def _replay(caller: Caller, item: Item, action: ApprovalRequest) -> Decided | None:
    if caller.user is None:
        return None
    known = replayed(person_id=caller.user.pk, key=item.idempotency_key, body=_body(item, action.pk), action=action)
    if known is not None:
        with transaction.atomic():
            audit.record(
                kind="decision_replayed",
                who=caller,
                action=action,
                idempotency_key=item.idempotency_key,
                digest=known.decision.digest,
            )
    return known


def _may_answer(caller: Caller, action: ApprovalRequest) -> None:
    if caller.user is None:
        raise refusals.with_action(refusals.PeopleOnly, "only a person decides", action)
    if not caller.can(DECIDE):
        raise refusals.with_action(NotAllowed, f"this needs the permission {DECIDE}", action)
    if caller.user.pk == action.person_id or access.asked_by(caller, action):
        raise refusals.with_action(refusals.SelfApproval, "nobody decides about their own request", action)


def _answer(caller: Caller, item: Item, action: ApprovalRequest, held: Held | None) -> Decided:
    """Judge and record the answer; `action` is locked. Everything is checked before anything is written."""
    assert caller.user is not None
    known = _replay(caller, item, action)
    if known is not None:
        return known
    if item.digest is None and action.risk in ("high", "critical"):
        raise refusals.with_action(refusals.DigestRequired, "say by its digest what you saw", action, field="digest")
    at = deadlines.refuse_if_due(action, held)
    settled = _settled(caller, item, action)
    if settled is not None:
        return settled
    if item.digest is not None and item.digest != action.digest:
        raise refusals.with_action(refusals.DigestMismatch, "what you saw is not what would run", action)
    edit = _edit(item, action)
    return _record(caller, item, action, held, at, edit)


def _settled(caller: Caller, item: Item, action: ApprovalRequest) -> Decided | None:
    """Say what the state leaves: nothing to settle (None), the person's own earlier answer, or a refusal."""
    if action.state == State.EXPIRED:
        raise refusals.with_action(refusals.Expired, "it expired before you answered", action)
    if action.state == State.CANCELLED:
        raise refusals.with_action(refusals.Cancelled, "it was cancelled", action)
    answers = list(action.decisions.filter(decision__in=["approve", "reject"]))
    mine = next((answer for answer in answers if caller.user and answer.person_id == caller.user.pk), None)
    if mine is None and action.state == State.PENDING:
        return None
    if mine is not None and (mine.decision, mine.arguments_text) == (
        item.decision,
        item.arguments_text or "",
    ):
        return Decided(replayed=False, already_decided=True, decision=mine, action=action)
    first = mine or answers[-1]
    raise refusals.with_action(
        refusals.AlreadyDecided,
        f"{first.actor_name} has decided already: {first.decision}",
        action,
        decision=represent.decision_json(first),
    )


def _edit(item: Item, action: ApprovalRequest) -> tools.Ready | None:
    """Hold an edit against the tool's schema and today's policy; None when it changes nothing."""
    if item.arguments_text is None:
        return None
    ready = tools.make_ready(tool_name=action.tool, arguments_text=item.arguments_text)
    if ready.fault is not None:
        raise refusals.ArgumentsInvalid(ready.fault.detail, field=ready.fault.field)
    if ready.text != item.arguments_text:
        # What a person approves is what runs: an edit that the tool would still change was not seen as it would run.
        raise refusals.ArgumentsInvalid(
            "the tool would change these arguments before it runs; send them in their final form",
            field="arguments",
            finalArgumentsText=ready.text,
        )
    if ready.digest == action.digest:
        return None
    verdict = policies.active().judge(action.tool)
    if verdict.verdict == "deny":
        raise refusals.with_action(refusals.PolicyDenies, f"rule {verdict.rule} denies this tool now", action)
    # The votes there are were for other arguments, so an edit stands alone.
    if max(action.approvals_required, verdict.approvals_required) > 1:
        raise refusals.with_action(
            refusals.NeedsMoreApprovals, "one person can't change what several have to approve", action
        )
    return ready


def _record(
    caller: Caller,
    item: Item,
    action: ApprovalRequest,
    held: Held | None,
    at: datetime,
    edit: tools.Ready | None,
) -> Decided:
    assert caller.user is not None
    changes: dict[str, Any] = {}
    if item.decision == "reject":
        to, kind = State.REJECTED, "rejected"
    else:
        votes = 1 + action.decisions.filter(decision="approve", person__isnull=False).count()
        to, kind = (State.APPROVED, "approved") if votes >= action.approvals_required else (State.PENDING, "voted")
    if to == State.APPROVED:
        changes["approved_until"] = at + timedelta(seconds=action.approval_valid_seconds)
        changes["fence_base"] = action.fence
    if edit is not None:
        changes["original_arguments_text"], changes["original_digest"] = action.arguments_text, action.digest
        changes["arguments_text"], changes["digest"] = edit.text, edit.digest
    decision = transitions.new_decision(
        action=action,
        who=caller,
        decision=item.decision,
        at=at,
        reason=item.reason,
        person_id=caller.user.pk,
        idempotency_key=item.idempotency_key,
        body_sha256=_body(item, action.pk),
        arguments_text=item.arguments_text or "",
        digest=edit.digest if edit is not None else action.digest,
    )
    moved = transitions.move(
        held=held,
        action=action,
        to=to,
        who=caller,
        kind=kind,
        decision=decision,
        reason=item.reason,
        **changes,
    )
    return Decided(replayed=False, already_decided=False, decision=decision, action=moved)


def _attempt(caller: Caller, item: Item) -> Outcome:
    try:
        decided = decide(
            caller=caller,
            action_id=item.action_id,
            idempotency_key=item.idempotency_key,
            decision=item.decision,
            reason=item.reason,
            arguments_text=item.arguments_text,
            digest=item.digest,
        )
    except Problem as problem:
        return Outcome(str(item.action_id), problem.status, problem.code, None, problem)
    return Outcome(str(item.action_id), 200, None, decided, None)


class _TogetherRefused(Exception):
    """Roll everything back and carry out who was refused."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__("refused")
        self.outcomes = outcomes


def _decide_together(caller: Caller, items: Sequence[Item]) -> list[Outcome]:
    seen: list[tuple[Item, UUID] | Problem] = []
    for item in items:
        try:
            shaped = _shape(item)
            seen.append((shaped, access.find(caller, shaped.action_id).pk))
        except Problem as problem:
            seen.append(problem)
    with (
        waiting.briefly(),
        transitions.lock(*(one[1] for one in seen if not isinstance(one, Problem))) as locked,
    ):
        outcomes = []
        for item, one in zip(items, seen, strict=True):
            try:
                if isinstance(one, Problem):
                    raise one
                decided = _answer_checked(caller, one[0], *locked[one[1]])
                outcomes.append(Outcome(str(item.action_id), 200, None, decided, None))
            except Problem as problem:
                outcomes.append(Outcome(str(item.action_id), problem.status, problem.code, None, problem))
        if any(outcome.problem is not None for outcome in outcomes):
            raise _TogetherRefused(
                [
                    outcome if outcome.problem else replace(outcome, status=424, code="batch_refused", decided=None)
                    for outcome in outcomes
                ]
            )
    return outcomes


def _answer_checked(caller: Caller, item: Item, action: ApprovalRequest, held: Held | None) -> Decided:
    known = _replay(caller, item, action)
    if known is not None:
        return known
    _may_answer(caller, action)
    return _answer(caller, item, action, held)


def _record_refusal(caller: Caller, item: Item, refusal: Problem) -> None:
    """Keep who was refused what, in a transaction of its own: the one that refused is rolled back."""
    try:
        action = ApprovalRequest.objects.filter(pk=access.as_id(item.action_id)).first()
    except NotFound:
        action = None
    with transaction.atomic():
        audit.record(
            kind="decision_refused",
            who=caller,
            action=action,
            # Kept as it came, if it is a text at all: in a batch it may be what was refused.
            idempotency_key=item.idempotency_key if isinstance(item.idempotency_key, str) else "",
            digest=(item.digest or "")[:71],
            reason=refusal.code,
            detail={"decision": item.decision, "actionId": str(item.action_id)[:64]},
        )


__all__ = [
    "Cancelled",
    "Decided",
    "Item",
    "Outcome",
    "Requested",
    "cancel",
    "decide",
    "decide_many",
    "expire_due",
    "reconcile",
    "request",
]
