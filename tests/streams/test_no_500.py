"""Whatever is sent, no call answers 500, and every refusal is a problem document (issue: errors people will make)."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import factories

CALLS = [
    ("POST", "generations"),
    ("GET", "generations"),
    ("GET", "generations/{log}"),
    ("POST", "generations/{log}/chunks"),
    ("GET", "generations/{log}/entries"),
    ("POST", "generations/{log}/cancel"),
    ("DELETE", "tokens/{text}"),
    ("POST", "approvals"),
    ("GET", "approvals"),
    ("GET", "approvals/{action}"),
    ("POST", "approvals/{action}/decision"),
    ("POST", "approvals/decisions"),
    ("POST", "approvals/{action}/cancel"),
    ("POST", "approvals/{action}/reconcile"),
    ("POST", "claims"),
    ("POST", "claims/heartbeat"),
    ("POST", "claims/complete"),
]
NAMES = [
    *(
        "id",
        "title",
        "conversation",
        "model",
        "metadata",
        "producerTimeoutSeconds",
        "attempt",
        "seq",
        "chunks",
        "writer",
    ),
    *("supersededFrom", "tool", "arguments", "generationId", "toolCallId", "summary", "context", "risk", "executor"),
    *("expiresInSeconds", "effects", "idempotencyKey", "decision", "reason", "digest", "decisions", "allOrNothing"),
    *("actionId", "outcome", "note", "result", "claimId", "tools", "max", "waitSeconds", "leaseSeconds", "claimToken"),
    *("type", "content", "name", "index", "isError", "error", "recoverable", "usage", "", "\0", "é", "state"),
]
# No `waitSeconds` that waits: a fuzz has no time.
GOOD: dict[str, Any] = {
    "attempt": 1, "seq": 0, "chunks": [{"type": "text", "content": "a"}], "tool": "pay", "arguments": {"a": 1},
    "idempotencyKey": "a-good-key", "decision": "approve", "claimId": "claim-1", "tools": ["*"], "note": "n",
    "outcome": "done", "claimToken": "x", "leaseSeconds": 5, "producerTimeoutSeconds": 60, "waitSeconds": 0,
    "decisions": [{"actionId": "x", "idempotencyKey": "a-good-key", "decision": "reject"}],
}  # fmt: skip
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 10**40, 0.5, 1e308, "", " ", "a", "\0", "\ud800",
    "\U0001f46a", "\u202e", "a" * 201, "a" * 3_000, "00000000-0000-0000-0000-000000000000",
    "2026-11-30T00:00:00Z", "'; DROP TABLE x; --", "%s", "{}",
    [], {}, [[]], [{}], [None], {"": ""}, {"\0": 1}, {"__proto__": {}},
]  # fmt: skip
QUERIES = [
    "state",
    "conversation",
    "since",
    "cursor",
    "limit",
    "from",
    "wait",
    "version",
    "tool",
    "requestedBy",
    "risk",
    "q",
]

values = st.recursive(
    st.sampled_from(HOSTILE) | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)
hostile_bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)
bodies = st.one_of(
    hostile_bodies,
    # Good but for a few members: gets deeper.
    st.builds(
        lambda keep, more: {name: GOOD[name] for name in keep} | more,
        st.sets(st.sampled_from(list(GOOD))),
        hostile_bodies,
    ),
)
raws = st.one_of(
    bodies.map(lambda body: json.dumps(body).encode()),
    st.binary(max_size=40),
    bodies.flatmap(lambda body: st.integers(0, 60).map(lambda cut: json.dumps(body).encode()[:cut])),
    st.sampled_from(
        [b"[" * 50_000, b'{"a":' * 50_000, b'{"arguments":' + b"9" * 5_000 + b"}", b"\xef\xbb\xbf{}", b'{"a":1,"a":2}']
    ),
)
texts = st.sampled_from(
    [
        "",
        "0",
        "-1",
        "1",
        "9" * 30,
        "x",
        "\0",
        "é",
        "pending",
        "2026-11-30T00:00:00Z",
        "0001-01-01T00:00:00+23:59",
        "1e3",
        "'",
        "%",
        "_",
        "a" * 300,
        "MjAyNi0x",
    ]
)


def check(client: Client, headers: dict[str, str], method: str, path: str, raw: bytes, query: dict[str, str]) -> None:
    from urllib.parse import urlencode

    response = client.generic(
        method,
        f"/api/v1/{path}?{urlencode(query)}",
        raw,
        content_type="application/json",
        headers={"Idempotency-Key": "fuzz-key-1", **headers},
    )
    assert response.status_code < 500, (method, path, raw, query, response.content)
    if response.status_code >= 400:
        assert response.headers["Content-Type"] == "application/problem+json"
        problem = json.loads(response.content)
        assert problem["status"] == response.status_code
        assert problem["code"]
        assert problem["detail"]


@pytest.mark.django_db
@pytest.mark.parametrize(("method", "path"), CALLS, ids=[f"{method} {path}" for method, path in CALLS])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    raw=raws,
    query=st.dictionaries(st.sampled_from(QUERIES), texts.filter(lambda text: text != "30"), max_size=3),
    who=st.sampled_from(["agent", "person"]),
    text=st.sampled_from(
        ["x", "%00", "%ff", "..", "a" * 300, "00000000-0000-0000-0000-000000000000", "REAL", "REAL", "REAL"]
    ),
)
def test_no_input_is_a_500(method: str, path: str, raw: bytes, query: dict[str, str], who: str, text: str) -> None:
    token, secret = factories.agent_token(
        "generations:write", "approvals:request", "claims", claim_tools=["*"], name="fuzz"
    )
    client, headers = Client(), factories.bearer(secret)
    generation = factories.generation(token=token)
    action = str(uuid.uuid4())
    if "{action}" in path:
        made = client.post(
            "/api/v1/approvals",
            json.dumps({"tool": "pay", "arguments": {}}),
            content_type="application/json",
            headers={**headers, "Idempotency-Key": f"key-{uuid.uuid4()}"},
        )
        action = made.json()["actionId"]
    if who == "person":
        headers = {}
        client.force_login(factories.chief())
    real = text == "REAL"
    # A held answer would only cost time here.
    query = {name: value for name, value in query.items() if name != "wait" or value not in ("1", "9" * 30)}
    place = path.format(
        log=generation.pk if real else text, action=action if real else text, text=token.prefix if real else text
    )
    check(client, headers, method, place, raw if method != "GET" else b"", query)
