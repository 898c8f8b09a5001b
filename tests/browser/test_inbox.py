"""The inbox: rows that stay under the hand, keys for the quick, nothing risky by haste."""

from __future__ import annotations

import json

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Page, expect

from approvals.models import ApprovalRequest, Decision
from tests.browser.conftest import Agent, Visit

pytestmark = pytest.mark.browser


def row(page: Page, action: ApprovalRequest) -> str:
    return f'.row[data-action="{action.pk}"]'


def live(page: Page) -> None:
    expect(page.locator("#freshness")).to_contain_text("live")
    page.wait_for_timeout(400)  # past the 350 ms in which nothing new can be decided


def test_what_comes_in_waits_behind_a_button_and_moves_nothing(visit: Visit, agent: Agent, ana: User) -> None:
    page = visit("/", ana)
    live(page)
    expect(page.locator("#empty")).to_be_visible()
    action = agent.call("note", '{"text":"hello"}')
    expect(page.locator("#polite")).to_have_text("1 request waits for a decision")
    expect(page).to_have_title("(1) Inbox · Agentsite")
    expect(page.locator(".row")).to_have_count(0)
    page.get_by_role("button", name="1 new · Show").click()
    expect(page.locator(row(page, action))).to_contain_text("note")
    expect(page.locator(row(page, action))).to_contain_text('{"text":"hello"}')
    expect(page.locator("#new-bar")).to_be_hidden()
    expect(page.locator('[data-count="pending"]')).to_have_text("1")


def test_a_row_is_opened_approved_and_stays_greyed_with_who(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call("note", '{"text":"hello"}')
    page = visit("/", ana)
    live(page)
    here = page.locator(row(page, action))
    here.get_by_role("button", name="Open", exact=True).click()
    expect(here.locator("article.card.live button.approve")).to_have_attribute("aria-disabled", "false")
    page.wait_for_timeout(400)
    here.get_by_role("button", name="Approve", exact=True).click()
    expect(here).to_have_attribute("data-state", "approved")
    expect(here).to_contain_text("by ana")
    expect(page.locator('[data-count="pending"]')).to_have_text("0")
    agent.execute(action)
    expect(here).to_have_attribute("data-state", "done")
    assert len(agent.effects) == 1


def test_keys_move_show_first_and_decide_on_the_second_press(visit: Visit, agent: Agent, ana: User) -> None:
    older = agent.call("note", '{"text":"older"}', id="c1")
    newer = agent.call("note", '{"text":"newer"}', id="c2")
    page = visit("/", ana)
    live(page)
    page.keyboard.press("j")
    expect(page.locator(row(page, newer))).to_have_class("row selected")
    page.keyboard.press("j")
    here = page.locator(row(page, older))
    expect(here).to_have_class("row selected")
    page.keyboard.press("a")
    expect(here.locator(".row-message")).to_contain_text("press a again")
    assert not Decision.objects.exists()
    expect(here.locator("button.approve")).to_have_attribute("aria-disabled", "false")
    page.wait_for_timeout(400)
    page.keyboard.press("a")
    expect(here).to_have_attribute("data-state", "approved")
    page.keyboard.press("k")
    expect(page.locator(row(page, newer))).to_have_class("row selected")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("Use these keys").uncheck()
    page.locator("#help-close").click()
    page.keyboard.press("x")
    expect(page.locator("#batch")).to_be_hidden()
    assert Decision.objects.get().action_id == older.pk


def test_a_key_in_the_first_moment_of_a_row_does_nothing(visit: Visit, agent: Agent, ana: User) -> None:
    page = visit("/", ana)
    live(page)
    action = agent.call("note", '{"text":"hello"}')
    show = page.get_by_role("button", name="1 new · Show")
    expect(show).to_be_visible()
    # In one task: the row appears under the hand, and the key that was meant for something else falls.
    page.evaluate(
        """() => { document.querySelector('#new-show').click();
          for (const key of ['x', 'a', 'a'])
            document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true})); }"""
    )
    expect(page.locator(f"{row(page, action)} .row-message")).to_contain_text("only just appeared")
    expect(page.locator(f"{row(page, action)} article.card")).to_have_count(0)
    assert not Decision.objects.exists()


def test_a_batch_decides_the_harmless_and_says_why_not_for_the_rest(visit: Visit, agent: Agent, ana: User) -> None:
    low = agent.call("note", '{"text":"hello"}', id="c1")
    risky = agent.call("wipe", '{"all":true}', id="c2")
    long = agent.call("note", json.dumps({"text": "x" * 500}), id="c3")
    page = visit("/", ana)
    live(page)
    for action in (low, risky, long):
        page.locator(f"{row(page, action)} .pick").check()
    expect(page.locator("#batch-count")).to_have_text("3 selected")
    page.locator("#batch-approve").click()
    expect(page.locator(row(page, low))).to_have_attribute("data-state", "approved")
    expect(page.locator(f"{row(page, risky)} .row-message")).to_contain_text("not approved in a batch")
    expect(page.locator(f"{row(page, long)} .row-message")).to_contain_text("open it first")
    assert Decision.objects.get().action_id == low.pk


def test_a_lost_line_is_said_with_the_age_of_the_list(visit: Visit, agent: Agent, ana: User) -> None:
    page = visit("/accounts/login/", ana)
    page.context.route_web_socket("**/ws/inbox/", lambda route: route.close(code=1013))
    page.goto("/")
    expect(page.locator("#freshness")).to_contain_text("not connected")
    expect(page.get_by_role("button", name="Connect again")).to_be_visible()
