"""What a query string may ask for, and the shape every list answers in."""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

from django.http import HttpRequest
from django.utils.dateparse import parse_datetime
from rest_framework.request import Request

from streams import shape
from streams.problems import Invalid


def page_limit(request: Request | HttpRequest, *, default: int = 50, most: int = 200) -> int:
    return whole(request, "limit", low=1, high=most, default=default)


def whole(request: Request | HttpRequest, name: str, *, low: int, high: int, default: int) -> int:
    """Read a whole number from the query: digits only, in range, else Invalid with `field`."""
    given = request.GET.get(name)
    if given is None or given == "":
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= 19) or not low <= int(given) <= high:
        raise Invalid(f"{name} is a whole number from {low} to {high}", field=name)
    return int(given)


def text(request: Request | HttpRequest, name: str, *, high: int = 200) -> str:
    return shape.text(request.GET.get(name, ""), field=name, high=high)


def moment(request: Request | HttpRequest, name: str) -> datetime | None:
    """Read a time with its zone."""
    given = request.GET.get(name)
    if not given:
        return None
    try:
        found = parse_datetime(given)
        if found is not None and found.tzinfo is not None:
            return found.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise Invalid(f"{name} is a time with a zone, as in 2026-11-30T12:00:00Z", field=name)


def cursor_text(when: datetime, key: UUID) -> str:
    """Name the last row of a page, newest first; opaque to clients."""
    return base64.urlsafe_b64encode(f"{when.astimezone(UTC).isoformat()} {key.hex}".encode()).decode().rstrip("=")


def cursor(request: Request | HttpRequest) -> tuple[datetime, UUID] | None:
    given = request.GET.get("cursor")
    if not given:
        return None
    try:
        decoded = base64.b64decode(given + "=" * (-len(given) % 4), altchars=b"-_", validate=True).decode()
        written, _, key = decoded.partition(" ")
        when = datetime.fromisoformat(written)
        if when.tzinfo is not None:
            return when.astimezone(UTC), UUID(key)
    except (ValueError, OverflowError):
        pass
    raise Invalid("this cursor was not given by a list", field="cursor")


M = TypeVar("M")


def page(
    rows: list[M], limit: int, show: Callable[[M], dict[str, Any]], place: Callable[[M], tuple[datetime, UUID]]
) -> dict[str, Any]:
    """Return a list's body; `rows` hold one more than `limit` when another page follows."""
    shown = rows[:limit]
    more = len(rows) > limit
    return {"results": [show(row) for row in shown], "next": cursor_text(*place(shown[-1])) if more else None}
