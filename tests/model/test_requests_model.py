"""A state machine over requests: whatever happens in whatever order, row, notices, counts and audit agree."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from approvals import access, claims, decisions, sweeps
from approvals.models import ApprovalRequest, Claim
from approvals.states import MAX_FENCES_A_DECISION, MOVES, State
from streams import clock, log
from streams.problems import Problem
from streams.protocol import Text
from tests.approvals import desk
from tests.approvals.desk import Desk
from tests.support import factories

pytestmark = [pytest.mark.django_db, pytest.mark.slow, pytest.mark.timeout(600)]

TOOLS = {
    "pay": "at_most_once",
    "again": "idempotent",
    "look": "at_most_once",
    "drop": "at_most_once",
    "both": "transactional",
}
PICK = st.integers(0, 1_000)


class Requests(RuleBasedStateMachine):
    """Every rule does one thing a client or the clock may do; a refusal is an answer, and changes nothing."""

    @initialize()
    def begin(self) -> None:
        self.outer = transaction.atomic()
        self.outer.__enter__()
        self.registering = desk.Registering()
        for name, effects in TOOLS.items():
            self.registering(name, effects=effects)
        factories.policy(
            ("look", "allow"), ("drop", "deny"), ("both", "ask", {"approvals_required": 2}), name=f"model-{desk.key()}"
        )
        self.here = Desk()
        self.people = [desk.person(), desk.person(), desk.chief()]
        self.runner = desk.runner()
        self.calls = 0
        self.ids: list[Any] = []
        self.tokens: dict[Any, list[claims.Claimed]] = {}
        self.keys: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self.seen: dict[Any, str] = {}
        self.finished: dict[tuple[Any, int], int] = {}

    def teardown(self) -> None:
        if not hasattr(self, "outer"):
            return
        transaction.set_rollback(True)
        self.outer.__exit__(None, None, None)
        self.registering.__exit__()
        desk.Clock.ahead = timedelta()

    def attempt(self, work: Any) -> Any:
        """Do it; None when it was refused, after checking that a refusal changed no action and no log."""
        before, refusal = self.snapshot(), None
        try:
            return work()
        except Problem as refused:
            refusal = refused
        assert refusal.status < 500, refusal
        for pk, version in self.snapshot().items():
            if before.get(pk) != version:
                # The clock may have struck on the way to the refusal, and only the clock.
                last = self.here.notices(pk)[-1]
                assert last["actor"]["kind"] == "clock", (refusal, last)
        return None

    def snapshot(self) -> dict[Any, int]:
        return dict(ApprovalRequest.objects.filter(pk__in=self.ids).values_list("pk", "version"))

    def action(self, pick: int) -> ApprovalRequest:
        return ApprovalRequest.objects.get(pk=self.ids[pick % len(self.ids)])

    def some(self) -> bool:
        return bool(getattr(self, "ids", None))

    # --- asking ---

    @rule(tool=st.sampled_from(sorted(TOOLS)), amount=st.integers(0, 2))
    def call(self, tool: str, amount: int) -> None:
        self.calls += 1
        sent = desk.call(f"call-{self.calls}", tool=tool, arguments=json.dumps({"amount": amount}))
        appended = self.attempt(lambda: self.here.append(sent))
        if appended is not None:
            self.ids.append(ApprovalRequest.objects.get(pk=appended.actions[0]["actionId"]).pk)

    @rule(tool=st.sampled_from(sorted(TOOLS)))
    def ask(self, tool: str) -> None:
        asked = self.attempt(lambda: desk.request(self.here.agent, tool=tool, generation_id=self.here.generation.pk))
        if asked is not None:
            self.ids.append(asked.pk)

    # --- answering ---

    @precondition(some)
    @rule(pick=PICK, who=PICK, decision=st.sampled_from(["approve", "approve", "reject"]), edit=st.booleans())
    def decide(self, pick: int, who: int, decision: str, edit: bool) -> None:
        action, person, key = self.action(pick), self.people[who % 3], desk.key()
        fields: dict[str, Any] = {"decision": decision}
        if edit and decision == "approve":
            fields["arguments_text"] = '{"amount":9}'
        decided = self.attempt(
            lambda: decisions.decide(caller=person, action_id=action.pk, idempotency_key=key, **fields)
        )
        if decided is not None and not decided.already_decided:
            self.keys.append((person, action.pk, fields | {"idempotency_key": key}, decided.decision.pk))

    @precondition(lambda self: bool(getattr(self, "keys", None)))
    @rule(pick=PICK)
    def send_the_same_key_again(self, pick: int) -> None:
        person, action_id, fields, first = self.keys[pick % len(self.keys)]
        before = self.snapshot()[action_id]
        again = decisions.decide(caller=person, action_id=action_id, **fields)
        assert again.replayed
        assert again.decision.pk == first
        assert again.action.version in (before, before + 1)  # one more when the clock had something to settle

    @precondition(some)
    @rule(pick=PICK, by=st.booleans())
    def cancel(self, pick: int, by: bool) -> None:
        who = self.here.agent if by else self.people[0]
        self.attempt(lambda: decisions.cancel(caller=who, action_id=self.action(pick).pk))

    @precondition(some)
    @rule(pick=PICK, outcome=st.sampled_from(["done", "failed", "retry"]))
    def reconcile(self, pick: int, outcome: str) -> None:
        self.attempt(
            lambda: decisions.reconcile(
                caller=self.people[2],
                action_id=self.action(pick).pk,
                idempotency_key=desk.key(),
                outcome=outcome,
                note="looked",
            )
        )

    # --- running ---

    @precondition(some)
    @rule(pick=PICK)
    def claim(self, pick: int) -> None:
        action, claim_id = self.action(pick), desk.key()
        taken = self.attempt(lambda: claims.claim(claimant=self.runner, claim_id=claim_id, action_id=action.pk))
        if taken:
            self.tokens.setdefault(action.pk, []).append(taken[0])
            assert claims.claim(claimant=self.runner, claim_id=claim_id, action_id=action.pk) == taken

    @rule(most=st.integers(1, 3))
    def claim_what_there_is(self, most: int) -> None:
        for taken in claims.claim(claimant=self.runner, claim_id=desk.key(), tools=["*"], max_claims=most):
            self.tokens.setdefault(taken.action_id, []).append(taken)

    def token(self, pick: int, which: int) -> claims.Claimed:
        every = [claimed for one in self.tokens.values() for claimed in one]
        # Mostly the newest token, sometimes one of long ago.
        return every[-1 - pick % min(3, len(every))] if which % 4 else every[pick % len(every)]

    @precondition(lambda self: bool(getattr(self, "tokens", None)))
    @rule(
        pick=PICK,
        which=PICK,
        outcome=st.sampled_from(["done", "failed", "not_started"]),
        text=st.sampled_from([None, '{"n":1}']),
    )
    def report(self, pick: int, which: int, outcome: str, text: str | None) -> None:
        claimed = self.token(pick, which)
        result = None if outcome == "not_started" else text
        reported = self.attempt(
            lambda: claims.complete(
                claim_token=claimed.claim_token, outcome=outcome, result_text=result, claimant=self.runner
            )
        )
        if reported is not None and outcome != "not_started":
            newest = ApprovalRequest.objects.get(pk=claimed.action_id).fence
            assert claimed.fence == newest, "an older fence settled it"

    @precondition(lambda self: bool(getattr(self, "tokens", None)))
    @rule(pick=PICK, which=PICK)
    def heartbeat(self, pick: int, which: int) -> None:
        claimed = self.token(pick, which)
        self.attempt(lambda: claims.heartbeat(claim_token=claimed.claim_token, lease_seconds=60, claimant=self.runner))

    # --- the clock and the log ---

    @precondition(some)
    @rule(pick=PICK, sweeps_come=st.booleans())
    def time_runs_out(self, pick: int, sweeps_come: bool) -> None:
        action = self.action(pick)
        if action.state in ("pending", "approved", "executing"):
            desk.make_overdue(action)
            if sweeps_come:
                sweeps.sweep()
            else:
                access.find(self.here.agent, action.pk)

    @rule(share=st.integers(0, 3))
    def start_over(self, share: int) -> None:
        from_offset = self.here.head().next_offset * share // 4
        before = self.here.attempt, self.here.seq
        done = self.attempt(
            lambda: self.here.append(Text(content="again"), new_attempt=True, superseded_from=from_offset)
        )
        if done is None:
            self.here.attempt, self.here.seq = before

    @precondition(some)
    @rule(pick=PICK, is_error=st.booleans())
    def producers_own_result(self, pick: int, is_error: bool) -> None:
        action = self.action(pick)
        if action.tool_call_id:
            self.attempt(lambda: self.here.append(desk.result(action.tool_call_id, is_error=is_error)))

    @precondition(lambda self: getattr(self, "calls", 0) > 6)
    @rule(how=st.sampled_from(["stop", "tool_use", "cancel", "error", "asked"]))
    def the_log_ends(self, how: str) -> None:
        if how == "asked":
            log.request_cancel(generation_id=self.here.generation.pk, actor=self.people[0].actor)
        else:
            self.attempt(lambda: self.here.end(how))

    # --- what always holds ---

    @invariant()
    def row_notices_counts_and_audit_agree(self) -> None:
        if not hasattr(self, "here"):
            return
        stories = desk.check_story(self.here)
        for action_id in self.ids:
            story = [notice["state"] for notice in stories[action_id]]
            for origin, target in zip([None, *story], story, strict=False):
                assert State(target) in MOVES[State(origin) if origin else None], story
        self.nothing_over_comes_back_and_nothing_cancelled_can_run()

    def nothing_over_comes_back_and_nothing_cancelled_can_run(self) -> None:
        head = self.here.head()
        runs = Counter(Claim.objects.filter(action__in=self.ids).values_list("action_id", flat=True))
        for action in ApprovalRequest.objects.filter(pk__in=self.ids).prefetch_related("decisions"):
            before = self.seen.get(action.pk)
            if before in ("done", "failed", "rejected", "expired", "cancelled"):
                assert action.state == before
            self.seen[action.pk] = action.state
            assert action.fence - action.fence_base <= MAX_FENCES_A_DECISION
            assert runs[action.pk] == action.fence
            votes = [one for one in action.decisions.all() if one.decision == "approve" and one.person_id]
            if action.gated and action.fence:
                assert len(votes) >= action.approvals_required, "it ran without being approved"
            if head.cancel_requested:
                assert action.state not in ("pending", "approved")


def test_whatever_happens_the_row_is_the_fold_of_its_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", desk.Clock.now)
    profile = settings()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Requests,
        settings=settings(
            max_examples=max(10, profile.max_examples // 4),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
