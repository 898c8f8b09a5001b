"""Tools whose effects are counted outside the system: lines of a file, one write each, with the effect key."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

from approvals.tools import tool


def _effect(tool_name: str, arguments: dict[str, Any], effect_key: str) -> None:
    descriptor = os.open(os.environ["SINK"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{tool_name} {arguments['n']} {effect_key}\n".encode())
    finally:
        os.close(descriptor)


def _takes_a_moment() -> None:
    # What a kill can hit: before, between and after the effect.
    threading.Event().wait(random.uniform(0, 0.01))


@tool(name="sink_once", effects="at_most_once", risk="low")
def sink_once(arguments: dict[str, Any], effect_key: str) -> Any:
    _takes_a_moment()
    _effect("sink_once", arguments, effect_key)
    _takes_a_moment()
    return {"n": arguments["n"]}


@tool(name="sink_again", effects="idempotent", risk="low")
def sink_again(arguments: dict[str, Any], effect_key: str) -> Any:
    _takes_a_moment()
    _effect("sink_again", arguments, effect_key)
    _takes_a_moment()
    return {"n": arguments["n"]}
