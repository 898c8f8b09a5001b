"""Every row of the decision table, and the order its checks are made in (contract §5, "The decision")."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.db import IntegrityError

from approvals import decisions, refusals
from approvals.models import ApprovalRequest, AuditEvent, Decision
from streams.access import caller_for_user
from streams.problems import Invalid, NotAllowed, NotFound, Problem
from tests.approvals import desk
from tests.approvals.desk import Desk
from tests.support import factories

pytestmark = pytest.mark.django_db


def decide(who: Any, action: ApprovalRequest, key: Any = "click-0001", **fields: Any) -> decisions.Decided:
    return decisions.decide(caller=who, action_id=action.pk, idempotency_key=key, **{"decision": "approve", **fields})


def code_of(who: Any, action: ApprovalRequest, key: Any = "click-0001", **fields: Any) -> tuple[int, str]:
    with pytest.raises(Problem) as refused:
        decide(who, action, key, **fields)
    return refused.value.status, refused.value.code


@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key_nothing_is_decided(here: Desk, key: Any) -> None:
    action = here.asked()
    assert code_of(desk.person(), action, key) == (400, "idempotency_key_required")
    assert desk.fresh(action).state == "pending"


@pytest.mark.parametrize(
    "key", ["short", "x" * 256, "with space", "tab\tinside", "ümlaut-key", "newline\nin-it", 12345678]
)
def test_a_key_has_8_to_255_visible_ascii_characters(here: Desk, key: Any) -> None:
    action = here.asked()
    assert code_of(desk.person(), action, key) == (400, "idempotency_key_invalid")


@pytest.mark.parametrize("key", ["12345678", "~" * 255, "!#$%&'()*"])
def test_a_key_may_be_any_visible_ascii(here: Desk, key: str) -> None:
    assert not decide(desk.person(), here.asked(), key).replayed


def test_same_key_twice_returns_the_first_decision_and_the_action_as_it_is_now(here: Desk) -> None:
    action, who = here.asked(), desk.person()
    first = decide(who, action, reason="fine")
    desk.report(desk.take(action), "done", '{"paid":10}')
    again = decide(who, action, reason="fine")
    assert again.replayed
    assert again.decision == first.decision
    assert (again.action.state, again.action.result_text) == ("done", '{"paid":10}')
    assert Decision.objects.filter(action=action).count() == 1
    assert desk.audited(action).count("decision_replayed") == 1


@pytest.mark.parametrize("change", ["decision", "reason", "arguments_text", "action"])
def test_same_key_for_something_else_is_refused_and_changes_nothing(here: Desk, change: str) -> None:
    action, other, who = here.asked(), here.asked(desk.call("call-2")), desk.person()
    decide(who, action)
    fields = {"decision": "reject", "reason": "other", "arguments_text": '{"amount":1}'}
    if change == "action":
        assert code_of(who, other) == (422, "idempotency_key_reused")
    else:
        assert code_of(who, action, **{change: fields[change]}) == (422, "idempotency_key_reused")
    assert (desk.fresh(action).version, desk.fresh(other).version) == (2, 1)
    assert AuditEvent.objects.filter(kind="decision_refused", reason="idempotency_key_reused").count() == 1


def test_the_digest_is_no_part_of_what_a_key_is_bound_to(here: Desk) -> None:
    action, who = here.asked(), desk.person()
    decide(who, action, digest=action.digest)
    assert decide(who, action).replayed
    assert decide(who, action, digest="sha256:other").replayed


def test_spelling_of_arguments_is_no_part_of_it_either(here: Desk) -> None:
    action, who = here.asked(), desk.person()
    decide(who, action, arguments_text='{"amount": 5.0, "to": "x"}')
    assert decide(who, action, arguments_text='{"to":"x","amount":5}').replayed


def test_another_persons_key_never_shows_the_first_ones_answer(here: Desk) -> None:
    action = here.asked()
    decide(desk.person(), action)
    assert code_of(desk.person(), action) == (409, "already_decided")
    other = here.asked(desk.call("call-2"))
    assert not decide(desk.person(), other).replayed


def test_what_one_may_not_see_looks_like_what_is_not_there(here: Desk) -> None:
    action = here.asked()
    blind = desk.person("streams.configure")
    assert code_of(blind, action) == (404, "not_found")
    hidden = pytest.raises(NotFound)
    with hidden as one:
        decide(blind, action)
    with pytest.raises(NotFound) as other:
        decisions.decide(caller=desk.person(), action_id=uuid.uuid4(), idempotency_key="click-0001", decision="approve")
    assert (one.value.detail, one.value.fields) == (other.value.detail, other.value.fields)
    with pytest.raises(NotFound):
        decisions.decide(caller=desk.person(), action_id="nonsense", idempotency_key="click-0001", decision="approve")


def test_who_may_only_look_may_not_decide(here: Desk) -> None:
    assert code_of(desk.person(factories.SEE), here.asked()) == (403, "not_allowed")


def test_an_agents_token_never_decides(here: Desk) -> None:
    action = here.asked()
    token, _ = factories.agent_token("read:all", "approvals:request", "generations:write")
    for who in (here.agent, desk.caller(token)):
        assert code_of(who, action) == (403, "people_only")
    assert code_of(Desk().agent, action) == (404, "not_found")


@pytest.mark.parametrize("decision", ["approve", "reject"])
def test_nobody_decides_what_they_or_their_agent_asked_for(decision: str) -> None:
    owner = factories.chief()
    token, _ = factories.agent_token("generations:write", "approvals:request", owner=owner)
    who = caller_for_user(user=owner, door="http")
    logged = Desk(token=token).asked()
    loose = desk.request(desk.caller(token))
    own = desk.request(who)
    for action in (logged, loose, own):
        assert code_of(who, action, desk.key(), decision=decision) == (403, "self_approval")
        assert desk.fresh(action).state == "pending"


@pytest.mark.parametrize("risk", ["high", "critical"])
@pytest.mark.parametrize("decision", ["approve", "reject"])
def test_dangerous_things_need_the_digest_of_what_was_seen(here: Desk, risk: str, decision: str) -> None:
    factories.policy(("pay", "ask", {"risk": risk}))
    action, who = here.asked(), desk.person()
    assert code_of(who, action, decision=decision) == (400, "digest_required")
    # A refused key is not used up.
    assert not decide(who, action, decision=decision, digest=action.digest).replayed


def test_below_that_the_digest_is_optional_but_must_be_right(here: Desk) -> None:
    action, who = here.asked(), desk.person()
    assert code_of(who, action, digest="sha256:" + "0" * 64) == (409, "digest_mismatch")
    assert desk.fresh(action).state == "pending"
    assert decide(who, action, digest=action.digest).action.state == "approved"


@pytest.mark.parametrize("state", ["expired", "cancelled"])
def test_what_is_over_can_not_be_decided_but_a_key_accepted_before_still_replays(here: Desk, state: str) -> None:
    action, who = here.asked(), desk.person()
    decide(who, action)
    if state == "expired":
        desk.make_overdue(action)
    else:
        decisions.cancel(caller=here.agent, action_id=action.pk)
    assert code_of(who, action, "click-0002") == (409, state)
    assert code_of(desk.person(), action, "click-0003") == (409, state)
    again = decide(who, action)
    assert again.replayed
    assert again.action.state == state


def test_a_question_whose_time_runs_out_between_the_look_and_the_lock_is_expired(
    here: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = here.asked()
    monkeypatch.setattr(decisions, "_may_answer", lambda caller, action: desk.make_overdue(action))
    assert code_of(desk.person(), action) == (409, "expired")
    assert (desk.fresh(action).state, Decision.objects.count()) == ("expired", 0)
    desk.check_story(here)


def test_a_new_key_for_ones_own_same_decision_counts_once(here: Desk) -> None:
    action, who = here.asked(), desk.person()
    first = decide(who, action, arguments_text='{"amount":5}')
    again = decide(who, action, "click-0002", arguments_text='{"amount":5.0}', reason="once more")
    assert (again.already_decided, again.replayed, again.decision) == (True, False, first.decision)
    assert Decision.objects.filter(action=action).count() == 1


def test_a_decided_question_says_who_and_when(here: Desk) -> None:
    action, first = here.asked(), desk.person()
    decide(first, action)
    for who, fields in [(desk.person(), {}), (first, {"decision": "reject"}), (first, {"arguments_text": "{}"})]:
        with pytest.raises(refusals.AlreadyDecided) as refused:
            decide(who, action, desk.key(), **fields)
        assert refused.value.fields["decision"]["actor"]["name"] == first.actor.name
        assert refused.value.fields["decision"]["at"].endswith("Z")
        assert refused.value.fields["action"]["state"] == "approved"
    assert desk.audited(action).count("decision_refused") == 3


def test_what_policy_decided_is_decided(here: Desk) -> None:
    factories.policy(("pay", "deny"), ("look", "allow"))
    for action in (here.asked(), here.asked(desk.call("call-2", tool="look"))):
        assert code_of(desk.person(), action, desk.key()) == (409, "already_decided")


def test_a_decision_of_yesterday_is_about_yesterdays_action(here: Desk) -> None:
    """C13."""
    old, who = here.asked(), desk.person()
    decisions.cancel(caller=here.agent, action_id=old.pk)
    newer = here.asked(desk.call("call-2"))
    assert code_of(who, old) == (409, "cancelled")
    assert desk.fresh(newer).version == 1


# --- edits ----------------------------------------------------------------------------------------


def test_an_edit_gets_a_new_digest_and_both_are_kept(here: Desk) -> None:
    action = here.asked()
    decided = decide(desk.person(), action, arguments_text='{"amount": 7.50}', digest=action.digest)
    now = decided.action
    assert (now.arguments_text, now.original_arguments_text) == ('{"amount":7.5}', '{"amount":10}')
    assert now.original_digest == action.digest
    assert now.digest not in ("", action.digest)
    assert decided.decision.digest == now.digest
    with pytest.raises(refusals.DigestMismatch):
        desk.take(now, digest=action.digest)
    assert desk.take(now, digest=now.digest).arguments_text == '{"amount":7.5}'
    desk.check_story(here)


def test_an_edit_that_changes_nothing_is_no_edit(here: Desk) -> None:
    now = decide(desk.person(), here.asked(), arguments_text='{"amount":10.0}').action
    assert (now.original_digest, now.original_arguments_text) == ("", "")


def test_a_rejection_has_no_arguments(here: Desk) -> None:
    action = here.asked()
    assert code_of(desk.person(), action, decision="reject", arguments_text="{}") == (400, "invalid")


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("[1]", 400, "invalid"),
        ('{"a":1,"a":2}', 400, "invalid"),
        ('{"a":NaN}', 400, "invalid"),
        ('{"a":1e400}', 400, "number_out_of_range"),
        ('{"a":"' + "x" * 262_144 + '"}', 413, "too_large"),
        ("{" + '"a":{' * 64 + "}" * 65, 400, "invalid"),
    ],
)
def test_an_edit_is_read_as_strictly_as_a_call(here: Desk, text: str, status: int, code: str) -> None:
    action = here.asked()
    assert code_of(desk.person(), action, arguments_text=text) == (status, code)
    assert desk.fresh(action).version == 1


SCHEMA = {
    "type": "object",
    "properties": {"amount": {"type": "integer", "minimum": 1, "maximum": 99}, "note": {"type": "string"}},
    "required": ["amount"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"amount":100}', "arguments.amount"),
        ('{"amount":"7"}', "arguments.amount"),
        ("{}", "arguments.amount"),
        ('{"amount":7,"to":"me"}', "arguments.to"),
    ],
)
def test_an_edit_is_held_against_the_tools_schema(
    here: Desk, registering: desk.Registering, text: str, field: str
) -> None:
    registering("pay", schema=SCHEMA)
    action = here.asked()
    with pytest.raises(refusals.ArgumentsInvalid) as refused:
        decide(desk.person(), action, arguments_text=text)
    assert (refused.value.code, refused.value.status, refused.value.fields["field"]) == (
        "arguments_invalid",
        422,
        field,
    )
    assert desk.fresh(action).version == 1


def test_an_edit_must_be_what_will_run(here: Desk, registering: desk.Registering) -> None:
    registering("pay", prepare=lambda arguments: {"currency": "EUR"} | arguments)
    action = here.asked()
    assert action.arguments_text == '{"amount":10,"currency":"EUR"}'
    with pytest.raises(refusals.ArgumentsInvalid) as refused:
        decide(desk.person(), action, arguments_text='{"amount":9}')
    assert refused.value.fields["finalArgumentsText"] == '{"amount":9,"currency":"EUR"}'
    final = refused.value.fields["finalArgumentsText"]
    assert decide(desk.person(), action, arguments_text=final).action.arguments_text == final


def test_one_person_can_not_change_what_several_must_approve(here: Desk) -> None:
    factories.policy(("pay", "ask", {"approvals_required": 2}))
    action = here.asked()
    assert code_of(desk.person(), action, arguments_text='{"amount":1}') == (409, "needs_more_approvals")
    assert Decision.objects.count() == 0


@pytest.mark.parametrize(
    ("rule", "code"),
    [(("pay", "ask", {"approvals_required": 2}), "needs_more_approvals"), (("pay", "deny"), "policy_denies")],
)
def test_an_edit_is_judged_by_the_policy_of_today(here: Desk, rule: Any, code: str) -> None:
    action = here.asked()
    factories.policy(rule)
    assert code_of(desk.person(), action, arguments_text='{"amount":1}') == (409, code)
    # What is not edited is not judged again (C05).
    assert decide(desk.person(), action).action.state == "approved"


def test_a_model_that_proposes_the_first_version_again_is_linked_and_told(here: Desk) -> None:
    """C08."""
    action = here.asked()
    decide(desk.person(), action, arguments_text='{"amount":1}')
    desk.report(desk.take(action), "done", '"paid"')
    (told,) = here.results()
    assert told["result"] == {"edited": True, "arguments": {"amount": 1}, "result": "paid"}
    assert desk.fresh(action).result_text == '"paid"'
    again = here.asked(desk.call("call-2", arguments='{"amount":10.0}'))
    assert again.previous_id == action.pk
    assert again.state == "pending"


# --- the order of checks --------------------------------------------------------------------------


def test_checks_come_in_the_order_of_the_contract(here: Desk, registering: desk.Registering) -> None:
    """Each step mends the fault that was reported, and the next one shows."""
    registering("pay", schema=SCHEMA, risk="high")
    factories.policy(("pay", "ask", {"risk": "high"}))
    action = here.asked()
    over = here.asked(desk.call("call-2"))
    decisions.cancel(caller=here.agent, action_id=over.pk)
    who, looker = desk.person(), desk.person(factories.SEE)
    decide(who, here.asked(desk.call("call-3")), "used-key-1", decision="reject", digest=action.digest)
    wrong: dict[str, Any] = {"arguments_text": '{"amount":1000}'}
    assert code_of(desk.person("streams.configure"), over, "bad", **wrong)[0] == 400
    assert code_of(desk.person("streams.configure"), over, "used-key-1", **wrong)[0] == 404
    assert code_of(who, over, "used-key-1", **wrong)[0] == 422
    assert code_of(looker, over, "new-key-01", **wrong)[0] == 403
    assert code_of(who, over, "new-key-01", **wrong) == (400, "digest_required")
    assert code_of(who, over, "new-key-01", digest="sha256:x", **wrong) == (409, "cancelled")
    assert code_of(who, action, "new-key-01", digest="sha256:x", **wrong) == (409, "digest_mismatch")
    assert code_of(who, action, "new-key-01", digest=action.digest, **wrong) == (422, "arguments_invalid")
    factories.policy(("pay", "deny"), name="now")
    edit = {"digest": action.digest, "arguments_text": '{"amount":9}'}
    assert code_of(who, action, "new-key-01", **edit) == (409, "policy_denies")
    factories.policy(("pay", "ask"), name="later")
    assert decide(who, action, "new-key-01", **edit).action.state == "approved"


@pytest.mark.parametrize(
    "fields",
    [
        {"decision": "APPROVE"},
        {"decision": ""},
        {"decision": None},
        {"reason": "x" * 2_001},
        {"reason": "nul\0"},
        {"reason": 7},
        {"digest": 7},
    ],
)
def test_a_body_of_the_wrong_shape_is_refused(here: Desk, fields: dict[str, Any]) -> None:
    action = here.asked()
    with pytest.raises(Invalid):
        decide(desk.person(), action, **fields)
    assert desk.fresh(action).version == 1


def test_every_decision_is_audited_with_its_door_key_and_digest(here: Desk) -> None:
    action, who = here.asked(), desk.person()
    decide(who, action, reason="fine")
    event = AuditEvent.objects.get(action=action, kind="approved")
    assert (event.door, event.address, event.request_id) == ("http", "192.0.2.8", "request-2")
    assert (event.idempotency_key, event.digest, event.reason) == ("click-0001", action.digest, "fine")
    assert (event.from_state, event.to_state, event.version) == ("pending", "approved", 2)
    assert event.actor_name == who.actor.name


def test_the_database_itself_refuses_a_second_vote_and_a_second_key(here: Desk) -> None:
    from django.db import transaction

    action, other, who = here.asked(), here.asked(desk.call("call-2")), desk.person()
    first = decide(who, action).decision
    for changed in ({"idempotency_key": "another-1"}, {"action": other}):
        copy = Decision.objects.get(pk=first.pk)
        copy.pk = uuid.uuid4()
        for name, value in changed.items():
            setattr(copy, name, value)
        with pytest.raises(IntegrityError), transaction.atomic():
            copy.save(force_insert=True)


# --- many at once ---------------------------------------------------------------------------------


def items(*actions: ApprovalRequest, **fields: Any) -> list[decisions.Item]:
    return [
        decisions.Item(action_id=action.pk, idempotency_key=desk.key(), **{"decision": "approve", **fields})
        for action in actions
    ]


def test_a_batch_decides_each_on_its_own(here: Desk) -> None:
    first, gone, last = (here.asked(desk.call(f"call-{n}")) for n in range(3))
    decisions.cancel(caller=here.agent, action_id=gone.pk)
    outcomes = decisions.decide_many(caller=desk.person(), all_or_nothing=False, items=items(first, gone, last))
    assert [(outcome.status, outcome.code) for outcome in outcomes] == [(200, None), (409, "cancelled"), (200, None)]
    assert [outcome.action_id for outcome in outcomes] == [str(one.pk) for one in (first, gone, last)]
    assert [desk.fresh(one).state for one in (first, gone, last)] == ["approved", "cancelled", "approved"]


def test_all_or_nothing_with_a_refusal_decides_nothing(here: Desk) -> None:
    elsewhere = Desk()
    first, gone, last = here.asked(), elsewhere.asked(), desk.request(elsewhere.agent)
    decisions.cancel(caller=elsewhere.agent, action_id=gone.pk)
    who, wanted = desk.person(), items(first, gone, last)
    with pytest.raises(refusals.BatchRefused) as refused:
        decisions.decide_many(caller=who, all_or_nothing=True, items=wanted)
    outcomes = refused.value.fields["outcomes"]
    assert [(one.status, one.code) for one in outcomes] == [
        (424, "batch_refused"),
        (409, "cancelled"),
        (424, "batch_refused"),
    ]
    assert [desk.fresh(one).state for one in (first, gone, last)] == ["pending", "cancelled", "pending"]
    assert Decision.objects.count() == 0
    # The keys were not used up.
    done = decisions.decide_many(caller=who, all_or_nothing=True, items=[wanted[0], wanted[2]])
    assert [one.decided.action.state for one in done if one.decided] == ["approved", "approved"]
    again = decisions.decide_many(caller=who, all_or_nothing=True, items=[wanted[0], wanted[2]])
    assert all(one.decided is not None and one.decided.replayed for one in again)
    desk.check_story(here)


def test_all_or_nothing_settles_what_is_overdue_and_says_so(here: Desk) -> None:
    first = here.asked()
    desk.make_overdue(first)
    second = here.asked(desk.call("call-2"))
    with pytest.raises(refusals.BatchRefused) as refused:
        decisions.decide_many(caller=desk.person(), all_or_nothing=True, items=items(first, second))
    assert [one.status for one in refused.value.fields["outcomes"]] == [409, 424]
    assert [desk.fresh(one).state for one in (first, second)] == ["expired", "pending"]


def test_a_batch_has_1_to_100_decisions_about_different_actions(here: Desk) -> None:
    action = here.asked()
    twice = items(action, action)
    twice[1] = decisions.Item(str(action.pk).upper(), "another-key", "approve")
    for batch in ([], items(*[action] * 101), twice):
        with pytest.raises(Invalid):
            decisions.decide_many(caller=desk.person(), all_or_nothing=False, items=batch)
    assert desk.fresh(action).version == 1


def test_reconciling_shares_the_keys_of_decisions(here: Desk) -> None:
    action = here.asked()
    who = caller_for_user(user=factories.chief(), door="http")
    decide(who, action)
    desk.take(action)
    desk.lose(action)
    fields: dict[str, Any] = {"caller": who, "action_id": action.pk, "outcome": "done", "note": "seen"}
    with pytest.raises(refusals.KeyReused):
        decisions.reconcile(idempotency_key="click-0001", **fields)
    first = decisions.reconcile(idempotency_key="look-0001", **fields)
    again = decisions.reconcile(idempotency_key="look-0001", **fields)
    assert (first.replayed, again.replayed, again.decision) == (False, True, first.decision)
    with pytest.raises(refusals.KeyReused):
        decisions.reconcile(idempotency_key="look-0001", **(fields | {"outcome": "failed"}))


def test_who_lost_the_right_still_learns_what_their_key_did(here: Desk) -> None:
    action, who = here.asked(), desk.person()
    decide(who, action)
    user = desk.user_of(who)
    user.user_permissions.remove(*user.user_permissions.filter(codename="decide"))
    now = caller_for_user(user=type(user).objects.get(pk=user.pk), door="http")
    assert decide(now, action).replayed
    with pytest.raises(NotAllowed):
        decide(now, here.asked(desk.call("call-2")), "click-0002")
