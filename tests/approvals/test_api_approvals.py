"""Approval requests over HTTP (contract §5): what each call takes and answers. The rules are proven at the verbs."""

from __future__ import annotations

import itertools
import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from approvals.models import ApprovalRequest, AuditEvent, Claim, Decision
from streams import clock
from streams.models import Entry
from tests.streams.conftest import Agent, Answer
from tests.support import factories

pytestmark = pytest.mark.django_db
_keys = itertools.count(1)
SAFE = ("GET", "HEAD", "OPTIONS")


def key() -> str:
    return f"http-key-{next(_keys):06}"


class Person:
    """Somebody signed in with a browser."""

    def __init__(self, user: User) -> None:
        self.user, self.client = user, Client()
        self.client.force_login(user)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        response = self.client.generic(
            method,
            f"/api/v1/{path}",
            b"" if body is None else json.dumps(body).encode(),
            content_type="application/json",
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        is_json = response.content and "json" in response.headers.get("Content-Type", "")
        return Answer(
            response.status_code, response.headers, json.loads(response.content) if is_json else None, response.content
        )

    def get(self, path: str) -> Answer:
        return self.call("GET", path)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.call("POST", path, body, **headers)

    def decide(self, action: str, decision: str = "approve", **fields: Any) -> Answer:
        body = {"idempotencyKey": key(), "decision": decision, **fields}
        return self.post(f"approvals/{action}/decision", body)


@pytest.fixture
def agent() -> Agent:
    return Agent(*factories.agent_token())


@pytest.fixture
def person() -> Person:
    return Person(factories.operator())


@pytest.fixture
def runner() -> Agent:
    return Agent(*factories.agent_token("claims", claim_tools=["pay*"]))


def request(agent: Agent, idempotency_key: str = "", **body: Any) -> Answer:
    sent = {"tool": "pay", "arguments": {"amount": 10}, **body}
    return agent.post("approvals", sent, Idempotency_Key=idempotency_key or key())


def asked(agent: Agent, **body: Any) -> str:
    answer = request(agent, **body)
    assert answer.status == 201, answer.body
    return str(answer.body["actionId"])


def row(action: str) -> ApprovalRequest:
    return ApprovalRequest.objects.get(pk=action)


# --- asking -------------------------------------------------------------------------------------------------------


def test_a_request_is_made_once_a_key_and_its_arguments_stay_exact(agent: Agent) -> None:
    """C03 too: the same key with another amount is 422 and changes nothing."""
    sent = b'{"tool":"pay","arguments":{"z":9007199254740993,"a":0.1000000000000000055,"m":4900.0}}'
    first = agent.post("approvals", raw=sent, Idempotency_Key="the-key-1")
    again = agent.post("approvals", raw=sent, Idempotency_Key="the-key-1")
    assert (first.status, again.status) == (201, 200)
    assert (first.headers.get("Idempotent-Replayed"), again.headers["Idempotent-Replayed"]) == (None, "true")
    assert again.body == first.body
    assert first.body["argumentsText"] == '{"a":0.1000000000000000055,"m":4900,"z":9007199254740993}'
    assert b'"arguments":{"a":0.1000000000000000055,"m":4900,"z":9007199254740993}' in first.raw
    assert first.body["digest"].startswith("sha256:")
    assert first.body["requestedBy"] == {"kind": "token", "id": agent.token.prefix, "name": agent.token.name}
    other = agent.post("approvals", raw=sent.replace(b"4900.0", b"4901"), Idempotency_Key="the-key-1")
    assert (other.status, other.body["code"]) == (422, "idempotency_key_reused")
    assert row(first.body["actionId"]).arguments_text == first.body["argumentsText"]
    assert ApprovalRequest.objects.count() == 1


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (None, "idempotency_key_required"),
        ("short", "idempotency_key_invalid"),
        ("a" * 256, "idempotency_key_invalid"),
        ("with space", "idempotency_key_invalid"),
    ],
)
def test_a_request_needs_a_good_key(agent: Agent, sent: str | None, code: str) -> None:
    headers = {} if sent is None else {"Idempotency_Key": sent}
    answer = agent.post("approvals", {"tool": "pay", "arguments": {}}, **headers)
    assert (answer.status, answer.body["code"]) == (400, code)
    assert not ApprovalRequest.objects.exists()


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"tool": ""}, 400, "tool"),
        ({"tool": "t" * 201}, 400, "tool"),
        ({"arguments": []}, 400, "arguments"),
        ({"arguments": None}, 400, "arguments"),
        ({"arguments": "{}"}, 400, "arguments"),
        ({"arguments": {"a": "x" * 262_144}}, 413, "arguments"),
        ({"expiresInSeconds": 0}, 400, "expiresInSeconds"),
        ({"expiresInSeconds": -1}, 400, "expiresInSeconds"),
        ({"expiresInSeconds": "soon"}, 400, "expiresInSeconds"),
        ({"expiresInSeconds": 1e9}, 400, "expiresInSeconds"),
        ({"expiresInSeconds": 2_592_001}, 400, "expiresInSeconds"),
        ({"expiresInSeconds": True}, 400, "expiresInSeconds"),
        ({"risk": "enormous"}, 400, "risk"),
        ({"effects": "maybe"}, 400, "effects"),
        ({"executor": "me"}, 400, "executor"),
        ({"generationId": "x"}, 400, "generationId"),
        ({"generationId": str(uuid.uuid4())}, 404, None),
        ({"toolCallId": "call-1"}, 400, "generationId"),
        ({"state": "approved"}, 400, "state"),
        ({"approved": True}, 400, "approved"),
        ({"decidedBy": "root"}, 400, "decidedBy"),
        ({"requestedBy": {"kind": "person"}}, 400, "requestedBy"),
    ],
)
def test_a_bad_request_is_refused_with_its_place(
    agent: Agent, body: dict[str, Any], status: int, field: str | None
) -> None:
    """C23 and C32: times that are none, and members that would decide."""
    answer = request(agent, **body)
    assert (answer.status, answer.body.get("field")) == (status, field), answer.body
    assert not ApprovalRequest.objects.exists()


def test_arguments_may_be_64_deep_and_no_deeper(agent: Agent) -> None:
    def nested(depth: int) -> bytes:
        return b'{"tool":"pay","arguments":' + b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1) + b"}"

    assert agent.post("approvals", raw=nested(64), Idempotency_Key=key()).status == 201
    for depth in (65, 66, 80, 5_000):
        answer = agent.post("approvals", raw=nested(depth), Idempotency_Key=key())
        assert (answer.status, answer.body["code"]) == (400, "invalid"), depth
    assert ApprovalRequest.objects.count() == 1


def test_a_call_of_a_log_is_named_and_not_asked_twice(agent: Agent) -> None:
    log_id = agent.post("generations", {}).body["id"]
    call = {"type": "tool_call", "id": "c1", "name": "pay", "arguments": '{"amount": 10.0}', "index": 0}
    appended = agent.post(f"generations/{log_id}/chunks", {"attempt": 1, "seq": 0, "chunks": [call]})
    (made,) = appended.body["actions"]
    assert (made["toolCallId"], made["state"]) == ("c1", "pending")
    named = request(agent, generationId=log_id, toolCallId="c1")
    assert (named.status, named.body["actionId"]) == (200, made["actionId"])
    for body, status, code in (
        ({"toolCallId": "c2"}, 404, "no_such_tool_call"),
        ({"toolCallId": "c1", "arguments": {"amount": 11}}, 422, "tool_call_conflict"),
        ({"toolCallId": "c1", "risk": "low"}, 400, "invalid"),
    ):
        answer = request(agent, generationId=log_id, **body)
        assert (answer.status, answer.body["code"]) == (status, code)
    shown = agent.get(f"generations/{log_id}").body
    assert [one["actionId"] for one in shown["actions"]] == [made["actionId"]]
    assert (shown["state"], shown["openActions"]) == ("waiting", 1)
    assert ApprovalRequest.objects.count() == 1


def test_people_may_ask_too_and_not_decide_what_they_asked(person: Person) -> None:
    answer = person.post("approvals", {"tool": "pay", "arguments": {}}, Idempotency_Key=key())
    assert (answer.status, answer.body["requestedBy"]["kind"]) == (201, "person")
    refused = person.decide(answer.body["actionId"], digest=answer.body["digest"])
    assert (refused.status, refused.body["code"]) == (403, "self_approval")
    stranger = Person(factories.person())
    assert stranger.post("approvals", {"tool": "pay", "arguments": {}}, Idempotency_Key=key()).status == 403
    assert row(answer.body["actionId"]).state == "pending"


# --- sight, lists, waits ------------------------------------------------------------------------------------------


def test_what_one_may_not_see_looks_like_what_is_not_there(agent: Agent, person: Person) -> None:
    """C32: a guessed id, over every call that takes one."""
    action = asked(agent)
    strangers: list[Any] = [Agent(*factories.agent_token()), Person(factories.person())]
    decision = {"idempotencyKey": key(), "decision": "approve"}
    note = {"idempotencyKey": key(), "outcome": "done", "note": "n"}
    for stranger in strangers:
        for method, suffix, body in (
            ("GET", "", None), ("POST", "/decision", decision), ("POST", "/cancel", {}), ("POST", "/reconcile", note)
        ):  # fmt: skip
            unseen = stranger.call(method, f"approvals/{action}{suffix}", body)
            absent = stranger.call(method, f"approvals/{uuid.uuid4()}{suffix}", body)
            broken = stranger.call(method, f"approvals/x%00{suffix}", body)
            assert unseen.status == 404, (suffix, unseen.body)
            assert unseen.body == absent.body == broken.body
    assert Agent(*factories.agent_token("read:all")).get(f"approvals/{action}").status == 200
    assert person.get(f"approvals/{action}").status == 200
    assert Agent(*factories.agent_token()).get("approvals").body == {"results": [], "next": None}
    assert Person(factories.person()).get("approvals").status == 403
    assert row(action).version == 1


def test_the_list_filters_and_goes_on_by_cursor(agent: Agent, person: Person) -> None:
    names = ["pay", "mail", "pay", "ls", "pay"]
    made = [
        asked(
            agent, tool=tool, conversation=f"c{n % 2}", arguments={"to": f"anna-{n}"}, risk="high" if n == 1 else "low"
        )
        for n, tool in enumerate(names)
    ]
    ApprovalRequest.objects.filter(pk__in=made[:3]).update(requested_at=clock.now() - timedelta(hours=2))
    person.decide(made[3], "reject", digest=row(made[3]).digest)

    def ids(query: str) -> set[str]:
        answer = person.get(f"approvals?{query}")
        assert answer.status == 200, answer.body
        return {one["actionId"] for one in answer.body["results"]}

    hour_ago = (clock.now() - timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    assert ids("tool=pay") == {made[0], made[2], made[4]}
    assert ids("state=rejected") == {made[3]}
    assert ids("state=pending,rejected&tool=ls") == {made[3]}
    assert ids("conversation=c1") == {made[1], made[3]}
    assert ids("risk=high") == {made[1]}
    assert ids("q=anna-4") == {made[4]}
    assert ids("q=ANNA+pay") == {made[0], made[2], made[4]}
    assert ids(f"since={hour_ago}") == {made[3], made[4]}
    assert ids(f"requestedBy={agent.token.prefix}") == set(made)
    assert ids("requestedBy=nobody") == set()
    seen: list[str] = []
    cursor = ""
    while cursor is not None:
        page = person.get(f"approvals?limit=2&cursor={cursor}").body
        seen += [one["actionId"] for one in page["results"]]
        cursor = page["next"]
    assert len(seen) == 5
    assert set(seen) == set(made)
    assert seen[:2] == [made[4], made[3]]
    (summary,) = person.get("approvals?state=rejected").body["results"]
    assert not {"arguments", "argumentsText", "context", "result"} & set(summary)
    assert summary["decisions"][0]["actor"]["name"] == person.user.username


@pytest.mark.parametrize(
    "query",
    [
        "state=open",
        "risk=x",
        "since=yesterday",
        "since=2026-11-30T12:00:00",
        "since=9999-99-99T00:00:00Z",
        "cursor=x",
        "cursor=%ff",
        "cursor=MjAyNg",
        "limit=0",
        "limit=201",
        "limit=x",
        "q=" + "a" * 201,
        "q=%00",
        "tool=%00",
        "conversation=%00",
        "requestedBy=%00",
    ],
)
def test_a_bad_filter_is_refused_with_its_name(person: Person, query: str) -> None:
    answer = person.get(f"approvals?{query}")
    assert (answer.status, answer.body["field"]) == (400, query.partition("=")[0])


def test_a_page_costs_the_same_number_of_queries_however_many_wait(
    agent: Agent, person: Person, django_assert_max_num_queries: Any
) -> None:
    for _ in range(12):
        asked(agent)
    with django_assert_max_num_queries(12) as few:
        person.get("approvals?limit=3")
    with django_assert_max_num_queries(12) as many:
        person.get("approvals?limit=12")
    assert len(few) == len(many)


def test_expired_is_not_rejected_and_nobody_has_to_sweep_first(agent: Agent, person: Person) -> None:
    """C25, over GET and in lists."""
    action, listed = asked(agent), asked(agent)
    past = clock.now() - timedelta(seconds=1)
    ApprovalRequest.objects.update(expires_at=past)
    assert agent.get(f"approvals/{action}").body["state"] == "expired"
    assert {one["actionId"] for one in person.get("approvals?state=expired").body["results"]} == {action, listed}
    assert person.get("approvals?state=rejected").body["results"] == []
    late = person.decide(action, digest=row(action).digest)
    assert (late.status, late.body["code"], late.body["action"]["state"]) == (409, "expired", "expired")


@pytest.mark.parametrize("query", ["wait=-1", "wait=31", "wait=1.5", "wait=x", "version=-1", "version=" + "9" * 30])
def test_a_bad_wait_is_refused(agent: Agent, query: str) -> None:
    answer = agent.get(f"approvals/{asked(agent)}?{query}")
    assert (answer.status, answer.body["field"]) == (400, query.partition("=")[0])


# --- deciding -----------------------------------------------------------------------------------------------------


def test_a_decision_is_recorded_once_and_its_replay_shows_the_action_as_it_is_now(
    agent: Agent, person: Person, runner: Agent
) -> None:
    action = asked(agent)
    body = {"idempotencyKey": key(), "decision": "approve", "reason": "fine", "digest": row(action).digest}
    first = person.post(f"approvals/{action}/decision", body)
    assert first.status == 200, first.body
    assert (first.body["replayed"], first.body["action"]["state"]) == (False, "approved")
    assert first.headers.get("Idempotent-Replayed") is None
    claimed = runner.post("claims", {"claimId": key(), "actionId": action}).body["claims"][0]
    done = runner.post(
        "claims/complete", {"claimToken": claimed["claimToken"], "outcome": "done", "result": {"n": 1.0}}
    )
    assert (done.status, done.body["state"]) == (200, "done")
    header = {"Idempotency_Key": body.pop("idempotencyKey")}
    again = person.call("POST", f"approvals/{action}/decision?wait=30", body, **header)
    assert (again.status, again.body["replayed"], again.headers["Idempotent-Replayed"]) == (200, True, "true")
    assert again.body["decision"] == first.body["decision"]
    assert (again.body["action"]["state"], again.body["action"]["result"]) == ("done", {"n": 1})
    assert Decision.objects.filter(action_id=action).count() == 1
    assert AuditEvent.objects.filter(action_id=action, kind__contains="approve").count() >= 1


def test_the_key_of_body_and_header_must_agree(agent: Agent, person: Person) -> None:
    action = asked(agent)
    body = {"idempotencyKey": "body-key-1", "decision": "reject"}
    differ = person.post(f"approvals/{action}/decision", body, Idempotency_Key="header-key")
    assert (differ.status, differ.body["code"]) == (400, "idempotency_key_invalid")
    none = person.post(f"approvals/{action}/decision", {"decision": "reject"})
    assert (none.status, none.body["code"]) == (400, "idempotency_key_required")
    for wrong in (7, True, "short", "a" * 256, "with space", "ümlaut-key", {"a": 1}):
        bad = person.post(f"approvals/{action}/decision", {**body, "idempotencyKey": wrong})
        assert (bad.status, bad.body["code"]) == (400, "idempotency_key_invalid"), wrong
    assert row(action).state == "pending"
    both = person.post(f"approvals/{action}/decision", body, Idempotency_Key="body-key-1")
    assert (both.status, both.body["action"]["state"]) == (200, "rejected")


def test_no_agent_decides_whatever_its_scopes_and_whatever_it_sends(agent: Agent) -> None:
    """C32."""
    action = asked(agent)
    everything = Agent(*factories.agent_token("read:all", "approvals:request", "approvals:read", "claims"))
    for token in (agent, everything):
        answer = token.post(
            f"approvals/{action}/decision",
            {"idempotencyKey": key(), "decision": "approve", "digest": row(action).digest},
        )
        assert (answer.status, answer.body["code"]) == (403, "people_only")
        for extra in ({"decidedBy": "root"}, {"state": "approved"}, {"approved": True}, {"actor": {"kind": "person"}}):
            forged = token.post(
                f"approvals/{action}/decision", {"idempotencyKey": key(), "decision": "approve", **extra}
            )
            assert (forged.status, forged.body["field"]) == (400, next(iter(extra)))
    assert row(action).state == "pending"
    assert not Decision.objects.exists()


def test_the_owner_of_the_token_may_not_approve_for_it() -> None:
    owner = factories.operator()
    action = asked(Agent(*factories.agent_token(owner=owner)))
    answer = Person(owner).decide(action, digest=row(action).digest)
    assert (answer.status, answer.body["code"]) == (403, "self_approval")
    assert row(action).state == "pending"


def test_reading_decides_nothing(agent: Agent, person: Person) -> None:
    """C33: GET, HEAD and OPTIONS on every address of an action, with everything in the query that would decide."""
    action = asked(agent)
    query = f"?decision=approve&idempotencyKey={key()}&digest={row(action).digest}"
    for method in SAFE:
        for suffix in ("", "/decision", "/cancel", "/reconcile"):
            answer = person.call(method, f"approvals/{action}{suffix}{query}")
            assert answer.status in ((200, 405) if suffix == "" else (405,)), (method, suffix)
        assert person.call(method, f"approvals/decisions{query}").status in (404, 405)
    assert (row(action).state, row(action).version) == ("pending", 1)
    assert not Decision.objects.exists()


def test_losing_the_race_says_who_won(agent: Agent, person: Person) -> None:
    action = asked(agent)
    digest = row(action).digest
    assert person.decide(action, "reject", digest=digest, reason="no").status == 200
    late = Person(factories.operator("late")).decide(action, digest=digest)
    assert (late.status, late.body["code"]) == (409, "already_decided")
    assert late.body["action"]["decisions"][0]["actor"]["name"] == person.user.username
    same = person.decide(action, "reject", digest=digest)
    assert (same.status, same.body["alreadyDecided"]) == (200, True)
    assert Decision.objects.count() == 1


def test_an_edit_is_exact_and_a_stale_digest_is_refused(agent: Agent, person: Person) -> None:
    action = asked(agent)
    digest = row(action).digest
    stale = person.decide(action, digest="sha256:" + "0" * 64)
    assert (stale.status, stale.body["code"]) == (409, "digest_mismatch")
    wrong = person.decide(action, "reject", digest=digest, arguments={"amount": 1})
    assert wrong.status == 400
    edited = person.decide(action, digest=digest, arguments={"amount": 9007199254740993})
    assert edited.status == 200, edited.body
    assert edited.body["action"]["edited"] is True
    assert edited.body["action"]["argumentsText"] == '{"amount":9007199254740993}'
    assert edited.body["action"]["originalArgumentsText"] == '{"amount":10}'
    assert edited.body["decision"]["digest"] == edited.body["action"]["digest"] != digest


def batch(person: Person, items: list[dict[str, Any]], **more: Any) -> Answer:
    filled = [{"idempotencyKey": key(), "decision": "approve", **item} for item in items]
    return person.post("approvals/decisions", {"decisions": filled, **more})


def test_a_batch_answers_for_each_in_the_order_sent(agent: Agent, person: Person) -> None:
    made = [asked(agent) for _ in range(3)]
    person.decide(made[1], "reject", digest=row(made[1]).digest)
    absent = str(uuid.uuid4())
    answer = batch(
        person, [{"actionId": one, "digest": row(made[0]).digest} for one in (made[2], made[1], absent, made[0])]
    )
    assert answer.status == 200
    results = answer.body["results"]
    assert [one["actionId"] for one in results] == [made[2], made[1], absent, made[0]]
    assert [(one["status"], one.get("code")) for one in results] == [
        (200, None), (409, "already_decided"), (404, "not_found"), (200, None)
    ]  # fmt: skip
    assert results[0]["decision"]["decision"] == "approve"
    assert results[1]["action"]["state"] == "rejected"
    assert [row(one).state for one in made] == ["approved", "rejected", "approved"]


def test_all_or_nothing_with_a_refusal_decides_nothing(agent: Agent, person: Person) -> None:
    made = [asked(agent) for _ in range(3)]
    person.decide(made[1], "reject", digest=row(made[1]).digest)
    items = [{"actionId": one, "digest": row(one).digest} for one in made]
    answer = batch(person, items, allOrNothing=True)
    assert (answer.status, answer.body["code"]) == (409, "batch_refused")
    assert [(one["status"], one.get("code")) for one in answer.body["results"]][1] == (409, "already_decided")
    assert [one["status"] for one in answer.body["results"]] == [424, 409, 424]
    assert [row(one).state for one in made] == ["pending", "rejected", "pending"]
    assert Decision.objects.count() == 1
    assert batch(person, [items[0], items[2]], allOrNothing=True).status == 200
    assert [row(one).state for one in made] == ["approved", "rejected", "approved"]


def test_a_batch_has_one_to_a_hundred_different_actions(agent: Agent, person: Person) -> None:
    action = asked(agent)
    for items in ([], [{"actionId": action}] * 2, [{"actionId": str(uuid.uuid4())} for _ in range(101)]):
        answer = batch(person, items)
        assert (answer.status, answer.body["field"]) == (400, "decisions")
    assert batch(person, [{"actionId": action, "more": 1}]).body["field"] == "decisions.0.more"
    assert row(action).state == "pending"


# --- cancel, reconcile --------------------------------------------------------------------------------------------


def test_a_request_is_withdrawn_once_and_the_second_time_says_the_same(agent: Agent, person: Person) -> None:
    action = asked(agent)
    first, second = (
        agent.post(f"approvals/{action}/cancel", {"reason": "no need"}),
        agent.post(f"approvals/{action}/cancel"),
    )
    assert (first.status, second.status) == (200, 200)
    assert first.body["state"] == second.body["state"] == "cancelled"
    late = person.decide(action, digest=row(action).digest)
    assert (late.status, late.body["code"]) == (409, "cancelled")
    assert agent.post(f"approvals/{action}/cancel", {"reason": "r" * 2_001}).body["field"] == "reason"


def test_what_runs_is_asked_to_stop_and_what_ended_stays_ended(agent: Agent, person: Person, runner: Agent) -> None:
    action = asked(agent)
    person.decide(action, digest=row(action).digest)
    token = runner.post("claims", {"claimId": key(), "actionId": action}).body["claims"][0]["claimToken"]
    asked_to = agent.post(f"approvals/{action}/cancel")
    assert (asked_to.status, asked_to.body["state"], asked_to.body["cancelRequested"]) == (202, "executing", True)
    beat = runner.post("claims/heartbeat", {"claimToken": token, "leaseSeconds": 90})
    assert (beat.status, beat.body) == (200, {"leaseSeconds": 90, "cancelRequested": True})
    runner.post("claims/complete", {"claimToken": token, "outcome": "done"})
    ended = agent.post(f"approvals/{action}/cancel")
    assert (ended.status, ended.body["code"], ended.body["action"]["state"]) == (409, "already_terminal", "done")


def test_an_unknown_action_is_settled_by_those_who_may(agent: Agent, person: Person, runner: Agent) -> None:
    action = asked(agent)
    person.decide(action, digest=row(action).digest)
    chief = Person(factories.chief())
    note = {"idempotencyKey": key(), "outcome": "failed", "note": "the bank says no", "result": {"seen": 0.10}}
    early = chief.post(f"approvals/{action}/reconcile", note)
    assert (early.status, early.body["code"]) == (409, "not_unknown")
    runner.post("claims", {"claimId": key(), "actionId": action})
    ApprovalRequest.objects.update(lease_expires_at=clock.now() - timedelta(seconds=1))
    assert agent.get(f"approvals/{action}").body["state"] == "unknown"
    assert person.post(f"approvals/{action}/reconcile", note).status == 403
    assert agent.post(f"approvals/{action}/reconcile", note).status == 403
    assert agent.post(f"approvals/{action}/cancel").body["code"] == "unknown"
    settled = chief.post(f"approvals/{action}/reconcile", note)
    assert (settled.status, settled.body["action"]["state"], settled.body["replayed"]) == (200, "failed", False)
    assert chief.post(f"approvals/{action}/reconcile", note).body["replayed"] is True
    for wrong in ({"note": ""}, {"outcome": "maybe"}, {"note": None}):
        assert chief.post(f"approvals/{action}/reconcile", {**note, "idempotencyKey": key(), **wrong}).status == 400


# --- claims -------------------------------------------------------------------------------------------------------


def approved(agent: Agent, **body: Any) -> str:
    factories.policy(("pay*", "allow"))
    return asked(agent, **body)


def test_a_claim_names_everything_needed_to_run_and_is_the_same_again(agent: Agent, runner: Agent) -> None:
    action = approved(agent)
    body = {"claimId": "claim-1", "tools": ["pay"], "leaseSeconds": 30}
    first, again = runner.post("claims", body), runner.post("claims", body)
    assert (first.status, again.status) == (200, 200)
    assert first.body == again.body
    (claim,) = first.body["claims"]
    assert claim["actionId"] == action
    assert (claim["tool"], claim["fence"], claim["leaseSeconds"]) == ("pay", 1, 30)
    assert (claim["argumentsText"], claim["digest"]) == ('{"amount":10}', row(action).digest)
    assert claim["effectKey"] == row(action).effect_key
    reused = runner.post("claims", {**body, "tools": ["mail"]})
    assert (reused.status, reused.body["code"]) == (422, "claim_id_reused")
    assert claim["claimToken"] not in str(list(Claim.objects.values()))
    taken = agent.post("claims", {"claimId": "claim-2", "actionId": action})
    assert (taken.status, taken.body["code"], taken.body["action"]["state"]) == (409, "already_claimed", "executing")
    assert Claim.objects.count() == 1


def test_a_result_is_reported_once_and_another_one_refused(agent: Agent, runner: Agent) -> None:
    log_id = agent.post("generations", {}).body["id"]
    call = {"type": "tool_call", "id": "c1", "name": "mail", "arguments": "{}", "index": 0}
    appended = agent.post(f"generations/{log_id}/chunks", {"attempt": 1, "seq": 0, "chunks": [call]})
    action = appended.body["actions"][0]["actionId"]
    Person(factories.operator()).decide(action, digest=row(action).digest)
    token = agent.post("claims", {"claimId": key(), "actionId": action}).body["claims"][0]["claimToken"]
    report = b'{"claimToken":"%s","outcome":"done","result":{"n":9007199254740993}}' % token.encode()
    first, again = agent.post("claims/complete", raw=report), agent.post("claims/complete", raw=report)
    assert (first.status, again.status) == (200, 200)
    assert b'"result":{"n":9007199254740993}' in first.raw
    for other in (report.replace(b"740993", b"740994"), report.replace(b'"done"', b'"failed"')):
        answer = agent.post("claims/complete", raw=other)
        assert (answer.status, answer.body["code"], answer.body["action"]["state"]) == (409, "outcome_conflict", "done")
    results = Entry.objects.filter(generation_id=log_id, type="tool_result")
    assert [json.loads(entry.body)["result"] for entry in results] == [{"n": 9007199254740993}]
    forged = {"type": "tool_result", "id": "r", "toolCallId": "c1", "result": 1, "isError": False}
    answer = agent.post(f"generations/{log_id}/chunks", {"attempt": 1, "seq": 1, "chunks": [forged]})
    assert (answer.status, answer.body["code"]) == (409, "result_needs_claim")
    assert results.count() == 1


def test_claims_are_not_for_people_nor_for_other_tools_or_requests(agent: Agent, person: Person, runner: Agent) -> None:
    action = approved(agent, tool="payroll")
    refused = person.post("claims", {"claimId": key(), "actionId": action})
    assert (refused.status, refused.body["code"]) == (403, "not_allowed")
    for path, body in (
        ("heartbeat", {"claimToken": "x", "leaseSeconds": 1}),
        ("complete", {"claimToken": "x", "outcome": "done"}),
    ):
        assert person.post(f"claims/{path}", body).status == 403
    other = Agent(*factories.agent_token("claims", claim_tools=["mail"]))
    assert other.post("claims", {"claimId": key(), "tools": ["payroll"]}).body == {"claims": []}
    assert other.post("claims", {"claimId": key(), "actionId": action}).status in (403, 404)
    assert Agent(*factories.agent_token()).post("claims", {"claimId": key(), "actionId": action}).status == 404
    assert row(action).state == "approved"
    own = agent.post("claims", {"claimId": key(), "actionId": action})
    assert own.status == 200, "an agent claims its own requests"


def test_what_was_rejected_is_not_claimed_whatever_became_of_the_rule(
    agent: Agent, person: Person, runner: Agent
) -> None:
    """C05."""
    factories.policy(("pay", "ask"))
    action = asked(agent)
    factories.policy(("pay", "allow"), name="later")
    person.decide(action, "reject", digest=row(action).digest)
    answer = runner.post("claims", {"claimId": key(), "actionId": action})
    assert (answer.status, answer.body["code"], answer.body["action"]["state"]) == (409, "rejected", "rejected")
    assert runner.post("claims", {"claimId": key(), "tools": ["*"]}).body == {"claims": []}
    assert not Claim.objects.exists()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("claims", {"claimId": "c"}, "actionId"),
        ("claims", {"claimId": "c", "actionId": str(uuid.uuid4()), "tools": ["pay"]}, "actionId"),
        ("claims", {"tools": ["pay"]}, "claimId"),
        ("claims", {"claimId": "", "tools": ["pay"]}, "claimId"),
        ("claims", {"claimId": "c", "tools": "pay"}, "tools"),
        ("claims", {"claimId": "c", "tools": [""]}, "tools.0"),
        ("claims", {"claimId": "c", "tools": [7]}, "tools.0"),
        ("claims", {"claimId": "c", "tools": ["pay"], "max": 11}, "max"),
        ("claims", {"claimId": "c", "tools": ["pay"], "waitSeconds": 31}, "waitSeconds"),
        ("claims", {"claimId": "c", "tools": ["pay"], "leaseSeconds": 0}, "leaseSeconds"),
        ("claims", {"claimId": "c", "tools": ["pay"], "leaseSeconds": True}, "leaseSeconds"),
        ("claims/heartbeat", {"claimToken": "x", "leaseSeconds": 3_601}, "leaseSeconds"),
        ("claims/heartbeat", {"leaseSeconds": 60}, "claimToken"),
        ("claims/complete", {"claimToken": "x", "outcome": "maybe"}, "outcome"),
        ("claims/complete", {"claimToken": "x", "outcome": "done", "fence": 2}, "fence"),
    ],
)
def test_a_bad_claim_is_refused_with_its_place(runner: Agent, path: str, body: dict[str, Any], field: str) -> None:
    answer = runner.post(path, body)
    assert (answer.status, answer.body.get("field")) == (400, field), answer.body
    assert not Claim.objects.exists()
