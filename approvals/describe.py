"""What OpenAPI is told of this app's answers (contract §5)."""

from __future__ import annotations

from approvals.states import State
from streams.docs import ACTOR, ANYTHING, FLAG, TEXT, TIME, WHOLE, Schema, listed, nullable, thing

DECISION = thing(
    "A person's or a policy's answer.", id=TEXT, decision=TEXT, reason=TEXT, actor=ACTOR, at=TIME, digest=TEXT
)

_HEAVY: dict[str, Schema] = {
    "arguments": {"type": "object"},
    "argumentsText": {"type": "string", "description": "canonical JSON; what runs"},
    "originalArgumentsText": TEXT,
    "context": ANYTHING,
    "result": ANYTHING,
}
_LIGHT: dict[str, Schema] = {
    "actionId": {"type": "string", "format": "uuid"},
    "generationId": {"type": "string", "format": "uuid"},
    "toolCallId": TEXT,
    "conversation": TEXT,
    "tool": TEXT,
    "digest": TEXT,
    "state": {"type": "string", "enum": [state.value for state in State]},
    "version": WHOLE,
    "risk": {"type": "string", "enum": ["low", "medium", "high", "critical"]},
    "executor": {"type": "string", "enum": ["agent", "server"]},
    "effects": {"type": "string", "enum": ["at_most_once", "idempotent", "transactional"]},
    "gated": FLAG,
    "requestedBy": ACTOR,
    "requestedAt": TIME,
    "expiresAt": nullable(TIME),
    "approvedUntil": TIME,
    "policy": thing(name=TEXT, version=WHOLE, rule=TEXT),
    "approvalsRequired": WHOLE,
    "decisions": listed(DECISION),
    "edited": FLAG,
    "originalDigest": TEXT,
    "cancelRequested": FLAG,
    "execution": thing(
        optional=("finishedAt",), fence=WHOLE, executor=TEXT, startedAt=TIME, leaseExpiresAt=TIME, finishedAt=TIME
    ),
    "summary": TEXT,
    "isError": FLAG,
    "previousActionId": TEXT,
}
_MAY_LACK = (
    *("generationId", "toolCallId", "conversation", "approvedUntil", "originalArgumentsText", "originalDigest"),
    *("execution", "summary", "context", "result", "isError", "previousActionId"),
)

SUMMARY = thing("An action without its arguments, context and result.", optional=_MAY_LACK, **_LIGHT)
ACTION = thing("The durable question about one thing an agent wants done.", optional=_MAY_LACK, **_LIGHT, **_HEAVY)
DECIDED = thing(
    optional=("alreadyDecided",),
    replayed=FLAG,
    alreadyDecided=FLAG,
    decision=DECISION,
    action=ACTION,
)
OUTCOMES = thing(
    results=listed(
        thing(
            optional=("code", "detail", "replayed", "alreadyDecided", "decision", "action"),
            actionId=TEXT,
            status=WHOLE,
            code=TEXT,
            detail=TEXT,
            replayed=FLAG,
            alreadyDecided=FLAG,
            decision=DECISION,
            action={"type": "object"},
        )
    )
)
CLAIMS = thing(
    claims=listed(
        thing(
            actionId=TEXT,
            tool=TEXT,
            fence=WHOLE,
            claimToken=TEXT,
            effectKey=TEXT,
            argumentsText=TEXT,
            digest=TEXT,
            leaseSeconds=WHOLE,
        )
    )
)
BEAT = thing(leaseSeconds=WHOLE, cancelRequested=FLAG)
