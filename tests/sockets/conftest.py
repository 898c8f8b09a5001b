"""Real servers under the socket tests: one daphne and one uvicorn a session, on this run's database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.processes import Kind, Server

Servers = Callable[[Kind], Server]
# Short times, so that no test waits for what only needs to be seen once.
ENV: dict[str, str | None] = {"SOCKET_HEARTBEAT_SECONDS": "1", "SOCKET_FULL_SECONDS": "2"}


@pytest.fixture(scope="session")
def servers(django_db_setup: None) -> Iterator[Servers]:
    started: dict[Kind, Server] = {}
    with ExitStack() as stack:

        def server(kind: Kind) -> Server:
            if kind not in started:
                started[kind] = stack.enter_context(Server(kind, env=ENV))
            return started[kind]

        yield server


@pytest.fixture(params=["daphne", "uvicorn"])
def server(request: pytest.FixtureRequest, servers: Servers, transactional_db: None) -> Server:
    """Give either server in turn; for what a server's own manners may change."""
    return servers(request.param)


@pytest.fixture
def uvicorn(servers: Servers, transactional_db: None) -> Server:
    return servers("uvicorn")
