"""An executor with one tool whose only effect is to say when it happened: `python -m agentsite.bench.executor`."""

from __future__ import annotations

import os
import time
from typing import Any

TOOL = "bench.effect"


def register() -> None:
    from approvals.tools import tool

    @tool(name=TOOL, effects="idempotent", risk="low", description="Says when it ran.")
    def effect(arguments: dict[str, Any], effect_key: str) -> dict[str, Any]:
        return {"at": repr(time.time())}


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "agentsite.settings")
    import django
    from django.core.management import call_command

    django.setup()
    register()
    call_command("run_executor")


if __name__ == "__main__":
    main()
