"""Do once, in a row, what the clock asks of everything; safe to run in any number of processes at once."""

from __future__ import annotations

from approvals import claims, decisions
from streams import log


def sweep(*, limit: int = 100) -> dict[str, int]:
    """Make one pass and return the counts. Expiry comes first: a question dies of its own time."""
    return {
        "expired": decisions.expire_due(limit=limit),
        "leasesLost": claims.reap_lost(limit=limit),
        "logsEnded": sum(log.end_lost(generation_id=pk) for pk in log.lost_producers(limit=limit)),
    }
