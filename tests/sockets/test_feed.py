"""The inbox's reader of changes: an id that is given before another and commits after it is not lost (C42)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection, transaction

from approvals import decisions, feed
from approvals.models import ApprovalRequest, AuditEvent
from streams import access
from tests.sockets.logs import story
from tests.sockets.test_deciding import Person, ask, until_told
from tests.sockets.wire import new_key
from tests.support import factories
from tests.support.polling import eventually
from tests.support.processes import Server

pytestmark = pytest.mark.postgres


def reject(action: ApprovalRequest) -> None:
    decisions.decide(
        caller=access.caller_for_user(user=factories.operator(), door="http"),
        action_id=action.pk,
        idempotency_key=new_key(),
        decision="reject",
        digest=action.digest,
    )


def two() -> tuple[ApprovalRequest, ApprovalRequest]:
    """Make two questions in two logs, whose decisions lock nothing in common."""
    factories.policy(("ls", "allow"))
    return ask(story("a")), ask(story("b"))


@contextmanager
def undecided_commit(action: ApprovalRequest, *, keep: bool = True) -> Iterator[threading.Event]:
    """Reject `action` in a transaction that ends when the event is set, by a commit unless told otherwise."""
    written, end = threading.Event(), threading.Event()

    def slowly() -> None:
        try:
            with transaction.atomic():
                reject(action)
                written.set()
                assert end.wait(60)
                transaction.set_rollback(not keep)
        finally:
            connection.close()

    thread = threading.Thread(target=slowly)
    thread.start()
    try:
        assert written.wait(20)
        yield end
    finally:
        end.set()
        thread.join(20)


def states(news: feed.News) -> dict[str, int]:
    return {str(change.action_id): change.version for change in news.changes}


def test_a_change_that_commits_after_a_later_one_reaches_the_inbox(server: Server, transactional_db: None) -> None:
    first, second = two()
    with Person(server).opens("/ws/inbox/") as wire:
        wire.until("welcome")
        with undecided_commit(first) as end:
            reject(second)
            seen = wire.until_that(lambda one: one["type"] == "action" and one["action"]["state"] == "rejected")
            assert seen["action"]["actionId"] == str(second.pk)
            # The reader has passed the missing id, and looks again each second.
            for _ in range(2):
                wire.until("heartbeat")
            assert ApprovalRequest.objects.get(pk=first.pk).state == "pending"
            end.set()
            seen = until_told(wire, first, seconds=5)
            assert (seen["action"]["state"], seen["action"]["version"]) == ("rejected", 2)


def test_a_gap_is_waited_for_as_long_as_its_transaction_runs(transactional_db: None) -> None:
    first, second = two()
    place = feed.start(0.0)
    with undecided_commit(first) as end:
        reject(second)
        assert states(feed.read(place, 1.0, [])) == {str(second.pk): 2}
        assert place.gaps
        assert states(feed.read(place, 1_000.0, [])) == {}
        assert place.gaps
        end.set()
        assert eventually(lambda: states(feed.read(place, 1_001.0, []))) == {str(first.pk): 2}
        assert not place.gaps


def test_what_was_open_when_the_reader_started_is_told_when_it_commits(transactional_db: None) -> None:
    first, second = two()
    with undecided_commit(first) as end:
        reject(second)
        place = feed.start(0.0)
        assert place.gaps
        assert states(feed.read(place, 1_000.0, [])) == {}
        end.set()
        assert eventually(lambda: states(feed.read(place, 1_001.0, []))) == {str(first.pk): 2}


def test_a_gap_that_was_rolled_back_is_given_up(transactional_db: None) -> None:
    first, second = two()
    place = feed.start(0.0)
    with undecided_commit(first, keep=False):
        reject(second)
        feed.read(place, 1.0, [])
        assert place.gaps
    feed.read(place, 2.0, [])
    assert place.gaps, "a transaction may have taken its id a moment before it shows"
    eventually(lambda: (feed.read(place, 1_000.0, []), not place.gaps)[1])
    assert AuditEvent.objects.filter(action=first, version=2).count() == 0
