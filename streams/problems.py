"""Refusals with a stable code. Pure: no Django. Doors alone turn them into answers (contract §6).

A class names the situation; `code` is what clients may rely on, `status` is how HTTP says it, `fields` are the
members beside `detail` in the problem document (`field`, `index`, `limit`, `action`, `nextSeq` …).
"""

from __future__ import annotations

from typing import Any, ClassVar


class Problem(Exception):
    code: str = "invalid"
    status: ClassVar[int] = 400

    def __init__(self, detail: str, *, code: str | None = None, **fields: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = {name: value for name, value in fields.items() if value is not None}
        if code is not None:
            self.code = code


class Invalid(Problem):
    """The shape is wrong; `field` or `index` says where."""


class NotSignedIn(Problem):
    code, status = "not_signed_in", 401


class NotAllowed(Problem):
    code, status = "not_allowed", 403


class NotFound(Problem):
    """It does not exist, or may not be seen: the two look the same."""

    code, status = "not_found", 404


class Conflict(Problem):
    """Losing a race, or asking for what the state does not allow: an answer, not an incident."""

    status = 409


class TooLarge(Problem):
    code, status = "too_large", 413


class Unprocessable(Problem):
    status = 422


class RateLimited(Problem):
    code, status = "rate_limited", 429


class TryAgain(Problem):
    """Nothing is known to have happened; the same request may be sent again after `retryAfterSeconds`."""

    code, status = "try_again", 503
