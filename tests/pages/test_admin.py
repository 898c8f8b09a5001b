"""Plain Django admin: tokens and policy are made there, requests are only read, and decided by the same verb."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.messages import get_messages
from django.test import Client

from approvals.models import ApprovalRequest, AuditEvent, Decision, Policy
from streams import access
from streams.models import AgentToken
from tests.pages.test_pages import make_request
from tests.support import factories

pytestmark = pytest.mark.django_db

LIST = "/admin/approvals/approvalrequest/"


@pytest.fixture
def chief(client: Client) -> Client:
    client.force_login(factories.chief("zoe", is_staff=True))
    return client


def hidden_fields(page: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', page):
        found.setdefault(name, []).append(value)
    return {name: values for name, values in found.items() if name != "csrfmiddlewaretoken"}


def said(answer: Any) -> str:
    return " ".join(str(message) for message in get_messages(answer.wsgi_request))


def choose(client: Client, decision: str, *actions: ApprovalRequest) -> Any:
    return client.post(LIST, {"action": decision, "_selected_action": [str(one.pk) for one in actions]})


def test_approve_asks_again_and_then_decides_by_the_verb_once(chief: Client) -> None:
    action = make_request(tool="pay\u202elap")
    asked = choose(chief, "approve", action)
    page = asked.content.decode()
    assert "pay‹U+202E›lap" in page
    assert not Decision.objects.exists()
    fields = hidden_fields(page)
    chief.post(LIST, fields)
    chief.post(LIST, fields)
    decision = Decision.objects.get()
    action.refresh_from_db()
    assert (decision.decision, decision.actor_name, action.state) == ("approve", "zoe", "approved")
    assert AuditEvent.objects.filter(action=action, door="admin").exists()


def test_reject_carries_the_reason(chief: Client) -> None:
    action = make_request()
    fields = hidden_fields(choose(chief, "reject", action).content.decode())
    chief.post(LIST, {**fields, "reason": "not today"})
    assert Decision.objects.get().reason == "not today"
    action.refresh_from_db()
    assert action.state == "rejected"


def test_arguments_that_changed_after_the_question_are_not_approved(chief: Client) -> None:
    action = make_request()
    fields = hidden_fields(choose(chief, "approve", action).content.decode())
    ApprovalRequest.objects.filter(pk=action.pk).update(digest="sha256:" + "1" * 64)
    answer = chief.post(LIST, fields)
    assert "digest_mismatch" in said(answer)
    assert not Decision.objects.exists()


def test_high_risk_is_approved_alone_or_not_at_all(chief: Client) -> None:
    answer = choose(chief, "approve", make_request(risk="high"), make_request(risk="low"))
    assert "never approved in a batch" in said(answer)
    harmless = [make_request(risk="low"), make_request(risk="medium")]
    chief.post(LIST, hidden_fields(choose(chief, "approve", *harmless).content.decode()))
    assert Decision.objects.count() == 2


def test_who_may_not_decide_has_no_such_action(client: Client) -> None:
    action = make_request()
    client.force_login(factories.person("carl", factories.SEE, is_staff=True))
    assert '<option value="approve">' not in client.get(LIST).content.decode()
    choose(client, "approve", action)
    client.post(LIST, {"action": "approve", "_selected_action": [str(action.pk)], "confirmed": "yes", "key": "k" * 32})
    assert not Decision.objects.exists()
    client.force_login(factories.person("nobody", is_staff=True))
    assert client.get(LIST).status_code == 403


def test_requests_decisions_and_events_can_only_be_read(client: Client) -> None:
    client.force_login(User.objects.create_superuser("root"))
    action = make_request()
    for model in ("approvalrequest", "decision", "auditevent"):
        assert client.get(f"/admin/approvals/{model}/").status_code == 200
        assert client.get(f"/admin/approvals/{model}/add/").status_code == 403
    assert client.get(f"{LIST}{action.pk}/change/").status_code == 200
    assert client.post(f"{LIST}{action.pk}/change/", {"state": "approved"}).status_code == 403
    assert client.post(f"{LIST}{action.pk}/delete/", {"post": "yes"}).status_code == 403
    action.refresh_from_db()
    assert (action.state, action.version) == ("pending", 1)
    run = factories.generation(title="a\u202eb")
    page = client.get(f"/admin/streams/generation/{run.pk}/change/").content.decode()
    assert "a‹U+202E›b" in page
    assert "a\u202eb" not in page


def test_a_token_is_made_its_secret_said_once_and_it_works(chief: Client) -> None:
    answer = chief.post(
        "/admin/streams/agenttoken/add/",
        {"name": "bot", "scopes": ["approvals:request", "claims"], "claim_tools": "pay*\n"},
    )
    assert answer.status_code == 302
    secret = re.search(r"ags_\w+_[\w-]+", said(answer))
    assert secret is not None
    caller = access.caller_for_token(secret=secret.group(), door="http")
    assert caller.can("claims")
    assert AgentToken.objects.get().claim_tools == ["pay*"]
    chief.get("/admin/streams/agenttoken/")
    again = chief.get(f"/admin/streams/agenttoken/{AgentToken.objects.get().pk}/change/").content.decode()
    assert secret.group() not in again
    wrong = chief.post("/admin/streams/agenttoken/add/", {"name": "b", "scopes": ["read:all"], "claim_tools": "x"})
    assert b"needs the scope claims" in wrong.content


def test_a_token_is_revoked_by_an_action(chief: Client) -> None:
    token, _ = factories.agent_token()
    chief.post("/admin/streams/agenttoken/", {"action": "revoke", "_selected_action": [str(token.pk)]})
    token.refresh_from_db()
    assert token.revoked_at is not None


def test_an_edit_of_policy_raises_its_version(chief: Client) -> None:
    made = factories.policy(("ls", "allow"))
    rule = made.rules.get()
    fields = {
        "name": made.name,
        "active": "on",
        "rules-TOTAL_FORMS": "1",
        "rules-INITIAL_FORMS": "1",
        "rules-0-id": str(rule.pk),
        "rules-0-policy": str(made.pk),
        "rules-0-position": "0",
        "rules-0-name": rule.name,
        "rules-0-tool_pattern": "ls",
        "rules-0-verdict": "ask",
        "rules-0-risk": "",
        "rules-0-approvals_required": "1",
        "rules-0-expires_in_seconds": "60",
        "rules-0-approval_valid_seconds": "60",
    }
    assert chief.post(f"/admin/approvals/policy/{made.pk}/change/", fields).status_code == 302
    changed = Policy.objects.get()
    assert (changed.version, changed.rules.get().verdict) == (2, "ask")
    chief.post(f"/admin/approvals/policy/{made.pk}/change/", fields)
    assert Policy.objects.get().version == 2
