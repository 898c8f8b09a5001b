"""The legal moves of an approval request. Pure: no Django. Source: docs/contract.md §5."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


OPEN = frozenset({State.PENDING, State.APPROVED, State.EXECUTING})
# `unknown` is not terminal: a late report or a person still settles it.
TERMINAL = frozenset({State.DONE, State.FAILED, State.REJECTED, State.EXPIRED, State.CANCELLED})
MAX_FENCES_A_DECISION = 5

MOVES: dict[State | None, frozenset[State]] = {
    None: frozenset({State.PENDING, State.APPROVED, State.REJECTED}),
    # pending → pending: a vote that is not the last one needed; executing → executing: a cancel is asked.
    State.PENDING: frozenset({State.PENDING, State.APPROVED, State.REJECTED, State.EXPIRED, State.CANCELLED}),
    State.APPROVED: frozenset(
        {State.EXECUTING, State.EXPIRED, State.CANCELLED, State.DONE, State.FAILED, State.UNKNOWN}
    ),
    State.EXECUTING: frozenset(
        {State.EXECUTING, State.DONE, State.FAILED, State.APPROVED, State.CANCELLED, State.UNKNOWN}
    ),
    State.UNKNOWN: frozenset({State.DONE, State.FAILED, State.APPROVED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.REJECTED: frozenset(),
    State.EXPIRED: frozenset(),
    State.CANCELLED: frozenset(),
}


def may(origin: State | None, target: State) -> bool:
    return target in MOVES[origin]
