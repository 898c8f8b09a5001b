"""`streams.client` against the real site: written, asked, claimed and reported once, whatever happens to the line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from approvals import decisions
from approvals.models import ApprovalRequest
from streams import access
from streams.client import Client, NotAnswered, Refused
from streams.models import AgentToken, Entry
from streams.protocol import Text
from tests.support import factories
from tests.support.processes import Server
from tests.support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(scope="module")
def server(django_db_setup: None) -> Iterator[Server]:
    with Server("uvicorn") as made:
        yield made


@pytest.fixture
def token() -> tuple[AgentToken, str]:
    return factories.agent_token()


def approve(action_id: str) -> None:
    action = ApprovalRequest.objects.get(pk=action_id)
    decisions.decide(
        caller=access.caller_for_user(user=factories.operator(), door="page"),
        action_id=action.pk,
        idempotency_key="key-approve",
        decision="approve",
        digest=action.digest,
    )


def bodies(generation_id: str) -> list[str]:
    return list(
        Entry.objects.filter(generation=generation_id, kind="chunk").order_by("offset").values_list("body", flat=True)
    )


def test_an_agent_writes_asks_waits_runs_and_reports(server: Server, token: tuple[AgentToken, str]) -> None:
    factories.policy()
    client = Client(server.url, token[1])
    writer = client.open(title="Refund")
    writer.text("I would refund it. é👩‍👩‍👧")
    action = writer.call(
        id="c1", name="own.refund", arguments={"order": 1042, "amount": Decimal("49.90"), "share": 0.1}
    )
    assert action["state"] == "pending"
    assert client.wait_decided(action["actionId"], seconds=0)["state"] == "pending"
    threading.Timer(0.2, approve, [action["actionId"]]).start()
    assert client.wait_decided(action["actionId"])["state"] == "approved"
    (claim,) = client.claim(actionId=action["actionId"])
    assert claim["argumentsText"] == '{"amount":49.9,"order":1042,"share":0.1}'
    with client.keep(claim) as should_stop:
        assert not should_stop.is_set()
    client.complete(claim["claimToken"], "done", result={"paid": Decimal("49.90")})
    settled = client.wait_settled(action["actionId"])
    assert (settled["state"], settled["result"]) == ("done", {"paid": Decimal("49.9")})
    writer.done("stop")
    kinds = [entry["chunk"]["type"] for entry in client.entries(writer.id) if "chunk" in entry]
    assert kinds == ["text", "tool_call", "tool_result", "done"]


def test_answers_that_are_lost_make_nothing_twice(server: Server, token: tuple[AgentToken, str]) -> None:
    factories.policy()
    with TcpProxy(server.port) as proxy:
        client = Client(f"http://127.0.0.1:{proxy.port}", token[1], pause=lambda seconds: None)
        proxy.cut_after_bytes(0)
        writer = client.open(title="Refund")
        for word in ("one ", "two ", "three "):
            proxy.cut_after_bytes(20)
            writer.text(word)
        proxy.cut_after_bytes(0)
        action = writer.call(id="c1", name="own.refund", arguments={"n": 1})
        approve(action["actionId"])
        proxy.cut_after_bytes(30)
        (claim,) = client.claim(actionId=action["actionId"])
        proxy.cut_after_bytes(0)
        client.complete(claim["claimToken"], "done", result="ok")
        assert proxy.cut_after is None
        assert proxy.accepted >= 12
    stored = bodies(writer.id)
    assert [word in body for word, body in zip(("one", "two", "three", "own.refund", "ok"), stored, strict=True)] == [
        True
    ] * 5
    row = ApprovalRequest.objects.get(pk=action["actionId"])
    assert (row.state, row.fence) == ("done", 1)


def test_a_refusal_is_raised_at_once_with_its_code(server: Server, token: tuple[AgentToken, str]) -> None:
    client = Client(server.url, "ags_0_wrong")
    with pytest.raises(Refused) as refused:
        client.open()
    assert (refused.value.status, refused.value.code) == (401, "not_signed_in")
    assert "ags_0_wrong" not in str(refused.value)


def test_many_chunks_go_in_as_few_calls_as_the_limits_allow(server: Server, token: tuple[AgentToken, str]) -> None:
    writer = Client(server.url, token[1]).open()
    writer.append([Text(content=f"{n} ") for n in range(2_500)])
    assert writer.seq == 2_500
    writer.append([Text(content="x" * 200_000) for _ in range(8)])
    assert len(bodies(writer.id)) == 2_508


def test_a_new_attempt_voids_what_the_last_one_said(server: Server, token: tuple[AgentToken, str]) -> None:
    client = Client(server.url, token[1])
    writer = client.open()
    writer.text("void")
    writer.start_over(superseded_from=0)
    writer.text("new")
    assert not writer.heartbeat()
    notices: list[Any] = [entry["notice"] for entry in client.entries(writer.id) if "notice" in entry]
    assert [(notice["attempt"], notice["supersededFrom"]) for notice in notices] == [(2, 0)]


def test_a_site_that_is_not_there_is_not_waited_for_without_end() -> None:
    client = Client("http://127.0.0.1:9", "t", give_up_after_seconds=0.2, pause=lambda seconds: None)
    with pytest.raises(NotAnswered):
        client.open()


def test_an_address_that_is_no_web_address_is_refused() -> None:
    with pytest.raises(ValueError, match="http"):
        Client("file:///etc/passwd", "t")
