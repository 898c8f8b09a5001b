"""Check the shape of what the verbs are given, the same for every door."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection

import msgspec

from approvals import canonical, refusals
from streams import strictjson
from streams.problems import Invalid
from streams.strictjson import BadJSON

MAX_REASON_CHARS = 2_000
_KEY = re.compile(r"[\x21-\x7e]{8,255}")
_CLAIM_ID = re.compile(r"[\x21-\x7e]{1,255}")


def key(value: object) -> str:
    """Return an idempotency key: 8 to 255 visible ASCII characters."""
    if value is None or value == "":
        raise refusals.KeyRequired("an idempotency key is needed", field="idempotencyKey")
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise refusals.KeyInvalid("a key has 8 to 255 visible ASCII characters", field="idempotencyKey")
    return value


def claim_id(value: object) -> str:
    if not isinstance(value, str) or not _CLAIM_ID.fullmatch(value):
        raise Invalid("a claimId has 1 to 255 visible ASCII characters", field="claimId")
    return value


def text(value: object, *, field: str, min_chars: int = 0, max_chars: int) -> str:
    try:
        return strictjson.check_text(value, field=field, min_chars=min_chars, max_chars=max_chars)
    except BadJSON as error:
        raise refusals.bad_json(error) from None


def reason(value: object, *, field: str = "reason") -> str:
    return text(value, field=field, max_chars=MAX_REASON_CHARS)


def one_of(value: object, allowed: Collection[str], *, field: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise Invalid(f"{field} is one of {', '.join(allowed)}", field=field)
    return value


def whole(value: object, *, field: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Invalid(f"{field} is a whole number from {least} to {most}", field=field, limit=most)
    return value


def arguments(value: str) -> str:
    """Return arguments that came as a JSON text in canonical form."""
    try:
        return canonical.parse_arguments(value).text
    except BadJSON as error:
        raise refusals.bad_json(error) from None


def result(value: str, *, field: str = "result") -> str:
    """Return a result that came as a JSON text in canonical form."""
    try:
        return canonical.parse_result(value, field=field).text
    except BadJSON as error:
        raise refusals.bad_json(error) from None


def sha256(*parts: object) -> str:
    """Name a body by its parts: two bodies are the same when every part is."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
