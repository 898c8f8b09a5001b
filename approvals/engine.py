"""The seam to a distributed task engine you already run (Celery, procrastinate, …): it carries an id, nothing else.

The approvals table is the work list and the engine a doorbell: a lost message costs latency, because `run_executor`
or the next sweep finds the row; a message delivered twice is refused by the claim. Install one at start-up:

    engine.install(engine.Engine(hand_over=lambda action_id: my_task.delay(str(action_id))))

and let the task call `engine.run(action_id)` in the worker, where the same tools are registered.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from approvals import executor, tools
from approvals.models import ApprovalRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """`hand_over` gives one action's id to the engine. It is called outside any transaction, may lose it, may raise."""

    hand_over: Callable[[UUID], None]


_engine: Engine | None = None


def install(engine: Engine | None) -> None:
    global _engine
    _engine = engine


def announce(*, limit: int = 100) -> int:
    """Hand every claimable action of the registered tools to the engine; return how many. Repeating is harmless."""
    if _engine is None:
        return 0
    names = [tool.name for tool in tools.all_tools()]
    work = ApprovalRequest.objects.filter(state="approved", executor="server", tool__in=names)
    ids = list(work.order_by("requested_at").values_list("pk", flat=True)[:limit])
    for action_id in ids:
        try:
            _engine.hand_over(action_id)
        except Exception:
            logger.exception("the engine did not take action %s; it stays in the work list", action_id)
    return len(ids)


def run(action_id: UUID | str) -> str:
    """Run one action in this thread, as the engine's task; return its state, or the code of why it was not run."""
    key = action_id if isinstance(action_id, UUID) else UUID(action_id)
    return executor.run_one(name=f"engine:{socket.gethostname()}"[:100], action_id=key)
