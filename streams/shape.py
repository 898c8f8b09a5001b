"""Check a parsed JSON body against a struct, and describe the same struct to OpenAPI. Pure: no Django.

A body is a `msgspec.Struct` made with `Shape`: keys in camelCase, an unknown key refused, `true` is no integer and
`3.0` is none either. What is no text, number or list of this struct's own (`arguments`, `result`) stays as
`strictjson.loads` gave it, exact numbers included.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from streams.problems import Invalid
from streams.strictjson import check_text

UNSET = msgspec.UNSET
Unset = msgspec.UnsetType


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What every body's struct is made of."""


S = TypeVar("S", bound=msgspec.Struct)

_PLACE = re.compile(r"(?s)^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$")
_MEMBER = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<key>.*)`$", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]")


def read(value: object, shape: type[S], *, field: str = "") -> S:
    """Return the struct, or raise Invalid with `field`, the dotted path of the place that is wrong."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise refusal(str(error), field=field) from None


def refusal(message: str, *, field: str = "") -> Invalid:
    """Turn msgspec's sentence, which ends in a path, into a Problem."""
    found = _PLACE.match(message)
    what, path = (found["what"], found["path"] or "") if found else (message, "")
    path = _STEP.sub(r".\1", path).strip(".")
    member = _MEMBER.match(what)
    place = ".".join(part for part in (field, path, member["key"] if member else "") if part)
    return Invalid(_printable(what)[:500], field=_printable(place)[:400] or None)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def optional(value: Any, default: Any) -> Any:
    """Return a member that may be left out."""
    return default if value is UNSET else value


def text(value: object, *, field: str, low: int = 0, high: int) -> str:
    """Check a text that came outside a JSON body (a header, a query): length, NUL, surrogates."""
    return check_text(value, field=field, min_chars=low, max_chars=high)


def schema(shape: Any) -> dict[str, Any]:
    """Describe a struct as a JSON schema without references, so that it can stand anywhere."""
    whole = msgspec.json.schema(shape)
    definitions = whole.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inline(definitions[node["$ref"].rpartition("/")[2]])
            # OpenAPI 3.0 has no empty list of required members.
            kept = {key: member for key, member in node.items() if key != "title" and (key, member) != ("required", [])}
            return {key: inline(member) for key, member in kept.items()}
        if isinstance(node, list):
            return [inline(member) for member in node]
        return node

    described: dict[str, Any] = inline(whole)
    return described
