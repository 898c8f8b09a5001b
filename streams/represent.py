"""A generation as every door shows it (contract §3)."""

from __future__ import annotations

from typing import Any

from django.db.models import Q

from streams import clock, gate, metrics, strictjson
from streams.models import Generation

# The words of `Generation.state`, as the database can ask for them.
_WAITING = Q(newest__in=["tool_call", "tool_result"], open_gated__gt=0)
_RUNNING = Q(finish_reason="", cancel_requested=False)
STATES: dict[str, Q] = {
    "open": _RUNNING & ~Q(newest="recoverable") & ~_WAITING,
    "waiting": _RUNNING & _WAITING,
    "retrying": _RUNNING & Q(newest="recoverable"),
    "cancelling": Q(finish_reason="", cancel_requested=True),
    "done": ~Q(finish_reason__in=["", "cancel", "error"]),
    "cancelled": Q(finish_reason="cancel"),
    "error": Q(finish_reason="error"),
}


def generation_json(generation: Generation, *, actions: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the representation; `actions` are asked of the gate unless given."""
    usage = strictjson.loads(generation.usage) if generation.usage else None
    return {
        "id": str(generation.pk),
        "state": generation.state,
        "title": generation.title,
        "conversation": generation.conversation,
        "model": generation.model,
        "metadata": strictjson.loads(generation.metadata),
        "epoch": generation.epoch,
        "firstOffset": generation.first_offset,
        "nextOffset": generation.next_offset,
        "attempt": generation.attempt,
        "nextSeq": generation.next_seq,
        "cancelRequested": generation.cancel_requested,
        "openActions": generation.open_actions,
        "finishReason": generation.finish_reason or None,
        "usage": usage,
        "producerTimeoutSeconds": generation.producer_timeout_seconds,
        "createdAt": clock.rfc3339(generation.created_at),
        "finishedAt": clock.rfc3339(generation.finished_at) if generation.finished_at else None,
        "metrics": metrics.six_numbers(
            created_at=generation.created_at,
            first_chunk_at=generation.first_chunk_at,
            finished_at=generation.finished_at,
            chunk_count=generation.chunk_count,
            tool_call_count=generation.tool_call_count,
            attempt=generation.attempt,
            usage_text=generation.usage,
        ),
        "actions": gate.installed().actions(generation.pk) if actions is None else actions,
    }
