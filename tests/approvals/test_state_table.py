"""Every row of the state table (contract §5), as what people and machines do; and that nothing else moves."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from approvals import claims, decisions, refusals, sweeps, transitions
from approvals.models import ApprovalRequest, Claim, Decision
from approvals.states import MOVES, State, may
from approvals.transitions import Illegal
from streams import log
from streams.problems import NotAllowed
from streams.protocol import Text
from tests.approvals import desk
from tests.approvals.desk import Desk
from tests.support import factories

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _tools(registering: desk.Registering) -> None:
    """`pay` may run once, the tools named after their effects as often as those allow."""
    for effects in ("idempotent", "transactional"):
        registering(effects, effects=effects)


def executing(here: Desk, effects: str = "at_most_once") -> tuple[ApprovalRequest, claims.Claimed]:
    action = here.asked(desk.call(tool="pay" if effects == "at_most_once" else effects))
    desk.approve(action)
    return desk.fresh(action), desk.take(action)


def unknown(here: Desk) -> tuple[ApprovalRequest, claims.Claimed]:
    action, claimed = executing(here)
    return desk.lose(action), claimed


# --- how an action is born ------------------------------------------------------------------------


def test_a_call_that_no_rule_names_waits_for_a_person(here: Desk) -> None:
    action = here.asked()
    assert (action.state, action.version, action.gated) == ("pending", 1, True)
    assert action.expires_at is not None
    assert action.expires_at - action.requested_at == timedelta(seconds=86_400)
    (notice,) = here.notices(action.pk)
    assert notice["actor"] == {"kind": "token", "id": here.token.prefix, "name": here.token.name}
    assert desk.audited(action) == ["requested"]


def test_what_policy_allows_is_approved_by_the_policy_and_does_not_expire(here: Desk) -> None:
    factories.policy(("pay", "allow"), name="house")
    action = here.asked()
    assert (action.state, action.gated, action.expires_at, action.approved_until) == ("approved", False, None, None)
    decision = Decision.objects.get(action=action)
    assert (decision.actor_kind, decision.actor_name, decision.decision) == ("policy", "house v1", "approve")
    assert here.notices(action.pk)[0]["actor"]["kind"] == "policy"
    desk.check_story(here)


def test_what_policy_denies_is_rejected_and_the_model_learns_it_at_once(here: Desk) -> None:
    factories.policy(("pay", "deny"), name="house")
    action = here.asked()
    assert (action.state, action.gated) == ("rejected", True)
    (told,) = here.results()
    assert told["isError"] is True
    assert told["result"] == {"code": "rejected", "reason": "denied by house v1, rule deny pay"}
    desk.check_story(here)


# --- pending → … ----------------------------------------------------------------------------------


def test_approval_takes_as_many_people_as_the_policy_asks_for(here: Desk) -> None:
    factories.policy(("pay", "ask", {"approvals_required": 3, "approval_valid_seconds": 600}))
    action = here.asked()
    versions = []
    for _ in range(3):
        versions.append(desk.approve(action).action.version)
    assert versions == [2, 3, 4]
    notices = here.notices(action.pk)
    assert [notice["state"] for notice in notices] == ["pending", "pending", "pending", "approved"]
    assert [len(notice["decisions"]) for notice in notices] == [0, 1, 2, 3]
    now = desk.fresh(action)
    assert now.approved_until is not None
    last = Decision.objects.filter(action=action).order_by("at").last()
    assert last is not None
    assert now.approved_until - last.at == timedelta(seconds=600)
    desk.check_story(here)


def test_a_second_vote_of_one_person_counts_once(here: Desk) -> None:
    factories.policy(("pay", "ask", {"approvals_required": 2}))
    action, who = here.asked(), desk.person()
    desk.approve(action, who)
    again = desk.approve(action, who)
    assert again.already_decided
    assert desk.fresh(action).state == "pending"
    assert Decision.objects.filter(action=action).count() == 1


def test_one_rejection_is_enough_even_after_votes_for_it(here: Desk) -> None:
    factories.policy(("pay", "ask", {"approvals_required": 3}))
    action = here.asked()
    desk.approve(action)
    desk.reject(action, reason="not today")
    assert desk.fresh(action).state == "rejected"
    (told,) = here.results()
    assert (told["result"], told["isError"]) == ({"code": "rejected", "reason": "not today"}, True)
    desk.check_story(here)


@pytest.mark.parametrize("touch", ["sweep", "read", "decide", "claim", "cancel"])
def test_whoever_touches_an_overdue_question_first_finds_it_expired(here: Desk, touch: str) -> None:
    action = here.asked()
    desk.make_overdue(action)
    if touch == "sweep":
        assert sweeps.sweep()["expired"] == 1
    elif touch == "read":
        from approvals import access

        assert access.find(here.agent, action.pk).state == "expired"
    else:
        with pytest.raises((refusals.Expired, refusals.AlreadyTerminal)):
            {"decide": desk.approve, "claim": desk.take, "cancel": lambda a: cancel(here, a)}[touch](action)
    assert desk.fresh(action).state == "expired"
    (told,) = here.results()
    assert (told["result"], told["isError"]) == ({"code": "expired", "reason": "nobody decided in time"}, True)
    assert desk.audited(action)[:2] == ["requested", "expired"]
    assert here.notices(action.pk)[-1]["actor"]["kind"] == "clock"
    desk.check_story(here)


def cancel(here: Desk, action: ApprovalRequest) -> decisions.Cancelled:
    return decisions.cancel(caller=here.agent, action_id=action.pk, reason="changed my mind")


@pytest.mark.parametrize("state", ["pending", "approved"])
@pytest.mark.parametrize("who", ["requester", "person", "superseded", "generation"])
def test_what_has_not_begun_can_be_cancelled(here: Desk, state: str, who: str) -> None:
    action = here.asked()
    if state == "approved":
        desk.approve(action)
    if who == "requester":
        assert not cancel(here, action).requested
    elif who == "person":
        decisions.cancel(caller=desk.person(), action_id=action.pk)
    elif who == "superseded":
        here.append(Text(content="again"), new_attempt=True)
    else:
        log.request_cancel(generation_id=here.generation.pk, actor=desk.person().actor)
    assert desk.fresh(action).state == "cancelled"
    # A superseded call is void: nobody is told about it.
    assert len(here.results()) == (0 if who == "superseded" else 1)
    with pytest.raises(refusals.Cancelled):
        desk.take(action)
    desk.check_story(here)


def test_a_stranger_can_neither_cancel_nor_learn_that_there_is_something(here: Desk) -> None:
    action = here.asked()
    with pytest.raises(refusals.Problem, match="no such approval request"):
        decisions.cancel(caller=Desk().agent, action_id=action.pk)
    with pytest.raises(NotAllowed):
        decisions.cancel(caller=desk.person(factories.SEE), action_id=action.pk)
    assert desk.fresh(action).state == "pending"


# --- approved → … ---------------------------------------------------------------------------------


def test_an_approval_nobody_used_in_time_expires_and_reading_does_not_renew_it(here: Desk) -> None:
    action = here.asked()
    desk.approve(action)
    until = desk.fresh(action).approved_until
    from approvals import access

    assert access.find(here.agent, action.pk).approved_until == until
    desk.make_overdue(action)
    assert access.find(here.agent, action.pk).state == "expired"
    with pytest.raises(refusals.Expired):
        desk.take(action)
    desk.check_story(here)


def test_a_claim_takes_the_next_fence_a_new_token_and_a_lease(here: Desk) -> None:
    action, first = executing(here, "idempotent")
    desk.lose(action)
    second = desk.take(action, lease_seconds=90)
    assert (first.fence, second.fence) == (1, 2)
    assert first.claim_token != second.claim_token
    assert first.effect_key == second.effect_key
    now = desk.fresh(action)
    assert now.started_at is not None
    assert now.lease_expires_at is not None
    assert now.lease_expires_at - now.started_at == timedelta(seconds=90)
    assert not Claim.objects.filter(token_sha256=second.claim_token).exists()
    desk.check_story(here)


@pytest.mark.parametrize(("is_error", "state"), [(False, "done"), (True, "failed")])
def test_the_producer_gives_the_result_of_an_allowed_call_itself(here: Desk, is_error: bool, state: str) -> None:
    factories.policy(("pay", "allow"))
    action = here.asked()
    here.append(desk.result(text='{"paid":10}', is_error=is_error))
    now = desk.fresh(action)
    assert (now.state, now.result_text, now.is_error) == (state, '{"paid":10}', is_error)
    assert len(here.results()) == 1
    desk.check_story(here)


@pytest.mark.parametrize(("outcome", "state"), [("done", "done"), ("failed", "failed")])
def test_a_late_report_counts_while_nobody_has_claimed_since(here: Desk, outcome: str, state: str) -> None:
    action, claimed = executing(here, "idempotent")
    assert desk.lose(action).state == "approved"
    assert desk.report(claimed, outcome, '"late"').state == state
    assert [told["result"] for told in here.results()] == ["late"]
    desk.check_story(here)


def test_a_late_report_after_another_claim_is_stale(here: Desk) -> None:
    action, first = executing(here, "idempotent")
    desk.lose(action)
    second = desk.take(action)
    with pytest.raises(refusals.StaleClaim) as refused:
        desk.report(first, "done", '"old"')
    assert refused.value.fields["action"]["state"] == "executing"
    assert "report_refused" in desk.audited(action)
    assert desk.report(second, "done", '"new"').state == "done"
    assert [told["result"] for told in here.results()] == ["new"]


def test_an_allowed_call_without_a_result_is_unknown_when_its_log_ends(here: Desk) -> None:
    factories.policy(("pay", "allow"))
    action = here.asked()
    here.end()
    assert desk.fresh(action).state == "unknown"
    desk.check_story(here)


# --- executing → … --------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "is_error"), [("done", False), ("failed", True)])
def test_the_holder_of_the_fence_reports_and_the_result_stands_in_the_log_once(
    here: Desk, outcome: str, is_error: bool
) -> None:
    action, claimed = executing(here)
    for _ in range(2):
        assert desk.report(claimed, outcome, '{"n":0.10}').state == outcome
    (told,) = here.results()
    assert told["isError"] is is_error
    assert str(told["result"]["n"]) == "0.1"
    assert desk.fresh(action).version == 4
    desk.check_story(here)


def test_not_started_gives_the_action_back(here: Desk) -> None:
    action, claimed = executing(here)
    assert desk.report(claimed, "not_started").state == "approved"
    assert desk.report(claimed, "not_started").state == "approved"
    assert desk.take(action).fence == 2
    assert here.results() == []


@pytest.mark.parametrize("effects", ["idempotent", "transactional"])
def test_a_lost_lease_of_what_may_run_again_gives_it_back(here: Desk, effects: str) -> None:
    action, _ = executing(here, effects)
    assert desk.lose(action).state == "approved"
    assert Claim.objects.get(action=action).outcome == "lease_lost"
    desk.check_story(here)


def test_a_lost_lease_of_what_may_not_run_again_is_unknown(here: Desk) -> None:
    action, _ = unknown(here)
    assert action.state == "unknown"
    assert here.head().open_actions == 0
    with pytest.raises(refusals.Unknown):
        desk.take(action)
    desk.check_story(here)


def test_a_lost_lease_after_a_cancel_is_unknown_whatever_the_tool(here: Desk) -> None:
    action, claimed = executing(here, "idempotent")
    assert cancel(here, action).requested
    beat = claims.heartbeat(claim_token=claimed.claim_token, lease_seconds=30, claimant=desk.runner())
    assert beat.cancel_requested
    assert desk.lose(action).state == "unknown"
    desk.check_story(here)


def test_a_cancel_while_it_runs_is_only_believed_when_nothing_was_started(here: Desk) -> None:
    action, claimed = executing(here)
    for _ in range(2):
        answer = cancel(here, action)
        assert (answer.requested, answer.action.state, answer.action.version) == (True, "executing", 4)
    assert desk.report(claimed, "not_started").state == "cancelled"
    assert here.results()[0]["result"]["code"] == "cancelled"
    desk.check_story(here)


def test_a_cancel_does_not_undo_what_was_done(here: Desk) -> None:
    action, claimed = executing(here)
    cancel(here, action)
    assert desk.report(claimed, "done").state == "done"
    with pytest.raises(refusals.AlreadyTerminal):
        cancel(here, action)


def test_the_fifth_lost_fence_since_the_decision_is_unknown(here: Desk) -> None:
    action, _ = executing(here, "idempotent")
    states = [desk.lose(action).state]
    for _ in range(4):
        desk.take(action)
        states.append(desk.lose(action).state)
    assert states == ["approved"] * 4 + ["unknown"]
    desk.check_story(here)


def test_not_started_on_the_fifth_fence_fails(here: Desk) -> None:
    action, claimed = executing(here)
    states = [desk.report(claimed, "not_started").state]
    for _ in range(4):
        states.append(desk.report(desk.take(action), "not_started").state)
    assert states == ["approved"] * 4 + ["failed"]
    (told,) = here.results()
    assert told["isError"] is True
    desk.check_story(here)


# --- unknown → … ----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["done", "failed"])
def test_a_late_report_settles_the_unknown(here: Desk, outcome: str) -> None:
    _, claimed = unknown(here)
    assert desk.report(claimed, outcome).state == outcome
    assert len(here.results()) == 1
    desk.check_story(here)


def test_a_late_not_started_does_not_settle_the_unknown(here: Desk) -> None:
    action, claimed = unknown(here)
    with pytest.raises(refusals.LeaseLost):
        desk.report(claimed, "not_started")
    assert desk.fresh(action).state == "unknown"


def reconcile(action: ApprovalRequest, outcome: str, **fields: str) -> decisions.Decided:
    fields = {"idempotency_key": desk.key(), "note": "I looked at the bank", **fields}
    return decisions.reconcile(caller=desk.chief(), action_id=action.pk, outcome=outcome, **fields)


@pytest.mark.parametrize("outcome", ["done", "failed"])
def test_a_person_says_what_happened(here: Desk, outcome: str) -> None:
    action, claimed = unknown(here)
    settled = reconcile(action, outcome, result_text='{"seen":true}').action
    assert (settled.state, settled.result_text) == (outcome, '{"seen":true}')
    assert Decision.objects.filter(action=action).last().decision == f"reconcile_{outcome}"  # type: ignore[union-attr]
    with pytest.raises(refusals.OutcomeConflict):
        desk.report(claimed, "done", '"too late"')
    assert len(here.results()) == 1
    desk.check_story(here)


def test_a_person_orders_another_run_with_five_new_fences_and_a_new_time(here: Desk) -> None:
    action, _ = executing(here, "idempotent")
    cancel(here, action)
    desk.lose(action)
    again = reconcile(action, "retry").action
    assert (again.state, again.fence_base, again.cancel_requested) == ("approved", 1, False)
    for _ in range(4):
        desk.take(action)
        assert desk.lose(action).state == "approved"
    desk.take(action)
    assert desk.lose(action).state == "unknown"
    desk.check_story(here)


def test_nothing_runs_again_in_a_cancelled_generation(here: Desk) -> None:
    action, _ = executing(here)
    log.request_cancel(generation_id=here.generation.pk, actor=desk.person().actor)
    assert desk.lose(action).state == "unknown"
    with pytest.raises(refusals.Cancelled):
        reconcile(action, "retry")
    assert reconcile(action, "done").action.state == "done"


def test_reconciling_needs_the_permission_a_person_a_note_and_the_unknown(here: Desk) -> None:
    action = here.asked()
    with pytest.raises(refusals.NotUnknown):
        reconcile(action, "done")
    for who, refusal in [(desk.person(), NotAllowed), (here.agent, refusals.PeopleOnly)]:
        with pytest.raises(refusal):
            decisions.reconcile(
                caller=who, action_id=action.pk, idempotency_key=desk.key(), outcome="done", note="seen"
            )
    with pytest.raises(refusals.Invalid):
        reconcile(action, "done", note="")
    assert desk.audited(action).count("reconcile_refused") == 3


# --- and nothing else -----------------------------------------------------------------------------


@pytest.mark.parametrize("origin", list(State))
@pytest.mark.parametrize("target", list(State))
def test_no_other_move_can_be_written(here: Desk, origin: State, target: State) -> None:
    if may(origin, target):
        assert target in MOVES[origin]
        return
    action = here.asked()
    action.state = origin
    with pytest.raises(Illegal), log.hold(here.generation.pk) as held:
        transitions.move(held=held, action=action, to=target, who=here.agent.actor, kind="test")


@pytest.mark.parametrize("changed", [{"version": 7}, {"state": "rejected"}, {"fence": 3}])
def test_a_row_that_changed_in_between_is_missed_and_nothing_is_written(here: Desk, changed: dict[str, object]) -> None:
    action = here.asked()
    before = here.head().next_offset
    ApprovalRequest.objects.filter(pk=action.pk).update(**changed)

    def swap() -> None:
        with log.hold(here.generation.pk) as held:
            transitions.move(held=held, action=action, to=State.CANCELLED, who=here.agent.actor, kind="test")

    with pytest.raises(transitions.Missed):
        swap()
    assert here.head().next_offset == before
    assert desk.audited(action) == ["requested"]


@pytest.mark.parametrize(
    ("reason", "pending", "approved"),
    [
        ("stop", "pending", "approved"),
        ("tool_use", "pending", "approved"),
        ("length", "pending", "approved"),
        ("cancel", "cancelled", "cancelled"),
        ("error", "cancelled", "cancelled"),
    ],
)
def test_how_a_log_ends_says_what_becomes_of_its_questions(
    here: Desk, reason: str, pending: str, approved: str
) -> None:
    waiting, agreed, running = (here.asked(desk.call(f"call-{n}")) for n in range(3))
    desk.approve(agreed)
    desk.approve(running)
    claimed = desk.take(running)
    here.end(reason)
    assert [desk.fresh(action).state for action in (waiting, agreed)] == [pending, approved]
    assert desk.fresh(running).state == "executing"
    assert desk.report(claimed, "done", '"after the end"').state == "done"
    # The log has its done: what is told now stands in the notice, never in another chunk.
    assert here.results("call-2") == []
    assert here.notices(running.pk)[-1]["result"] == "after the end"
    desk.check_story(here)


def test_what_ends_after_the_log_tells_it_in_the_notice(here: Desk) -> None:
    action = here.asked()
    here.end("tool_use")
    desk.reject(action, reason="no")
    assert here.results() == []
    last = here.notices(action.pk)[-1]
    assert (last["result"], last["isError"]) == ({"code": "rejected", "reason": "no"}, True)
    desk.check_story(here)


AFTER: dict[str, Callable[[Desk], object]] = {
    "restart": lambda here: here.append(Text(content="again"), new_attempt=True),
    "cancel": lambda here: log.request_cancel(generation_id=here.generation.pk, actor=here.agent.actor),
}


@pytest.mark.parametrize("how", AFTER)
def test_what_runs_is_asked_to_stop_when_its_call_is_void(here: Desk, how: str) -> None:
    action, claimed = executing(here)
    AFTER[how](here)
    now = desk.fresh(action)
    assert (now.state, now.cancel_requested, now.superseded) == ("executing", True, how == "restart")
    assert desk.report(claimed, "done", '"late"').state == "done"
    assert len(here.results()) == (0 if how == "restart" else 1)
    assert here.notices(action.pk)[-1]["result"] == "late"
    desk.check_story(here)
