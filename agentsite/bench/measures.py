"""The measurements. Each returns plain numbers; `report` turns them into a table."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import Permission, User
from django.contrib.sessions.backends.db import SessionStore
from django.db import connection, connections, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

from agentsite.bench import children
from agentsite.bench.executor import TOOL, register
from approvals import requesting
from approvals.models import ApprovalRequest
from streams import access, log
from streams.models import AgentToken, Generation
from streams.protocol import Actor, Text

ACTOR = Actor(kind="token", id="bench", name="bench")


@dataclass(frozen=True)
class Sizes:
    """How much of each. `quick` shows that it works; its figures mean nothing."""

    append_seconds: float = 2.0
    writers: tuple[int, ...] = (1, 20)
    batches: tuple[int, ...] = (1, 10, 100)
    sockets: tuple[int, ...] = (1, 50, 200, 1_000)
    paced_chunks: int = 200
    chunks_a_second: int = 50
    burst_deliveries: int = 200_000
    catch_up_entries: int = 100_000
    decisions: int = 200
    idle_sockets: int = 1_000
    requests: tuple[int, int] = (10, 10_000)


QUICK = Sizes(0.05, (1, 2), (1, 10), (1, 3), 10, 50, 300, 500, 3, 20, (2, 12))


@dataclass(frozen=True)
class Site:
    """The throwaway database and who is in it."""

    database_url: str
    server: children.ServerKind
    sizes: Sizes
    token: AgentToken
    secret: str
    operator: User


def make_site(database_url: str, server: children.ServerKind, sizes: Sizes) -> Site:
    children.allow_many_sockets()
    register()
    token, secret = access.create_token(
        name="bench", scopes=["generations:write", "generations:read", "approvals:request", "read:all"]
    )
    operator = User.objects.create_user("bench-operator")
    operator.user_permissions.set(Permission.objects.filter(codename__in=["see", "decide"]))
    return Site(database_url, server, sizes, token, secret, operator)


def generation(site: Site) -> Generation:
    made, _ = log.create(actor_token=site.token, user_id=None, producer_timeout_seconds=3_600)
    return made


class Writer:
    """Appends to one generation and knows its own seq."""

    def __init__(self, made: Generation) -> None:
        self.id, self.seq = made.pk, 0

    def append(self, chunks: list[Text]) -> None:
        log.append(generation_id=self.id, attempt=1, seq=self.seq, chunks=chunks, writer="bench", actor=ACTOR)
        self.seq += len(chunks)


def stamped() -> Text:
    """Make a chunk of about a token's size that says when it was written."""
    return Text(content=f"@{time.time():.6f}@ token")


def appends(site: Site) -> list[dict[str, Any]]:
    """Append from 1 and 20 writers, in batches: appends and chunks a second, CPU of this process per chunk."""
    rows = []
    for writers in site.sizes.writers:
        for batch in site.sizes.batches:
            chunks = [Text(content="token ")] * batch
            crew = [Writer(generation(site)) for _ in range(writers)]
            connection.close()
            cpu_before = time.process_time()
            seconds = _together([_appending(one, chunks, site.sizes.append_seconds) for one in crew])
            cpu = time.process_time() - cpu_before
            written = sum(one.seq for one in crew)
            rows.append(
                {
                    "writers": writers,
                    "batch": batch,
                    "appends_per_second": round(written / batch / seconds),
                    "chunks_per_second": round(written / seconds),
                    "cpu_us_per_chunk": round(1e6 * cpu / written, 1),
                }
            )
    return rows


def _appending(writer: Writer, chunks: list[Text], seconds: float) -> Callable[[], None]:
    def work() -> None:
        deadline = time.monotonic() + seconds
        while True:
            writer.append(chunks)
            if time.monotonic() >= deadline:
                return

    return work


def _together(calls: list[Callable[[], None]]) -> float:
    """Run the calls on a thread each, at once; return the seconds until the last was done; raise what one raised."""
    failed: list[BaseException] = []
    gate = threading.Barrier(len(calls) + 1)

    def run(call: Callable[[], None]) -> None:
        try:
            connection.ensure_connection()
            gate.wait()
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)
            # Whoever waits for one that will never come would wait for ever.
            gate.abort()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):
        gate.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    if failed:
        raise next((one for one in failed if not isinstance(one, threading.BrokenBarrierError)), failed[0])
    return time.monotonic() - began


def deliveries(site: Site) -> list[dict[str, Any]]:
    """Read one generation with many sockets: latency and CPU at 50 chunks a second, then as fast as it goes.

    The writer is this process, so the server hears of each append as it would of a worker's. CPU is the server's
    alone; the readers are a third process and share the cores with both.
    """
    rows = []
    for count in site.sizes.sockets:
        burst = max(100, site.sizes.burst_deliveries // count)
        made = generation(site)
        config = {
            "path": f"/ws/generations/{made.pk}/",
            "token": site.secret,
            "sockets": count,
            "phases": [["paced", site.sizes.paced_chunks], ["burst", burst]],
        }
        with (
            children.server(site.server, site.database_url) as (server, port),
            children.readers({**config, "port": port}, site.database_url) as crowd,
        ):
            crowd.wait("caught_up", seconds=120)
            writer = Writer(made)
            cpu_before = children.cpu_seconds(server.pid)
            began = time.monotonic()
            for number in range(site.sizes.paced_chunks):
                time.sleep(max(0.0, began + number / site.sizes.chunks_a_second - time.monotonic()))
                writer.append([stamped()])
            paced = crowd.wait("paced", seconds=120)
            cpu_paced = children.cpu_seconds(server.pid) - cpu_before
            cpu_before, began_at = children.cpu_seconds(server.pid), time.time()
            for _ in range(0, burst, 100):
                writer.append([stamped() for _ in range(100)])
            burst_seen = crowd.wait("burst", seconds=180)
            cpu_burst = children.cpu_seconds(server.pid) - cpu_before
        rows.append(
            {
                "sockets": count,
                "chunks_per_second": site.sizes.chunks_a_second,
                "p50_ms": paced["p50_ms"],
                "p99_ms": paced["p99_ms"],
                "max_ms": paced["max_ms"],
                "cpu_us_per_delivery": round(1e6 * cpu_paced / paced["deliveries"], 1),
                "burst_deliveries_per_second": round(burst_seen["deliveries"] / (burst_seen["at"] - began_at)),
                "burst_cpu_us_per_delivery": round(1e6 * cpu_burst / burst_seen["deliveries"], 1),
            }
        )
    return rows


def catch_up(site: Site) -> dict[str, Any]:
    """Let one socket read a long log from its beginning."""
    made, total = generation(site), site.sizes.catch_up_entries
    writer = Writer(made)
    with transaction.atomic():
        for start in range(0, total, 500):
            writer.append([Text(content="token ")] * min(500, total - start))
    config = {"path": f"/ws/generations/{made.pk}/", "token": site.secret, "sockets": 1, "phases": []}
    with children.server(site.server, site.database_url) as (server, port):
        warm = {**config, "path": f"/ws/generations/{generation(site).pk}/", "port": port}
        with children.readers(warm, site.database_url) as crowd:
            crowd.wait("caught_up", seconds=60)
        cpu_before, began = children.cpu_seconds(server.pid), time.time()
        with children.readers({**config, "port": port}, site.database_url) as crowd:
            seconds = crowd.wait("caught_up", seconds=180)["at"] - began
        cpu = children.cpu_seconds(server.pid) - cpu_before
    return {
        "entries": total,
        "seconds": round(seconds, 2),
        "entries_per_second": round(total / seconds),
        "cpu_us_per_entry": round(1e6 * cpu / total, 1),
    }


def idle_memory(site: Site) -> dict[str, Any]:
    """Open idle sockets on one generation and see what the server grew by."""
    made = generation(site)
    config = {"path": f"/ws/generations/{made.pk}/", "token": site.secret, "phases": []}
    with children.server(site.server, site.database_url) as (server, port):
        with children.readers({**config, "port": port, "sockets": 10}, site.database_url) as crowd:
            crowd.wait("caught_up", seconds=60)
            before = children.resident_bytes(server.pid)
            rest = {**config, "port": port, "sockets": site.sizes.idle_sockets}
            with children.readers(rest, site.database_url) as more:
                more.wait("caught_up", seconds=180)
                after = children.resident_bytes(server.pid)
    return {
        "sockets": site.sizes.idle_sockets,
        "kb_per_socket": round((after - before) / site.sizes.idle_sockets / 1_000, 1),
    }


def decide_to_effect(site: Site) -> dict[str, Any]:
    """Approve over HTTP, one after the other, and take the time until the tool's effect, and until it is `done`."""
    caller = access.caller_for_token(secret=site.secret, door="command")
    session, csrf = _session(site.operator), "b" * 32
    effects, ends = [], []
    with (
        children.server(site.server, site.database_url) as (_, port),
        children.child(["-m", "agentsite.bench.executor"], site.database_url) as executor,
    ):
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for number in range(-1, site.sizes.decisions):
            action = requesting.request(
                caller=caller,
                idempotency_key=f"bench-request-{number}",
                tool=TOOL,
                arguments_text=json.dumps({"number": number}),
                executor="server",
            ).action
            body = {"idempotencyKey": f"bench-decision-{number}", "decision": "approve", "digest": action.digest}
            began = time.time()
            line.request(
                "POST",
                f"/api/v1/approvals/{action.pk}/decision?wait=20",
                json.dumps(body),
                {
                    "Content-Type": "application/json",
                    "Cookie": f"{settings.SESSION_COOKIE_NAME}={session}; {settings.CSRF_COOKIE_NAME}={csrf}",
                    "X-CSRFToken": csrf,
                    "Origin": f"http://127.0.0.1:{port}",
                },
            )
            answer = line.getresponse()
            said = json.loads(answer.read())
            if answer.status != 200 or said["action"]["state"] != "done":
                raise RuntimeError(f"the decision did not end in an effect: {answer.status} {said}")
            if executor.poll() is not None:
                raise RuntimeError("the executor ended")
            # The first one also waits for the executor to start.
            if number >= 0:
                effects.append(float(said["action"]["result"]["at"]) - began)
                ends.append(time.time() - began)
        line.close()
    return {"decisions": len(effects), **_spread("effect", effects), **_spread("answer", ends)}


def _session(user: User) -> str:
    store = SessionStore()
    store[SESSION_KEY] = str(user.pk)
    store[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    store[HASH_SESSION_KEY] = user.get_session_auth_hash()
    store.save()
    return str(store.session_key)


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    count = len(ordered)
    return {
        f"{name}_p50_ms": round(1_000 * ordered[count // 2], 1),
        f"{name}_p99_ms": round(1_000 * ordered[min(count - 1, count * 99 // 100)], 1),
    }


def inbox_queries(site: Site) -> list[dict[str, Any]]:
    """Count what a page of the inbox and of the list costs with few and with many requests."""
    caller = access.caller_for_token(secret=site.secret, door="command")
    client = Client(SERVER_NAME="localhost")
    client.force_login(site.operator)
    rows, made = [], ApprovalRequest.objects.count()
    for wanted in site.sizes.requests:
        with transaction.atomic():
            for number in range(made, wanted):
                requesting.request(
                    caller=caller, idempotency_key=f"bench-inbox-{number}", tool="bench.ask", arguments_text="{}"
                )
        made = max(made, wanted)
        row: dict[str, Any] = {"requests": made}
        for name, path in (("inbox", "/"), ("list", "/api/v1/approvals")):
            client.get(path)
            began = time.monotonic()
            with CaptureQueriesContext(connection) as queries:
                answer = client.get(path)
            if answer.status_code != 200:
                raise RuntimeError(f"{path} answered {answer.status_code}")
            row[f"{name}_queries"] = len(queries)
            row[f"{name}_ms"] = round(1_000 * (time.monotonic() - began), 1)
        rows.append(row)
    return rows


MEASURES: dict[str, Callable[[Site], Any]] = {
    "appends": appends,
    "deliveries": deliveries,
    "catch_up": catch_up,
    "decide_to_effect": decide_to_effect,
    "idle_memory": idle_memory,
    "inbox_queries": inbox_queries,
}
