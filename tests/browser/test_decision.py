"""The click that survives: drop, reload, double click, two tabs, and whatever was not meant."""

from __future__ import annotations

import json
import uuid

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Locator, Page, Route, WebSocketRoute, expect

from approvals import decisions
from approvals.models import ApprovalRequest, Decision
from streams.access import caller_for_user
from tests.browser.conftest import Agent, Visit, sign_in
from tests.support import Server, eventually

pytestmark = pytest.mark.browser


def request_path(action: ApprovalRequest) -> str:
    return f"/approvals/{action.pk}/"


def ready(page: Page) -> Locator:
    """The request's card, once it may be pressed."""
    card = page.locator("article.card.live")
    expect(card.get_by_role("button", name="Approve", exact=True)).to_have_attribute("aria-disabled", "false")
    page.wait_for_timeout(400)  # past the 350 ms in which nothing new can be decided
    return card


def press(card: Locator, name: str = "Approve") -> None:
    card.get_by_role("button", name=name, exact=True).click()


def decide_elsewhere(user: User, action: ApprovalRequest, decision: str) -> None:
    decisions.decide(
        caller=caller_for_user(user=user, door="http"),
        action_id=action.pk,
        idempotency_key=uuid.uuid4().hex,
        decision=decision,
        digest=action.digest,
    )


def test_lost_answer_reload_and_a_second_tab_make_one_effect_and_say_not_repeated(
    visit: Visit, agent: Agent, ana: User
) -> None:
    action = agent.call()
    page = visit(request_path(action), ana)
    second = visit(request_path(action), ana, beside=page)
    lost: list[str] = []

    def lose(route: Route) -> None:
        route.fetch()  # the server answers, and nobody hears it
        lost.append(route.request.post_data_json["idempotencyKey"])
        route.abort()

    page.route("**/decision", lose)
    for tab in (page, second):
        ready(tab)
    press(page.locator("article.card"))
    eventually(lambda: lost or page.wait_for_timeout(20))
    expect(page.locator(".ladder")).to_contain_text("sent")
    page.unroute_all()
    page.reload()
    expect(page.locator(".card .message")).to_have_text("Already recorded, not repeated")
    press_if_live(second)
    expect(second.locator(".card .message")).to_have_text("Already recorded, not repeated")
    agent.execute(action)
    for tab in (page, second):
        expect(tab.locator('.ladder [aria-current="step"]')).to_have_text("done")
        expect(tab.locator(".badge.state").first).to_have_text("Done")
    assert len(agent.effects) == 1
    assert Decision.objects.get().idempotency_key == lost[0]
    assert set(lost) == {lost[0]}


def press_if_live(page: Page) -> None:
    button = page.get_by_role("button", name="Approve", exact=True)
    if button.is_visible():
        button.click()


def test_two_tabs_pressed_at_once_make_one_key(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call()
    first = visit(request_path(action), ana)
    second = visit(request_path(action), ana, beside=first)
    for tab in (first, second):
        ready(tab)
    keys: set[str] = set()
    first.context.on(
        "request",
        lambda sent: keys.add(sent.post_data_json["idempotencyKey"]) if sent.url.endswith("/decision") else None,
    )
    for tab in (first, second):
        tab.evaluate(
            """() => document.querySelector('button.approve')
              .dispatchEvent(new MouseEvent('click', {bubbles: true, detail: 1}))"""
        )
    for tab in (first, second):
        expect(tab.locator('.ladder [aria-current="step"]')).to_have_text("recorded")
    assert len(keys) == 1
    assert Decision.objects.count() == 1


def test_a_double_click_decides_once(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call()
    page = visit(request_path(action), ana)
    ready(page).get_by_role("button", name="Approve", exact=True).dblclick()
    expect(page.locator('.ladder [aria-current="step"]')).to_have_text("recorded")
    assert Decision.objects.count() == 1


def test_enter_held_down_approves_nothing_risky(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call()
    page = visit(request_path(action), ana)
    ready(page).get_by_role("button", name="Approve", exact=True).focus()
    for _ in range(5):
        page.keyboard.down("Enter")
    page.keyboard.up("Enter")
    expect(page.locator(".card .message")).to_contain_text("never approved by Enter")
    assert not Decision.objects.exists()
    page.keyboard.press("Space")
    expect(page.locator(".card .message")).to_have_text("Approval recorded")


def test_a_press_as_the_card_appears_decides_nothing(visit: Visit, agent: Agent, ana: User) -> None:
    page = visit(agent.path, ana)
    expect(page.locator("#state-name")).to_have_text("streaming")
    # Press in the very task in which the card becomes live: no hand can be faster.
    page.evaluate(
        """() => new MutationObserver(() => {
          const button = document.querySelector('article.card.live button.approve[aria-disabled="false"]');
          if (button && !window.pressed) { window.pressed = true; button.click(); }
        }).observe(document, {subtree: true, attributes: true, childList: true})"""
    )
    agent.call()
    expect(page.locator(".card .message")).to_contain_text("only just appeared")
    assert not Decision.objects.exists()


def test_the_click_that_brings_the_window_forward_decides_nothing(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call()
    page = visit(request_path(action), ana)
    card = ready(page)
    page.evaluate("() => { window.dispatchEvent(new Event('blur')); window.dispatchEvent(new Event('focus')); }")
    press(card)
    expect(page.locator(".card .message")).to_contain_text("brought the window forward")
    assert not Decision.objects.exists()
    page.wait_for_timeout(400)
    press(card)
    expect(page.locator(".card .message")).to_have_text("Approval recorded")


def test_decided_in_another_browser_every_page_shows_it_settled_and_no_live_buttons(
    visit: Visit, agent: Agent, ana: User, bruna: User
) -> None:
    action = agent.call()
    pages = [visit(request_path(action), ana), visit(agent.path, ana), visit("/", ana)]
    for page in pages[:2]:
        ready(page)
    decide_elsewhere(bruna, action, "reject")
    pages += [visit(request_path(action), ana), visit(agent.path, ana)]
    for page in (pages[0], pages[1], pages[3], pages[4]):
        expect(page.locator(".badge.state").first).to_have_text("Rejected")
        expect(page.locator("article.card")).to_contain_text("Rejected by bruna")
        expect(page.locator("article.card.live")).to_have_count(0)
        expect(page.get_by_role("button", name="Approve", exact=True)).to_have_count(0)
    row = pages[2].locator(f'[data-action="{action.pk}"]')
    expect(row).to_have_attribute("data-state", "rejected")
    expect(row).to_contain_text("by bruna")


def test_a_lost_race_says_who_won_and_that_the_approval_was_not_applied(
    visit: Visit, agent: Agent, ana: User, bruna: User
) -> None:
    action = agent.call()
    page = visit("/accounts/login/", ana)
    hold = False

    def deaf(route: WebSocketRoute) -> None:
        server = route.connect_to_server()
        server.on_message(lambda message: None if hold else route.send(message))

    page.context.route_web_socket("**/ws/inbox/", deaf)
    page.goto(request_path(action))
    card = ready(page)
    hold = True
    decide_elsewhere(bruna, action, "reject")
    press(card)
    expect(page.locator(".card .message")).to_contain_text("Already rejected by bruna")
    expect(page.locator(".card .message")).to_contain_text("your approval was not applied")
    expect(page.locator("article.card.live")).to_have_count(0)
    assert Decision.objects.get().person == bruna


def test_while_the_line_is_down_the_buttons_are_off_and_a_click_made_before_is_still_sent(
    visit: Visit, agent: Agent, ana: User
) -> None:
    action = agent.call()
    page = visit(request_path(action), ana)
    card = ready(page)
    page.route("**/decision", lambda route: route.abort())
    press(card)
    expect(page.locator(".card .message")).to_contain_text("the same click is sent again")
    assert not Decision.objects.exists()
    page.unroute_all()
    eventually(lambda: Decision.objects.exists() or page.wait_for_timeout(50))
    expect(page.locator('.ladder [aria-current="step"]')).to_have_text("recorded")


def test_not_caught_up_no_button_decides(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call()
    page = visit("/accounts/login/", ana)

    def never_caught_up(route: WebSocketRoute) -> None:
        server = route.connect_to_server()
        server.on_message(lambda message: None if "caught_up" in str(message) else route.send(message))

    page.context.route_web_socket("**/ws/generations/**", never_caught_up)
    page.goto(agent.path)
    button = page.locator(f'[data-action="{action.pk}"]').get_by_role("button", name="Approve", exact=True)
    expect(button).to_have_attribute("aria-disabled", "true")
    page.wait_for_timeout(400)
    button.click(force=True)  # aria-disabled: a hand can press it all the same
    expect(page.locator(".card .message")).to_contain_text("Catching up")
    assert not Decision.objects.exists()


def test_a_session_that_ended_keeps_the_click_for_the_same_person_only(
    visit: Visit, agent: Agent, ana: User, bruna: User, site: Server
) -> None:
    action = agent.call()
    page = visit(request_path(action), ana)
    card = ready(page)
    page.context.clear_cookies(name="sessionid")
    press(card)
    expect(page.locator(".card .message")).to_contain_text("The click is kept")
    sign_in(page.context, bruna, site.url)
    page.goto(request_path(action))
    ready(page)
    assert not Decision.objects.exists()
    sign_in(page.context, ana, site.url)
    page.goto(request_path(action))
    expect(page.locator('.ladder [aria-current="step"]')).to_have_text("recorded")
    assert Decision.objects.get().person == ana


def test_edited_arguments_run_with_every_digit_that_was_typed(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call(arguments='{"amount":10,"order":1042}')
    page = visit(request_path(action), ana)
    card = ready(page)
    press(card, "Approve with edits…")
    editor = card.get_by_label("Exact arguments")
    editor.fill('{"amount": 9007199254740993, "order": }')
    press(card, "Approve these arguments")
    expect(card).to_contain_text("Not JSON")
    assert not Decision.objects.exists()
    editor.fill('{"amount": 9007199254740993, "order": 1042}')
    expect(card).to_contain_text("1 field changed")
    press(card, "Approve these arguments")
    expect(page.locator(".card .message")).to_have_text("Approval recorded")
    action.refresh_from_db()
    assert action.arguments_text == '{"amount":9007199254740993,"order":1042}'
    expect(page.locator("table.diff")).to_contain_text("9007199254740993")
    agent.execute(action)
    assert agent.effects == [("refund", {"amount": 9007199254740993, "order": 1042})]


def test_reject_with_a_reason_tells_it_and_nothing_runs(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call()
    page = visit(request_path(action), ana)
    card = ready(page)
    press(card, "Reject")
    card.get_by_label("Reason").fill("wrong order")
    press(card, "Reject it")
    expect(page.locator(".card .message")).to_have_text("Rejection recorded")
    expect(card).to_have_count(0)
    expect(page.locator("article.card")).to_contain_text("wrong order")
    assert Decision.objects.get().reason == "wrong order"
    assert agent.effects == []


def test_approve_stays_off_until_all_of_a_long_text_was_opened(visit: Visit, agent: Agent, ana: User) -> None:
    command = "ls " + "a" * 4000 + " && rm -rf /"
    action = agent.call(arguments=json.dumps({"command": command}))
    page = visit(request_path(action), ana)
    card = page.locator("article.card.live")
    button = card.get_by_role("button", name="Approve", exact=True)
    expect(card).to_be_visible()
    expect(button).to_have_attribute("aria-disabled", "true")
    page.wait_for_timeout(400)
    button.click(force=True)  # aria-disabled: a hand can press it all the same
    expect(page.locator(".card .message")).to_contain_text("not all of it has been shown")
    assert not Decision.objects.exists()
    card.get_by_role("button", name="more characters").click()
    expect(card.locator(".fields")).to_contain_text("rm -rf /")
    button.click()
    expect(page.locator(".card .message")).to_have_text("Approval recorded")


def test_two_hundred_fields_are_all_there_before_approve(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call(arguments=json.dumps({f"f{n:03}": n for n in range(200)}))
    page = visit(request_path(action), ana)
    card = page.locator("article.card.live")
    expect(card.get_by_role("button", name="Approve", exact=True)).to_have_attribute("aria-disabled", "true")
    card.get_by_role("button", name="Show 160 more fields").click()
    expect(card.locator(".fields dt")).to_have_count(200)
    expect(card.get_by_role("button", name="Approve", exact=True)).to_have_attribute("aria-disabled", "false")


def test_what_nobody_knows_is_settled_by_a_person_with_a_note(visit: Visit, agent: Agent, ana: User) -> None:
    action = agent.call()
    ApprovalRequest.objects.filter(pk=action.pk).update(state="unknown", fence=1, version=5)
    page = visit(request_path(action), ana)
    form = page.locator("#reconcile")
    form.get_by_label("It ran").check()
    form.get_by_role("button").click()
    expect(form).to_contain_text("how you know")
    form.get_by_label("How do you know?").fill("the bank shows it")
    form.get_by_role("button").click()
    expect(page.locator(".badge.state").first).to_have_text("Done")
    assert Decision.objects.get().decision == "reconcile_done"
