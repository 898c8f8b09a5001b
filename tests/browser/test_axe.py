"""axe finds nothing in any page, theme and width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Page, expect

from approvals.models import ApprovalRequest
from tests.browser.conftest import Agent, Visit

pytestmark = pytest.mark.browser

AXE = Path(__file__).parent.parent / "js" / "node_modules" / "axe-core" / "axe.min.js"
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
    "dark phone": {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}},
}


def faults(page: Page) -> list[str]:
    page.evaluate(AXE.read_text())
    found: dict[str, Any] = page.evaluate("() => axe.run(document, {resultTypes: ['violations', 'incomplete']})")
    worst = found["violations"] + [one for one in found["incomplete"] if one["id"] == "color-contrast"]
    return [f"{one['id']}: {node['target']} {node['failureSummary']}" for one in worst for node in one["nodes"]]


@pytest.mark.skipif(not AXE.exists(), reason="without axe-core: run npm ci --prefix tests/js")
@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(
    look: str, visit: Visit, agent: Agent, ana: User
) -> None:
    agent.say("Let me see.\n")
    action = agent.call("wipe", json.dumps({"text": "p\u0430y\u202e", "long": "x" * 900}), id="c1")
    lost = agent.call("refund", id="c2")
    ApprovalRequest.objects.filter(pk=lost.pk).update(state="unknown", fence=1, version=5)
    done = agent.call("note", '{"text":"hello"}', id="c3")
    ApprovalRequest.objects.filter(pk=done.pk).update(state="failed", version=5, result_text='"no"', is_error=True)
    strangers = visit("/accounts/login/", None, **LOOKS[look])
    pages = {"sign-in": strangers}
    for name, path in {
        "inbox": "/",
        "decided": "/?tab=decided",
        "request": f"/approvals/{action.pk}/",
        "unknown": f"/approvals/{lost.pk}/",
        "run": agent.path,
        "runs": "/runs/",
        "nothing": "/nothing/",
    }.items():
        pages[name] = visit(path, ana, **LOOKS[look])
    opener = pages["inbox"].locator(f'.row[data-action="{action.pk}"] .opener')
    opener.click()
    expect(pages["inbox"].locator("article.card.live")).to_be_visible()
    expect(pages["run"].locator("article.card.live")).to_be_visible()
    pages["request"].get_by_role("button", name="more characters").click()
    pages["request"].wait_for_timeout(400)
    pages["request"].get_by_role("button", name="Approve with edits…").click()
    for name, page in pages.items():
        assert faults(page) == [], name
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), name


def test_the_admin_works_under_its_policy(visit: Visit, agent: Agent, ana: User) -> None:
    """`visit` fails the test for any page that throws or asks for what the policy forbids."""
    action = agent.call("note")
    ana.is_staff = True
    ana.save()
    page = visit("/admin/approvals/approvalrequest/", ana)
    page.locator(f'input[name="_selected_action"][value="{action.pk}"]').check()
    page.locator('select[name="action"]').select_option("approve")
    page.locator('button[name="index"]').click()
    expect(page.get_by_text("This will run, exactly as shown:")).to_be_visible()
    page.get_by_role("button", name="Approve").click()
    expect(page.locator(".messagelist")).to_contain_text("approve recorded")
    page.goto("/admin/streams/agenttoken/add/")
    page.get_by_label("Name:").fill("bot")
    page.get_by_label("claims", exact=True).check()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".messagelist")).to_contain_text("shown this once")
    page.goto("/admin/approvals/policy/add/")
    page.get_by_text("Add another Policy rule").click()
    expect(page.locator("#id_rules-1-tool_pattern")).to_be_visible()
    agent.execute(action)
    assert len(agent.effects) == 1
