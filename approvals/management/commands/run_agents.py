"""`manage.py run_agents`: drive the runs of this site's own agent loop."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from approvals.agent import Worker
from approvals.management.serving import process_name, serve
from approvals.providers import available


class Command(BaseCommand):
    help = "Take agent runs that can go on and play their turns until SIGTERM."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--name", default="", help="Shown in logs (default: host and pid).")
        parser.add_argument("--concurrency", type=int, default=16, help="How many turns may play at once.")

    def handle(self, **options: Any) -> None:
        providers = available()
        worker = Worker(
            name=options["name"] or process_name(),
            makers=providers.makers,
            concurrency=max(1, options["concurrency"]),
        )
        self.stdout.write(f"agents {worker.name} are up; adapters: {', '.join(providers.makers)}")

        async def work() -> None:
            try:
                await worker.run()
            finally:
                await providers.aclose()

        serve(work(), worker.stop)
