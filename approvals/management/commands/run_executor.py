"""`manage.py run_executor`: run approved server tools, and sweep (expiry, lost leases, lost producers) each second."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from approvals import engine, sweeps, tools
from approvals.executor import Executor
from approvals.management.serving import process_name, serve


class Command(BaseCommand):
    help = "Run approved server tools until SIGTERM, and do each second what the clock asks for."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--name", default="", help="Shown as the executor of an action (default: host and pid).")
        parser.add_argument("--concurrency", type=int, default=4, help="How many tools may run at once.")
        parser.add_argument("--tool", action="append", default=[], help="Run this tool only; may be repeated.")
        parser.add_argument("--lease-seconds", type=int, default=None, help="Instead of what each tool declares.")

    def handle(self, **options: Any) -> None:
        unknown = [name for name in options["tool"] if tools.registered(name) is None]
        if unknown:
            raise CommandError(f"no tool is registered as {', '.join(unknown)} (see AGENTSITE_TOOL_MODULES)")
        executor = Executor(
            name=options["name"] or process_name(),
            concurrency=max(1, options["concurrency"]),
            only=tuple(options["tool"]),
            lease_seconds=options["lease_seconds"],
            each_second=(sweeps.sweep, engine.announce),
        )
        names = ", ".join(tool.name for tool in tools.all_tools()) or "none: AGENTSITE_TOOL_MODULES names no module"
        self.stdout.write(f"executor {executor.name} is up; tools: {names}")
        serve(executor.run(), executor.stop)
