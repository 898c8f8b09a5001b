"""Named crash points: no-ops unless the environment arms one, which only tests do. Pure: no Django.

`AGENTSITE_FAULT="after_effect:kill"` kills this process with SIGKILL at the point; `:stop` freezes it (SIGSTOP);
`:raise` raises FaultInjected. A third part counts: `after_effect:kill:3` is the third passing. Several: by comma.
"""

from __future__ import annotations

import os
import signal
import threading


class FaultInjected(Exception):
    """A test armed this point to fail."""


_lock = threading.Lock()
_passed: dict[str, int] = {}


def point(name: str) -> None:
    """Pass a named place; do there what the environment says."""
    armed = os.environ.get("AGENTSITE_FAULT", "")
    if not armed:
        return
    for fault in armed.split(","):
        place, _, rest = fault.partition(":")
        if place != name:
            continue
        what, _, count = rest.partition(":")
        with _lock:
            _passed[name] = _passed.get(name, 0) + 1
            hit = _passed[name] == int(count or 1)
        if hit:
            _do(what, name)


def _do(what: str, name: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "raise":
        raise FaultInjected(name)
