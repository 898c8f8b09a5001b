"""Say on what machine it ran, and lay the figures out as tables."""

from __future__ import annotations

import os
import platform
from typing import Any

import django
from django.db import connection


def machine(server: str) -> dict[str, Any]:
    """Name what the figures depend on."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            database = f"PostgreSQL {cursor.fetchone()[0].split()[0]}"
    else:
        import sqlite3

        database = f"SQLite {sqlite3.sqlite_version}, WAL, synchronous=FULL"
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "django": django.get_version(),
        "database": database,
        "server": server,
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def tables(report: dict[str, Any]) -> str:
    """Lay out every part as a table in Markdown, which reads well on a terminal too."""
    parts = []
    for name, figures in report.items():
        rows = figures if isinstance(figures, list) else [figures]
        columns = list(rows[0])
        cells = [[_cell(row[column]) for column in columns] for row in rows]
        widths = [max(len(line[place]) for line in [columns, *cells]) for place in range(len(columns))]
        lines = [
            "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"
            for line in [columns, *cells]
        ]
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        parts.append("\n".join([f"### {name}", "", lines[0], rule, *lines[1:]]))
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
