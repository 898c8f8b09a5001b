"""Show an action as the contract has it (§5): whole, as a summary, or as the fields a notice carries.

No field ever vanishes from an action once it has it, so the fold of its notices is plain overwriting.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from approvals.models import ApprovalRequest, Decision
from streams import strictjson
from streams.clock import rfc3339

# What a list and the inbox's socket leave out: these may be 256 KiB each.
HEAVY = frozenset({"arguments", "argumentsText", "originalArgumentsText", "context", "result"})
# A notice names arguments by their digest: the call stands in the same log, an edit in the action.
BY_DIGEST = frozenset({"arguments", "argumentsText", "originalArgumentsText"})


def decision_json(decision: Decision) -> dict[str, Any]:
    return {
        "id": str(decision.pk),
        "decision": decision.decision,
        "reason": decision.reason,
        "actor": {"kind": decision.actor_kind, "id": decision.actor_id, "name": decision.actor_name},
        "at": rfc3339(decision.at),
        "digest": decision.digest,
    }


def action_json(action: ApprovalRequest, *, decisions: Iterable[Decision] | None = None) -> dict[str, Any]:
    """Return the whole representation; numbers are ints and Decimals, for `strictjson.dumps`.

    Without `decisions` they are read from the row (prefetch them for a list).
    """
    shown = _light(action)
    shown["arguments"] = strictjson.loads(action.arguments_text)
    shown["argumentsText"] = action.arguments_text
    if action.original_digest:
        shown["originalArgumentsText"] = action.original_arguments_text
    shown["decisions"] = _decisions(action, decisions)
    return shown


def summary_json(action: ApprovalRequest, *, decisions: Iterable[Decision] | None = None) -> dict[str, Any]:
    """Return what a list shows: no arguments, context or result."""
    shown = {name: value for name, value in _light(action, heavy=False).items() if name not in HEAVY}
    shown["decisions"] = _decisions(action, decisions)
    return shown


def notice_fields(action: ApprovalRequest) -> dict[str, Any]:
    """Return what notices tell of an action, decisions apart: `transitions` adds those when they change."""
    return _light(action)


def _decisions(action: ApprovalRequest, decisions: Iterable[Decision] | None) -> list[dict[str, Any]]:
    return [decision_json(decision) for decision in (action.decisions.all() if decisions is None else decisions)]


def _light(action: ApprovalRequest, *, heavy: bool = True) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "actionId": str(action.pk),
        "tool": action.tool,
        "digest": action.digest,
        "state": str(action.state),
        "version": action.version,
        "risk": action.risk,
        "executor": action.executor,
        "effects": action.effects,
        "gated": action.gated,
        "requestedBy": {
            "kind": action.requested_by_kind,
            "id": action.requested_by_id,
            "name": action.requested_by_name,
        },
        "requestedAt": rfc3339(action.requested_at),
        "expiresAt": rfc3339(action.expires_at) if action.expires_at else None,
        "policy": {"name": action.policy_name, "version": action.policy_version, "rule": action.policy_rule},
        "approvalsRequired": action.approvals_required,
        "edited": bool(action.original_digest),
        "cancelRequested": action.cancel_requested,
    }
    if action.generation_id is not None:
        shown["generationId"] = str(action.generation_id)
    if action.tool_call_id:
        shown["toolCallId"] = action.tool_call_id
    if action.conversation:
        shown["conversation"] = action.conversation
    if action.approved_until is not None:
        shown["approvedUntil"] = rfc3339(action.approved_until)
    if action.original_digest:
        shown["originalDigest"] = action.original_digest
    if action.started_at is not None and action.lease_expires_at is not None:
        shown["execution"] = {
            "fence": action.fence,
            "executor": action.executor_name,
            "startedAt": rfc3339(action.started_at),
            "leaseExpiresAt": rfc3339(action.lease_expires_at),
        }
        if action.finished_at is not None:
            shown["execution"]["finishedAt"] = rfc3339(action.finished_at)
    if action.summary:
        shown["summary"] = action.summary
    if action.is_error is not None:
        shown["isError"] = action.is_error
    if action.previous_id is not None:
        shown["previousActionId"] = str(action.previous_id)
    if heavy:
        if action.context_text:
            shown["context"] = strictjson.loads(action.context_text)
        if action.result_text:
            shown["result"] = strictjson.loads(action.result_text)
    return shown
