"""Server-sent events and held answers against real servers: what arrives, when it ends, and what it holds meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.db import transaction

from streams import access, doorbell, log
from streams.models import Generation
from streams.protocol import Actor, Chunk, Done, Text, ToolCall
from tests.support import factories
from tests.support.polling import eventually
from tests.support.processes import Kind, Server

ACTOR = Actor(kind="token", id="t", name="agent")
Servers = Callable[[Kind], Server]


@pytest.fixture(scope="module")
def servers(django_db_setup: None) -> Iterator[Servers]:
    started: dict[Kind, Server] = {}
    with ExitStack() as stack:

        def server(kind: Kind) -> Server:
            if kind not in started:
                env: dict[str, str | None] = {"SOCKET_HEARTBEAT_SECONDS": "1", "DATABASE_POOL_SIZE": "4"}
                started[kind] = stack.enter_context(Server(kind, env=env))
            return started[kind]

        yield server
        doorbell.close()


@pytest.fixture
def daphne(servers: Servers, transactional_db: None) -> Server:
    return servers("daphne")


@pytest.fixture(params=["daphne", "uvicorn"])
def server(request: pytest.FixtureRequest, servers: Servers, transactional_db: None) -> Server:
    return servers(request.param)


class Story:
    """One agent, its generation, and the writing of it."""

    def __init__(self) -> None:
        self.token, self.secret = factories.agent_token()
        self.generation = factories.generation(token=self.token)
        self.seq = 0

    @property
    def path(self) -> str:
        return f"/api/v1/generations/{self.generation.pk}"

    def write(self, *chunks: Chunk | str) -> None:
        made = [Text(content=chunk) if isinstance(chunk, str) else chunk for chunk in chunks]
        log.append(generation_id=self.generation.pk, attempt=1, seq=self.seq, chunks=made, writer="w", actor=ACTOR)
        self.seq += len(made)

    def note(self) -> None:
        with transaction.atomic(), log.hold(self.generation.pk) as held:
            held.notice({"type": "action", "state": "x"})


@pytest.fixture
def story(transactional_db: None) -> Story:
    return Story()


class Reader:
    """An open event stream, read line by line."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines = response.iter_lines()
        self.comments: list[str] = []

    def event(self) -> tuple[int, dict[str, Any]]:
        """Return the next event; StopIteration at the end of the stream."""
        offset = -1
        for line in self.lines:
            if line.startswith(":"):
                self.comments.append(line)
            elif line.startswith("id: "):
                offset = int(line[4:])
            elif line.startswith("data: "):
                return offset, json.loads(line[6:])
        raise StopIteration

    def rest(self) -> list[tuple[int, dict[str, Any]]]:
        found = []
        while True:
            try:
                found.append(self.event())
            except StopIteration:
                return found

    def comment(self) -> str:
        return next(line for line in self.lines if line.startswith(":"))


@contextmanager
def reading(server: Server, story: Story, query: str = "", **headers: str) -> Iterator[Reader]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.stream(
        "GET",
        f"{server.url}{story.path}/events{query}",
        headers={**factories.bearer(story.secret), **named},
        timeout=20,
    ) as response:
        assert response.status_code == 200, response.read()
        yield Reader(response)


def test_entries_arrive_one_an_event_and_the_stream_ends_after_done(server: Server, story: Story) -> None:
    story.write("a", "b")
    with reading(server, story) as reader:
        headers = reader.response.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-accel-buffering"] == "no"
        assert "no-transform" in headers["cache-control"]
        assert headers.get("content-encoding", "identity") == "identity"
        assert [reader.event()[0], reader.event()[0]] == [0, 1]
        story.write("c")
        offset, entry = reader.event()
        assert (offset, entry["offset"], entry["chunk"]["content"]) == (2, 2, "c")
        story.write(Done(reason="stop"))
        assert [(at, entry["chunk"]["type"]) for at, entry in reader.rest()] == [(3, "done")]


def test_a_reader_comes_back_and_the_header_wins_over_the_query(daphne: Server, story: Story) -> None:
    """C43: it dropped at 5, the writer finished at 9; it gets 6 … 9 and the end, and then a clear nothing."""
    story.write(*[str(n) for n in range(9)], Done(reason="stop"))
    with reading(daphne, story, "?from=2", Last_Event_ID="5") as reader:
        assert [offset for offset, _ in reader.rest()] == [6, 7, 8, 9]
    with reading(daphne, story, "?from=7") as reader:
        assert [offset for offset, _ in reader.rest()] == [7, 8, 9]
    for query, headers in (("?from=10", {}), ("", {"Last-Event-ID": "9"})):
        answer = httpx.get(
            f"{daphne.url}{story.path}/events{query}", headers={**factories.bearer(story.secret), **headers}
        )
        assert (answer.status_code, answer.content) == (204, b"")


def test_heartbeats_carry_no_id_and_never_move_the_cursor(daphne: Server, story: Story) -> None:
    """C44: comments between entries, then a drop: the reader still comes back for what it has not seen."""
    story.write("a")
    with reading(daphne, story) as reader:
        assert reader.event()[0] == 0
        assert reader.comment() == ": heartbeat"
        assert reader.comment() == ": heartbeat"
        story.write("b")
        assert reader.event()[0] == 1
    story.write(Done(reason="stop"))
    with reading(daphne, story, Last_Event_ID="1") as reader:
        assert [offset for offset, _ in reader.rest()] == [2]


def test_the_stream_stays_open_while_an_action_is_open(daphne: Server, story: Story) -> None:
    story.write(ToolCall(id="1", name="pay", arguments="{}", index=0), Done(reason="tool_use"))
    with reading(daphne, story) as reader:
        types = []
        while "done" not in types:
            _, entry = reader.event()
            types.append((entry.get("chunk") or entry["notice"])["type"])
        assert reader.comment() == ": heartbeat"
        with transaction.atomic(), log.hold(story.generation.pk) as held:
            held.generation.open_actions = held.generation.open_gated = 0
            held.notice({"type": "action", "state": "rejected"})
        assert [entry["notice"]["state"] for _, entry in reader.rest()] == ["rejected"]


@pytest.mark.parametrize(
    ("query", "header"), [("?from=-1", ""), ("?from=x", ""), ("?from=7", ""), ("", "x"), ("", "-1"), ("", "99")]
)
def test_an_offset_that_is_none_is_refused(daphne: Server, story: Story, query: str, header: str) -> None:
    answer = httpx.get(
        f"{daphne.url}{story.path}/events{query}",
        headers={**factories.bearer(story.secret), **({"Last-Event-ID": header} if header else {})},
    )
    assert answer.status_code == 400
    assert answer.json()["field"] in ("from", "Last-Event-ID")


def test_a_revoked_token_ends_its_open_stream(daphne: Server, story: Story) -> None:
    with reading(daphne, story) as reader:
        reader.comment()
        access.revoke_token(prefix=story.token.prefix, caller=access.COMMAND)
        began = time.monotonic()
        assert reader.rest() == []
        assert time.monotonic() - began < 6


def test_what_is_not_there_is_a_problem_document_from_a_real_server_too(daphne: Server, story: Story) -> None:
    headers = factories.bearer(story.secret)
    for path in ("/api/v1/nothing", "/api/v1/generations/", "/api/v2/x", f"{story.path}x"):
        answer = httpx.get(f"{daphne.url}{path}", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_session_works_without_the_browsers_middleware(server: Server, story: Story) -> None:
    """The shortcut looks for the session itself, with everything that guards it."""
    cookie = {"Cookie": f"sessionid={factories.session_cookie(factories.operator())}; csrftoken={'a' * 32}"}
    url = f"{server.url}{story.path}"
    assert httpx.get(url, headers=cookie).status_code == 200
    assert httpx.get(url, headers={"Cookie": "sessionid=guessed"}).status_code == 401
    refused = httpx.post(f"{url}/cancel", headers=cookie)
    assert (refused.status_code, refused.json()["code"]) == (403, "csrf_failed")
    foreign = httpx.post(f"{url}/cancel", headers={**cookie, "X-CSRFToken": "a" * 32, "Origin": "http://evil.test"})
    assert (foreign.status_code, foreign.json()["code"]) == (403, "origin_refused")
    assert not Generation.objects.get().cancel_requested
    stopped = httpx.post(f"{url}/cancel", headers={**cookie, "X-CSRFToken": "a" * 32, "Origin": server.url})
    assert stopped.status_code == 202
    assert Generation.objects.get().cancel_requested


def test_a_chunked_body_is_read_and_a_wrong_host_refused(daphne: Server, story: Story) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"attempt":1,"seq":0,"chunks":[{"type":"text",'
        yield b'"content":"in two"}]}'

    headers = {**factories.bearer(story.secret), "Content-Type": "application/json"}
    answer = httpx.post(f"{daphne.url}{story.path}/chunks", content=body(), headers=headers)
    assert answer.status_code == 201, answer.text
    opened = httpx.post(f"{daphne.url}/api/v1/generations", content=iter([b'{"title":', b'"t"}']), headers=headers)
    assert (opened.status_code, opened.json()["title"]) == (201, "t")
    strange = httpx.get(f"{daphne.url}{story.path}", headers={**headers, "Host": "evil.test"})
    assert (strange.status_code, strange.json()["field"]) == (400, "Host")


# --- waits --------------------------------------------------------------------------------------------------------


def ask(server: Server, story: Story) -> str:
    answer = httpx.post(
        f"{server.url}/api/v1/approvals",
        json={"tool": "pay", "arguments": {}},
        headers={**factories.bearer(story.secret), "Idempotency-Key": f"key-{time.monotonic_ns()}"},
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["actionId"])


def threads_of(server: Server) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:")))


def cancel(server: Server, story: Story, action: str) -> None:
    answer = httpx.post(
        f"{server.url}/api/v1/approvals/{action}/cancel", json={}, headers=factories.bearer(story.secret)
    )
    assert answer.status_code == 200, answer.text


def test_a_wait_ends_with_the_change_it_waits_for_and_holds_no_thread(server: Server, story: Story) -> None:
    """C24: a held answer; sixty of them take no sixty threads, and no database connection each (the pool has 4)."""
    action = ask(server, story)
    answers: list[httpx.Response] = []
    url = f"{server.url}/api/v1/approvals/{action}?wait=30&version=1"

    def wait() -> None:
        answers.append(httpx.get(url, headers=factories.bearer(story.secret), timeout=60))

    readers = [threading.Thread(target=wait) for _ in range(60)]
    for reader in readers:
        reader.start()
    eventually(lambda: connections_to(server) >= 60, within_seconds=30)
    assert threads_of(server) < 45
    # Beside sixty that wait, work goes on at once.
    story.write("still writing")
    assert httpx.get(f"{server.url}{story.path}", headers=factories.bearer(story.secret)).status_code == 200
    assert answers == []
    cancel(server, story, action)
    for reader in readers:
        reader.join(30)
    assert [(answer.status_code, answer.json()["state"]) for answer in answers] == [(200, "cancelled")] * 60


def connections_to(server: Server) -> int:
    """Count established connections at the server's port."""
    wanted = f":{server.port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(wanted) and line.split()[3] == "01" for line in lines)


def test_a_wait_without_a_change_ends_in_its_time(daphne: Server, story: Story) -> None:
    action = ask(daphne, story)
    url = f"{daphne.url}/api/v1/approvals/{action}"
    headers = factories.bearer(story.secret)
    began = time.monotonic()
    answer = httpx.get(f"{url}?wait=1&version=1", headers=headers, timeout=20)
    took = time.monotonic() - began
    assert (answer.status_code, answer.json()["state"]) == (200, "pending")
    assert 0.9 < took < 6
    assert httpx.get(f"{url}?wait=30&version=0", headers=headers, timeout=8).json()["version"] == 1, "newer: at once"
    assert httpx.get(f"{url}?wait=31", headers=headers).json()["field"] == "wait"


def test_a_client_that_goes_away_ends_its_wait(server: Server, story: Story) -> None:
    """Its claim is not taken by a ghost: what is approved afterwards goes to the next who asks."""
    _, secret = factories.agent_token("claims", claim_tools=["*"])
    body = json.dumps({"claimId": "ghost-claim", "tools": ["*"], "waitSeconds": 30}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(
            b"POST /api/v1/claims HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {secret}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        eventually(lambda: _claim_requests() == 1)
    eventually(lambda: connections_to(server) == 0)
    factories.policy(("pay", "allow"))
    action = ask(server, story)
    # Longer than a poll: a ghost would have taken it by now.
    with pytest.raises(AssertionError):
        eventually(lambda: _state(action) != "approved", within_seconds=2.5)
    claimed = httpx.post(
        f"{server.url}/api/v1/claims",
        json={"claimId": "next-claim", "tools": ["*"]},
        headers=factories.bearer(secret),
    )
    assert [one["actionId"] for one in claimed.json()["claims"]] == [action]


def _claim_requests() -> int:
    from approvals.models import ClaimRequest

    return ClaimRequest.objects.count()


def _state(action: str) -> str:
    from approvals.models import ApprovalRequest

    return ApprovalRequest.objects.get(pk=action).state


@pytest.mark.postgres
def test_idle_readers_hold_no_connection_to_the_database(server: Server, story: Story) -> None:
    """C52 in small: forty readers on a pool of four; writing works, and their tasks end when they go."""
    from django.db import connection

    def backends() -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return int(cursor.fetchone()[0])

    before = backends()
    with ExitStack() as stack:
        readers = [stack.enter_context(reading(server, story)) for _ in range(40)]
        for reader in readers:
            reader.comment()
        # This server's pool, its doorbell, and nothing for the readers.
        assert backends() - before <= 4 + 1
        story.write("a", Done(reason="stop"))
        assert [[offset for offset, _ in reader.rest()] for reader in readers] == [[0, 1]] * 40
    eventually(lambda: connections_to(server) == 0, within_seconds=5)
