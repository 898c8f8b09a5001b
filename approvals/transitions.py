"""The only writer of `state`: one guarded UPDATE, its audit event and its notice, in the caller's transaction.

Lock order everywhere: the generation (`streams.log.hold`), then its actions in order of id, then nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

import msgspec
from django.db import transaction

from approvals import audit, represent
from approvals.models import ApprovalRequest, Decision
from approvals.states import OPEN, State, may
from streams import clock, doorbell, log, strictjson
from streams.log import Held
from streams.problems import NotFound
from streams.protocol import tool_result

# What a call that never ran tells the model. done and failed tell what the tool gave.
NEVER_RAN = frozenset({State.REJECTED, State.EXPIRED, State.CANCELLED})


class Missed(Exception):
    """The row was not as the caller had seen it. Nothing was written; look again and say which miss it was."""

    code: ClassVar[str] = "missed"


class Illegal(Exception):
    """A move the table of states does not have: a fault in this code, never an answer to anybody."""


@contextmanager
def lock(*action_ids: UUID) -> Iterator[dict[UUID, tuple[ApprovalRequest, Held | None]]]:
    """Lock actions and, before them, their generations; yield each with what holds its log. Needs a transaction.

    Unknown ids are left out. Everything is locked in order of id, so that two who lock many can't wait for each other.
    """
    generation_ids = (
        ApprovalRequest.objects.filter(pk__in=action_ids, generation__isnull=False)
        .order_by("generation_id")
        .values_list("generation_id", flat=True)
        .distinct()
    )
    with ExitStack() as stack:
        held = {pk: stack.enter_context(log.hold(pk)) for pk in list(generation_ids) if pk is not None}
        # NO KEY: an audit event that names the action (a refusal elsewhere) must not wait for this transaction.
        rows = ApprovalRequest.objects.select_for_update(no_key=True).filter(pk__in=action_ids).order_by("pk")
        yield {row.pk: (row, held.get(row.generation_id) if row.generation_id else None) for row in rows}


@contextmanager
def lock_one(action_id: UUID) -> Iterator[tuple[ApprovalRequest, Held | None]]:
    """Lock one action as `lock` does; NotFound when there is none."""
    with lock(action_id) as found:
        if action_id not in found:
            raise NotFound("no such approval request")
        yield found[action_id]


def moment(held: Held | None) -> datetime:
    """Return the time a change is written with: the log's, or the database's where there is no log."""
    return held.at if held is not None else clock.now()


def create(
    *,
    held: Held | None,
    action: ApprovalRequest,
    who: audit.Who,
    at: datetime,
    decision: Decision | None = None,
    reason: str = "",
) -> ApprovalRequest:
    """Insert a new action in its first state with its first notice. `who` made that state: the asker or the policy."""
    if not may(None, State(action.state)):
        raise Illegal(f"an action is not born {action.state}")
    action.version = 1
    action.effect_key = action.effect_key or f"act_{action.pk.hex}"
    action.requested_at = at
    told = _told(held, action, reason)
    if told is not None and _log_has_ended(held):
        action.result_text, action.is_error = told, True
    action.save(force_insert=True)
    if decision is not None:
        decision.save(force_insert=True)
    fields = {
        name: value for name, value in represent.notice_fields(action).items() if name not in ("state", "version")
    }
    fields["decisions"] = [represent.decision_json(decision)] if decision is not None else []
    _after(
        held,
        action,
        None,
        who,
        "requested",
        fields,
        told,
        decision=decision,
        reason=reason,
    )
    return action


def move(
    *,
    held: Held | None,
    action: ApprovalRequest,
    to: State,
    who: audit.Who,
    kind: str,
    decision: Decision | None = None,
    idempotency_key: str = "",
    reason: str = "",
    told_already: bool = False,
    detail: dict[str, Any] | None = None,
    **changes: Any,
) -> ApprovalRequest:
    """Move an action that this transaction has locked, raising its version by one; return it as it is now.

    The UPDATE is guarded by state, version and fence as `action` has them; Missed when no row matched. `kind` names
    the audit event, `decision` is the new row to keep with it, `changes` are further columns. A call that ends is told
    to the model by one `tool_result`: into the log, or into the notice when the log has its `done`. `told_already`:
    the producer's own chunk was the result.
    """
    origin = State(action.state)
    if not may(origin, to):
        raise Illegal(f"{origin} → {to} is no move")
    if (held.generation.pk if held is not None else None) != action.generation_id:
        raise Illegal("the action's generation is not the one that is held")
    before = represent.notice_fields(action)
    seen = {"state": action.state, "version": action.version, "fence": action.fence}
    for name, value in changes.items():
        setattr(action, name, value)
    action.state, action.version = to, action.version + 1
    told = None if to == origin or told_already else _told(held, action, reason)
    if told is not None and to in NEVER_RAN and _log_has_ended(held):
        # The notice is then the only place the result stands in, and the row is the fold of its notices.
        changes |= {"result_text": told, "is_error": True}
        action.result_text, action.is_error = told, True
    columns = {**changes, "state": to, "version": action.version}
    if not ApprovalRequest.objects.filter(pk=action.pk, **seen).update(**columns):
        raise Missed(f"{action.pk} is not {origin} version {seen['version']} any more")
    if decision is not None:
        decision.save(force_insert=True)
    after = represent.notice_fields(action)
    fields = {
        name: after.get(name)
        for name in [*after, *(gone for gone in before if gone not in after)]
        if name not in ("state", "version") and after.get(name, ...) != before.get(name, ...)
    }
    if decision is not None:
        fields["decisions"] = [represent.decision_json(row) for row in Decision.objects.filter(action=action)]
    _after(
        held,
        action,
        origin,
        who,
        kind,
        fields,
        told,
        decision=decision,
        idempotency_key=idempotency_key,
        reason=reason,
        detail=detail,
    )
    return action


def _after(
    held: Held | None,
    action: ApprovalRequest,
    origin: State | None,
    who: audit.Who,
    kind: str,
    fields: dict[str, Any],
    told: str | None,
    *,
    decision: Decision | None = None,
    idempotency_key: str = "",
    reason: str = "",
    detail: dict[str, Any] | None = None,
) -> None:
    """Write what belongs to every change: counts, notice, tool_result, audit event, doorbell."""
    state = State(action.state)
    if held is not None:
        _count(held, action, origin, state)
        head: dict[str, Any] = {"type": "action", "actionId": str(action.pk)}
        if action.tool_call_id:
            head["toolCallId"] = action.tool_call_id
        head |= {"state": str(state), "version": action.version}
        head["actor"] = msgspec.to_builtins(audit.actor_of(who))
        held.notice(head | {name: value for name, value in fields.items() if name not in head})
        if told is not None and not _log_has_ended(held):
            held.chunk(
                tool_result(
                    tool_call_id=action.tool_call_id,
                    result_text=told,
                    is_error=state != State.DONE,
                    result_id=f"result-{action.pk}",
                )
            )
    audit.record(
        kind=kind,
        who=who,
        action=action,
        idempotency_key=idempotency_key or (decision.idempotency_key if decision is not None else ""),
        from_state=str(origin or ""),
        to_state=str(state),
        version=action.version,
        digest=action.digest,
        reason=reason,
        detail=detail,
    )
    _ring_after_commit(action.pk, state, held)


def _count(held: Held, action: ApprovalRequest, origin: State | None, state: State) -> None:
    step = (state in OPEN) - (origin in OPEN)
    held.generation.open_actions += step
    held.generation.open_gated += step if action.gated else 0


def _log_has_ended(held: Held | None) -> bool:
    return held is not None and bool(held.generation.finish_reason)


def _told(held: Held | None, action: ApprovalRequest, reason: str) -> str | None:
    """Return the `tool_result` this state gives the model as JSON text; None when it gives none."""
    state = State(action.state)
    if held is None or action.call_offset is None or action.superseded:
        return None
    if state in NEVER_RAN:
        return strictjson.dumps({"code": str(state), "reason": reason})
    if state not in (State.DONE, State.FAILED):
        return None
    result = action.result_text or "null"
    if action.original_digest:
        # The model asked for something else than what ran; it must not believe that its own arguments did this.
        return f'{{"edited":true,"arguments":{action.arguments_text},"result":{result}}}'
    return result


def _ring_after_commit(action_id: UUID, state: State, held: Held | None) -> None:
    topics = [f"a:{action_id}", "inbox"]
    if state == State.APPROVED:
        topics.append("work")
    if held is not None and state not in OPEN:
        topics.append("runs")
    transaction.on_commit(lambda: doorbell.ring(*topics))


def new_decision(
    *,
    action: ApprovalRequest,
    who: audit.Who,
    decision: str,
    at: datetime,
    reason: str = "",
    person_id: int | None = None,
    idempotency_key: str = "",
    body_sha256: str = "",
    arguments_text: str = "",
    digest: str = "",
) -> Decision:
    """Build a decision row for `create` or `move` to keep."""
    actor = audit.actor_of(who)
    return Decision(
        id=uuid.uuid4(),
        action=action,
        person_id=person_id,
        actor_kind=actor.kind,
        actor_id=actor.id[:64],
        actor_name=actor.name[:150],
        idempotency_key=idempotency_key,
        decision=decision,
        body_sha256=body_sha256,
        reason=reason,
        arguments_text=arguments_text,
        digest=digest or action.digest,
        at=at,
    )
