"""When a broken attempt is tried again, and after how long. Pure: no Django, no clock, no randomness of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from streams.protocol import Error


@dataclass(frozen=True)
class RetryPolicy:
    """At most `tries` attempts in all; the n-th pause is at most `base_ms · 2^(n-1)`, never over `longest_ms`.

    A provider that names its own wait (`retryAfter`) is obeyed up to `longest_asked_ms`; one that asks for more is
    not waited for: the person who watches is better served by an end that says so.
    """

    tries: int = 3
    base_ms: int = 250
    longest_ms: int = 2_000
    longest_asked_ms: int = 60_000


DEFAULT = RetryPolicy()


def pause_ms(error: Error, *, failures: int, policy: RetryPolicy = DEFAULT, random: Callable[[], float]) -> int | None:
    """Return how long to wait after the `failures`-th broken attempt in a row, or None: give up.

    `random` gives a number from 0 up to 1. The jitter lies below the nominal pause (half of it to all of it), so
    that many agents whose provider broke at one moment don't return at one moment.
    """
    if not error.recoverable or failures >= policy.tries:
        return None
    nominal = min(policy.longest_ms, policy.base_ms * 2 ** (failures - 1))
    jittered = int(nominal * (0.5 + random() / 2))
    if error.retryAfter is msgspec.UNSET:
        return jittered
    if error.retryAfter > policy.longest_asked_ms:
        return None
    # Never earlier than asked; the jitter goes on top, because everybody was told the same moment.
    return error.retryAfter + jittered
