"""The OpenAI-compatible adapter against a real HTTP server on this machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from streams.adapters import Completion, Message, Request, ToolSpec, complete
from streams.adapters.openai_chat import OpenAIChatAdapter
from streams.protocol import Text, ToolCall, Usage
from tests.streams.model_server import DONE, Connection, ModelServer, call_delta, event, model_server

KEY = "sk-verysecretkey123"
ASK = Request(messages=(Message(role="user", content="refund order 1042"),))


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    async with model_server() as server:
        yield server


@asynccontextmanager
async def adapter(model: ModelServer, **fields: float) -> AsyncIterator[OpenAIChatAdapter]:
    made = OpenAIChatAdapter(base_url=model.url, api_key=KEY, model="m", **fields)
    try:
        yield made
    finally:
        await made.aclose()


async def ask(model: ModelServer, request: Request = ASK, **fields: float) -> Completion:
    async with adapter(model, **fields) as one:
        return await complete(one, request)


PARALLEL = [
    event({"role": "assistant", "content": "I'll do bo"}),
    event({"content": "th: é 你 👩‍👩‍👧"}),
    event(call_delta(0, id="a", name="refund_order", arguments="")),
    event(call_delta(1, id="b", name="send_message", arguments='{"te')),
    event(call_delta(0, arguments='{"order":10')),
    event(call_delta(1, arguments='xt":"é 👩‍👩‍👧"}')),
    event(call_delta(0, arguments="42}")),
    event({}, finish="tool_calls"),
    event(None, usage={"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}),
    DONE,
]


def assert_parallel(folded: Completion) -> None:
    assert folded.error is None
    assert folded.text == "I'll do both: é 你 👩‍👩‍👧"
    assert folded.tool_calls == [
        ToolCall(id="a", name="refund_order", arguments='{"order":1042}', index=0),
        ToolCall(id="b", name="send_message", arguments='{"text":"é 👩‍👩‍👧"}', index=1),
    ]
    assert folded.reason == "tool_use"
    assert folded.usage == Usage(promptTokens=7, completionTokens=5, totalTokens=12)


async def test_interleaved_parallel_calls_come_out_whole_and_in_order(model: ModelServer) -> None:
    model.stream(*PARALLEL)
    assert_parallel(await ask(model))


@pytest.mark.slow
async def test_every_cut_of_the_wire_gives_the_same_turn(model: ModelServer) -> None:
    wire = b"".join(PARALLEL)
    cuts = iter(range(1, len(wire)))

    async def handler(connection: Connection) -> None:
        cut = next(cuts)
        await connection.begin()
        await connection.send(wire[:cut])
        await asyncio.sleep(0)
        await connection.send(wire[cut:])
        await connection.end()

    model.then(handler)
    # One server, many connections at once: a cut at every single byte place in a few seconds.
    places = len(wire) - 1
    async with adapter(model) as one:
        for start in range(0, places, 50):
            folds = await asyncio.gather(*(complete(one, ASK) for _ in range(min(50, places - start))))
            for folded in folds:
                assert_parallel(folded)
    assert len(model.requests) == places


async def test_every_cut_of_names_and_arguments_between_deltas_gives_the_same_call(model: ModelServer) -> None:
    arguments = '{"text":"\\ud83d\\udc69 👩 é","n":10.50}'
    async with adapter(model) as one:
        for cut in range(len(arguments) + 1):
            model.handlers.clear()
            model.stream(
                event(call_delta(0, id="a", name="go", arguments=arguments[:cut])),
                event(call_delta(0, name="go", arguments=arguments[cut:])),
                event({}, finish="tool_calls"),
            )
            folded = await complete(one, ASK)
            assert folded.tool_calls == [ToolCall(id="a", name="gogo", arguments=arguments, index=0)]


async def test_a_surrogate_pair_cut_between_two_deltas_is_one_character(model: ModelServer) -> None:
    first = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a\\ud83d"},"finish_reason":null}]}\n\n'
    second = (
        b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\\udc69b\\ud83d"},"finish_reason":"stop"}]}\n\n'
    )
    model.stream(first, second, DONE)
    folded = await ask(model)
    assert (folded.text, folded.error) == ("a👩b\ufffd", None)


async def test_calls_that_share_index_zero_are_told_apart_by_their_ids(model: ModelServer) -> None:
    model.stream(
        event(call_delta(0, id="a", name="one", arguments="{}")),
        event(call_delta(0, id="b", name="two", arguments='{"x":1}')),
        event({}, finish="stop"),
    )
    folded = await ask(model)
    assert [(c.id, c.name, c.arguments, c.index) for c in folded.tool_calls] == [
        ("a", "one", "{}", 0),
        ("b", "two", '{"x":1}', 1),
    ]
    assert folded.reason == "tool_use"


async def test_a_call_without_arguments_has_an_empty_object(model: ModelServer) -> None:
    model.stream(event(call_delta(None, id="a", name="ping")), event({}, finish="tool_calls"))
    assert [call.arguments for call in (await ask(model)).tool_calls] == ["{}"]


async def test_calls_cut_by_the_length_limit_are_not_made(model: ModelServer) -> None:
    model.stream(
        event({"content": "so"}),
        event(call_delta(0, id="a", name="pay", arguments='{"amount":1}')),
        event({}, finish="length"),
    )
    folded = await ask(model)
    assert (folded.text, folded.tool_calls, folded.reason, folded.usage) == ("so", [], "length", None)


async def test_a_dropped_connection_is_a_recoverable_error_and_makes_no_call(model: ModelServer) -> None:
    async def handler(connection: Connection) -> None:
        await connection.begin()
        await connection.send(event({"content": "half"}))
        await connection.send(event(call_delta(0, id="a", name="pay", arguments='{"amount":1}')))
        connection.writer.transport.abort()

    model.then(handler)
    folded = await ask(model)
    assert folded.text in ("", "half")
    assert folded.tool_calls == []
    assert folded.error is not None
    assert (folded.error.error.code, folded.error.recoverable) == ("connection_lost", True)


async def test_an_end_without_a_finish_is_a_recoverable_error(model: ModelServer) -> None:
    model.stream(event({"content": "half"}), DONE)
    folded = await ask(model)
    assert folded.text == "half"
    assert folded.error is not None
    assert (folded.error.error.code, folded.error.recoverable) == ("connection_lost", True)


@pytest.mark.parametrize(
    ("status", "headers", "body", "code", "recoverable", "retry_after"),
    [
        (
            429,
            {"Retry_After": "7"},
            {"error": {"code": "rate_limit_exceeded", "message": KEY}},
            "rate_limited",
            True,
            7000,
        ),
        (429, {"retry_after_ms": "250"}, {}, "rate_limited", True, 250),
        (429, {}, {"error": {"code": "insufficient_quota", "message": KEY}}, "out_of_quota", False, None),
        (500, {}, {"error": {"message": KEY}}, "provider_error", True, None),
        (503, {"Retry_After": "1.5"}, {}, "provider_error", True, 1500),
        (401, {}, {"error": {"code": "invalid_api_key", "message": f"bad key {KEY}"}}, "not_authorised", False, None),
        (400, {}, {"error": {"message": f"model m, key {KEY}"}}, "refused_by_provider", False, None),
        (404, {}, {}, "refused_by_provider", False, None),
    ],
)
async def test_a_status_becomes_an_error_chunk_without_a_secret(
    model: ModelServer,
    status: int,
    headers: dict[str, str],
    body: dict[str, object],
    code: str,
    recoverable: bool,
    retry_after: int | None,
) -> None:
    model.answer(status, json.dumps(body).encode(), Content_Type="application/json", **headers)
    folded = await ask(model)
    assert folded.error is not None
    assert (folded.error.error.code, folded.error.recoverable) == (code, recoverable)
    assert str(status) in folded.error.error.message
    assert KEY not in folded.error.error.message
    assert getattr(folded.error, "retryAfter", None) == retry_after or retry_after is None
    assert len(model.requests) == 1, "the package must not retry by itself"


async def test_a_retry_after_date_is_read(model: ModelServer) -> None:
    moment = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    model.answer(429, b"{}", Retry_After=moment)
    folded = await ask(model)
    assert folded.error is not None
    assert 25_000 <= int(folded.error.retryAfter) <= 30_000  # type: ignore[arg-type]


async def test_a_web_page_instead_of_a_stream_is_said_plainly(model: ModelServer) -> None:
    model.answer(200, b"<html>It works!</html>", Content_Type="text/html")
    folded = await ask(model)
    assert folded.error is not None
    assert (folded.error.error.code, folded.error.recoverable) == ("bad_answer", False)
    assert "<html" not in folded.error.error.message


async def test_an_error_inside_the_stream_ends_the_turn_without_its_words(model: ModelServer) -> None:
    model.stream(event({"content": "so"}), b'data: {"error":{"message":"%s","code":"server_error"}}\n\n' % KEY.encode())
    folded = await ask(model)
    assert folded.text == "so"
    assert folded.error is not None
    assert (folded.error.error.code, folded.error.recoverable) == ("provider_error", True)
    assert KEY not in folded.error.error.message


async def test_a_stream_that_is_no_json_is_a_bad_answer(model: ModelServer) -> None:
    model.stream(b"data: {oops\n\n")
    folded = await ask(model)
    assert folded.error is not None
    assert folded.error.error.code == "bad_answer"


async def test_a_silent_endpoint_times_out_recoverably(model: ModelServer) -> None:
    async def handler(connection: Connection) -> None:
        await connection.begin()
        await connection.closed.wait()

    model.then(handler)
    folded = await ask(model, silence_seconds=0.2)
    assert folded.error is not None
    assert (folded.error.error.code, folded.error.recoverable) == ("timeout", True)


async def test_an_endpoint_that_is_not_there_is_unreachable(model: ModelServer) -> None:
    gone = OpenAIChatAdapter(base_url="http://127.0.0.1:9/v1", api_key=KEY, model="m")
    folded = await complete(gone, ASK)
    await gone.aclose()
    assert folded.error is not None
    assert (folded.error.error.code, folded.error.recoverable) == ("unreachable", True)
    assert KEY not in folded.error.error.message


async def test_an_endpoint_that_refuses_stream_options_is_asked_without(model: ModelServer) -> None:
    model.answer(400, json.dumps({"error": {"message": "unknown field stream_options"}}).encode())
    model.stream(event({"content": "fine"}), event({}, finish="stop"), DONE)
    folded = await ask(model)
    assert (folded.text, folded.reason, folded.usage) == ("fine", "stop", None)
    assert "stream_options" in model.requests[0]
    assert "stream_options" not in model.requests[1]


async def test_the_first_token_comes_before_the_last_is_sent_and_closing_hangs_up(model: ModelServer) -> None:
    async def handler(connection: Connection) -> None:
        await connection.begin()
        await connection.send(event({"content": "first"}))
        await connection.closed.wait()

    model.then(handler)
    async with adapter(model) as one, aclosing(one.stream(ASK)) as chunks:
        assert await asyncio.wait_for(anext(chunks), 5) == Text(content="first")
        await chunks.aclose()
        await asyncio.wait_for(model.connections[0].closed.wait(), 2)


async def test_the_conversation_and_the_tools_are_sent_as_the_endpoint_expects(model: ModelServer) -> None:
    model.stream(event({"content": "ok"}), event({}, finish="stop"))
    call = ToolCall(id="a", name="pay", arguments='{"amount":1.10}', index=0)
    request = Request(
        messages=(
            Message(role="system", content="be kind"),
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", tool_call_id="a", content='{"code":"rejected"}', is_error=True),
        ),
        tools=(ToolSpec(name="pay", description="Pays.", schema_text='{"type":"object","properties":{}}'),),
    )
    await ask(model, request)
    sent = model.requests[0]
    assert sent["stream"] is True
    assert sent["messages"] == [
        {"role": "system", "content": "be kind"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "pay", "arguments": '{"amount":1.10}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": '{"code":"rejected"}'},
    ]
    assert sent["tools"][0]["function"]["name"] == "pay"
