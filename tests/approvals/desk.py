"""A desk to act at: an agent, people and an executor, the verbs in short form, and a clock to put forward."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.contrib.auth.models import User

from approvals import claims, decisions, represent, tools
from approvals.claims import Claimant, Claimed
from approvals.models import ApprovalRequest, AuditEvent
from streams import clock, log, strictjson
from streams.access import Caller, caller_for_user
from streams.models import AgentToken, Generation
from streams.protocol import Actor, Chunk, Done, ToolCall, ToolResult
from tests.support import factories

_keys = itertools.count(1)


def key() -> str:
    """Make a new idempotency key, as a click does."""
    return f"key-{next(_keys):08}"


def caller(token: AgentToken) -> Caller:
    actor = Actor(kind="token", id=token.prefix, name=token.name)
    return Caller(actor=actor, token=token, user=None, door="http", address="192.0.2.7", request_id="request-1")


def person(*permissions: str) -> Caller:
    user = factories.person("", *(permissions or (factories.SEE, factories.DECIDE)))
    return caller_for_user(user=user, door="http", address="192.0.2.8", request_id="request-2")


def chief() -> Caller:
    return caller_for_user(user=factories.chief(), door="http")


def call(id: str = "call-1", tool: str = "pay", arguments: str = '{"amount":10}') -> ToolCall:
    return ToolCall(id=id, name=tool, arguments=arguments, index=0)


def result(id: str = "call-1", text: str = '"ok"', *, is_error: bool = False) -> ToolResult:
    import msgspec

    return ToolResult(id=f"r-{id}", toolCallId=id, result=msgspec.Raw(text.encode()), isError=is_error)


@dataclass
class Desk:
    """One agent with one generation; every verb acts as that agent or as the person given."""

    token: AgentToken = field(default_factory=lambda: factories.agent_token()[0])
    generation: Generation = field(init=False)
    seq: int = 0
    attempt: int = 1

    def __post_init__(self) -> None:
        self.generation = factories.generation(token=self.token, conversation=f"talk-{self.token.prefix}")

    @property
    def agent(self) -> Caller:
        return caller(self.token)

    def append(self, *chunks: Chunk, superseded_from: int | None = None, new_attempt: bool = False) -> log.Appended:
        if new_attempt:
            self.attempt, self.seq = self.attempt + 1, 0
        appended = log.append(
            generation_id=self.generation.pk,
            attempt=self.attempt,
            seq=self.seq,
            chunks=chunks,
            writer=f"writer-{self.attempt}",
            actor=self.agent.actor,
            superseded_from=superseded_from,
        )
        self.seq = appended.next_seq
        return appended

    def asked(self, tool_call: ToolCall | None = None) -> ApprovalRequest:
        """Append a call and return its action."""
        appended = self.append(tool_call or call())
        return ApprovalRequest.objects.get(pk=appended.actions[0]["actionId"])

    def end(self, reason: Any = "stop") -> None:
        self.append(Done(reason=reason))

    def entries(self) -> list[dict[str, Any]]:
        """Read the whole log as parsed bodies, and check on the way that no offset is missing."""
        rows = list(log.read(generation_id=self.generation.pk, from_offset=0, limit=100_000))
        assert [row.offset for row in rows] == list(range(len(rows)))
        return [strictjson.loads(row.body) for row in rows]  # type: ignore[misc]

    def notices(self, action_id: UUID) -> list[dict[str, Any]]:
        return [body for body in self.entries() if body["type"] == "action" and body["actionId"] == str(action_id)]

    def results(self, tool_call_id: str = "call-1") -> list[dict[str, Any]]:
        return [body for body in self.entries() if body["type"] == "tool_result" and body["toolCallId"] == tool_call_id]

    def head(self) -> Generation:
        return Generation.objects.get(pk=self.generation.pk)


def request(who: Caller, tool: str = "pay", arguments: str = '{"amount":10}', **fields: Any) -> ApprovalRequest:
    fields.setdefault("idempotency_key", key())
    return decisions.request(caller=who, tool=tool, arguments_text=arguments, **fields).action


def approve(action: ApprovalRequest, who: Caller | None = None, **fields: Any) -> decisions.Decided:
    return answer(action, who, "approve", **fields)


def reject(action: ApprovalRequest, who: Caller | None = None, **fields: Any) -> decisions.Decided:
    return answer(action, who, "reject", **fields)


def answer(action: ApprovalRequest, who: Caller | None, decision: str, **fields: Any) -> decisions.Decided:
    fields.setdefault("idempotency_key", key())
    return decisions.decide(caller=who or person(), action_id=action.pk, decision=decision, **fields)


def take(action: ApprovalRequest, claimant: Claimant | None = None, **fields: Any) -> Claimed:
    fields.setdefault("claim_id", key())
    (claimed,) = claims.claim(claimant=claimant or runner(), action_id=action.pk, **fields)
    return claimed


def runner() -> Claimant:
    """An executor with `claims` for every tool; the same one all through a test."""
    token = AgentToken.objects.filter(name="runner").first()
    if token is None:
        token, _ = factories.agent_token("claims", name="runner", claim_tools=["*"])
    return Claimant.of(caller(token))


def report(claimed: Claimed, outcome: str = "done", text: str | None = None) -> ApprovalRequest:
    return claims.complete(claim_token=claimed.claim_token, outcome=outcome, result_text=text, claimant=runner())


def fresh(action: ApprovalRequest) -> ApprovalRequest:
    return ApprovalRequest.objects.get(pk=action.pk)


class Clock:
    """The database's clock, put forward. `tests/approvals/conftest.py` and the model put it in and back."""

    real_now = staticmethod(clock.now)
    ahead = timedelta()

    @classmethod
    def now(cls) -> datetime:
        return cls.real_now() + cls.ahead

    @classmethod
    def travel_past(cls, moment: datetime | None) -> None:
        if moment is not None:
            cls.ahead += max(moment - cls.now(), timedelta()) + timedelta(milliseconds=1)


def make_overdue(action: ApprovalRequest) -> None:
    """Put the clock past the deadline the action has in its state."""
    now = fresh(action)
    deadlines = {"pending": now.expires_at, "approved": now.approved_until, "executing": now.lease_expires_at}
    Clock.travel_past(deadlines.get(now.state))


def lose(action: ApprovalRequest) -> ApprovalRequest:
    """Let the lease run out and the reaper come by; the approval's own time goes on."""
    make_overdue(action)
    claims.reap_lost()
    return fresh(action)


def audited(action: ApprovalRequest) -> list[str]:
    return list(AuditEvent.objects.filter(action=action).order_by("id").values_list("kind", flat=True))


def without_leases(shown: dict[str, Any]) -> dict[str, Any]:
    """Take out what no notice promises: the lease, and arguments, which notices name by their digest."""
    kept = {name: value for name, value in shown.items() if name not in represent.BY_DIGEST}
    if "execution" in kept:
        kept["execution"] = {n: v for n, v in kept["execution"].items() if n != "leaseExpiresAt"}
    return kept


def fold(notices: list[dict[str, Any]]) -> dict[str, Any]:
    """Fold an action's notices into what GET shows."""
    folded: dict[str, Any] = {}
    for notice in notices:
        folded |= {name: value for name, value in notice.items() if name not in ("type", "actor")}
    return without_leases(folded)


def check_story(desk: Desk) -> dict[UUID, list[dict[str, Any]]]:
    """Assert what must hold after anything: see each line. Return the notices of each action."""
    entries, head = desk.entries(), desk.head()
    actions = list(ApprovalRequest.objects.filter(generation=head).prefetch_related("decisions"))
    events: dict[UUID | None, list[AuditEvent]] = defaultdict(list)
    for event in AuditEvent.objects.filter(action__in=actions, version__isnull=False).order_by("id"):
        events[event.action_id].append(event)
    stories: dict[UUID, list[dict[str, Any]]] = {action.pk: [] for action in actions}
    told: dict[str, int] = defaultdict(int)
    for body in entries:
        if body["type"] == "action":
            stories[UUID(body["actionId"])].append(body)
        elif body["type"] == "tool_result":
            told[body["toolCallId"]] += 1
    assert head.next_offset == len(entries)
    in_progress = [action for action in actions if action.state in ("pending", "approved", "executing")]
    assert head.open_actions == len(in_progress)
    assert head.open_gated == sum(action.gated for action in in_progress)
    for action in actions:
        notices = stories[action.pk]
        assert [notice["version"] for notice in notices] == list(range(1, action.version + 1))
        assert fold(notices) == without_leases(represent.action_json(action))
        assert [event.version for event in events[action.pk]] == list(range(1, action.version + 1))
        assert [event.to_state for event in events[action.pk]] == [notice["state"] for notice in notices]
        if action.call_offset is not None and action.gated and not action.superseded:
            has_ended = action.state in ("done", "failed", "rejected", "expired", "cancelled")
            assert told[action.tool_call_id] <= has_ended
            if not head.finish_reason:
                assert told[action.tool_call_id] == has_ended
    return stories


class Registering:
    """Register server tools for one test: `registering("pay", effects="idempotent", schema={…})`."""

    def __init__(self) -> None:
        self.before = dict(tools._tools)

    def __call__(self, name: str, **fields: Any) -> None:
        fields = {"effects": "at_most_once", "risk": "low", **fields}
        tools.tool(name=name, **fields)(lambda arguments, effect_key: None)

    def __enter__(self) -> Registering:
        return self

    def __exit__(self, *_: object) -> None:
        tools._tools.clear()
        tools._tools.update(self.before)


def user_of(who: Caller) -> User:
    assert who.user is not None
    return who.user
