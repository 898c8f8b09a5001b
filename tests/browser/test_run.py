"""The run page: what a person sees of a stream on a network that breaks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Page, WebSocketRoute, expect

from approvals.models import Decision
from streams import log
from streams.models import Entry, Generation
from streams.protocol import Actor
from tests.browser.conftest import HEARTBEAT_SECONDS, Agent, Visit, log_text, names
from tests.support import Server, TcpProxy, eventually

pytestmark = pytest.mark.browser

WORDS = [f"word{n} " for n in range(16)]


class Line:
    """Stands between page and server: counts texts, notes each hello, cuts and refuses on request."""

    def __init__(self, *, cut_after_texts: int | None = None) -> None:
        self.cut_after, self.refusing = cut_after_texts, False
        self.hellos: list[dict[str, Any]] = []
        self.texts = 0

    def __call__(self, route: WebSocketRoute) -> None:
        if self.refusing:
            route.close(code=1013)
            return
        server = route.connect_to_server()

        def up(message: str | bytes) -> None:
            if '"hello"' in str(message):
                self.hellos.append(json.loads(message))
            server.send(message)

        def down(message: str | bytes) -> None:
            frame = json.loads(message)
            if frame["type"] == "entries" and self.cut_after is not None:
                kept = []
                for entry in frame["entries"]:
                    kept.append(entry)
                    self.texts += entry.get("chunk", {}).get("type") == "text"
                    if self.texts == self.cut_after:
                        self.cut_after = None
                        route.send(json.dumps({**frame, "entries": kept}))
                        route.close(code=1011)
                        server.close()
                        return
            route.send(message)

        route.on_message(up)
        server.on_message(down)


def open_through(visit: Visit, agent: Agent, user: User, line: Line) -> Page:
    page = visit("/accounts/login/?next=/nowhere/", user)
    page.context.route_web_socket("**/ws/generations/**", line)
    page.goto(agent.path)
    return page


def test_text_streams_a_card_appears_approve_runs_it_once_and_the_agent_goes_on(
    visit: Visit, agent: Agent, ana: User
) -> None:
    page = visit(agent.path, ana)
    agent.say("I will ", "refund it.")
    expect(page.locator("#log")).to_contain_text("I will refund it.")
    action = agent.call()
    card = page.locator(f'[data-action="{action.pk}"]')
    expect(card).to_have_class("card live")
    expect(card.get_by_text("Waiting for a decision")).to_be_visible()
    expect(page.locator("#state-sentence")).to_have_text("Live · 1 action waits for a person")
    page.wait_for_timeout(400)  # the card refuses presses in its first 350 ms; that has a test of its own
    card.get_by_role("button", name="Approve").click()
    expect(card.locator(".message")).to_have_text("Approval recorded")
    agent.execute(action)
    expect(card.locator(".badge.state")).to_have_text("Done")
    expect(card.locator('.ladder [aria-current="step"]')).to_have_text("done")
    expect(page.locator('[data-kind="result"]')).to_contain_text('"ok": true')
    agent.say("It is refunded.")
    expect(page.locator("#log")).to_contain_text("It is refunded.")
    agent.end()
    expect(page.locator("#state-name")).to_have_text("done")
    assert len(agent.effects) == 1
    assert str(agent.effects[0][1]["amount"]) == "49.9"
    assert Decision.objects.get().person == ana
    assert Entry.objects.filter(generation=agent.generation, type="tool_result").count() == 1


def test_cut_at_the_eighth_token_it_goes_on_at_8_and_nothing_is_doubled_or_lost(
    visit: Visit, agent: Agent, ana: User
) -> None:
    line = Line(cut_after_texts=8)
    agent.say(*WORDS)
    page = open_through(visit, agent, ana, line)
    expect(page.locator("#count-tokens")).to_have_text("16")
    agent.end()
    expect(page.locator("#state-name")).to_have_text("done")
    assert log_text(page) == "".join(WORDS)
    assert "retrying" in names(page)
    assert [hello["from"] for hello in line.hellos] == [0, 8]
    expect(page.locator("#count-reconnects")).to_have_text("1")
    expect(page.locator(".mark").first).to_have_text("Resumed at entry 8")


def test_four_refusals_in_a_row_end_in_error_naming_the_token_and_continue_works(
    visit: Visit, agent: Agent, ana: User
) -> None:
    line = Line(cut_after_texts=8)
    agent.say(*WORDS)
    line.refusing = False
    page = visit("/accounts/login/", ana)

    def once_then_refuse(route: WebSocketRoute) -> None:
        line(route)
        line.refusing = True

    page.context.route_web_socket("**/ws/generations/**", once_then_refuse)
    page.goto(agent.path)
    expect(page.locator("#state-sentence")).to_have_text("Gave up after 4 attempts at token 8: refused")
    expect(page.locator("#state-name")).to_have_text("error")
    expect(page.get_by_role("alert")).to_contain_text("at token 8")
    assert len(line.hellos) == 1
    page.unroute_all()
    page.context.unroute_all()
    line.refusing = False
    page.get_by_role("button", name="Continue from token 8").click()
    line.refusing = False
    eventually(lambda: page.locator("#count-tokens").text_content() == "16" or _retry(page, line))
    assert log_text(page) == "".join(WORDS)
    assert line.hellos[-1]["from"] == 8


def _retry(page: Page, line: Line) -> bool:
    line.refusing = False
    button = page.get_by_role("button", name="Continue from token 8")
    if button.is_visible():
        button.click()
    page.wait_for_timeout(50)
    return False


def test_a_frozen_line_is_stalled_within_two_heartbeats_and_then_resumed(
    visit: Visit, agent: Agent, ana: User, site: Server
) -> None:
    with TcpProxy(site.port) as proxy:
        agent.say(*WORDS[:4])
        page = visit(agent.path, ana, url=f"http://127.0.0.1:{proxy.port}")
        expect(page.locator("#count-tokens")).to_have_text("4")
        proxy.freeze()
        agent.say(*WORDS[4:])
        expect(page.locator("#state-name")).to_have_text("stalled", timeout=(2 * HEARTBEAT_SECONDS + 1) * 1000)
        proxy.thaw()
        expect(page.locator("#count-tokens")).to_have_text("16", timeout=15_000)
        assert log_text(page) == "".join(WORDS)


def test_stop_reaches_the_producer_within_a_second_and_a_second_stop_says_the_same(
    visit: Visit, agent: Agent, ana: User
) -> None:
    page, other = visit(agent.path, ana), None
    agent.say(*WORDS[:3])
    expect(page.locator("#count-tokens")).to_have_text("3")
    other = visit(agent.path, ana, beside=page)
    expect(other.locator("#count-tokens")).to_have_text("3")
    page.get_by_role("button", name="Stop").click()
    eventually(lambda: Generation.objects.get().cancel_requested, within_seconds=1)
    expect(page.locator("#state-sentence")).to_have_text("Live · stopping")
    if (stop := other.get_by_role("button", name="Stop", exact=True)).is_visible():
        stop.click()
    agent.end("cancel")
    for tab in (page, other):
        expect(tab.locator("#state-sentence")).to_have_text("Stopped by you at token 3. No tool had run")
        expect(tab.locator("#state-name")).to_have_text("cancelled")
    assert Entry.objects.filter(type="cancel_requested").count() == 1
    assert log.request_cancel(generation_id=agent.generation.pk, actor=Actor(kind="person", id="1", name="x")) is False


def test_the_tab_closes_and_the_agent_goes_on_and_a_new_tab_has_it_all_once(
    visit: Visit, agent: Agent, ana: User
) -> None:
    page = visit(agent.path, ana)
    agent.say(*WORDS[:5])
    expect(page.locator("#count-tokens")).to_have_text("5")
    page.close()
    agent.say(*WORDS[5:])
    assert not Generation.objects.get().cancel_requested
    again = visit(agent.path, ana)
    beside = visit(agent.path, ana, beside=again)
    for tab in (again, beside):
        expect(tab.locator("#count-tokens")).to_have_text("16")
        assert log_text(tab) == "".join(WORDS)


def test_a_superseded_attempt_is_struck_and_the_new_one_stands(visit: Visit, agent: Agent, ana: User) -> None:
    from streams.protocol import Text

    page = visit(agent.path, ana)
    agent.say("wrong ", "start")
    log.append(
        generation_id=agent.generation.pk,
        attempt=2,
        seq=0,
        chunks=[Text(content="right start")],
        writer="agent-2",
        actor=Actor(kind="token", id="x", name="x"),
    )
    expect(page.locator("#log > del")).to_have_text("wrong start")
    expect(page.locator("#log > div.block")).to_have_text("right start")
    expect(page.locator("#count-attempt")).to_have_text("2")


def test_hidden_characters_from_an_agent_are_written_out_and_emoji_stay_whole(
    visit: Visit, agent: Agent, ana: User
) -> None:
    page = visit(agent.path, ana)
    family = "👨\u200d👩\u200d👧"
    agent.say("a\u202eb ", family[:3], family[3:], " <b>x</b>")
    expect(page.locator("#count-tokens")).to_have_text("4")
    page.wait_for_function("() => document.querySelector('#log').textContent.includes('<b>x</b>')")
    assert log_text(page) == f"a‹U+202E›b {family} <b>x</b>"
