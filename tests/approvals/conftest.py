"""Every test here has a clock it may put forward, a desk, and the tools it registers itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from streams import clock
from tests.approvals import desk


@pytest.fixture(autouse=True)
def _a_clock_that_can_be_put_forward(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(clock, "now", desk.Clock.now)
    yield
    desk.Clock.ahead = timedelta()


@pytest.fixture
def here() -> desk.Desk:
    return desk.Desk()


@pytest.fixture
def registering() -> Iterator[desk.Registering]:
    """Register server tools that are gone after the test."""
    with desk.Registering() as registering:
        yield registering
