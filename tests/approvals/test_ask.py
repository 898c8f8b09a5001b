"""`manage.py ask` in a process of its own, against a model endpoint that speaks real SSE."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from approvals.models import AgentRun, ApprovalRequest
from streams.models import Generation
from tests.streams.model_server import DONE, call_delta, event, model_server
from tests.support import factories
from tests.support.processes import run_manage

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]
KEY = "sk-verysecretkey123"


async def ask(url: str, text: str = "refund order 1042") -> tuple[int, str]:
    env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY, "OPENAI_MODEL": "m"}
    ended = await asyncio.to_thread(partial(run_manage, "ask", text, env=env, seconds=100))
    assert KEY not in ended.stdout + ended.stderr
    return ended.returncode, ended.stdout + ended.stderr


async def test_it_streams_asks_policy_and_goes_on_with_the_result() -> None:
    await asyncio.to_thread(factories.policy, ("refund_order", "deny"))
    arguments = '{"order":1042,"amount":49.90,"currency":"EUR"}'
    async with model_server() as model:
        model.stream(
            event({"content": "I would "}),
            event({"content": "refund it."}),
            event(call_delta(0, id="c1", name="refund_order", arguments=arguments)),
            event({}, finish="tool_calls"),
            DONE,
        )
        model.stream(event({"content": "I may not."}), event({}, finish="stop"), DONE)
        code, output = await ask(model.url)
        assert code == 0, output
        assert "I would refund it." in output
        assert "I may not." in output
        second = model.requests[1]["messages"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "tool"]
    assert second[2]["tool_calls"][0]["function"] == {"name": "refund_order", "arguments": arguments}
    assert json.loads(second[3]["content"])["code"] == "rejected"
    names = [tool["function"]["name"] for tool in model.requests[0]["tools"]]
    assert "refund_order" in names
    run = await asyncio.to_thread(AgentRun.objects.select_related("generation").get)
    assert (run.phase, run.generation.finish_reason) == ("ended", "stop")
    action = await asyncio.to_thread(ApprovalRequest.objects.get)
    assert (action.state, action.requested_by_name) == ("rejected", "ask")


async def test_an_endpoint_that_is_not_there_is_named_and_the_run_ends_in_error() -> None:
    await asyncio.to_thread(factories.policy)
    code, output = await ask("http://127.0.0.1:9/v1")
    assert code == 1
    assert "can't be reached" in output
    assert "Traceback" not in output
    generation = await asyncio.to_thread(Generation.objects.get)
    assert generation.state == "error"


def test_without_settings_it_says_each_of_them() -> None:
    ended = run_manage("ask", "x", env={"OPENAI_BASE_URL": None, "OPENAI_API_KEY": None, "OPENAI_MODEL": None})
    assert ended.returncode == 1
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"):
        assert f"set {name}" in ended.stderr
    assert Generation.objects.count() == 0
