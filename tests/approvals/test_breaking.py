"""Found by trying to break it: each test is the way a stranger got through, and fails without its mend."""

from __future__ import annotations

import time
from typing import Any

import pytest

from approvals import access, claimants, claims, deadlines, decisions, history, refusals, settling
from approvals.canonical import MAX_TEXT_BYTES
from approvals.models import ApprovalRequest, AuditEvent
from streams import log
from streams.problems import Invalid
from tests.approvals import desk
from tests.approvals.desk import Desk
from tests.support import factories

pytestmark = pytest.mark.django_db


# --- a call on its way when the cancel came --------------------------------------------------------


@pytest.mark.parametrize("verdict", ["deny", "ask", "allow"])
def test_a_call_on_its_way_when_the_cancel_came_never_breaks_the_append(here: Desk, verdict: str) -> None:
    """C12: what policy had denied is no less over because the run was cancelled."""
    factories.policy(("pay", verdict))
    log.request_cancel(generation_id=here.generation.pk, actor=here.agent.actor)
    action = here.asked()
    assert action.state == ("rejected" if verdict == "deny" else "cancelled")
    here.end()
    desk.check_story(here)


# --- keys of a batch ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "", 7, ["a"], "short", "\u00e9" * 9])
def test_a_batch_with_a_key_that_is_none_is_refused_and_audited(here: Desk, key: Any) -> None:
    action = here.asked()
    with pytest.raises(refusals.BatchRefused) as refused:
        decisions.decide_many(
            caller=desk.person(), all_or_nothing=True, items=[decisions.Item(action.pk, key, "approve")]
        )
    assert refused.value.fields["outcomes"][0].status == 400
    assert AuditEvent.objects.get(kind="decision_refused").action_id == action.pk
    assert desk.fresh(action).state == "pending"


def test_one_action_written_in_two_ways_is_still_one(here: Desk) -> None:
    action = here.asked()
    items = [
        decisions.Item(str(action.pk), desk.key(), "approve"),
        decisions.Item(f"{{{action.pk}}}", desk.key(), "reject"),
    ]
    with pytest.raises(Invalid):
        decisions.decide_many(caller=desk.person(), all_or_nothing=False, items=items)
    assert desk.fresh(action).state == "pending"


# --- what may have run ----------------------------------------------------------------------------


def lost_once(here: Desk, registering: desk.Registering) -> tuple[ApprovalRequest, claims.Claimed]:
    """An idempotent call whose executor vanished: its effect may have happened."""
    registering("send", effects="idempotent")
    action = here.asked(desk.call(tool="send"))
    desk.approve(action)
    claimed = desk.take(action)
    desk.lose(action)
    assert desk.fresh(action).state == "approved"
    return action, claimed


def test_what_may_have_run_is_never_called_expired(here: Desk, registering: desk.Registering) -> None:
    """The model would believe that nothing happened, and ask for the same again under a new effect key."""
    action, claimed = lost_once(here, registering)
    desk.make_overdue(action)
    assert access.find(here.agent, action.pk).state == "unknown"
    assert here.results() == []
    desk.check_story(here)
    assert desk.report(claimed, "done", '"it had run"').state == "done"
    assert [told["result"] for told in here.results()] == ["it had run"]


@pytest.mark.parametrize("how", ["cancel", "generation", "superseded", "error"])
def test_what_may_have_run_is_never_called_cancelled(here: Desk, registering: desk.Registering, how: str) -> None:
    action, claimed = lost_once(here, registering)
    if how == "cancel":
        settling.cancel(caller=here.agent, action_id=action.pk)
    elif how == "generation":
        log.request_cancel(generation_id=here.generation.pk, actor=here.agent.actor)
    elif how == "superseded":
        from streams.protocol import Text

        here.append(Text(content="again"), new_attempt=True)
    else:
        here.end("error")
    assert desk.fresh(action).state == "unknown"
    with pytest.raises(refusals.Unknown):
        desk.take(action)
    desk.check_story(here)
    assert desk.report(claimed, "done", '"it had run"').state == "done"


def test_what_the_lost_run_says_did_not_start_may_expire(here: Desk, registering: desk.Registering) -> None:
    action, claimed = lost_once(here, registering)
    desk.report(claimed, "not_started")
    desk.make_overdue(action)
    assert access.find(here.agent, action.pk).state == "expired"
    desk.check_story(here)


def test_a_run_that_did_not_start_proves_nothing_about_the_lost_one_before(
    here: Desk, registering: desk.Registering
) -> None:
    action, _ = lost_once(here, registering)
    second = desk.take(action)
    settling.cancel(caller=here.agent, action_id=action.pk)
    assert desk.report(second, "not_started").state == "unknown"
    desk.check_story(here)


def test_the_fifth_run_that_did_not_start_proves_nothing_about_a_lost_one(
    here: Desk, registering: desk.Registering
) -> None:
    action, _ = lost_once(here, registering)
    for _ in range(4):
        claimed = desk.take(action)
        state = desk.report(claimed, "not_started").state
    assert state == "unknown"
    desk.check_story(here)


# --- patterns -------------------------------------------------------------------------------------


def test_no_pattern_of_a_claim_can_make_it_slow(here: Desk) -> None:
    """Within a claim's transaction, so on SQLite nobody else could have written meanwhile."""
    registered = "a" * 60
    factories.policy(("*", "allow"))
    action = here.asked(desk.call(tool=registered))
    began = time.monotonic()
    patterns = ["*a" * 12 + "b", "*" * 40 + "b"]
    assert claims.claim(claimant=desk.runner(), claim_id=desk.key(), tools=patterns) == []
    assert time.monotonic() - began < 5
    assert desk.fresh(action).state == "approved"


@pytest.mark.parametrize(
    ("pattern", "tool"),
    [
        ("a*b?c", "axxbyc"),
        ("a*b?c", "abbc"),
        ("pay?", "pay\n"),
        ("pay?", "payx\n"),
        ("p*y", "p\ny"),
        ("a*a", "a"),
        ("*a*", "bab"),
    ],
)
def test_the_database_reads_a_pattern_as_the_policy_does(here: Desk, pattern: str, tool: str) -> None:
    from approvals import policy

    factories.policy(("*", "allow"))
    action = here.asked(desk.call(tool=tool))
    found = ApprovalRequest.objects.filter(claimants.tool_named([pattern]), pk=action.pk).exists()
    assert found == policy.matches(pattern, tool)


# --- what is past its time ------------------------------------------------------------------------


def test_one_action_that_can_not_be_settled_keeps_no_other_from_it(
    here: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = here.asked(), here.asked(desk.call("call-2"))
    desk.make_overdue(first)
    desk.make_overdue(second)
    real = deadlines.expire

    def expire(held: Any, action: ApprovalRequest) -> None:
        if action.pk == first.pk:
            raise RuntimeError("a fault of ours")
        real(held, action)

    monkeypatch.setattr(deadlines, "expire", expire)
    assert decisions.expire_due() == 1
    assert [desk.fresh(one).state for one in (first, second)] == ["pending", "expired"]
    assert "can't be settled" in caplog.text


def test_a_request_that_names_a_call_past_its_time_finds_it_expired(here: Desk) -> None:
    action = here.asked()
    desk.make_overdue(action)
    named = desk.request(here.agent, generation_id=here.generation.pk, tool_call_id="call-1")
    assert named.state == "expired"


# --- results of every size ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["large", "deep"])
def test_the_largest_and_deepest_result_of_an_edited_call_can_be_told_to_the_model(here: Desk, kind: str) -> None:
    action = here.asked()
    if kind == "large":
        arguments = '{"a":"' + "x" * (MAX_TEXT_BYTES - 8) + '"}'
        text = '"' + "y" * (MAX_TEXT_BYTES - 2) + '"'
    else:
        arguments = '{"a":' + "[" * 63 + "]" * 63 + "}"
        text = "[" * 64 + "]" * 64
    desk.approve(action, arguments_text=arguments)
    desk.report(desk.take(action), "done", text)
    rows = history.read(generation_id=here.generation.pk)
    told = history.tell(before=(), rows=rows)
    assert told.open_calls == ()
    assert told.messages[-1].content.endswith(f'"result":{text}}}')
