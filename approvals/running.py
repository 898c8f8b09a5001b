"""What a server tool may say and ask while it runs. Pure: no Django; tools import this and `approvals.tools`."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any


class ToolFailed(Exception):
    """The tool surely did not do it, or it surely went wrong. `code` and `message` are shown to people and models.

    Any other exception proves nothing: it ends a transactional tool's action as failed, and any other's like
    OutcomeUnknown. Only its class is shown, its text may hold secrets.
    """

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.more = code, message, more


class NotStarted(Exception):
    """Nothing happened (a cancel was seen in time, a resource was busy): the action may be run again, or cancelled."""


class OutcomeUnknown(Exception):
    """The tool can't tell whether its effect happened (an answer was lost); its text is kept for who must look.

    The action becomes `unknown`, or runs again with the same effect key if the tool declared that this is safe.
    """


_cancel: ContextVar[threading.Event | None] = ContextVar("cancel", default=None)


def cancel_requested() -> bool:
    """Say whether somebody asked to stop the run this tool is in. A long tool looks now and then, and raises
    NotStarted if nothing happened yet, or returns what it did."""
    event = _cancel.get()
    return event is not None and event.is_set()


def bind_cancel(event: threading.Event) -> None:
    """Let `cancel_requested` look at this event, in this context and the threads it is copied to."""
    _cancel.set(event)
