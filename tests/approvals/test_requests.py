"""How a question comes to be: in a log, over a door, prepared, judged, once a key, and as a repeat of another."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest

from approvals import access, decisions, policies, refusals, represent, sweeps
from approvals.decisions import request
from approvals.models import ApprovalRequest, Decision, Policy, PolicyRule
from approvals.requesting import NoSuchToolCall
from streams import log
from streams.log import GenerationClosed
from streams.problems import Invalid, NotAllowed, NotFound, Problem, TooLarge
from streams.protocol import Text
from tests.approvals import desk
from tests.approvals.desk import Desk
from tests.support import factories

pytestmark = pytest.mark.django_db


def ask(who: Any, key: str = "asked-0001", **fields: Any) -> decisions.Requested:
    return request(caller=who, idempotency_key=key, **{"tool": "pay", "arguments_text": '{"amount":10}', **fields})


# --- the same key ---------------------------------------------------------------------------------


def test_one_key_asks_once(here: Desk) -> None:
    first, again = ask(here.agent), ask(here.agent, arguments_text='{"amount": 10.0}')
    assert (first.created, first.replayed) == (True, False)
    assert (again.created, again.replayed) == (False, True)
    assert first.action == again.action
    assert ApprovalRequest.objects.count() == 1


def test_one_key_for_another_amount_is_refused_and_the_first_stays(here: Desk) -> None:
    """C03."""
    first = ask(here.agent).action
    with pytest.raises(refusals.KeyReused) as refused:
        ask(here.agent, arguments_text='{"amount":999999}')
    assert refused.value.status == 422
    assert desk.fresh(first).arguments_text == '{"amount":10}'
    assert ApprovalRequest.objects.count() == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"tool": "other"},
        {"summary": "s"},
        {"context_text": "{}"},
        {"risk": "high"},
        {"expires_in_seconds": 5},
        {"conversation": "c"},
        {"executor": "server"},
        {"effects": "idempotent"},
    ],
)
def test_every_field_is_part_of_the_body(here: Desk, changed: dict[str, Any]) -> None:
    ask(here.agent)
    with pytest.raises(refusals.KeyReused):
        ask(here.agent, **changed)


def test_another_requesters_key_is_another_key(here: Desk) -> None:
    assert ask(here.agent).action != ask(Desk().agent).action


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tool": ""}, "tool"),
        ({"tool": "x" * 201}, "tool"),
        ({"tool": "nul\0"}, "tool"),
        ({"arguments_text": "[]"}, "arguments"),
        ({"arguments_text": '{"a":{"b":1,"b":2}}'}, "arguments.a.b"),
        ({"risk": "extreme"}, "risk"),
        ({"effects": "maybe"}, "effects"),
        ({"executor": "me"}, "executor"),
        ({"context_text": "{"}, "context"),
        ({"summary": "x" * 2_001}, "summary"),
        ({"generation_id": "nonsense"}, "generationId"),
        ({"tool_call_id": "call-1"}, "generationId"),
        *[
            ({"expires_in_seconds": value}, "expiresInSeconds")
            for value in (0, -1, "soon", 10**9, 2_592_001, 1.5, True)
        ],
    ],
)
def test_a_request_of_the_wrong_shape_names_the_place(here: Desk, changed: dict[str, Any], field: str) -> None:
    """C23 among them: an expiry of 0, -1, "soon" or 1e9."""
    with pytest.raises(Invalid) as refused:
        ask(here.agent, **changed)
    assert refused.value.fields["field"] == field
    assert ApprovalRequest.objects.count() == 0


def test_too_large_arguments_name_the_limit(here: Desk) -> None:
    with pytest.raises(TooLarge) as refused:
        ask(here.agent, arguments_text='{"a":"' + "x" * 262_144 + '"}')
    assert refused.value.fields["limit"] == 262_144


@pytest.mark.parametrize("seconds", [1, 2_592_000])
def test_a_request_may_say_how_long_it_waits(here: Desk, seconds: int) -> None:
    action = ask(here.agent, expires_in_seconds=seconds).action
    assert action.expires_at is not None
    assert action.expires_at - action.requested_at == timedelta(seconds=seconds)


# --- who may --------------------------------------------------------------------------------------


def test_agents_need_the_scope_and_people_the_permission(here: Desk) -> None:
    token, _ = factories.agent_token("generations:write")
    for who in (desk.caller(token), desk.person("streams.configure")):
        with pytest.raises(NotAllowed):
            ask(who)
    assert ask(desk.person(factories.SEE)).action.requested_by_kind == "person"


def test_nobody_asks_in_somebody_elses_generation(here: Desk) -> None:
    with pytest.raises(NotFound):
        ask(here.agent, generation_id=Desk().generation.pk)
    all_reader, _ = factories.agent_token("read:all", "approvals:request")
    with pytest.raises(NotAllowed):
        ask(desk.caller(all_reader), generation_id=here.generation.pk)


def test_a_token_sees_what_it_made_and_nothing_else(here: Desk) -> None:
    mine, theirs = here.asked(), Desk().asked()
    loose = ask(here.agent).action
    assert set(access.visible(here.agent)) == {mine, loose}
    with pytest.raises(NotFound):
        access.find(here.agent, theirs.pk)
    reader, _ = factories.agent_token("read:all")
    assert set(access.visible(desk.caller(reader))) == {mine, loose, theirs}
    claimer, _ = factories.agent_token("claims", claim_tools=["*"])
    assert not access.visible(desk.caller(claimer)).exists()
    assert set(access.visible(desk.person())) == {mine, loose, theirs}
    assert not access.visible(desk.person("streams.configure")).exists()


# --- with a generation ----------------------------------------------------------------------------


def test_a_request_with_a_generation_is_told_in_its_log_without_a_tool_result(here: Desk) -> None:
    action = ask(here.agent, generation_id=here.generation.pk).action
    assert action.conversation == here.generation.conversation
    desk.approve(action)
    desk.report(desk.take(action), "done", '"ok"')
    assert [body["type"] for body in here.entries()] == ["action"] * 4
    assert here.entries()[-1]["result"] == "ok"
    desk.check_story(here)


def test_a_request_that_names_a_call_is_the_action_that_call_made(here: Desk) -> None:
    action = here.asked()
    named = ask(here.agent, generation_id=here.generation.pk, tool_call_id="call-1", arguments_text='{"amount":1e1}')
    assert (named.action, named.created, named.replayed) == (action, False, False)
    with pytest.raises(NoSuchToolCall):
        ask(here.agent, generation_id=here.generation.pk, tool_call_id="call-9")
    for changed in ({"tool": "other"}, {"arguments_text": "{}"}):
        with pytest.raises(Problem) as refused:
            ask(here.agent, generation_id=here.generation.pk, tool_call_id="call-1", **changed)
        assert refused.value.status == 422
    for extra in ({"effects": "idempotent"}, {"risk": "low"}, {"expires_in_seconds": 9}):
        with pytest.raises(Invalid):
            ask(here.agent, generation_id=here.generation.pk, tool_call_id="call-1", **extra)
    assert ApprovalRequest.objects.count() == 1


@pytest.mark.parametrize("how", ["asked", "cancel", "error"])
def test_nothing_more_is_asked_in_a_run_that_was_cancelled_or_broke_off(here: Desk, how: str) -> None:
    if how == "asked":
        log.request_cancel(generation_id=here.generation.pk, actor=here.agent.actor)
    else:
        here.end(how)
    with pytest.raises(GenerationClosed):
        ask(here.agent, generation_id=here.generation.pk)


def test_a_call_on_its_way_when_the_cancel_came_is_kept_and_cancelled(here: Desk) -> None:
    """C12, the quiet half of it."""
    log.request_cancel(generation_id=here.generation.pk, actor=here.agent.actor)
    action = here.asked()
    assert action.state == "cancelled"
    assert [notice["state"] for notice in here.notices(action.pk)] == ["pending", "cancelled"]
    desk.check_story(here)


# --- in a log -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("", "invalid", "arguments"),
        ("[]", "invalid", "arguments"),
        ('{"a":1,"a":1}', "invalid", "arguments.a"),
        ('{"a":[1e999]}', "number_out_of_range", "arguments.a.0"),
    ],
)
def test_a_call_whose_arguments_are_not_strict_json_refuses_the_whole_append(
    here: Desk, text: str, code: str, field: str
) -> None:
    with pytest.raises(Problem) as refused:
        here.append(Text(content="now"), desk.call(arguments=text))
    assert (refused.value.status, refused.value.code, refused.value.fields["index"]) == (400, code, 1)
    assert refused.value.fields["field"] == field
    assert here.entries() == []
    assert ApprovalRequest.objects.count() == 0


def test_the_same_call_again_is_the_same_action_and_another_content_is_refused(here: Desk) -> None:
    first = here.asked()
    again = here.append(desk.call(arguments='{ "amount" : 10.0 }'))
    assert again.actions == [{"toolCallId": "call-1", "actionId": str(first.pk), "state": "pending"}]
    for other in (desk.call(tool="other"), desk.call(arguments="{}")):
        with pytest.raises(refusals.ToolCallConflict) as refused:
            here.append(Text(content="x"), other)
        assert refused.value.fields["index"] == 1
    assert ApprovalRequest.objects.count() == 1


def test_the_same_call_in_a_later_attempt_is_a_new_action_that_names_the_old(here: Desk) -> None:
    old = here.asked()
    appended = here.append(desk.call(arguments="{}"), new_attempt=True)
    new = ApprovalRequest.objects.get(pk=appended.actions[0]["actionId"])
    assert (new.previous_id, new.attempt) == (old.pk, 2)
    assert (desk.fresh(old).state, new.state) == ("cancelled", "pending")
    assert here.results() == []


def test_what_stands_before_the_superseded_part_lives_on(here: Desk) -> None:
    kept = here.asked()
    here.append(Text(content="x"))
    void = here.asked(desk.call("call-2"))
    here.append(Text(content="again"), new_attempt=True, superseded_from=2)
    assert [desk.fresh(one).state for one in (kept, void)] == ["pending", "cancelled"]
    desk.reject(kept)
    assert len(here.results()) == 1
    desk.check_story(here)


def test_a_result_of_a_gated_call_needs_a_claim(here: Desk) -> None:
    action = here.asked()
    for state in ("pending", "approved"):
        with pytest.raises(refusals.ResultNeedsClaim) as refused:
            here.append(Text(content="x"), desk.result())
        assert (refused.value.code, refused.value.fields["index"]) == ("result_needs_claim", 1)
        assert desk.fresh(action).state == state
        if state == "pending":
            desk.approve(action)
    assert here.results() == []


def test_the_first_result_of_an_allowed_call_wins(here: Desk) -> None:
    factories.policy(("pay", "allow"))
    claimed_first, own_first = here.asked(), here.asked(desk.call("call-2"))
    claimed = desk.take(claimed_first)
    with pytest.raises(refusals.AlreadyClaimed):
        here.append(desk.result())
    desk.report(claimed, "done", '"claimed"')
    with pytest.raises(refusals.AlreadyTerminal):
        here.append(desk.result())
    here.append(desk.result("call-2", '"own"'))
    with pytest.raises(refusals.AlreadyTerminal):
        desk.take(own_first)
    assert [told["result"] for told in here.results() + here.results("call-2")] == ["claimed", "own"]
    desk.check_story(here)


def test_a_result_of_no_call_is_refused_with_its_place(here: Desk) -> None:
    with pytest.raises(Invalid) as refused:
        here.append(desk.result("call-9"))
    assert refused.value.fields == {"index": 0, "field": "toolCallId"}


# --- prepared and judged --------------------------------------------------------------------------


def seven(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"currency": "EUR"} | arguments | {"amount": int(arguments["amount"])}


SCHEMA = {"type": "object", "properties": {"amount": {"type": "integer", "multipleOf": 0.5}}, "required": ["amount"]}


def test_a_person_sees_the_arguments_that_will_run(here: Desk, registering: desk.Registering) -> None:
    """C06."""
    registering("pay", schema=SCHEMA, prepare=seven)
    for action in (
        here.asked(desk.call(arguments='{"amount":"7"}')),
        ask(here.agent, arguments_text='{"amount":"7"}').action,
    ):
        assert represent.action_json(action)["argumentsText"] == '{"amount":7,"currency":"EUR"}'
        desk.approve(action, digest=action.digest)
        assert desk.take(action, digest=action.digest).arguments_text == '{"amount":7,"currency":"EUR"}'


@pytest.mark.parametrize("text", ['{"amount":"seven"}', "{}", '{"amount":[]}'])
def test_a_logs_call_that_can_not_run_is_rejected_by_the_policy_with_the_field(
    here: Desk, registering: desk.Registering, text: str
) -> None:
    registering("pay", schema=SCHEMA, prepare=None if text == "{}" else seven)
    action = here.asked(desk.call(arguments=text))
    assert (action.state, action.arguments_text) == ("rejected", text)
    (told,) = here.results()
    assert told["result"]["code"] == "rejected"
    assert "arguments" in told["result"]["reason"]
    assert Decision.objects.get(action=action).actor_kind == "policy"
    with pytest.raises(refusals.ArgumentsInvalid) as refused:
        ask(here.agent, arguments_text=text)
    assert refused.value.fields["field"].startswith("arguments")
    desk.check_story(here)


def test_the_reason_names_the_field(here: Desk, registering: desk.Registering) -> None:
    registering("pay", schema=SCHEMA)
    action = here.asked(desk.call(arguments='{"amount":"7"}'))
    assert Decision.objects.get(action=action).reason.startswith("arguments.amount: ")


def test_a_schema_of_elsewhere_is_never_fetched(here: Desk, registering: desk.Registering) -> None:
    registering("pay", schema={"$ref": "http://192.0.2.1/schema.json"})
    with pytest.raises(Exception, match=r"192\.0\.2\.1"):
        here.asked()


def test_registration_and_policy_say_what_a_call_needs(here: Desk, registering: desk.Registering) -> None:
    registering("pay", effects="idempotent", risk="low")
    factories.policy(("pay", "ask", {"risk": "critical", "expires_in_seconds": 60}), ("x*", "ask"))
    action = here.asked()
    assert (action.executor, action.effects, action.risk) == ("server", "idempotent", "critical")
    other = here.asked(desk.call("call-2", tool="xyz"))
    assert (other.executor, other.effects, other.risk) == ("agent", "at_most_once", "medium")


def test_an_agent_can_make_its_request_sound_more_dangerous_but_not_less(
    here: Desk, registering: desk.Registering
) -> None:
    registering("pay", risk="high")
    assert ask(here.agent, risk="low").action.risk == "high"
    assert ask(here.agent, "asked-0002", risk="critical").action.risk == "critical"
    assert ask(here.agent, "asked-0003", tool="unknown-tool", risk="low").action.risk == "low"
    with pytest.raises(Invalid) as refused:
        ask(here.agent, "asked-0004", effects="idempotent")
    assert refused.value.fields["field"] == "effects"


def test_what_was_decided_when_it_was_asked_is_never_worked_out_again(here: Desk) -> None:
    """C05."""
    factories.policy(("pay", "ask", {"approvals_required": 2, "approval_valid_seconds": 77}), name="then")
    action = here.asked()
    factories.policy(("pay", "allow"), name="now")
    Policy.objects.filter(name="then").delete()
    assert desk.fresh(action).approvals_required == 2
    desk.reject(action)
    with pytest.raises(refusals.Rejected):
        desk.take(action)
    shown = represent.action_json(desk.fresh(action))
    assert shown["policy"] == {"name": "then", "version": 1, "rule": "ask pay"}


@pytest.mark.sqlite  # only SQLite can be told to look away from its constraints
def test_a_rule_that_can_not_be_read_never_means_allow(here: Desk) -> None:
    from django.db import connection

    made = factories.policy(("pay", "allow"))
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA ignore_check_constraints = ON")
    PolicyRule.objects.filter(policy=made).update(verdict="alow")
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA ignore_check_constraints = OFF")
    assert here.asked().state == "pending"


def test_an_edited_policy_counts_from_the_next_question_on(here: Desk) -> None:
    made = factories.policy(("pay", "ask"))
    first = here.asked()
    policies.edited(policy_id=made.pk)
    second = here.asked(desk.call("call-2"))
    assert (first.policy_version, second.policy_version) == (1, 2)


def test_repeats_are_linked_within_the_conversation_and_the_requester_only(here: Desk) -> None:
    first = here.asked()
    assert here.asked(desk.call("call-2")).previous_id == first.pk
    assert here.asked(desk.call("call-3", arguments="{}")).previous_id is None
    other = Desk()
    assert ask(other.agent, conversation=here.generation.conversation).action.previous_id is None
    assert ask(here.agent, conversation=here.generation.conversation).action.previous_id is not None


# --- waiting --------------------------------------------------------------------------------------


def test_waiting_is_not_stale_and_a_dropped_line_is_no_answer(here: Desk) -> None:
    """C21 and C23: every periodic job runs for ten minutes, and nothing changes."""
    action = here.asked()
    expires_at = action.expires_at
    for _ in range(10):
        desk.Clock.ahead += timedelta(minutes=1)
        assert sweeps.sweep() == {"expired": 0, "leasesLost": 0, "logsEnded": 0}
    now = access.find(here.agent, action.pk)
    assert (now.state, now.version, now.expires_at) == ("pending", 1, expires_at)
    assert here.head().state == "waiting"


def test_expired_is_not_rejected(here: Desk) -> None:
    """C25."""
    expired, rejected = here.asked(), here.asked(desk.call("call-2"))
    desk.reject(rejected, reason="no")
    desk.make_overdue(expired)
    sweeps.sweep()
    assert [represent.action_json(desk.fresh(one))["state"] for one in (expired, rejected)] == ["expired", "rejected"]
    codes = [told["result"]["code"] for told in (*here.results(), *here.results("call-2"))]
    assert codes == ["expired", "rejected"]


def test_someone_guesses_an_id(here: Desk) -> None:
    """C32: what one may not see looks like what is not there."""
    action = here.asked()
    details = set()
    for action_id in (action.pk, uuid.uuid4(), "not-an-id", str(action.pk)[:-1]):
        with pytest.raises(NotFound) as refused:
            access.find(Desk().agent, action_id)
        details.add((refused.value.detail, str(refused.value.fields)))
    assert len(details) == 1


# --- shown ----------------------------------------------------------------------------------------


def test_the_whole_representation(here: Desk) -> None:
    action = ask(
        here.agent,
        summary="pay the bill",
        context_text='{"bill":1}',
        conversation="talk",
        generation_id=here.generation.pk,
    ).action
    shown = represent.action_json(action)
    assert set(shown) == {
        *("actionId", "generationId", "conversation", "tool", "arguments", "argumentsText", "digest", "state"),
        *("version", "risk", "executor", "effects", "gated", "requestedBy", "requestedAt", "expiresAt", "policy"),
        *("approvalsRequired", "decisions", "edited", "cancelRequested", "summary", "context"),
    }
    summary = represent.summary_json(action)
    assert set(shown) - set(summary) == {"arguments", "argumentsText", "context"}
    desk.approve(action, arguments_text='{"amount":1}')
    desk.report(desk.take(action), "failed", '{"why":"no money"}')
    after = represent.action_json(desk.fresh(action))
    assert set(after) - set(shown) == {
        *("originalArgumentsText", "originalDigest", "approvedUntil", "execution", "result", "isError")
    }
    assert set(after["execution"]) == {"fence", "executor", "startedAt", "leaseExpiresAt", "finishedAt"}
    assert (after["arguments"], after["edited"], after["isError"]) == ({"amount": 1}, True, True)
    assert represent.summary_json(desk.fresh(action))["state"] == "failed"
