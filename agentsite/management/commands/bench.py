"""Measure this machine: `manage.py bench`, `--json` for machines, `--only appends,deliveries` for a part."""

from __future__ import annotations

import importlib.util
import json
import warnings
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connection

from agentsite import startup
from agentsite.bench import measures, report
from agentsite.bench.throwaway import throwaway_database


class Command(BaseCommand):
    help = "Measure appends, deliveries, catch-up and decisions in a throwaway database of the configured kind."
    # It brings a database of its own.
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
        parser.add_argument("--server", choices=["uvicorn", "daphne"], default="uvicorn")
        parser.add_argument("--only", default="", help=f"Some of: {','.join(measures.MEASURES)}")
        parser.add_argument(
            "--quick", action="store_true", help="Show that it works, in seconds; the figures mean nothing."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        wanted = [name for name in options["only"].split(",") if name] or list(measures.MEASURES)
        unknown = [name for name in wanted if name not in measures.MEASURES]
        if unknown:
            raise CommandError(f"no such measure: {unknown[0]}; there are {', '.join(measures.MEASURES)}")
        if options["server"] == "uvicorn" and importlib.util.find_spec("uvicorn") is None:
            raise CommandError("uvicorn is not installed: uv sync --extra production, or --server daphne")
        if connection.vendor == "postgresql":
            startup.reach_postgres(connection.settings_dict)
        # What a library's next version will drop is no figure.
        warnings.simplefilter("ignore")
        with throwaway_database() as url:
            figures: dict[str, Any] = {"machine": report.machine(options["server"])}
            sizes = measures.QUICK if options["quick"] else measures.Sizes()
            site = measures.make_site(url, options["server"], sizes)
            for name in wanted:
                # One part that can't be measured here (too few open files, an idle core missing) costs only itself.
                try:
                    figures[name] = measures.MEASURES[name](site)
                except (RuntimeError, OSError, DatabaseError) as error:
                    figures[name] = {"failed": str(error)}
                # It takes minutes: whoever ends it early keeps what there is.
                self.stderr.write(f"{name}: {json.dumps(figures[name])}")
        self.stdout.write(json.dumps(figures, indent=2) if options["json"] else report.tables(figures))
        failed = [name for name in wanted if "failed" in figures[name]]
        if failed:
            raise CommandError(f"could not measure {', '.join(failed)}")
