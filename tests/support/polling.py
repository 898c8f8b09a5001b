"""Wait for something to become true, with a deadline; the only place of the tests that sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(look: Callable[[], T], *, within_seconds: float = 10.0, every_seconds: float = 0.02) -> T:
    """Call `look` until it returns something true and raises no AssertionError; return that.

    Raise AssertionError with what was seen last when the time is up. Any other exception is raised at once.
    """
    deadline = time.monotonic() + within_seconds
    while True:
        seen: object
        try:
            value = look()
            if value:
                return value
            seen = value
        except AssertionError as error:
            seen = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not so within {within_seconds} s; last seen: {seen!r}")
        time.sleep(every_seconds)


async def eventually_async(
    look: Callable[[], Awaitable[T]], *, within_seconds: float = 10.0, every_seconds: float = 0.02
) -> T:
    """Do what `eventually` does with an async `look`."""
    deadline = time.monotonic() + within_seconds
    while True:
        seen: object
        try:
            value = await look()
            if value:
                return value
            seen = value
        except AssertionError as error:
            seen = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not so within {within_seconds} s; last seen: {seen!r}")
        await asyncio.sleep(every_seconds)
