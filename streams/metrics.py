"""The six numbers of a generation (contract §3). Pure: no Django."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from streams import strictjson


def six_numbers(
    *,
    created_at: datetime,
    first_chunk_at: datetime | None,
    finished_at: datetime | None,
    chunk_count: int,
    tool_call_count: int,
    attempt: int,
    usage_text: str,
) -> dict[str, Any]:
    """Return the wire's `metrics`: milliseconds and counts; a number that isn't known yet is null."""
    return {
        "ttfbMs": _milliseconds(created_at, first_chunk_at),
        "totalMs": _milliseconds(created_at, finished_at),
        "chunkCount": chunk_count,
        "toolCallCount": tool_call_count,
        "retryCount": attempt - 1,
        "tokenUsage": strictjson.loads(usage_text) if usage_text else None,
    }


def _milliseconds(start: datetime, end: datetime | None) -> int | None:
    # Two reads of one clock can't go backwards, but a clock that was set can.
    return None if end is None else max(0, round((end - start).total_seconds() * 1000))
