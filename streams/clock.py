"""The database's clock: leases, deadlines and entry times never compare two machines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.db import connection


def now() -> datetime:
    """Return the database's time of this very moment, not of the transaction's start.

    SQLite has no clock of its own: its time is this machine's, which is the only one that can write the file.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT clock_timestamp()")
            value: datetime = cursor.fetchone()[0]
            return value.astimezone(UTC)
    return datetime.now(UTC)


def sql() -> tuple[str, list[Any]]:
    """Return the same moment as an SQL expression and its parameters."""
    if connection.vendor == "postgresql":
        return "clock_timestamp()", []
    return "%s", [connection.ops.adapt_datetimefield_value(datetime.now(UTC))]


def rfc3339(moment: datetime) -> str:
    """Write a time as the wire has it: UTC, microseconds, `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
