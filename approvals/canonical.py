"""Write arguments and results in the one text that is shown, hashed and run (docs/contract.md §5).

The form is RFC 8785 with one change: a number is the decimal that was sent, not the double nearest to it.
Every canonical text parses back to itself, so what the server shows may be sent back and has the same digest.

Pure: no Django here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from decimal import Decimal
from typing import Generic, TypeVar

from streams import strictjson
from streams.strictjson import MAX_DEPTH, BadJSON, JSONValue, Parts

MAX_TEXT_BYTES = 256 * 1024

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Canonical(Generic[T_co]):
    """A value beside its canonical text; both within the limits. The text is what counts."""

    value: T_co
    text: str


Arguments = Canonical[dict[str, JSONValue]]
Result = Canonical[JSONValue]


def parse_arguments(text: str | bytes, *, field: str = "arguments") -> Arguments:
    """Parse the arguments of a tool call that came as a JSON text (as a `tool_call` chunk carries them).

    Raises `BadJSON`: not strict JSON, not an object, too deep, a number out of range, or `too_large`.
    """
    return canonical_arguments(strictjson.loads(text, field=field), field=field)


def canonical_arguments(value: JSONValue, *, field: str = "arguments") -> Arguments:
    """Check arguments that came inside an already parsed body. Raises as `parse_arguments` does."""
    if not isinstance(value, dict):
        raise BadJSON("The arguments must be a JSON object.", field=field)
    return Canonical(value, _limited_text(value, field))


def parse_result(text: str | bytes, *, field: str = "result") -> Result:
    """Parse a tool's result that came as a JSON text. Any JSON value; the limits are those of arguments."""
    return canonical_result(strictjson.loads(text, field=field), field=field)


def canonical_result(value: JSONValue, *, field: str = "result") -> Result:
    """Check a result that came inside an already parsed body."""
    return Canonical(value, _limited_text(value, field))


def _limited_text(value: JSONValue, field: str) -> str:
    try:
        text = canonical_text(value)
    except BadJSON as bad:
        bad.under(field)
        raise
    if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
        raise BadJSON(
            f"The canonical text is larger than {MAX_TEXT_BYTES} bytes.",
            code="too_large",
            field=field,
            limit=MAX_TEXT_BYTES,
        )
    return text


def digest(*, tool: str, arguments_text: str) -> str:
    """Name the call by its content: `sha256:` and 64 hex digits.

    `arguments_text` must be canonical already; it is not parsed again. There is no Unicode normalisation
    anywhere: texts that only look the same have different digests.
    """
    name = canonical_text(strictjson.check_text(tool, field="tool"))
    # The two keys are written in canonical order, so the whole is canonical when its parts are.
    call = f'{{"arguments":{arguments_text},"tool":{name}}}'
    return f"sha256:{hashlib.sha256(call.encode()).hexdigest()}"


def canonical_text(value: JSONValue) -> str:
    """Write a value in canonical form. Raises `BadJSON` for what could not have come through `loads`.

    Limits depth (64, an object or list at the top is 1) but not size.
    """
    return strictjson.render(value, number=number_text, members=_in_utf16_order, max_depth=MAX_DEPTH)


def _in_utf16_order(members: dict[str, JSONValue]) -> list[tuple[str, JSONValue]]:
    # Code points and UTF-16 units order alike except above U+FFFF, whose surrogates sort before U+E000.
    if all(map(str.isascii, members)):
        return sorted(members.items())
    return sorted(members.items(), key=lambda member: member[0].encode("utf-16-be", "surrogatepass"))


def number_text(value: int | Decimal) -> str:
    """Write a number exactly: as ECMAScript does where that denotes this decimal, else all its digits."""
    if isinstance(value, int) and -(2**53) <= value <= 2**53:
        return str(int(value))
    parts = strictjson.in_range(strictjson.parts_of(value))
    if parts.digits == "0":
        return "0"
    # repr() gives the shortest digits that round-trip, the nearest to the double among those, which are the
    # digits Number::toString takes; only the layout differs.
    shortest = strictjson.parts_of_text(repr(float(f"{parts.sign}{parts.digits}e{parts.exponent}")))
    return _ecmascript(parts) if shortest == parts else _plain(parts)


def _ecmascript(parts: Parts) -> str:
    """Lay digits out as ECMA-262 Number::toString does."""
    if -7 < parts.magnitude < 21:
        return _plain(parts)
    fraction = f".{parts.digits[1:]}" if len(parts.digits) > 1 else ""
    return f"{parts.sign}{parts.digits[0]}{fraction}e{parts.magnitude:+d}"


def _plain(parts: Parts) -> str:
    sign, digits, exponent = parts
    if exponent >= 0:
        return f"{sign}{digits}{'0' * exponent}"
    digits = digits.rjust(1 - exponent, "0")
    return f"{sign}{digits[:exponent]}.{digits[exponent:]}"
