"""Any OpenAI-compatible chat completions endpoint, by the official `openai` package (extra `openai`). No Django.

The package's own retries are off: retrying is the pump's business, where a person can see it. Error messages are
made here; of what the endpoint says only an identifier-like error code is passed on, because endpoints quote keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import import_module, util
from typing import Any

import msgspec
import openai

from streams import strictjson
from streams.adapters.base import Message, Request, TextMender, ToolSpec, mend
from streams.protocol import Chunk, Done, DoneReason, Error, Text, ToolCall, Usage, error_chunk

_REASONS: dict[str, DoneReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
}
_CODE = re.compile(r"[a-z][a-z_]{0,39}")
# Statuses after which the same request may well succeed.
_PASSING = {408, 409, 425, 429}
# The package moved from one HTTP library to the next; older ones let its errors through as they are.
_http = [import_module(name) for name in ("httpx", "httpx2") if util.find_spec(name)]
_TRANSPORT: tuple[type[Exception], ...] = tuple(module.TransportError for module in _http)
_TIMEOUT: tuple[type[Exception], ...] = (openai.APITimeoutError, *(module.TimeoutException for module in _http))
_UNREADABLE: tuple[type[Exception], ...] = (json.JSONDecodeError, UnicodeDecodeError)
_FAULTS: tuple[type[Exception], ...] = (openai.OpenAIError, *_TRANSPORT, *_UNREADABLE)
_OUT_OF_MONEY = {"insufficient_quota", "billing_hard_limit_reached"}


class OpenAIChatAdapter:
    """Stream chat completions from `base_url`. An adapter lives in one event loop; `aclose` closes its connections."""

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str,
        model: str,
        connect_seconds: float = 10,
        silence_seconds: float = 60,
        options: dict[str, Any] | None = None,
        client: openai.AsyncOpenAI | None = None,
    ) -> None:
        self._model = model
        self._options = options or {}
        # One client an adapter: making one reads the machine's certificates, which takes longer than many answers.
        self._client = client or openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key,
            timeout=openai.Timeout(silence_seconds, connect=connect_seconds),
            max_retries=0,
        )

    async def aclose(self) -> None:
        await self._client.close()

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        turn = _Turn()
        try:
            answer = await self._open(request)
            try:
                async for part in answer:
                    for text in turn.feed(part):
                        yield text
            finally:
                # An answer that was not read to its end takes its connection with it.
                await answer.close()
            content_type = answer.response.headers.get("content-type", "")
        except _FAULTS as error:
            for text in turn.mender.end():
                yield text
            yield _as_error(error, began=turn.began)
            return
        for chunk in turn.end(content_type):
            yield chunk

    async def _open(self, request: Request) -> openai.AsyncStream[Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_message(message) for message in request.messages],
            "stream": True,
            **self._options,
        }
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        create: Callable[..., Any] = self._client.chat.completions.create
        try:
            answer: openai.AsyncStream[Any] = await create(**body, stream_options={"include_usage": True})
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            # Older compatible servers refuse the option; an answer without token counts is better than none.
            if "stream_options" not in str(error):
                raise
            answer = await create(**body)
        return answer


@dataclass
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass
class _Turn:
    """The fold of one answer's parts. Calls wait for the finish: only then it is sure that they are whole."""

    mender: TextMender = field(default_factory=TextMender)
    calls: dict[int, _Call] = field(default_factory=dict)
    finish: str | None = None
    usage: Usage | None = None
    began: bool = False

    def feed(self, part: Any) -> list[Text]:
        self.began = True
        usage = getattr(part, "usage", None)
        if usage is not None:
            self.usage = _usage(usage)
        texts: list[Text] = []
        for choice in getattr(part, "choices", None) or []:
            if getattr(choice, "index", 0) not in (0, None):
                continue
            delta = getattr(choice, "delta", None)
            content = getattr(delta, "content", None)
            if isinstance(content, str) and content:
                texts += self.mender.feed(content)
            for place, piece in enumerate(getattr(delta, "tool_calls", None) or []):
                self._feed_call(place, piece)
            self.finish = getattr(choice, "finish_reason", None) or self.finish
        return texts

    def _feed_call(self, place: int, piece: Any) -> None:
        function = getattr(piece, "function", None)
        index = getattr(piece, "index", None)
        index = place if index is None else int(index)
        call_id, name = getattr(piece, "id", None) or "", getattr(function, "name", None) or ""
        call = self.calls.get(index)
        if call is not None and call_id and call.id and call_id != call.id:
            # Some servers give every parallel call index 0 and only the id tells them apart.
            index = next((key for key, known in self.calls.items() if known.id == call_id), max(self.calls) + 1)
            call = self.calls.get(index)
        if call is None:
            call = self.calls[index] = _Call()
        # A name may come in pieces; a piece that brings the id again is the whole header sent again.
        if not (call_id and call.id):
            call.name += name
        call.id = call.id or call_id
        call.arguments.append(getattr(function, "arguments", None) or "")

    def end(self, content_type: str) -> list[Chunk]:
        rest: list[Chunk] = [*self.mender.end()]
        if not self.began and "text/event-stream" not in content_type:
            message = "the model endpoint answered with something that is no event stream; is its address right?"
            return [*rest, error_chunk("bad_answer", message, recoverable=False)]
        if self.finish is None:
            return [
                *rest,
                error_chunk("connection_lost", "the answer broke off before its end", recoverable=True),
            ]
        if self.finish == "content_filter":
            message = "the model endpoint withheld the answer (content filter)"
            return [*rest, error_chunk("content_filter", message, recoverable=False)]
        reason = _REASONS.get(self.finish, "stop")
        # Cut by the length limit, a call may look whole and not be what the model meant: none of them counts.
        calls = [] if reason == "length" else self._whole_calls()
        if reason != "length":
            reason = "tool_use" if calls else "stop"
        usage = msgspec.UNSET if self.usage is None else self.usage
        return [*rest, *calls, Done(reason=reason, usage=usage)]

    def _whole_calls(self) -> list[ToolCall]:
        return [
            ToolCall(
                id=call.id or f"call_{place}",
                name=mend(call.name),
                arguments=mend("".join(call.arguments)) or "{}",
                index=place,
            )
            for place, (_, call) in enumerate(sorted(self.calls.items()))
        ]


def _usage(usage: Any) -> Usage | None:
    counts = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    prompt, completion, total = (count if isinstance(count, int) and count >= 0 else 0 for count in counts)
    return Usage(promptTokens=prompt, completionTokens=completion, totalTokens=total or prompt + completion)


def _message(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
    if message.role == "assistant" and message.tool_calls:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
        return {"role": "assistant", "content": message.content or None, "tool_calls": calls}
    return {"role": message.role, "content": message.content}


def _tool(tool: ToolSpec) -> dict[str, Any]:
    schema = json.loads(strictjson.dumps(strictjson.loads(tool.schema_text)))
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def _as_error(error: Exception, *, began: bool) -> Error:
    """Say a fault of the endpoint in our own words: code, whether trying again makes sense, and when."""
    if isinstance(error, openai.APIStatusError):
        return _status_error(error)
    if isinstance(error, _TIMEOUT):
        return error_chunk("timeout", "the model endpoint was silent for too long", recoverable=True)
    if isinstance(error, (openai.APIConnectionError, *_TRANSPORT)):
        if began:
            return error_chunk("connection_lost", "the connection to the model broke off", recoverable=True)
        return error_chunk("unreachable", "the model endpoint can't be reached", recoverable=True)
    if isinstance(error, (openai.APIResponseValidationError, *_UNREADABLE)):
        return error_chunk("bad_answer", "the model endpoint sent something that can't be read", recoverable=True)
    if isinstance(error, openai.APIError):
        said = _said(error)
        message = f"the model endpoint reported an error in its stream{said}"
        return error_chunk("provider_error", message, recoverable=error.code not in _OUT_OF_MONEY)
    return error_chunk("provider_error", f"the model endpoint failed ({type(error).__name__})", recoverable=False)


def _status_error(error: openai.APIStatusError) -> Error:
    status = error.status_code
    message = f"the model endpoint answered {status}{_said(error)}"
    if status in (401, 403):
        return error_chunk("not_authorised", message, recoverable=False)
    if status == 429 and error.code in _OUT_OF_MONEY:
        return error_chunk("out_of_quota", message, recoverable=False)
    if status in _PASSING or status >= 500:
        code = "rate_limited" if status == 429 else "provider_error"
        return error_chunk(code, message, recoverable=True, retry_after_ms=_retry_after_ms(error.response.headers))
    return error_chunk("refused_by_provider", message, recoverable=False)


def _said(error: openai.APIError) -> str:
    code = error.code
    return f" ({code})" if isinstance(code, str) and _CODE.fullmatch(code) else ""


def _retry_after_ms(headers: Mapping[str, str]) -> int | None:
    """Read `retry-after-ms`, or `Retry-After` as seconds or as a date."""
    exact = headers.get("retry-after-ms", "")
    if re.fullmatch(r"[0-9]{1,9}", exact):
        return int(exact)
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", value):
        return round(float(value) * 1000)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0, round((moment - datetime.now(UTC)).total_seconds() * 1000))
