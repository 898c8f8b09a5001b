"""Who may come in and how (contract §6): tokens, sessions, origins, and what a refusal looks like."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any
from unittest import mock

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import Client

from streams import access, clock
from streams.models import AgentToken, Generation
from streams.problems import Invalid, NotFound, NotSignedIn
from tests.streams.conftest import Agent
from tests.support import factories

MakeAgent = Callable[..., Agent]
pytestmark = pytest.mark.django_db


def test_a_token_is_kept_as_its_hash_and_known_by_its_secret_only() -> None:
    token, secret = factories.agent_token()
    assert secret.startswith(f"ags_{token.prefix}_")
    assert secret not in str(AgentToken.objects.values())
    caller = access.caller_for_token(secret=secret, door="http")
    assert caller.token == token
    assert caller.actor.kind == "token"
    for wrong in (
        "",
        "ags",
        f"ags_{token.prefix}_",
        secret[:-1],
        secret + "x",
        secret.upper(),
        f"ags_{token.prefix}_\0",
        f"ags_{'é' * 4}_x",
        f"ags_\0_{secret}",
        "ags__",
        "\ud800",
        secret.replace("ags", "agt"),
    ):
        with pytest.raises(NotSignedIn):
            access.caller_for_token(secret=wrong, door="http")


def test_a_token_that_is_over_opens_nothing(make_agent: MakeAgent) -> None:
    expired = make_agent(expires_at=clock.now() - timedelta(seconds=1))
    revoked = make_agent()
    access.revoke_token(prefix=revoked.token.prefix, caller=access.COMMAND)
    orphan = make_agent(owner=factories.person("gone", is_active=False))
    for agent in (expired, revoked, orphan):
        answer = agent.get("generations")
        assert (answer.status, answer.body["code"]) == (401, "not_signed_in")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert make_agent(expires_at=clock.now() + timedelta(minutes=1)).get("generations").status == 200


def test_last_use_is_written_at_most_once_a_minute(agent: Agent) -> None:
    agent.get("generations")
    first = AgentToken.objects.get().last_used_at
    agent.get("generations")
    assert AgentToken.objects.get().last_used_at == first
    AgentToken.objects.update(last_used_at=clock.now() - timedelta(seconds=61))
    agent.get("generations")
    second = AgentToken.objects.get().last_used_at
    assert first is not None
    assert second is not None
    assert second > first


def test_a_token_gets_no_scope_that_does_not_exist() -> None:
    for fields in (
        {"scopes": ["approvals:decide"]},
        {"scopes": ["claims"], "name": ""},
        {"scopes": [], "claim_tools": ["*"]},
    ):
        with pytest.raises(Invalid):
            access.create_token(**{"name": "x", **fields})  # type: ignore[arg-type]
    assert not AgentToken.objects.exists()


@pytest.mark.parametrize("header", ["Basic YTpi", "Bearer", "Bearer ", "bearer x", "Token x", "Bearer ags_a_b c"])
def test_another_way_to_authorize_is_not_signed_in_even_beside_a_session(header: str) -> None:
    client = Client()
    client.force_login(factories.operator())
    answer = client.get("/api/v1/generations", headers={"Authorization": header})
    assert (answer.status_code, answer.json()["code"]) == (401, "not_signed_in")


# --- sessions -----------------------------------------------------------------------------------------------------


def signed_in(*permissions: str) -> Client:
    client = Client(enforce_csrf_checks=True)
    client.force_login(factories.person("", *permissions))
    return client


def stop(client: Client, generation: Generation, **headers: str) -> Any:
    return client.post(f"/api/v1/generations/{generation.pk}/cancel", content_type="application/json", headers=headers)


def test_a_session_changes_nothing_without_the_csrf_token() -> None:
    generation, client = factories.generation(), signed_in(factories.SEE, factories.DECIDE)
    assert client.get(f"/api/v1/generations/{generation.pk}").status_code == 200
    refused = stop(client, generation)
    assert (refused.status_code, refused.json()["code"]) == (403, "csrf_failed")
    client.cookies["csrftoken"] = "b" * 32
    assert stop(client, generation, **{"X-CSRFToken": "c" * 32}).status_code == 403
    generation.refresh_from_db()
    assert not generation.cancel_requested
    assert stop(client, generation, **{"X-CSRFToken": "b" * 32}).status_code == 202


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.test",
        "null",
        "https://testserver",
        "http://testserver:8000",
        "http://testserver.evil.test",
        "http://TESTSERVER/",
        "",
    ],
)
def test_a_session_from_another_origin_is_refused_also_for_reading(origin: str) -> None:
    generation, client = factories.generation(), signed_in(factories.SEE, factories.DECIDE)
    client.cookies["csrftoken"] = "b" * 32
    for answer in (
        stop(client, generation, **{"X-CSRFToken": "b" * 32, "Origin": origin}),
        client.get(f"/api/v1/generations/{generation.pk}", headers={"Origin": origin}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (403, "origin_refused")
    generation.refresh_from_db()
    assert not generation.cancel_requested


def test_the_own_origin_and_a_trusted_one_may(settings: Any) -> None:
    settings.CSRF_TRUSTED_ORIGINS = ["https://console.example", "https://*.wild.example"]
    client = signed_in(factories.SEE, factories.DECIDE)
    client.cookies["csrftoken"] = "b" * 32
    for origin, status in (
        ("http://testserver", 202),
        ("https://console.example", 202),
        ("https://console.example:8443", 403),
        ("https://a.wild.example", 403),
    ):
        answer = stop(client, factories.generation(), **{"X-CSRFToken": "b" * 32, "Origin": origin})
        assert answer.status_code == status, origin


def test_a_token_needs_no_csrf_and_no_origin_and_cookies_beside_it_do_not_count(agent: Agent, log_id: str) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(factories.person())
    answer = client.post(
        f"/api/v1/generations/{log_id}/cancel",
        content_type="application/json",
        headers={**factories.bearer(agent.secret), "Origin": "http://evil.test"},
    )
    assert answer.status_code == 202


def test_a_person_without_permission_sees_nothing_and_a_stranger_is_asked_to_sign_in() -> None:
    generation = factories.generation()
    plain = signed_in()
    assert plain.get(f"/api/v1/generations/{generation.pk}").status_code == 404
    assert plain.get("/api/v1/generations").status_code == 403
    stranger = Client().get(f"/api/v1/generations/{generation.pk}")
    assert (stranger.status_code, stranger.json()["code"], stranger.headers["WWW-Authenticate"]) == (
        401,
        "not_signed_in",
        "Bearer",
    )


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_problem_says_everything_in_the_agreed_form(agent: Agent) -> None:
    answer = agent.get(f"generations/{uuid.uuid4()}")
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.body == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "code": "not_found",
        "detail": "no such generation",
    }


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", "nothing", {}, 404, "not_found"),
        ("GET", "generations/", {}, 404, "not_found"),
        ("GET", "generations/not-a-uuid", {}, 404, "not_found"),
        ("GET", "generations/%00", {}, 404, "not_found"),
        ("GET", "generations/%ff%fe", {}, 404, "not_found"),
        ("PUT", "generations", {}, 405, "method_not_allowed"),
        ("OPTIONS", "generations", {}, 405, "method_not_allowed"),
        ("PATCH", "approvals/decisions", {}, 405, "method_not_allowed"),
        ("POST", "generations", {"content_type": "text/xml"}, 415, "unsupported_media_type"),
        ("GET", "generations", {"Accept": "text/html"}, 406, "not_acceptable"),
    ],
)
def test_what_the_framework_refuses_is_a_problem_too(
    agent: Agent, method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    answer = agent.call(method, path, {} if method == "POST" else None, **headers)
    assert (answer.status, answer.body["code"], answer.body["status"]) == (status, code, status)
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_database_out_of_reach_is_try_again_and_not_a_failure(agent: Agent, log_id: str) -> None:
    """Plain and DRF views, before and inside the verb: 503, and when to come back."""
    gone = OperationalError("server closed the connection unexpectedly")
    calls: list[tuple[str, str, Any]] = [
        ("streams.log.create", "generations", {}),
        ("streams.log.append", f"generations/{log_id}/chunks", {"attempt": 1, "seq": 0, "chunks": []}),
        ("streams.access.caller_for_token", "approvals", {"tool": "x", "arguments": {}}),
    ]
    for target, path, body in calls:
        with mock.patch(target, side_effect=gone):
            answer = agent.post(path, body, Idempotency_Key="some-key-1")
        assert (answer.status, answer.body["code"], answer.headers["Retry-After"]) == (503, "try_again", "1")


def test_a_fault_of_ours_is_not_dressed_up_as_the_callers(agent: Agent) -> None:
    with mock.patch("streams.log.create", side_effect=KeyError("a bug")), pytest.raises(KeyError):
        agent.post("generations", {})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"x"', None),
        (b"null", None),
        (b"\xff\xfe{}", None),
        (b"\xef\xbb\xbf{}", None),
        (b"{} {}", None),
        (b'{"title":"a","title":"b"}', "title"),
        (b'{"title":"a\\u0000"}', "title"),
        (b'{"title":"\\ud800"}', "title"),
        (b'{"metadata":{"a":NaN}}', "metadata.a"),
        (b'{"metadata":{"a":1e999}}', "metadata.a"),
        (b'{"metadata":' + b'{"a":' * 80 + b"1" + b"}" * 80 + b"}", None),
        (b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"metadata":[]}', "metadata"),
        (b'{"titel":"a"}', "titel"),
        (b'{"title":null}', "title"),
        (b'{"title":"' + b"a" * 201 + b'"}', "title"),
        (b'{"id":"not-a-uuid"}', "id"),
        (b'{"id":7}', "id"),
        (b'{"producerTimeoutSeconds":4}', "producerTimeoutSeconds"),
        (b'{"producerTimeoutSeconds":86401}', "producerTimeoutSeconds"),
        (b'{"producerTimeoutSeconds":true}', "producerTimeoutSeconds"),
        (b'{"producerTimeoutSeconds":60.0}', "producerTimeoutSeconds"),
        (b'{"producerTimeoutSeconds":"60"}', "producerTimeoutSeconds"),
    ],
)
def test_a_bad_body_is_refused_with_its_place(agent: Agent, body: bytes, field: str | None) -> None:
    answer = agent.post("generations", raw=body)
    if body == b"":
        assert answer.status == 201, "a body that may be empty"
        return
    assert answer.status == 400, answer.body
    assert answer.body.get("field") == field
    assert not Generation.objects.exists()


def test_a_body_over_the_limit_is_refused_and_names_it(agent: Agent, settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 2_000
    answer = agent.post("generations", {"title": "a" * 3_000})
    assert (answer.status, answer.body["code"], answer.body["limit"]) == (413, "too_large", 2_000)
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1_000_000
    big = agent.post("generations", {"metadata": {"a": "b" * 70_000}})
    assert (big.status, big.body["code"], big.body["field"], big.body["limit"]) == (
        413,
        "too_large",
        "metadata",
        65_536,
    )


# --- tokens by API and by command ---------------------------------------------------------------------------------


def test_a_token_is_revoked_by_those_who_may_configure_and_by_nobody_else(agent: Agent, make_agent: MakeAgent) -> None:
    path = f"/api/v1/tokens/{agent.token.prefix}"
    assert make_agent("read:all").call("DELETE", f"tokens/{agent.token.prefix}").status == 403
    assert agent.call("DELETE", f"tokens/{agent.token.prefix}").status == 403
    for permissions, status in (((factories.SEE, factories.DECIDE), 403), ((factories.CONFIGURE,), 204)):
        client = Client()
        client.force_login(factories.person("", *permissions))
        assert client.delete(path).status_code == status
        assert (AgentToken.objects.get(pk=agent.token.pk).revoked_at is not None) == (status == 204)
    first = AgentToken.objects.get(pk=agent.token.pk).revoked_at
    assert client.delete(path).status_code == 204, "again is no error"
    assert AgentToken.objects.get(pk=agent.token.pk).revoked_at == first
    for absent in ("nothing", "%00", "a" * 100):
        assert client.delete(f"/api/v1/tokens/{absent}").status_code == 404
    assert agent.get("generations").status == 401


def test_the_command_prints_the_secret_once_and_it_works() -> None:
    owner = factories.person("olga")
    out, told = StringIO(), StringIO()
    call_command(
        "create_agent_token", "crawler", "--scope", "generations:write", "--scope", "approvals:request",
        "--owner", "olga", "--claims", "mail_*", "--expires-days", "7", stdout=out, stderr=told,
    )  # fmt: skip
    secret = out.getvalue().strip()
    caller = access.caller_for_token(secret=secret, door="http")
    token = AgentToken.objects.get()
    assert caller.token == token
    assert token.scopes == ["generations:write", "approvals:request", "claims"]
    assert (token.claim_tools, token.owner, token.name) == (["mail_*"], owner, "crawler")
    assert token.expires_at is not None
    assert timedelta(days=6, hours=23) < token.expires_at - clock.now() <= timedelta(days=7)
    assert secret not in told.getvalue()
    call_command("revoke_agent_token", token.prefix, stdout=out)
    with pytest.raises(NotSignedIn):
        access.caller_for_token(secret=secret, door="http")


@pytest.mark.parametrize(
    "arguments",
    [["x", "--owner", "nobody"], ["x", "--expires-days", "0"], [""], ["x" * 101], ["x", "--scope", "decide"]],
)
def test_the_command_says_what_is_wrong_and_makes_nothing(arguments: list[str]) -> None:
    with pytest.raises(CommandError):
        call_command("create_agent_token", *arguments, stdout=StringIO(), stderr=StringIO())
    assert not AgentToken.objects.exists()


def test_revoking_an_unknown_prefix_says_so() -> None:
    with pytest.raises(CommandError, match="no such token"):
        call_command("revoke_agent_token", "nothing", stdout=StringIO())


def test_an_id_that_is_none_looks_like_one_that_is_not_there(agent: Agent) -> None:
    caller = access.caller_for_token(secret=agent.secret, door="http")
    for wrong in ("", "x", str(uuid.uuid4()), uuid.uuid4()):
        with pytest.raises(NotFound, match="no such generation"):
            access.find_generation(caller, wrong)


# --- OpenAPI ------------------------------------------------------------------------------------------------------


def test_the_schema_is_made_without_a_warning_and_describes_every_call() -> None:
    out, told = StringIO(), StringIO()
    with mock.patch("sys.stderr", told):
        call_command("spectacular", "--fail-on-warn", "--validate", "--format", "openapi-json", stdout=out)
    assert told.getvalue() == ""
    described = json.loads(out.getvalue())
    calls = {
        (path.removeprefix("/api/v1/"), method) for path, methods in described["paths"].items() for method in methods
    }
    assert calls == {
        ("generations", "post"), ("generations", "get"), ("generations/{generation_id}", "get"),
        ("generations/{generation_id}/chunks", "post"), ("generations/{generation_id}/entries", "get"),
        ("generations/{generation_id}/events", "get"), ("generations/{generation_id}/cancel", "post"),
        ("tokens/{prefix}", "delete"), ("approvals", "post"), ("approvals", "get"),
        ("approvals/{action_id}", "get"), ("approvals/{action_id}/decision", "post"), ("approvals/decisions", "post"),
        ("approvals/{action_id}/cancel", "post"), ("approvals/{action_id}/reconcile", "post"), ("claims", "post"),
        ("claims/heartbeat", "post"), ("claims/complete", "post"),
    }  # fmt: skip
    for path, methods in described["paths"].items():
        for method, call in methods.items():
            assert {"400", "401", "503"} <= set(call["responses"]), (path, method)
            assert ("requestBody" in call) == (method == "post"), (path, method)
    decision = described["paths"]["/api/v1/approvals/{action_id}/decision"]["post"]
    body = decision["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"idempotencyKey", "decision", "reason", "arguments", "digest"}
    assert body["additionalProperties"] is False


def test_the_schema_is_served_as_json() -> None:
    answer = Client().get("/api/v1/schema")
    assert answer.status_code == 200
    assert json.loads(answer.content)["openapi"].startswith("3.")
