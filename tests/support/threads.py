"""Run the same call in many threads at one moment, as a race does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from django.db import connections


def in_threads(*calls: Callable[[], Any], times: int = 1) -> list[Any]:
    """Start every call (each `times` times) at one moment; return results or exceptions, in that order.

    Each thread has its own database connection and closes it, so use it in tests with `transaction=True`.
    """
    work: Sequence[Callable[[], Any]] = [call for call in calls for _ in range(times)]
    results: list[Any] = [None] * len(work)
    gate = threading.Barrier(len(work))

    def run(place: int) -> None:
        try:
            gate.wait(30)
            results[place] = work[place]()
        except Exception as error:  # noqa: BLE001 - the test judges it
            results[place] = error
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a racing call hangs"
    return results
