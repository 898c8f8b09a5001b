"""The pages as the server makes them, before any script runs."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from agentsite.csp import POLICY
from approvals.models import ApprovalRequest, AuditEvent, Decision
from tests.support import factories

pytestmark = pytest.mark.django_db

PAGES = ("/", "/?tab=mine", "/?tab=look", "/?tab=decided", "/?tab=expired", "/runs/")


def make_request(tool: str = "refund", arguments_text: str = '{"order":1042}', **fields: Any) -> ApprovalRequest:
    now = timezone.now()
    made: dict[str, Any] = {
        "tool": tool,
        "arguments_text": arguments_text,
        "digest": "sha256:" + "0" * 64,
        "state": "pending",
        "risk": "high",
        "executor": "agent",
        "gated": True,
        "requested_by_kind": "token",
        "requested_by_id": "p",
        "requested_by_name": "agent",
        "requested_at": now,
        "expires_at": now + timedelta(hours=1),
        "effect_key": uuid.uuid4().hex,
    }
    return ApprovalRequest.objects.create(**{**made, **fields})


@pytest.fixture
def ana(client: Client) -> Client:
    client.force_login(factories.operator("ana"))
    return client


def test_a_stranger_is_asked_to_sign_in_and_comes_back_where_they_wanted(client: Client) -> None:
    action = make_request()
    for path in (*PAGES, f"/approvals/{action.pk}/"):
        answer = client.get(path)
        assert answer.status_code == 302
        assert answer.headers["Location"].startswith("/accounts/login/?next=")


def test_signing_in_leads_to_the_inbox(client: Client) -> None:
    factories.operator("ana", password=factories.PASSWORD)
    answer = client.post("/accounts/login/", {"username": "ana", "password": factories.PASSWORD}, follow=True)
    assert answer.redirect_chain == [("/", 302)]
    wrong = Client().post("/accounts/login/", {"username": "ana", "password": "no"})
    assert b"do not match" in wrong.content


def test_who_may_not_see_gets_403_for_lists_and_404_for_things(client: Client) -> None:
    action, run = make_request(), factories.generation()
    client.force_login(factories.person("carl"))
    assert client.get("/").status_code == 403
    assert client.get("/runs/").status_code == 403
    for path in (f"/approvals/{action.pk}/", f"/runs/{run.pk}/"):
        nothing = client.get(path.replace(path.split("/")[2], str(uuid.uuid4())))
        refused = client.get(path)
        assert (refused.status_code, nothing.status_code) == (404, 404)
        assert action.tool.encode() not in refused.content


def test_every_page_answers_and_carries_the_policy(ana: Client) -> None:
    action, run = make_request(), factories.generation(title="story")
    for path in (*PAGES, f"/approvals/{action.pk}/", f"/runs/{run.pk}/"):
        answer = ana.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["Content-Security-Policy"] == POLICY
        text = answer.content.decode()
        assert "style=" not in text, path
        assert "onclick" not in text, path
        assert "<script>" not in text, path
    assert ana.get("/nothing/").headers["Content-Security-Policy"] == POLICY
    admin = ana.get("/admin/login/").headers["Content-Security-Policy"]
    assert f"{admin}; require-trusted-types-for 'script'; trusted-types 'none'" == POLICY


def test_agent_text_is_shown_with_visible_escapes_and_never_as_markup(ana: Client) -> None:
    action = make_request(tool="pay\u202elap", arguments_text='{"to":"<b>p\u0430ypal</b>"}')
    for path in ("/", f"/approvals/{action.pk}/"):
        text = ana.get(path).content.decode()
        assert "pay‹U+202E›lap" in text
        assert "<b>p" not in text
    assert "different alphabets" in ana.get(f"/approvals/{action.pk}/").content.decode()


def test_a_get_or_head_of_any_page_decides_nothing(ana: Client) -> None:
    action = make_request()
    for path in (*PAGES, f"/approvals/{action.pk}/", f"/approvals/{action.pk}/?decision=approve"):
        ana.get(path)
        ana.head(path)
        assert ana.post(path).status_code == 405
    action.refresh_from_db()
    assert (action.state, action.version) == ("pending", 1)
    assert not Decision.objects.exists()
    assert not AuditEvent.objects.exists()


def test_the_inbox_costs_the_same_queries_at_10_and_at_60_requests(ana: Client, django_assert_num_queries: Any) -> None:
    for _ in range(10):
        make_request()
    with django_assert_num_queries(8) as at_10:
        ana.get("/")
    for _ in range(50):
        make_request()
    with django_assert_num_queries(len(at_10)):
        answer = ana.get("/")
    assert answer.content.count(b'class="row" data-action') == 50


def test_older_requests_follow_without_a_gap_or_a_double(ana: Client) -> None:
    made = {str(make_request().pk) for _ in range(60)}
    first = ana.get("/")
    second = ana.get("/?" + first.context["older"])
    shown = [str(row.pk) for answer in (first, second) for row in answer.context["rows"]]
    assert len(shown) == 60
    assert set(shown) == made
    assert second.context["older"] == ""


def test_tabs_and_filters_show_what_they_say(ana: Client) -> None:
    wanted = make_request(tool="wipe", risk="critical")
    lost = make_request(state="unknown")
    gone = make_request(state="expired")
    assert [row.pk for row in ana.get("/").context["rows"]] == [wanted.pk]
    assert [row.pk for row in ana.get("/?tab=look").context["rows"]] == [lost.pk]
    assert [row.pk for row in ana.get("/?tab=expired").context["rows"]] == [gone.pk]
    assert [row.pk for row in ana.get("/?q=WIP&risk=critical").context["rows"]] == [wanted.pk]
    assert list(ana.get("/?q=WIP&risk=low").context["rows"]) == []
    for odd in ("/?before=x", "/?tab=%00", "/?q=%00", "/?risk='", f"/?before={uuid.uuid4()}"):
        assert ana.get(odd).status_code == 200, odd


def test_long_arguments_stay_out_of_the_list_and_whole_on_their_page(ana: Client) -> None:
    command = "ls " + "a" * 4000 + " && rm -rf /"
    action = make_request(arguments_text=json.dumps({"command": command}))
    assert "rm -rf" not in ana.get("/").content.decode()
    assert "rm -rf" in ana.get(f"/approvals/{action.pk}/").content.decode()


def test_the_form_for_the_unknown_is_there_for_who_may_reconcile(client: Client) -> None:
    action = make_request(state="unknown", fence=1)
    client.force_login(factories.operator("ana"))
    assert b'id="reconcile"' not in client.get(f"/approvals/{action.pk}/").content
    client.force_login(factories.chief("zoe"))
    assert b'id="reconcile"' in client.get(f"/approvals/{action.pk}/").content
