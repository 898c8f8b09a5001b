"""The seam to whoever judges tool calls. `streams` knows this protocol only; `approvals` installs itself.

Every method is called by `streams.log` inside the append's transaction, the generation's row locked, and writes
its notices and server chunks through the `Held` it is given. Lock order everywhere: generation, then actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

if TYPE_CHECKING:
    from streams.log import Held, PlacedCall, PlacedResult
    from streams.protocol import Actor


class Gate(Protocol):
    def call(self, held: Held, call: PlacedCall, *, actor: Actor) -> dict[str, Any]:
        """Judge a call just placed in the log and make its action; return `{toolCallId, actionId, state}`.

        A repeat of the same id and content in the same attempt is the same action. Raise a Problem (arguments that
        are not JSON, `tool_call_conflict`) to refuse the whole append.
        """
        ...

    def known_calls(self, generation_id: UUID, tool_call_ids: list[str]) -> list[dict[str, Any]]:
        """Return `{toolCallId, actionId, state}` as they are now, for an append that was a repeat."""
        ...

    def result(self, held: Held, result: PlacedResult, *, actor: Actor) -> None:
        """Settle an allowed call by the producer's own result; raise `result_needs_claim` and its like."""
        ...

    def superseded(self, held: Held, *, from_offset: int, actor: Actor) -> None:
        """Cancel what was born at or after `from_offset`; executing ones get `cancelRequested`."""
        ...

    def cancel_requested(self, held: Held, *, actor: Actor) -> None:
        """Cancel pending and approved actions; executing ones get `cancelRequested`."""
        ...

    def closing(self, held: Held, *, reason: str, actor: Actor) -> None:
        """The log has just got its `done`: settle what may not stay open (contract §2 and §3)."""
        ...

    def actions(self, generation_id: UUID) -> list[dict[str, Any]]:
        """Return the generation's actions as `GET /approvals/{id}` shows them, oldest first."""
        ...


_gate: Gate | None = None


def install(gate: Gate) -> None:
    global _gate
    _gate = gate


def installed() -> Gate:
    if _gate is None:
        raise RuntimeError("no gate is installed: the app that judges tool calls must call streams.gate.install")
    return _gate
