"""Put a question: judge it by the policy of this moment and make its action. Used by the gate and by requests."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q

from approvals import audit, policies, policy, transitions
from approvals.models import ApprovalRequest
from approvals.states import State
from approvals.tools import Ready, registered
from streams.log import Held
from streams.protocol import Actor

DEFAULT_RISK = "medium"


@dataclass(frozen=True)
class Asker:
    """Who wants it done. `person_id` is the requester or the owner of its token: that person may not approve it."""

    actor: Actor
    token_id: int | None
    person_id: int | None


@dataclass(frozen=True)
class Origin:
    """Where in a log a call stands; nothing for what was asked for over `POST /approvals`."""

    tool_call_id: str = ""
    call_offset: int | None = None


@dataclass(frozen=True)
class Wishes:
    """What a requester may say about its own question. Registration and policy come first."""

    summary: str = ""
    context_text: str = ""
    risk: str | None = None
    expires_in_seconds: int | None = None
    executor: str | None = None
    effects: str | None = None
    request_key: str = ""
    request_sha256: str = ""


def ask(
    *,
    held: Held | None,
    at: datetime,
    asker: Asker,
    who: audit.Who,
    tool: str,
    ready: Ready,
    conversation: str,
    origin: Origin,
    wishes: Wishes,
) -> ApprovalRequest:
    """Create the action in the state its verdict gives: pending, approved (allow) or rejected (deny, or can't run).

    What the policy says here stays on the row and is never worked out again.
    """
    loaded = policies.active()
    verdict = loaded.judge(tool)
    found = registered(tool)
    state = {"allow": State.APPROVED, "ask": State.PENDING, "deny": State.REJECTED}[verdict.verdict]
    reason = f"denied by {loaded.actor.name}, rule {verdict.rule}" if state == State.REJECTED else ""
    if ready.fault is not None:
        state, reason = State.REJECTED, ready.fault.detail
    expires_in = wishes.expires_in_seconds or verdict.expires_in_seconds
    action = ApprovalRequest(
        id=uuid.uuid4(),
        generation=held.generation if held is not None else None,
        tool_call_id=origin.tool_call_id,
        call_offset=origin.call_offset,
        attempt=held.generation.attempt if held is not None and origin.tool_call_id else None,
        conversation=conversation,
        tool=tool,
        arguments_text=ready.text,
        digest=ready.digest,
        summary=wishes.summary,
        context_text=wishes.context_text,
        state=state,
        risk=_risk(verdict, found.risk if found else "", wishes.risk),
        executor=wishes.executor or ("server" if found else "agent"),
        effects=found.effects if found else wishes.effects or "at_most_once",
        gated=state != State.APPROVED,
        requested_by_kind=asker.actor.kind,
        requested_by_id=asker.actor.id[:64],
        requested_by_name=asker.actor.name[:150],
        token_id=asker.token_id,
        person_id=asker.person_id,
        request_key=wishes.request_key,
        request_sha256=wishes.request_sha256,
        policy_name=loaded.name,
        policy_version=loaded.version,
        policy_rule=verdict.rule,
        approvals_required=verdict.approvals_required,
        approval_valid_seconds=verdict.approval_valid_seconds,
        expires_at=at + timedelta(seconds=expires_in) if state == State.PENDING else None,
    )
    action.previous_id = _previous(action, held)
    if state == State.PENDING:
        return transitions.create(held=held, action=action, who=who, at=at)
    answer = "approve" if state == State.APPROVED else "reject"
    decision = transitions.new_decision(
        action=action, who=loaded.actor, decision=answer, at=at, reason=reason, arguments_text=""
    )
    return transitions.create(held=held, action=action, who=loaded.actor, at=at, decision=decision, reason=reason)


def _risk(verdict: policy.Verdict, declared: str, wished: str | None) -> str:
    """The rule's word, else the tool's; a requester may make it sound more dangerous, never less."""
    known = verdict.risk or declared
    if wished is None:
        return known or DEFAULT_RISK
    return policy.higher_risk(known, wished) if known else wished


def _previous(action: ApprovalRequest, held: Held | None) -> uuid.UUID | None:
    """Find what this repeats: the same call of an earlier attempt, or the same tool and arguments asked before.

    Only among the same requester's own, so that a conversation's name tells nothing about somebody else's.
    """
    rows = ApprovalRequest.objects.filter(
        requested_by_kind=action.requested_by_kind, requested_by_id=action.requested_by_id
    ).order_by("-requested_at", "-id")
    if held is not None and action.tool_call_id:
        earlier = rows.filter(
            generation=held.generation, tool_call_id=action.tool_call_id, attempt__lt=held.generation.attempt
        ).order_by("-attempt")
        if (found := earlier.values_list("pk", flat=True).first()) is not None:
            return found
    if action.conversation:
        rows = rows.filter(conversation=action.conversation)
    elif held is not None:
        rows = rows.filter(generation=held.generation)
    else:
        return None
    same = Q(digest=action.digest) | Q(original_digest=action.digest)
    return rows.filter(same, tool=action.tool).values_list("pk", flat=True).first()
