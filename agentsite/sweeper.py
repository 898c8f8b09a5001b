"""Let every server process do what the clock asks: a site of one process forgets nothing either.

`run_executor` sweeps too; any number may at once. A thread, because daphne tells an application neither of its start
nor of its end; a daemon, because a sweep that is cut is one that has not been.
"""

from __future__ import annotations

import logging
import threading

from django.conf import settings
from django.db import close_old_connections

from approvals.sweeps import sweep

logger = logging.getLogger(__name__)


def start() -> None:
    """Sweep each `AGENTSITE_SWEEP_SECONDS` from now on, as long as this process lives; 0: leave it to others."""
    if settings.SWEEP_SECONDS > 0:
        threading.Thread(target=_run, name="sweeper", daemon=True).start()


def _run() -> None:
    pause = threading.Event()
    well = True
    while not pause.wait(settings.SWEEP_SECONDS):
        try:
            sweep()
            well = True
        except Exception:
            # Told once, not each second: the database may be away for long.
            if well:
                logger.exception("a sweep failed; it goes on trying")
            well = False
        finally:
            close_old_connections()
