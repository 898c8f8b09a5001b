"""An agent with a token and a generation of its own, and clients of the HTTP door."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.test import Client

from streams.models import AgentToken
from tests.support import factories


@dataclass
class Answer:
    """What a call answered: its status, its headers, its body as JSON."""

    status: int
    headers: Any
    body: Any
    raw: bytes


class Agent:
    """A program that calls /api/v1 with a token."""

    def __init__(self, token: AgentToken, secret: str) -> None:
        self.token, self.secret = token, secret
        self.client = Client(raise_request_exception=True)

    def call(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Answer:
        sent = raw if raw is not None else (b"" if body is None else json.dumps(body).encode())
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = self.client.generic(
            method,
            f"/api/v1/{path}",
            sent,
            content_type=named.pop("content-type", "application/json"),
            headers={**factories.bearer(self.secret), **named},
        )
        content = response.content
        is_json = content and "json" in response.headers.get("Content-Type", "")
        return Answer(response.status_code, response.headers, json.loads(content) if is_json else None, content)

    def get(self, path: str, **headers: str) -> Answer:
        return self.call("GET", path, **headers)

    def post(self, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Answer:
        return self.call("POST", path, body, raw=raw, **headers)


@pytest.fixture
def make_agent(db: None) -> Callable[..., Agent]:
    def make(*scopes: str, **fields: Any) -> Agent:
        return Agent(*factories.agent_token(*scopes, **fields))

    return make


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    return make_agent()


@pytest.fixture
def log_id(agent: Agent) -> str:
    answer = agent.post("generations", {})
    assert answer.status == 201, answer.body
    return str(answer.body["id"])
