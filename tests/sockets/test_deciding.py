"""decide over either socket, and the inbox: first page, then every change, versions only growing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from approvals import decisions
from approvals.models import ApprovalRequest, Decision
from streams import access, doorbell
from streams.protocol import ToolCall
from tests.sockets.logs import Story, story
from tests.sockets.wire import Wire, drained, never_reads, new_key, own_origin
from tests.support import factories
from tests.support.processes import Server


def ask(told: Story, call: str = "c1", tool: str = "pay", arguments: str = '{"amount":10}') -> ApprovalRequest:
    told.write(ToolCall(id=call, name=tool, arguments=arguments, index=0))
    return ApprovalRequest.objects.get(generation=told.generation, tool_call_id=call)


def asking() -> tuple[Story, ApprovalRequest]:
    factories.policy(("ls", "allow"))
    told = story("May I?")
    return told, ask(told)


class Person:
    """Somebody at a browser of this site."""

    def __init__(self, server: Server, *permissions: str) -> None:
        self.user = factories.person("", *(permissions or (factories.SEE, factories.DECIDE)))
        self.cookie = factories.session_cookie(self.user)
        self.server = server

    def opens(self, path: str) -> Wire:
        return Wire(self.server, path, cookie=self.cookie, origin=own_origin(self.server)).hello()


def until_told(inbox: Wire, action: ApprovalRequest, *, seconds: float = 10) -> dict[str, Any]:
    """Read on to the next news of this action."""
    wanted = str(action.pk)
    return inbox.until_that(
        lambda one: one["type"] == "action" and one["action"]["actionId"] == wanted, seconds=seconds
    )


def decide(wire: Wire, action: ApprovalRequest, **more: Any) -> dict[str, Any]:
    frame = {
        "requestId": "r1",
        "actionId": str(action.pk),
        "idempotencyKey": new_key(),
        "decision": "approve",
        "digest": action.digest,
        **more,
    }
    wire.send(type="decide", **{name: value for name, value in frame.items() if value is not None})
    return wire.until_that(lambda one: one["type"] in ("decided", "error"))


@pytest.mark.parametrize("door", ["run", "inbox"])
def test_a_decision_over_a_socket_is_the_same_decision(server: Server, door: str) -> None:
    told, action = asking()
    with Person(server).opens(told.path if door == "run" else "/ws/inbox/") as wire:
        key = new_key()
        answer = decide(wire, action, idempotencyKey=key)
        assert (answer["type"], answer["requestId"], answer["replayed"]) == ("decided", "r1", False)
        assert answer["decision"]["decision"] == "approve"
        assert (answer["action"]["state"], answer["action"]["arguments"]) == ("approved", {"amount": 10})
        again = decide(wire, action, idempotencyKey=key, requestId="r2")
        assert (again["requestId"], again["replayed"]) == ("r2", True)
        assert again["decision"]["id"] == answer["decision"]["id"]
    assert Decision.objects.filter(action=action, decision="approve").count() == 1
    action.refresh_from_db()
    assert action.state == "approved"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ({"idempotencyKey": None}, "idempotency_key_required"),
        ({"idempotencyKey": "short"}, "idempotency_key_invalid"),
        ({"decision": "perhaps"}, "invalid"),
        ({"actionId": "nonsense"}, "not_found"),
        ({"digest": "sha256:" + "0" * 64}, "digest_mismatch"),
        ({"arguments": [1]}, "invalid"),
        ({"decidedBy": "me"}, "invalid"),
        ({"decision": "reject", "arguments": {}}, "invalid"),
    ],
)
def test_a_refused_decision_is_an_error_with_its_request_id(uvicorn: Server, frame: dict[str, Any], code: str) -> None:
    told, action = asking()
    with Person(uvicorn).opens(told.path) as wire:
        error = decide(wire, action, **frame)
        assert (error["type"], error["requestId"], error["code"]) == ("error", "r1", code)
        action.refresh_from_db()
        assert action.state == "pending"
        assert decide(wire, action)["type"] == "decided"


def test_the_rows_of_the_decision_table_that_need_two(uvicorn: Server) -> None:
    told, action = asking()
    first, second = Person(uvicorn), Person(uvicorn)
    with first.opens(told.path) as one, second.opens("/ws/inbox/") as two:
        key = new_key()
        done = decide(one, action, idempotencyKey=key, reason="fine")
        assert done["type"] == "decided"
        reused = decide(one, action, idempotencyKey=key, reason="other")
        assert reused["code"] == "idempotency_key_reused"
        own = decide(one, action, reason="fine")
        assert (own["alreadyDecided"], own["decision"]["id"]) == (True, done["decision"]["id"])
        other = decide(two, action, idempotencyKey=key, decision="reject")
        assert other["code"] == "already_decided"
        assert other["action"]["state"] == "approved"
        assert Decision.objects.filter(action=action).count() == 1


def test_a_token_and_the_owner_of_the_asking_token_may_not_decide(uvicorn: Server) -> None:
    factories.policy(("ls", "allow"))
    owner = Person(uvicorn)
    told = story()
    told.token.owner = owner.user
    told.token.save()
    action = ask(told)
    with Wire(uvicorn, told.path, secret=told.secret).hello() as agent:
        assert decide(agent, action)["code"] == "people_only"
    with owner.opens(told.path) as wire:
        assert decide(wire, action)["code"] == "self_approval"
    with Person(uvicorn, factories.SEE).opens(told.path) as wire:
        assert decide(wire, action)["code"] == "not_allowed"
    action.refresh_from_db()
    assert action.state == "pending"


def test_a_permission_lost_a_moment_ago_decides_nothing(uvicorn: Server) -> None:
    told, action = asking()
    person = Person(uvicorn)
    with person.opens(told.path) as wire:
        wire.until("caught_up")
        person.user.user_permissions.remove(*person.user.user_permissions.filter(codename="decide"))
        assert decide(wire, action)["code"] == "not_allowed"
    action.refresh_from_db()
    assert action.state == "pending"


def test_the_run_shows_the_action_and_the_fold_of_its_notices(uvicorn: Server) -> None:
    told, action = asking()
    with Person(uvicorn).opens(told.path) as wire:
        welcome = wire.until("welcome")
        assert [one["actionId"] for one in welcome["actions"]] == [str(action.pk)]
        assert welcome["generation"]["state"] == "waiting"
        wire.until("caught_up")
        decide(wire, action)
        # The notice may come before the answer or after it.
        wire.until_offset(welcome["nextOffset"])
        notice = wire.entries[-1]["notice"]
        assert (notice["actionId"], notice["state"], notice["version"]) == (str(action.pk), "approved", 2)


def test_the_inbox_tells_every_change_once_with_growing_versions(server: Server) -> None:
    told, action = asking()
    judge = factories.operator()
    with Person(server).opens("/ws/inbox/") as wire:
        welcome = wire.until("welcome")
        assert [one["actionId"] for one in welcome["actions"]] == [str(action.pk)]
        assert welcome["counts"]["pending"] == 1
        assert welcome["asOf"].endswith("Z")
        assert "arguments" not in welcome["actions"][0]
        fresh = ask(told, "c2")
        frame = wire.until("action")
        assert (frame["action"]["actionId"], frame["action"]["version"]) == (str(fresh.pk), 1)
        assert frame["counts"]["pending"] == 2
        for one in (action, fresh):
            decisions.decide(
                caller=access.caller_for_user(user=judge, door="http"),
                action_id=one.pk,
                idempotency_key=new_key(),
                decision="reject",
                digest=one.digest,
            )
        seen = [wire.until("action")["action"] for _ in range(2)]
        assert {(one["actionId"], one["state"], one["version"]) for one in seen} == {
            (str(action.pk), "rejected", 2),
            (str(fresh.pk), "rejected", 2),
        }


def test_the_inbox_misses_nothing_when_every_ring_is_lost(uvicorn: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "ring", lambda *topics: None)
    told, _ = asking()
    with Person(uvicorn).opens("/ws/inbox/") as wire:
        wire.until("welcome")
        fresh = ask(told, "c2")
        # A change of a moment ago may come again: its version tells (contract §4).
        until_told(wire, fresh, seconds=3)


def test_a_token_sees_its_own_actions_in_the_inbox_and_no_numbers_of_others(uvicorn: Server) -> None:
    told, action = asking()
    other = story()
    with Wire(uvicorn, "/ws/inbox/", secret=told.secret).hello() as wire:
        welcome = wire.until("welcome")
        assert [one["actionId"] for one in welcome["actions"]] == [str(action.pk)]
        ask(other, "c9")
        mine = ask(told, "c2")
        frame = wire.until("action")
        assert frame["action"]["actionId"] == str(mine.pk)
        assert "counts" not in frame


def test_two_hundred_changes_come_in_order(uvicorn: Server) -> None:
    factories.policy(("ls", "allow"))
    told = story()
    with Person(uvicorn).opens("/ws/inbox/") as wire:
        wire.until("welcome")
        told.write(*[ToolCall(id=f"c{n}", name="pay", arguments="{}", index=0) for n in range(200)])
        seen = {wire.until("action", seconds=20)["action"]["actionId"] for _ in range(200)}
        assert len(seen) == 200


def test_an_inbox_that_never_reads_is_closed_and_costs_a_buffer(server: Server) -> None:
    told, _ = asking()
    agent = access.caller_for_token(secret=told.secret, door="http")
    person = Person(server)
    with (
        person.opens("/ws/inbox/") as healthy,
        never_reads(server, "/ws/inbox/", f"Cookie: sessionid={person.cookie}\r\nOrigin: {server.url}") as lazy,
    ):
        healthy.until("welcome")
        for number in range(600):
            made = decisions.request(
                caller=agent,
                idempotency_key=new_key(),
                tool="pay",
                arguments_text="{}",
                summary=f"{number}".ljust(2_000, "\N{BANKNOTE WITH DOLLAR SIGN}"),
            )
            if number % 20 == 19:
                until_told(healthy, made.action)
        said = sum(len(json.dumps(frame, ensure_ascii=False).encode()) for frame in healthy.frames)
        told_why, size = drained(lazy)
        # The kernel keeps its own two or three megabytes; the server keeps 256 KiB and then the newest of each action.
        assert size < said - 1_000_000
        assert told_why or "daphne" in server.command
    with person.opens("/ws/inbox/") as wire:
        assert wire.until("welcome")["counts"]["pending"] == 601
