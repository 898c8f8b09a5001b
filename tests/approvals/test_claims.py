"""The one right to run: who may have it, how it is lost and told again, and what a report may say."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings

from approvals import claims, decisions, refusals, sweeps
from approvals.claims import Claimant
from approvals.models import ApprovalRequest, AuditEvent, Claim
from streams.problems import Invalid, NotAllowed, NotFound, Problem
from tests.approvals import desk
from tests.approvals.desk import Desk
from tests.support import factories

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _tools(registering: desk.Registering) -> None:
    registering("again", effects="idempotent")


def approved(here: Desk, n: int = 1, tool: str = "pay") -> ApprovalRequest:
    action = here.asked(desk.call(f"call-{n}", tool=tool))
    desk.approve(action)
    return desk.fresh(action)


def claim(claim_id: str = "claim-1", *, who: Claimant | None = None, **fields: Any) -> list[claims.Claimed]:
    return claims.claim(claimant=who or desk.runner(), claim_id=claim_id, **fields)


# --- C01 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tool", "state", "effects"), [("pay", "unknown", 1), ("again", "approved", 1)])
def test_an_executor_that_dies_after_the_effect_does_not_make_it_happen_twice(
    here: Desk, tool: str, state: str, effects: int
) -> None:
    """C01: refused while the lease lives; then unknown, or the next fence with the same effect key."""
    happened: set[str] = set()
    action = approved(here, tool=tool)
    first = desk.take(action)
    happened.add(first.effect_key)  # and then it dies
    with pytest.raises(refusals.AlreadyClaimed) as refused:
        desk.take(action)
    assert refused.value.fields["action"]["state"] == "executing"
    assert desk.lose(action).state == state
    if state == "approved":
        second = desk.take(action)
        assert (second.fence, second.effect_key) == (2, first.effect_key)
        happened.add(second.effect_key)
        desk.report(second)
    else:
        with pytest.raises(refusals.Unknown):
            desk.take(action)
    assert len(happened) == effects
    desk.check_story(here)


# --- the same claimId -----------------------------------------------------------------------------


def test_the_same_claim_id_tells_the_same_token_again_while_the_lease_lives(here: Desk) -> None:
    approved(here, 1)
    approved(here, 2)
    first = claim(tools=["pay"], max_claims=2)
    assert claim(tools=["pay"], max_claims=2) == first
    assert len(first) == 2
    stored = Claim.objects.get(action_id=first[0].action_id)
    assert first[0].claim_token not in (stored.token_sha256, stored.nonce)
    assert Claim.objects.count() == 2


def test_after_an_empty_answer_the_same_claim_id_tries_again(here: Desk) -> None:
    assert claim(tools=["pay"]) == []
    action = approved(here)
    (claimed,) = claim(tools=["pay"])
    assert claimed.action_id == action.pk


@pytest.mark.parametrize(
    "changed",
    [{"tools": ["again"]}, {"max_claims": 2}, {"lease_seconds": 61}, {"action_id": uuid.uuid4(), "tools": ()}],
)
def test_the_same_claim_id_for_something_else_is_refused(here: Desk, changed: dict[str, Any]) -> None:
    claim(tools=["pay"])
    with pytest.raises(refusals.ClaimIdReused):
        claim(**({"tools": ["pay"]} | changed))


@pytest.mark.parametrize("end", ["report", "lease", "not_started"])
def test_what_a_claim_id_took_is_over_when_it_ended(here: Desk, end: str) -> None:
    action = approved(here, tool="again")
    (claimed,) = claim(action_id=action.pk)
    if end == "lease":
        desk.make_overdue(action)
    else:
        desk.report(claimed, "done" if end == "report" else end)
    with pytest.raises(refusals.ClaimOver):
        claim(action_id=action.pk)


def test_claim_ids_of_two_claimants_have_nothing_to_do_with_each_other(here: Desk) -> None:
    action = approved(here)
    assert claim(tools=["pay"], who=Claimant.of(Desk().agent)) == []
    assert claim(tools=["again"]) == []
    (claimed,) = claim("claim-1", who=Claimant.of(here.agent), tools=["pay"])
    assert claimed.action_id == action.pk


def test_a_token_made_under_another_secret_key_is_not_told_wrongly(here: Desk) -> None:
    action = approved(here)
    claim(action_id=action.pk)
    with override_settings(SECRET_KEY="another key altogether"), pytest.raises(refusals.ClaimOver):
        claim(action_id=action.pk)


# --- who may --------------------------------------------------------------------------------------


def test_an_agent_claims_its_own_requests_only(here: Desk) -> None:
    mine, theirs = approved(here), approved(Desk())
    who = Claimant.of(here.agent)
    assert [one.action_id for one in claim(who=who, tools=["*"], max_claims=10)] == [mine.pk]
    with pytest.raises(NotFound):
        claim("claim-2", who=who, action_id=theirs.pk)


def test_a_token_with_claims_runs_the_tools_it_names(here: Desk) -> None:
    pay, again = approved(here, 1), approved(here, 2, tool="again")
    token, _ = factories.agent_token("claims", claim_tools=["ag*n"])
    who = Claimant.of(desk.caller(token))
    with pytest.raises(NotFound):
        claim(who=who, action_id=pay.pk)
    assert [one.action_id for one in claim("claim-2", who=who, tools=["*"], max_claims=10)] == [again.pk]


def test_the_servers_executor_runs_what_is_the_servers_only(here: Desk) -> None:
    agents, servers = approved(here, 1), approved(here, 2, tool="again")
    who = Claimant.server("one")
    assert [one.action_id for one in claim(who=who, tools=["pay", "again"], max_claims=10)] == [servers.pk]
    with pytest.raises(NotFound):
        claim("claim-2", who=who, action_id=agents.pk)


def test_people_do_not_claim() -> None:
    with pytest.raises(NotAllowed):
        Claimant.of(desk.person())


def test_a_claim_token_is_worth_nothing_in_other_hands(here: Desk) -> None:
    claimed = desk.take(approved(here))
    thief = Claimant.of(Desk().agent)
    with pytest.raises(NotFound):
        claims.heartbeat(claim_token=claimed.claim_token, lease_seconds=60, claimant=thief)
    with pytest.raises(NotFound):
        claims.complete(claim_token=claimed.claim_token, outcome="done", claimant=thief)
    with pytest.raises(NotFound):
        claims.complete(claim_token="0" * 64, outcome="done", claimant=desk.runner())


# --- which -----------------------------------------------------------------------------------------


def test_the_oldest_is_taken_first_and_no_more_than_asked_for(here: Desk) -> None:
    other = Desk()
    wanted = [approved(here, 1), approved(other, 1), approved(here, 2)]
    wanted.append(desk.request(here.agent))
    desk.approve(wanted[-1])
    first = claim(tools=["pay"], max_claims=3)
    assert [one.action_id for one in first] == [action.pk for action in wanted[:3]]
    assert [one.action_id for one in claim("claim-2", tools=["p?y"], max_claims=10)] == [wanted[3].pk]
    for one in (here, other):
        desk.check_story(one)


@pytest.mark.parametrize(
    "state", ["pending", "rejected", "expired", "cancelled", "executing", "unknown", "done", "failed"]
)
def test_only_what_is_approved_can_be_claimed_and_the_refusal_says_why(here: Desk, state: str) -> None:
    action = here.asked()
    if state == "rejected":
        desk.reject(action)
    elif state == "expired":
        desk.make_overdue(action)
    elif state == "cancelled":
        decisions.cancel(caller=here.agent, action_id=action.pk)
    elif state != "pending":
        desk.approve(action)
        claimed = desk.take(action)
        if state == "unknown":
            desk.lose(action)
        elif state != "executing":
            desk.report(claimed, state)
    codes = {
        "pending": "not_approved",
        "executing": "already_claimed",
        "done": "already_terminal",
        "failed": "already_terminal",
    }
    with pytest.raises(Problem) as refused:
        claim(action_id=action.pk)
    assert (refused.value.status, refused.value.code) == (409, codes.get(state, state))
    assert refused.value.fields["action"]["state"] == state
    assert claim("claim-2", tools=["pay"]) == []


def test_a_claim_that_names_another_digest_is_refused(here: Desk) -> None:
    """C06: what was approved is what runs."""
    action = approved(here)
    with pytest.raises(refusals.DigestMismatch):
        claim(action_id=action.pk, digest="sha256:" + "0" * 64)
    assert desk.fresh(action).state == "approved"
    (claimed,) = claim("claim-2", action_id=action.pk, digest=action.digest)
    assert (claimed.digest, claimed.arguments_text) == (action.digest, action.arguments_text)


def test_an_approval_whose_time_ran_out_is_not_taken_by_a_search_either(here: Desk) -> None:
    """C14."""
    action = approved(here)
    desk.make_overdue(action)
    assert claim(tools=["pay"]) == []
    sweeps.sweep()
    assert desk.fresh(action).state == "expired"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"action_id": uuid.uuid4(), "tools": ["pay"]},
        {"tools": ["pay"], "max_claims": 0},
        {"tools": ["pay"], "max_claims": 11},
        {"tools": ["pay"], "lease_seconds": 0},
        {"tools": ["pay"], "lease_seconds": 3_601},
        {"tools": ["pay"], "lease_seconds": True},
        {"tools": [""]},
        {"tools": ["pay"], "digest": "sha256:x"},
    ],
)
def test_a_claim_of_the_wrong_shape_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        claim(**fields)


@pytest.mark.parametrize("claim_id", ["", "x" * 256, "a b", None])
def test_a_claim_id_has_1_to_255_visible_ascii_characters(claim_id: Any) -> None:
    with pytest.raises(Invalid):
        claim(claim_id, tools=["pay"])


# --- keeping and reporting -------------------------------------------------------------------------


def test_a_heartbeat_keeps_the_lease_and_is_no_part_of_the_story(here: Desk) -> None:
    action = approved(here)
    claimed = desk.take(action, lease_seconds=10)
    before, offset = desk.fresh(action), here.head().next_offset
    beat = claims.heartbeat(claim_token=claimed.claim_token, lease_seconds=120, claimant=desk.runner())
    after = desk.fresh(action)
    assert (beat.lease_seconds, beat.cancel_requested) == (120, False)
    assert (after.version, here.head().next_offset) == (before.version, offset)
    assert before.lease_expires_at is not None
    assert after.lease_expires_at is not None
    assert (after.lease_expires_at - before.lease_expires_at).total_seconds() > 109
    desk.check_story(here)


def test_a_heartbeat_after_the_lease_is_too_late_even_when_no_sweep_came(here: Desk) -> None:
    action = approved(here)
    claimed = desk.take(action)
    desk.make_overdue(action)
    with pytest.raises(refusals.LeaseLost) as refused:
        claims.heartbeat(claim_token=claimed.claim_token, lease_seconds=60, claimant=desk.runner())
    assert refused.value.fields["action"]["state"] == "unknown"


def test_a_heartbeat_of_an_older_fence_keeps_nothing(here: Desk) -> None:
    action = approved(here, tool="again")
    old = desk.take(action)
    desk.lose(action)
    desk.take(action)
    with pytest.raises(refusals.LeaseLost):
        claims.heartbeat(claim_token=old.claim_token, lease_seconds=3_600, claimant=desk.runner())


@pytest.mark.parametrize(
    ("outcome", "text"), [("failed", '{"a":1}'), ("done", '{"a":2}'), ("done", None), ("not_started", None)]
)
def test_a_second_report_that_says_something_else_is_refused(here: Desk, outcome: str, text: str | None) -> None:
    action = approved(here)
    claimed = desk.take(action)
    desk.report(claimed, "done", '{"a":1}')
    desk.report(claimed, "done", '{ "a" : 1.0 }')  # the same, spelled otherwise
    with pytest.raises(refusals.OutcomeConflict):
        desk.report(claimed, outcome, text)
    assert (desk.fresh(action).state, desk.fresh(action).result_text) == ("done", '{"a":1}')
    assert len(here.results()) == 1


def test_a_report_that_came_too_late_is_kept_in_the_audit(here: Desk) -> None:
    action = approved(here, tool="again")
    claimed = desk.take(action)
    desk.lose(action)
    decisions.cancel(caller=here.agent, action_id=action.pk)
    decisions.reconcile(
        caller=desk.chief(), action_id=action.pk, idempotency_key=desk.key(), outcome="failed", note="looked"
    )
    with pytest.raises(refusals.OutcomeConflict):
        desk.report(claimed, "done", '"it did happen"')
    event = AuditEvent.objects.get(action=action, kind="report_refused")
    assert "it did happen" in event.detail
    assert desk.fresh(action).state == "failed"


@pytest.mark.parametrize("text", ['{"a":NaN}', "[" * 65 + "]" * 65, '"' + "x" * 262_144 + '"', "not json"])
def test_a_result_is_read_strictly(here: Desk, text: str) -> None:
    action = approved(here)
    claimed = desk.take(action)
    with pytest.raises(Problem):
        desk.report(claimed, "done", text)
    assert desk.fresh(action).state == "executing"


def test_a_result_keeps_its_numbers(here: Desk) -> None:
    action = approved(here)
    desk.report(desk.take(action), "done", '{"n":9007199254740993,"m":0.1000000000000000055}')
    assert desk.fresh(action).result_text == '{"m":0.1000000000000000055,"n":9007199254740993}'


def test_nothing_is_told_twice_when_one_reports_nothing(here: Desk) -> None:
    action = approved(here)
    desk.report(desk.take(action), "done")
    (told,) = here.results()
    assert told["result"] is None
    assert desk.fresh(action).result_text == ""
    with pytest.raises(Invalid):
        desk.report(desk.take(approved(here, 2)), "not_started", '"x"')
    desk.check_story(here)


def test_a_sweep_finds_what_nobody_touches(here: Desk) -> None:
    waiting, unused, running = here.asked(), approved(here, 2), approved(here, 3)
    desk.take(running)
    desk.make_overdue(waiting)  # the longest deadline: the others are past then too
    assert sweeps.sweep() == {"expired": 2, "leasesLost": 1, "logsEnded": 0}
    desk.Clock.ahead += timedelta(minutes=2)  # the producer's own time begins when the waiting ends
    assert sweeps.sweep() == {"expired": 0, "leasesLost": 0, "logsEnded": 1}
    assert [desk.fresh(one).state for one in (waiting, unused, running)] == ["expired", "expired", "unknown"]
    desk.check_story(here)
