"""Parse JSON strictly at the door, and write it back exactly.

The standard parser keeps the last of two equal keys, takes NaN, turns 0.1 into a binary fraction, recurses on
hostile nesting and lets NUL and lone surrogates through to a database that refuses them. What comes out of
`loads` has none of that: it is a tree a row can hold, a digest can be taken of, and `dumps` can write again.

Pure: no Django here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from itertools import accumulate
from json.encoder import encode_basestring
from typing import Literal, NamedTuple, TypeAlias

JSONValue: TypeAlias = "bool | int | Decimal | str | list[JSONValue] | dict[str, JSONValue] | None"
Code: TypeAlias = Literal["invalid", "number_out_of_range", "too_large"]

# docs/contract.md §5, "Arguments are exact".
MAX_DEPTH = 64
MAX_SIGNIFICANT_DIGITS = 64
MAX_EXPONENT = 308
# A body wraps what may itself be MAX_DEPTH deep (a batch: body, list, item, arguments), so doors parse with
# this and leave the exact limit to the check of the part.
MAX_BODY_DEPTH = MAX_DEPTH + 8
# Deeper than any parsed value, well below Python's own recursion limit.
MAX_WRITE_DEPTH = 200


class BadJSON(ValueError):
    """Say why a JSON text or value is refused.

    `code` is the stable word of the contract, `detail` a sentence for people, `field` the place as a dotted
    path (`chunks.3.content`; safe to show, cut when long; None when unknown or the whole), `limit` the limit
    that was passed.
    """

    def __init__(
        self, detail: str, *, code: Code = "invalid", field: str | None = None, limit: int | None = None
    ) -> None:
        super().__init__(detail)
        self.code: Code = code
        self.detail = detail
        self.field = field or None
        self.limit = limit

    def under(self, place: str | int) -> None:
        """Put one outer step before the path; called while the error travels up through the containers."""
        step = _showable(str(place))
        self.field = f"{step}.{self.field}"[:400] if self.field else step


# --- reading --------------------------------------------------------------------------------------


def loads(text: str | bytes, *, max_bytes: int | None = None, max_depth: int = MAX_DEPTH, field: str = "") -> JSONValue:
    """Parse one JSON text, or raise `BadJSON`.

    Integers come as `int`, every other number as a `Decimal` of exactly that value (the spelling may differ).
    A scalar has depth 0, `{}` has depth 1. `field` names the text when it is itself a part of something, and
    stands before every path. Costs linear time whatever is sent; never raises RecursionError.
    """
    try:
        return _loads(text, max_bytes, max_depth)
    except BadJSON as bad:
        if field:
            bad.under(field)
        raise


def _loads(source: str | bytes, max_bytes: int | None, max_depth: int) -> JSONValue:
    if max_bytes is not None and len(source) > max_bytes:
        raise _too_large(max_bytes)
    text, data = _decoded(source)
    if max_bytes is not None and len(data) > max_bytes:
        raise _too_large(max_bytes)
    if text.startswith("\ufeff"):
        raise BadJSON("The JSON text starts with a byte order mark.")
    if not text.strip(" \t\n\r"):
        raise BadJSON("There is no JSON here: the text is empty.")
    skeleton = _skeleton(data)
    if _depth(skeleton) > max_depth:
        raise BadJSON(f"The JSON text is nested deeper than {max_depth} levels.", limit=max_depth)

    reader = _Reader()
    decoder = reader.decoder(plain_numbers=not _UNUSUAL_NUMBER.search(skeleton))
    try:
        value: JSONValue = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise BadJSON(f"This is not JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from None
    except RecursionError:  # only when the caller's own stack is nearly used up
        raise BadJSON("The JSON text is nested too deep.", limit=max_depth) from None
    if reader.met_fault or _SUSPICIOUS_ESCAPE.search(data):
        _inspect(value)
    return value


def _decoded(source: str | bytes) -> tuple[str, bytes]:
    try:
        if isinstance(source, str):
            return source, source.encode()
        return source.decode(), source
    except UnicodeDecodeError as error:
        raise BadJSON(f"The JSON text is not valid UTF-8 (byte {error.start}).") from None
    except UnicodeEncodeError as error:
        raise BadJSON(f"The JSON text contains a lone surrogate (character {error.start}).") from None


def _too_large(limit: int) -> BadJSON:
    return BadJSON(f"The JSON text is larger than {limit} bytes.", code="too_large", limit=limit)


_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')  # escapes are out by then; that in one pattern would backtrack
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = [0] * 256
for _byte in b"[{":
    _STEP[_byte] = 1
for _byte in b"]}":
    _STEP[_byte] = -1


# Without exponents, and with at most 29 digits on either side of the point, no number can break the rules.
_UNUSUAL_NUMBER = re.compile(rb"[0-9](?:[eE]|[0-9]{29})")


def _skeleton(data: bytes) -> bytes:
    """Take the strings out; exact as far as the text is JSON, which is as far as the parser gets."""
    if b"\\" in data:
        data = _ESCAPE.sub(b"", data)
    return _STRING.sub(b"", data)


def _depth(skeleton: bytes) -> int:
    brackets = skeleton.translate(None, _ALL_BUT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


class _Fault:
    """Stand in the parsed tree where something was refused, so that its path can be told afterwards."""

    __slots__ = ("code", "detail", "key", "limit")

    def __init__(
        self, detail: str, *, code: Code = "invalid", key: str | None = None, limit: int | None = None
    ) -> None:
        self.detail = detail
        self.code: Code = code
        self.key = key
        self.limit = limit


class _Reader:
    """Hold the hooks of one parse.

    They note a fault instead of raising, since the C scanner tells no hook where it is. Once one is noted the
    text is refused anyway, so later numbers are not judged any more.
    """

    def __init__(self) -> None:
        self.met_fault = False

    def decoder(self, *, plain_numbers: bool) -> json.JSONDecoder:
        return json.JSONDecoder(
            object_pairs_hook=self.members,
            parse_int=int if plain_numbers else self.integer,
            parse_float=Decimal if plain_numbers else self.fraction,
            parse_constant=self.constant,
        )

    def members(self, pairs: list[tuple[str, JSONValue]]) -> dict[str, JSONValue] | _Fault:
        members = dict(pairs)
        if len(members) == len(pairs):
            return members
        self.met_fault = True
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return _Fault("An object has the same key twice.", key=twice)

    def integer(self, text: str) -> int | _Fault:
        # The long ones are judged before int() sees them, because int() is quadratic and raises on its own
        # above a limit that the environment can move.
        if len(text) <= MAX_SIGNIFICANT_DIGITS:
            return int(text)
        parts = self.judged(text)
        if isinstance(parts, _Fault):
            return parts
        return int(f"{parts.sign}{parts.digits}{'0' * parts.exponent}")

    def fraction(self, text: str) -> Decimal | _Fault:
        if len(text) <= MAX_SIGNIFICANT_DIGITS and "e" not in text and "E" not in text:
            return Decimal(text)
        parts = self.judged(text)
        if isinstance(parts, _Fault):
            return parts
        return Decimal(f"{parts.sign}{parts.digits}E{parts.exponent}")

    def judged(self, text: str) -> Parts | _Fault:
        if self.met_fault:
            return ZERO
        try:
            return in_range(parts_of_text(text))
        except BadJSON as bad:
            self.met_fault = True
            return _Fault(bad.detail, code=bad.code, limit=bad.limit)

    def constant(self, name: str) -> _Fault:
        self.met_fault = True
        return _Fault(f"{name} is not a JSON number.")


# Raw NUL and raw surrogates never get past the decoder, so only escapes can bring them. Most of these hits
# are honest pairs (an emoji from an ASCII-only writer); they only mean that the strings are worth a look.
_SUSPICIOUS_ESCAPE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")


def _inspect(value: object) -> None:
    """Raise the first fault of a parsed tree, with its path. Depth is bounded already."""
    if isinstance(value, str):
        _refuse_unfit(value)
    elif isinstance(value, _Fault):
        raise BadJSON(
            value.detail,
            code=value.code,
            field=None if value.key is None else _showable(value.key),
            limit=value.limit,
        )
    elif isinstance(value, dict | list):
        steps: Iterable[tuple[str | int, object]]
        steps = value.items() if isinstance(value, dict) else enumerate(value)
        for step, item in steps:
            try:
                if isinstance(step, str):
                    _refuse_unfit(step)
                _inspect(item)
            except BadJSON as bad:
                bad.under(step)
                raise


# --- numbers --------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """A decimal as `sign digits × 10^exponent`: digits without zeros at either end, `"0"` and 0 for zero."""

    sign: str
    digits: str
    exponent: int

    @property
    def magnitude(self) -> int:
        """Give the power of ten of the first digit."""
        return self.exponent + len(self.digits) - 1


ZERO = Parts("", "0", 0)


def parts_of_text(text: str) -> Parts:
    """Take a JSON number apart without building it, so that `1e999999999` costs nothing."""
    sign = "-" if text.startswith("-") else ""
    mantissa, _, power = text.removeprefix("-").replace("E", "e").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    power_digits = power.lstrip("+-").lstrip("0")
    if digits and len(power_digits) > 18:  # no text is long enough for its zeros to make up for this
        raise _out_of_range()
    stripped = digits.rstrip("0")
    if not stripped:
        return Parts(sign, "0", 0)
    shift = int(power_digits or "0") * (-1 if power.startswith("-") else 1)
    return Parts(sign, stripped, shift - len(fraction) + len(digits) - len(stripped))


def parts_of(value: int | Decimal) -> Parts:
    """Take a number apart; raise `BadJSON` for one that no JSON text may say."""
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise BadJSON(f"{value} is not a JSON number.")
        return parts_of_text(str(value))
    if value.bit_length() > 1024:  # 2^1024 > 1e308; and str() is quadratic
        raise _out_of_range()
    return parts_of_text(str(value))


def in_range(parts: Parts) -> Parts:
    """Return the parts unchanged, or raise `number_out_of_range` (docs/contract.md §5)."""
    if len(parts.digits) > MAX_SIGNIFICANT_DIGITS:
        raise BadJSON(
            f"A number has more than {MAX_SIGNIFICANT_DIGITS} significant digits.",
            code="number_out_of_range",
            limit=MAX_SIGNIFICANT_DIGITS,
        )
    magnitude = parts.magnitude
    beyond = magnitude > MAX_EXPONENT or (magnitude == MAX_EXPONENT and parts.digits != "1")
    if parts.digits != "0" and (beyond or magnitude < -MAX_EXPONENT):
        raise _out_of_range()
    return parts


def _out_of_range() -> BadJSON:
    return BadJSON(
        f"A number is outside 1e-{MAX_EXPONENT} … 1e{MAX_EXPONENT} in size.",
        code="number_out_of_range",
        limit=MAX_EXPONENT,
    )


# --- text -----------------------------------------------------------------------------------------

_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSHOWABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")


def check_text(value: object, *, field: str, min_chars: int = 0, max_chars: int | None = None) -> str:
    """Return the text unchanged, or raise `BadJSON` naming the field. Characters are Unicode code points."""
    if not isinstance(value, str):
        raise BadJSON("A text is expected here.", field=field)
    if len(value) < min_chars:
        detail = "The text is empty." if not value else f"The text has fewer than {min_chars} characters."
        raise BadJSON(detail, field=field, limit=min_chars)
    if max_chars is not None and len(value) > max_chars:
        raise BadJSON(f"The text has more than {max_chars} characters.", field=field, limit=max_chars)
    try:
        _refuse_unfit(value)
    except BadJSON as bad:
        bad.under(field)
        raise
    return value


def _refuse_unfit(text: str) -> None:
    if "\0" in text:
        raise BadJSON("A text contains the NUL character.")
    if not text.isascii() and _SURROGATE.search(text):
        raise BadJSON("A text contains a lone surrogate.")


def _showable(step: str) -> str:
    """Make a hostile key fit to be shown as a step of a path."""
    return _UNSHOWABLE.sub(lambda hit: f"\\u{ord(hit[0]):04x}", step[:80])


# --- writing --------------------------------------------------------------------------------------


def dumps(value: JSONValue) -> str:
    """Write a value compactly and exactly; raise `BadJSON` for what `loads` would refuse.

    A Decimal keeps its digits and its exponent. A float is a TypeError: whoever has one has lost the number
    already.
    """
    return render(value, number=_number_text, members=dict.items, max_depth=MAX_WRITE_DEPTH)


def dumps_bytes(value: JSONValue) -> bytes:
    """Write a value as UTF-8, as `dumps` does."""
    return dumps(value).encode()


def _number_text(value: int | Decimal) -> str:
    in_range(parts_of(value))
    return str(value)


def render(
    value: JSONValue,
    *,
    number: Callable[[int | Decimal], str],
    members: Callable[[dict[str, JSONValue]], Iterable[tuple[str, JSONValue]]],
    max_depth: int,
) -> str:
    """Write a value without spaces, escaping only what JSON must (as RFC 8785 does).

    `number` writes the numbers, `members` gives the members of an object in the order wanted.
    """
    out: list[str] = []
    add = out.append

    def quoted(text: str) -> str:
        _refuse_unfit(text)
        return encode_basestring(text)

    def write(item: JSONValue, depth: int) -> None:
        if isinstance(item, str):
            add(quoted(item))
        elif item is None:
            add("null")
        elif isinstance(item, bool):
            add("true" if item else "false")
        elif isinstance(item, int | Decimal):
            add(number(item))
        elif depth == max_depth and isinstance(item, dict | list):
            raise BadJSON(f"The value is nested deeper than {max_depth} levels.", limit=max_depth)
        elif isinstance(item, dict):
            separator = "{"
            for key, member in members(item):
                try:
                    add(f"{separator}{quoted(key)}:")
                    write(member, depth + 1)
                except BadJSON as bad:
                    bad.under(key)
                    raise
                separator = ","
            add("}" if item else "{}")
        elif isinstance(item, list):
            separator = "["
            for index, member in enumerate(item):
                try:
                    add(separator)
                    write(member, depth + 1)
                except BadJSON as bad:
                    bad.under(index)
                    raise
                separator = ","
            add("]" if item else "[]")
        else:
            raise TypeError(f"{type(item).__name__} is not a JSON value")

    write(value, 0)
    return "".join(out)
