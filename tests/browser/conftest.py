"""A real Chromium against a real server in a child process, on the database of this test.

The test process plays the agent and the executor through the same verbs they use; what ran is counted outside the
system, in `effects`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from django.conf import settings
from django.contrib.auth.models import User
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from approvals import executor, tools
from approvals.models import ApprovalRequest
from streams import log
from streams.models import AgentToken, Entry, Generation
from streams.protocol import Actor, Chunk, Done, Text, ToolCall
from tests.support import Server, eventually, factories, services

HEARTBEAT_SECONDS = 2
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
# Keeps every name the run page's state ever had, however short it stood.
REMEMBER_NAMES = """
    window.names = [];
    new MutationObserver(() => {
      const name = document.body?.dataset.run;
      if (name && window.names.at(-1) !== name) window.names.push(name);
    }).observe(document, {subtree: true, attributes: true, attributeFilter: ['data-run']});
"""


@pytest.fixture(autouse=True)
def _database(transactional_db: None) -> None:
    """The server sees only what is committed."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Start Chromium for a module, not for the session: Playwright's loop runs in this thread as long as it lives, and
    no test of another module may find a running loop. The ORM beside it is used by one thread at a time all the same.
    """
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        browser = playwright.chromium.launch(executable_path=services.chromium(), args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site(django_db_setup: None, django_db_blocker: Any) -> Iterator[Server]:
    with django_db_blocker.unblock():
        server = Server(env={"SOCKET_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS)})
    with server:
        yield server


Visit = Callable[..., Page]


@pytest.fixture
def visit(chromium: Browser, site: Server) -> Iterator[Visit]:
    """Open a page as somebody, in a browser of their own (or another tab: `beside`)."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def open_page(path: str, user: User | None, *, beside: Page | None = None, url: str = "", **options: Any) -> Page:
        base = url or site.url
        if beside is None:
            context = chromium.new_context(base_url=base, **options)
            context.add_init_script(REMEMBER_NAMES)
            contexts.append(context)
            if user is not None:
                sign_in(context, user, base)
        else:
            context = beside.context
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda said: complaints.append(said.text) if "Content Security Policy" in said.text else None,
        )
        page.goto(path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == [], "a page threw, or broke its own policy"


def sign_in(context: BrowserContext, user: User, base: str) -> None:
    context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": factories.session_cookie(user), "url": base}])


@pytest.fixture
def ana() -> User:
    return factories.chief("ana")


@pytest.fixture
def bruna() -> User:
    return factories.operator("bruna")


@dataclass
class Agent:
    """An agent that writes one run. Its tools' effects are counted where the system can't reach."""

    token: AgentToken
    generation: Generation
    seq: int = 0
    effects: list[Any] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"/runs/{self.generation.pk}/"

    def write(self, *chunks: Chunk) -> log.Appended:
        answer = log.append(
            generation_id=self.generation.pk,
            attempt=1,
            seq=self.seq,
            chunks=list(chunks),
            writer="agent",
            actor=Actor(kind="token", id=self.token.prefix, name=self.token.name),
        )
        self.seq += len(chunks)
        return answer

    def say(self, *texts: str) -> None:
        for text in texts:
            self.write(Text(content=text))

    def call(
        self, tool: str = "refund", arguments: str = '{"amount":49.90,"order":1042}', id: str = "call-1"
    ) -> ApprovalRequest:
        self.write(ToolCall(id=id, name=tool, arguments=arguments, index=0))
        return ApprovalRequest.objects.get(generation=self.generation, tool_call_id=id)

    def end(self, reason: Any = "stop") -> None:
        self.write(Done(reason=reason))

    def execute(self, action: ApprovalRequest) -> None:
        """Run what was approved, as the site's executor does."""
        eventually(lambda: ApprovalRequest.objects.filter(pk=action.pk, state="approved").exists())
        outcome: list[str] = []
        # In a thread of its own: the executor has a loop, and so has the browser in this one.
        worker = threading.Thread(target=lambda: outcome.append(_run_one(action)))
        worker.start()
        worker.join()
        assert outcome == ["done"]

    def words(self) -> str:
        return "".join(
            msgspec.json.decode(body)["content"]
            for body in Entry.objects.filter(generation=self.generation, type="text")
            .order_by("offset")
            .values_list("body", flat=True)
        )


def _run_one(action: ApprovalRequest) -> str:
    from django.db import connections

    try:
        return executor.run_one(name="browser-test", action_id=action.pk)
    finally:
        connections.close_all()


@pytest.fixture
def agent() -> Iterator[Agent]:
    """An agent whose tools are `refund` (high), `note` (low) and `wipe` (critical), each asked about."""
    factories.policy(name="browser")
    token, _ = factories.agent_token()
    made = Agent(token=token, generation=factories.generation(token=token, title="Refund order 1042"))
    before = dict(tools._tools)

    def register(name: str, risk: Any) -> None:
        @tools.tool(name=name, effects="idempotent", risk=risk)
        def run(arguments: dict[str, Any], effect_key: str) -> Any:
            made.effects.append((name, arguments))
            return {"ok": True, "tool": name}

    for name, risk in (("refund", "high"), ("note", "low"), ("wipe", "critical")):
        register(name, risk)
    yield made
    tools._tools.clear()
    tools._tools.update(before)


def log_text(page: Page) -> str:
    """The standing text on the run page."""
    parts: Sequence[str] = page.locator("#log > div.block").all_text_contents()
    return "".join(parts)


def names(page: Page) -> list[str]:
    seen: list[str] = page.evaluate("window.names")
    return seen
