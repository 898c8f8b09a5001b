"""An adapter that plays a JSON script: the demo's agent, and every fault a provider can show. Pure: no Django.

    {"tokenMs": 40, "turns": [{"steps": [...], "usage": {...}, "reason": "stop", "faults": [...]}, ...]}

Steps: {"text": "…"} in tokens · {"call": {"id","name","arguments"}} (arguments an object or a JSON text) ·
{"pauseMs": n} · {"error": {"code","message"}, "recoverable": true, "retryAfter"?: ms} · {"forever": true}.
A step with `"ifOk": id` or `"ifError": id` is played only when that call's result was so.
Faults: {"kind": "drop"|"error"|"hang", "at": n tokens, "attempts"?: n} break the first n attempts (default 1) after
n tokens. `"burst": n` on a text step sends the text n times without a pause.
A script knows nothing between turns: which turn it is stands in the request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from streams import strictjson
from streams.adapters.base import Message, Request
from streams.protocol import Chunk, Done, Text, ToolCall, Usage, error_chunk

_TOKEN = re.compile(r"\s*\S+|\s+$")


class BadScript(ValueError):
    """The script can't be read; `args[0]` says where."""


class ScriptedAdapter:
    """Play `script` (its parsed JSON). Beyond the last turn it says one sentence and stops."""

    def __init__(self, script: dict[str, Any]) -> None:
        turns = script.get("turns")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise BadScript("a script has a list 'turns' of objects")
        self._turns: list[dict[str, Any]] = turns
        self._token_ms = float(script.get("tokenMs", 0))

    async def aclose(self) -> None:
        return None

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        if request.turn >= len(self._turns):
            yield Text(content="The script has ended.")
            yield Done(reason="stop")
            return
        turn = self._turns[request.turn]
        pause_seconds = float(turn.get("tokenMs", self._token_ms)) / 1000
        faults = [fault for fault in turn.get("faults", []) if request.attempt <= int(fault.get("attempts", 1))]
        said, calls = 0, 0
        for step in turn.get("steps", []):
            if not _applies(step, request.messages):
                continue
            if "text" in step:
                tokens = _TOKEN.findall(step["text"]) * int(step.get("burst", 1))
                for token in tokens:
                    broken = next((fault for fault in faults if said >= int(fault["at"])), None)
                    if broken is not None:
                        yield await _break(broken)
                        return
                    if pause_seconds and "burst" not in step:
                        await asyncio.sleep(pause_seconds)
                    yield Text(content=token)
                    said += 1
            elif "call" in step:
                yield _call(step["call"], calls)
                calls += 1
            elif "pauseMs" in step:
                await asyncio.sleep(float(step["pauseMs"]) / 1000)
            elif "error" in step:
                yield error_chunk(
                    step["error"]["code"],
                    step["error"]["message"],
                    recoverable=bool(step.get("recoverable", True)),
                    retry_after_ms=step.get("retryAfter"),
                )
                return
            elif step.get("forever"):
                await asyncio.Event().wait()
        if faults:
            yield await _break(faults[0])
            return
        usage = msgspec.convert(turn["usage"], Usage) if "usage" in turn else msgspec.UNSET
        yield Done(reason=turn.get("reason", "tool_use" if calls else "stop"), usage=usage)


def _applies(step: dict[str, Any], messages: tuple[Message, ...]) -> bool:
    for key, wanted in (("ifOk", False), ("ifError", True)):
        if key in step:
            results = [m.is_error for m in messages if m.role == "tool" and m.tool_call_id == step[key]]
            if not results or results[-1] is not wanted:
                return False
    return True


async def _break(fault: dict[str, Any]) -> Chunk:
    if fault["kind"] == "hang":
        await asyncio.Event().wait()
    if fault["kind"] == "error":
        return error_chunk("provider_error", "the model endpoint reported an error", recoverable=True)
    return error_chunk("connection_lost", "the connection to the model broke off", recoverable=True)


def _call(call: dict[str, Any], index: int) -> ToolCall:
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else strictjson.dumps(arguments)
    return ToolCall(id=call["id"], name=call["name"], arguments=text, index=index)
