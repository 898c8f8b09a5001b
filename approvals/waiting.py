"""A transaction that waits for others at most two seconds, so that nobody's click hangs behind somebody's append."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import OperationalError, connection, transaction

from approvals.refusals import InFlight

WAIT_SECONDS = 2  # contract §5, the decision table: "waits at most 2 s"
_LOCK_NOT_AVAILABLE = "55P03"


@contextmanager
def briefly() -> Iterator[None]:
    """Open a transaction; InFlight when another one kept a row, a key or the file longer than the wait."""
    before = _sqlite_patience()
    try:
        if before is not None:
            _be_patient(WAIT_SECONDS * 1000)
        with transaction.atomic():
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute(f"SET LOCAL lock_timeout = '{WAIT_SECONDS}s'")
            yield
    except OperationalError as error:
        if _kept_waiting(error):
            raise InFlight from None
        raise
    finally:
        if before is not None:
            _be_patient(before)


def _sqlite_patience() -> int | None:
    if connection.vendor != "sqlite":
        return None
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout")
        return int(cursor.fetchone()[0])


def _be_patient(milliseconds: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"PRAGMA busy_timeout = {milliseconds:d}")


def _kept_waiting(error: OperationalError) -> bool:
    if getattr(error.__cause__, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
        return True
    return connection.vendor == "sqlite" and "locked" in str(error)
