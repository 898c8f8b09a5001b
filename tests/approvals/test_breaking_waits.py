"""What changes about the one who waits, while the answer waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streams import access, waiting
from tests.approvals.test_api_approvals import Person, agent, asked, key, person, row, runner
from tests.streams.conftest import Agent
from tests.support import factories

__all__ = ["agent", "person", "runner"]
pytestmark = pytest.mark.django_db


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Let something happen after a call's first look and before its next ones."""
    real = waiting._until

    def happens(change: Callable[[], Any]) -> None:
        async def until(again: Any, wait: Any) -> Any:
            await waiting.run(change)
            return await real(again, wait)

        monkeypatch.setattr(waiting, "_until", until)

    return happens


def approve(action: str) -> None:
    chief = Person(factories.chief())
    assert chief.decide(action, digest=row(action).digest).status == 200


def test_a_token_revoked_while_its_claim_waits_gets_nothing_to_run(
    agent: Agent, runner: Agent, meanwhile: Callable[[Callable[[], Any]], None]
) -> None:
    action = asked(agent)

    def change() -> None:
        access.revoke_token(prefix=runner.token.prefix, caller=access.COMMAND)
        approve(action)

    meanwhile(change)
    answer = runner.post("claims", {"claimId": key(), "tools": ["pay*"], "waitSeconds": 1})
    assert (answer.status, answer.body) == (200, {"claims": []})
    assert row(action).state == "approved"
    assert runner.post("claims", {"claimId": key(), "tools": ["pay*"]}).status == 401


def test_work_that_comes_while_a_claim_waits_is_taken(
    agent: Agent, runner: Agent, meanwhile: Callable[[Callable[[], Any]], None]
) -> None:
    action = asked(agent)
    meanwhile(lambda: approve(action))
    answer = runner.post("claims", {"claimId": key(), "tools": ["pay*"], "waitSeconds": 1})
    assert [one["actionId"] for one in answer.body["claims"]] == [action]


def test_a_person_who_lost_the_right_to_see_while_waiting_sees_nothing_more(
    agent: Agent, person: Person, meanwhile: Callable[[Callable[[], Any]], None]
) -> None:
    action = asked(agent)

    def change() -> None:
        person.user.user_permissions.clear()
        approve(action)

    meanwhile(change)
    answer = person.get(f"approvals/{action}?wait=1&version=1")
    assert (answer.status, answer.body["code"]) == (404, "not_found")
