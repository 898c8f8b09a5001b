"""Which model providers this process can play: the scripted one always, OpenAI-compatible ones by the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib import util
from typing import Any

from approvals.agent import MakeAdapter
from streams.adapters import Adapter
from streams.adapters.scripted import ScriptedAdapter

VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")


@dataclass
class Providers:
    """`makers` by the adapter's name. Adapters with connections are made once and closed by `aclose`."""

    makers: dict[str, MakeAdapter] = field(default_factory=dict)
    _made: dict[str, Adapter] = field(default_factory=dict)

    async def aclose(self) -> None:
        for adapter in self._made.values():
            await adapter.aclose()
        self._made.clear()


def missing() -> list[str]:
    """Say what stands in the way of an OpenAI-compatible endpoint, each as one thing to do."""
    wanted = [f"set {name}" for name in VARIABLES if not os.environ.get(name)]
    if util.find_spec("openai") is None:
        wanted.append("install the extra: uv sync --extra openai")
    return wanted


def available() -> Providers:
    providers = Providers()
    providers.makers["scripted"] = ScriptedAdapter
    if not missing():
        providers.makers["openai"] = lambda config: _openai(providers, config)
    return providers


def _openai(providers: Providers, config: dict[str, Any]) -> Adapter:
    from streams.adapters.openai_chat import OpenAIChatAdapter

    model = str(config.get("model") or os.environ["OPENAI_MODEL"])
    if model not in providers._made:
        providers._made[model] = OpenAIChatAdapter(
            base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], model=model
        )
    return providers._made[model]
