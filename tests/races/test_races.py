"""Races with threads and real connections. SQLite has one writer, so only PostgreSQL can show these."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from approvals import claims, deadlines, decisions, refusals
from approvals.claims import Claimant
from approvals.decisions import Decided
from approvals.models import ApprovalRequest, Claim, Decision
from streams import clock, log
from streams.problems import Conflict, Problem
from streams.protocol import Text
from tests.approvals import desk
from tests.approvals.desk import Desk
from tests.support import factories, in_threads

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


def approving(who: Any, action: ApprovalRequest, key: str) -> Callable[[], Decided]:
    return lambda: decisions.decide(caller=who, action_id=action.pk, idempotency_key=key, decision="approve")


def test_fifty_decisions_with_one_key_are_one_decision_and_one_answer() -> None:
    here = Desk()
    action, who = here.asked(), desk.person()
    answers = in_threads(approving(who, action, "one-click"), times=50)
    assert all(isinstance(answer, Decided) for answer in answers), answers
    assert {answer.decision.pk for answer in answers} == {Decision.objects.get(action=action).pk}
    assert sum(not answer.replayed for answer in answers) == 1
    assert desk.fresh(action).version == 2
    desk.check_story(here)


def test_fifty_different_keys_of_one_person_count_once() -> None:
    here = Desk()
    action, who = here.asked(), desk.person()
    answers = in_threads(*[approving(who, action, f"click-{n:04}") for n in range(50)])
    assert all(isinstance(answer, Decided) for answer in answers), answers
    assert sum(not answer.already_decided for answer in answers) == 1
    assert Decision.objects.filter(action=action).count() == 1
    desk.check_story(here)


def test_fifty_people_at_once_make_one_decision() -> None:
    here = Desk()
    action, people = here.asked(), [desk.person() for _ in range(50)]
    answers = in_threads(*[approving(who, action, "same-key-1") for who in people])
    won = [answer for answer in answers if isinstance(answer, Decided)]
    lost = [answer for answer in answers if isinstance(answer, refusals.AlreadyDecided)]
    assert (len(won), len(lost)) == (1, 49), answers
    assert all(refusal.fields["decision"]["actor"]["name"] == won[0].decision.actor_name for refusal in lost)
    assert Decision.objects.filter(action=action).count() == 1
    desk.check_story(here)


def test_ten_votes_at_once_are_ten_versions() -> None:
    factories.policy(("pay", "ask", {"approvals_required": 10}))
    here = Desk()
    action = here.asked()
    answers = in_threads(*[approving(desk.person(), action, "same-key-1") for _ in range(10)])
    assert all(isinstance(answer, Decided) for answer in answers), answers
    assert (desk.fresh(action).state, desk.fresh(action).version) == ("approved", 11)
    desk.check_story(here)


def test_one_key_for_two_actions_at_once_is_used_for_one() -> None:
    who = desk.person()
    for _ in range(10):
        one, other, key = Desk().asked(), Desk().asked(), desk.key()
        answers = in_threads(approving(who, one, key), approving(who, other, key))
        assert sorted(type(answer).__name__ for answer in answers) == ["Decided", "KeyReused"]
        assert Decision.objects.filter(idempotency_key=key).count() == 1


def test_one_request_key_at_once_is_one_question() -> None:
    here = Desk()
    ask = lambda: decisions.request(  # noqa: E731
        caller=here.agent, idempotency_key="ask-once-1", tool="pay", arguments_text="{}"
    )
    answers = in_threads(ask, times=20)
    assert sum(answer.created for answer in answers) == 1
    assert ApprovalRequest.objects.count() == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancel_in_the_same_instant_as_an_approve_has_one_story() -> None:
    """C12, 200 times: never a cancelled generation with an action that can still be claimed."""
    who, token = desk.person(), factories.agent_token()[0]
    ended: collections.Counter[str] = collections.Counter()
    for round in range(200):
        here = Desk(token=token)
        action = here.asked()
        cancel = (
            (lambda here=here: log.request_cancel(generation_id=here.generation.pk, actor=who.actor))
            if round % 2
            else (lambda here=here, action=action: decisions.cancel(caller=here.agent, action_id=action.pk))
        )
        approve, cancelled = in_threads(approving(who, action, desk.key()), cancel)
        assert isinstance(approve, Decided | refusals.Cancelled), approve
        assert not isinstance(cancelled, Exception), cancelled
        now = desk.fresh(action)
        assert now.state == "cancelled"
        with pytest.raises(refusals.Cancelled):
            desk.take(now)
        assert [notice["state"] for notice in here.notices(action.pk)][-1] == "cancelled"
        assert len(here.results()) == 1
        ended[type(approve).__name__] += 1
        desk.check_story(here)
    assert set(ended) <= {"Decided", "Cancelled"}


def test_an_expiry_and_a_decision_at_the_same_instant_have_one_story(monkeypatch: pytest.MonkeyPatch) -> None:
    who, token = desk.person(), factories.agent_token()[0]
    for round in range(30):
        here = Desk(token=token)
        action = here.asked()
        soon = clock.now() + timedelta(milliseconds=round % 6)
        ApprovalRequest.objects.filter(pk=action.pk).update(expires_at=soon)
        answer, _ = in_threads(approving(who, action, desk.key()), decisions.expire_due)
        now = desk.fresh(action)
        if isinstance(answer, Decided):
            assert now.state == "approved"
            assert Decision.objects.get(action=action).at < soon
        else:
            assert isinstance(answer, refusals.Expired), answer
            assert now.state == "expired"
            assert now.expires_at == soon
        assert (now.version, here.head().open_actions) == (2, int(now.state == "approved"))


def test_twenty_claims_of_one_action_are_one_run() -> None:
    here = Desk()
    action = here.asked()
    desk.approve(action)
    who = desk.runner()
    answers = in_threads(
        *[lambda n=n: claims.claim(claimant=who, claim_id=f"claim-{n}", action_id=action.pk) for n in range(20)]
    )
    won = [answer for answer in answers if isinstance(answer, list)]
    assert len(won) == 1
    assert all(isinstance(answer, refusals.AlreadyClaimed) for answer in answers if not isinstance(answer, list))
    assert Claim.objects.count() == 1
    desk.check_story(here)


def test_one_claim_id_at_once_is_one_claim() -> None:
    here = Desk()
    for n in range(8):
        desk.approve(here.asked(desk.call(f"call-{n}")))
    who = desk.runner()
    answers = in_threads(lambda: claims.claim(claimant=who, claim_id="claim-1", tools=["pay"]), times=10)
    assert all(answer == answers[0] for answer in answers), answers
    assert Claim.objects.count() == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("logs", [1, 40])
def test_eight_workers_empty_the_list_while_the_logs_are_written(logs: int) -> None:
    """Nobody starves, nobody waits in a circle, nothing runs twice; with one hot log and with many."""
    who, token = desk.person(), factories.agent_token()[0]
    desks = [Desk(token=token) for _ in range(logs)]
    for n in range(200):
        action = desks[n % logs].asked(desk.call(f"call-{n}"))
        decisions.decide(caller=who, action_id=action.pk, idempotency_key=desk.key(), decision="approve")
    runner, stop = desk.runner(), threading.Event()
    done: collections.Counter[int] = collections.Counter()
    effects: collections.Counter[str] = collections.Counter()

    def work(worker: int) -> None:
        turn = 0
        deadline = time.monotonic() + 240
        while not stop.is_set():
            assert time.monotonic() < deadline, f"worker {worker} starves"
            turn += 1
            for claimed in claims.claim(claimant=runner, claim_id=f"{worker}-{turn}", tools=["pay"], max_claims=2):
                effects[claimed.effect_key] += 1
                claims.complete(claim_token=claimed.claim_token, outcome="done", result_text="1", claimant=runner)
                done[worker] += 1
                if sum(done.values()) == 200:
                    stop.set()

    def write(here: Desk) -> None:
        while not stop.is_set():
            here.append(Text(content="meanwhile"))

    answers = in_threads(
        *[lambda worker=worker: work(worker) for worker in range(8)],
        *[lambda here=here: write(here) for here in desks[:2]],
    )
    assert [answer for answer in answers if answer is not None] == []
    assert (len(effects), max(effects.values())) == (200, 1)
    assert len(done) == 8, f"a worker got nothing: {done}"
    assert ApprovalRequest.objects.filter(state="done").count() == 200
    for here in desks:
        desk.check_story(here)


def test_a_report_and_the_reaper_at_the_same_instant_have_one_story() -> None:
    token = factories.agent_token()[0]
    for _ in range(20):
        here = Desk(token=token)
        action = here.asked()
        desk.approve(action)
        claimed = desk.take(action)
        ApprovalRequest.objects.filter(pk=action.pk).update(lease_expires_at=clock.now() - timedelta(seconds=1))
        in_threads(lambda claimed=claimed: desk.report(claimed), claims.reap_lost)
        # Whoever came first: a report with the newest fence always counts.
        assert desk.fresh(action).state == "done"
        assert len(here.results()) == 1


def test_a_heartbeat_and_the_reaper_at_the_same_instant_agree() -> None:
    here = Desk()
    for n in range(20):
        action = here.asked(desk.call(f"call-{n}"))
        desk.approve(action)
        claimed, runner = desk.take(action), desk.runner()
        soon = clock.now() + timedelta(milliseconds=n % 5)
        ApprovalRequest.objects.filter(pk=action.pk).update(lease_expires_at=soon)

        def beat(claimed: claims.Claimed = claimed, runner: Claimant = runner) -> claims.Beat:
            return claims.heartbeat(claim_token=claimed.claim_token, lease_seconds=60, claimant=runner)

        kept, _ = in_threads(beat, claims.reap_lost)
        now = desk.fresh(action)
        assert now.state == ("executing" if isinstance(kept, claims.Beat) else "unknown"), kept


class Holding:
    """Another transaction that keeps a row locked until told to let go."""

    def __init__(self, lock: Callable[[], object]) -> None:
        self.held, self.let_go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._hold, args=(lock,))

    def _hold(self, lock: Callable[[], object]) -> None:
        with transaction.atomic():
            lock()
            self.held.set()
            self.let_go.wait(30)
        connections.close_all()

    def __enter__(self) -> Holding:
        self.thread.start()
        assert self.held.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.thread.join(30)


def test_a_first_call_still_in_its_transaction_is_waited_for_two_seconds_at_most() -> None:
    here = Desk()
    action, who = here.asked(), desk.person()
    row = ApprovalRequest.objects.select_for_update().filter(pk=action.pk)
    with Holding(lambda: list(row)):
        began = time.monotonic()
        with pytest.raises(Conflict) as refused:
            decisions.decide(caller=who, action_id=action.pk, idempotency_key="click-0001", decision="approve")
        waited = time.monotonic() - began
    assert (refused.value.code, refused.value.fields["retryAfterSeconds"]) == ("in_flight", 1)
    assert 1.9 < waited < 4
    assert not approving(who, action, "click-0001")().replayed


def test_a_hot_log_keeps_nobody_from_claiming_elsewhere() -> None:
    busy, calm = Desk(), Desk()
    for here in (busy, calm):
        desk.approve(here.asked())
    from streams.models import Generation

    row = Generation.objects.select_for_update().filter(pk=busy.generation.pk)
    with Holding(lambda: list(row)):
        (claimed,) = claims.claim(claimant=desk.runner(), claim_id="claim-1", tools=["pay"])
    assert ApprovalRequest.objects.get(pk=claimed.action_id).generation_id == calm.generation.pk


def test_two_batches_over_the_same_actions_in_opposite_order_do_not_wait_in_a_circle() -> None:
    desks = [Desk() for _ in range(6)]
    actions = [here.asked() for here in desks]

    def batch(order: list[ApprovalRequest], key: str) -> Callable[[], object]:
        who = desk.person()
        items = [decisions.Item(action.pk, f"{key}-{n:08}", "approve") for n, action in enumerate(order)]
        return lambda: decisions.decide_many(caller=who, all_or_nothing=True, items=items)

    answers = in_threads(batch(actions, "there"), batch(actions[::-1], "back"))
    refused = [answer for answer in answers if isinstance(answer, Problem)]
    assert [refusal.code for refusal in refused] == ["batch_refused"]
    assert Decision.objects.count() == 6


def test_whoever_settles_first_the_clock_strikes_once() -> None:
    here = Desk()
    action = here.asked()
    ApprovalRequest.objects.filter(pk=action.pk).update(expires_at=clock.now() - timedelta(seconds=1))
    answers = in_threads(lambda: deadlines.settle(action_id=action.pk), times=10)
    assert sorted(answers) == [False] * 9 + [True]
    assert desk.fresh(action).version == 2
