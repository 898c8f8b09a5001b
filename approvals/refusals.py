"""How the verbs of this app refuse. Each class names the situation; `action` shows what is the case instead."""

from __future__ import annotations

from typing import Any

from approvals import represent
from approvals.models import ApprovalRequest
from approvals.states import State
from streams.problems import Conflict, Invalid, NotAllowed, Problem, TooLarge, Unprocessable
from streams.strictjson import BadJSON


class KeyRequired(Invalid):
    code = "idempotency_key_required"


class KeyInvalid(Invalid):
    code = "idempotency_key_invalid"


class KeyReused(Unprocessable):
    """The key was used for another body by the same person or requester. Nothing changes."""

    code = "idempotency_key_reused"


class InFlight(Conflict):
    """The first call with this key, or another change of this action, is still inside its transaction."""

    code = "in_flight"

    def __init__(self) -> None:
        super().__init__("the first request is still being worked on; send it again", retryAfterSeconds=1)


class SelfApproval(NotAllowed):
    code = "self_approval"


class PeopleOnly(NotAllowed):
    code = "people_only"


class DigestRequired(Invalid):
    code = "digest_required"


class DigestMismatch(Conflict):
    code = "digest_mismatch"


class AlreadyDecided(Conflict):
    code = "already_decided"


class Expired(Conflict):
    code = "expired"


class Cancelled(Conflict):
    code = "cancelled"


class Rejected(Conflict):
    code = "rejected"


class Unknown(Conflict):
    code = "unknown"


class NotUnknown(Conflict):
    code = "not_unknown"


class AlreadyTerminal(Conflict):
    code = "already_terminal"


class NotApproved(Conflict):
    code = "not_approved"


class AlreadyClaimed(Conflict):
    code = "already_claimed"


class ArgumentsInvalid(Unprocessable):
    code = "arguments_invalid"


class NeedsMoreApprovals(Conflict):
    code = "needs_more_approvals"


class PolicyDenies(Conflict):
    """An edit was judged again, and the policy of today denies it."""

    code = "policy_denies"


class BatchRefused(Conflict):
    code = "batch_refused"


class ClaimIdReused(Unprocessable):
    code = "claim_id_reused"


class ClaimOver(Conflict):
    code = "claim_over"


class LeaseLost(Conflict):
    code = "lease_lost"


class StaleClaim(Conflict):
    code = "stale_claim"


class OutcomeConflict(Conflict):
    code = "outcome_conflict"


class ResultNeedsClaim(Conflict):
    code = "result_needs_claim"


class ToolCallConflict(Conflict):
    code = "tool_call_conflict"


class ToolCallDiffers(Unprocessable):
    code = "tool_call_conflict"


def with_action(refusal: type[Problem], detail: str, action: ApprovalRequest, **fields: Any) -> Problem:
    """Build a refusal that shows the action as it is now."""
    return refusal(detail, action=represent.action_json(action), **fields)


_NOT_CLAIMABLE: dict[str, tuple[type[Problem], str]] = {
    State.PENDING: (NotApproved, "nobody has approved it yet"),
    State.EXECUTING: (AlreadyClaimed, "somebody is running it"),
    State.REJECTED: (Rejected, "it was rejected"),
    State.EXPIRED: (Expired, "it expired"),
    State.CANCELLED: (Cancelled, "it was cancelled"),
    State.UNKNOWN: (Unknown, "nobody knows whether it happened; a person must look"),
    State.DONE: (AlreadyTerminal, "it is done"),
    State.FAILED: (AlreadyTerminal, "it failed"),
}


def not_claimable(action: ApprovalRequest, **fields: Any) -> Problem:
    """Say why an action that is not approved can't be run."""
    kind, detail = _NOT_CLAIMABLE[action.state]
    return with_action(kind, detail, action, **fields)


def bad_json(error: BadJSON, **fields: Any) -> Problem:
    """Turn a refused JSON text into the problem the contract names."""
    kind: type[Problem] = TooLarge if error.code == "too_large" else Invalid
    return kind(error.detail, code=error.code, field=error.field, limit=error.limit, **fields)
