"""The server's own tools: what they declare, and how arguments are made ready before anybody is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import referencing
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from approvals import canonical
from streams import strictjson

Effects = Literal["at_most_once", "idempotent", "transactional"]
Risk = Literal["low", "medium", "high", "critical"]
Run = Callable[[dict[str, Any], str], Any]
Prepare = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Tool:
    """A registered tool. `run(arguments, effect_key)`: numbers come as int and Decimal, the result is any JSON.

    `effects` says what a lost lease means: `at_most_once` is never run again by a machine, `idempotent` and
    `transactional` are, with the same effect key.
    """

    name: str
    run: Run
    effects: Effects
    risk: Risk
    description: str
    schema: Mapping[str, Any] | None
    prepare: Prepare | None
    lease_seconds: int
    _validator: Draft202012Validator | None


@dataclass(frozen=True)
class Fault:
    """Why arguments can't run: a sentence, and the dotted place under `arguments`."""

    detail: str
    field: str


@dataclass(frozen=True)
class Ready:
    """Arguments as they would run, canonical; with a `fault` they never will, and are as they came."""

    text: str
    digest: str
    fault: Fault | None


_tools: dict[str, Tool] = {}


def tool(
    *,
    name: str,
    effects: Effects,
    risk: Risk,
    schema: Mapping[str, Any] | None = None,
    prepare: Prepare | None = None,
    lease_seconds: int = 60,
    description: str = "",
) -> Callable[[Run], Run]:
    """Register a server tool. `schema` is JSON Schema 2020-12 of the arguments, after `prepare` has had them.

    `prepare` coerces and fills in defaults; it must give the same for the same arguments, and leave its own output
    as it is. It runs before the question is stored, so people see what will run. A second registration of a name
    replaces the first.
    """
    validator = None
    if schema is not None:
        Draft202012Validator.check_schema(schema)
        # An empty registry: a `$ref` to an address fails instead of making a request.
        validator = Draft202012Validator(_exact(schema), registry=referencing.Registry())

    def register(run: Run) -> Run:
        _tools[name] = Tool(name, run, effects, risk, description, schema, prepare, lease_seconds, validator)
        return run

    return register


def registered(name: str) -> Tool | None:
    return _tools.get(name)


def all_tools() -> list[Tool]:
    return [_tools[name] for name in sorted(_tools)]


def make_ready(*, tool_name: str, arguments_text: str) -> Ready:
    """Prepare canonical arguments and hold them against the tool's schema. Never raises for what they contain."""
    found = _tools.get(tool_name)
    text, fault = arguments_text, None
    if found is not None and found.prepare is not None:
        text, fault = _prepared(found.prepare, arguments_text)
    if found is not None and fault is None:
        fault = _schema_fault(found, text)
        text = arguments_text if fault else text
    return Ready(text, canonical.digest(tool=tool_name, arguments_text=text), fault)


def _prepared(prepare: Prepare, arguments_text: str) -> tuple[str, Fault | None]:
    arguments = strictjson.loads(arguments_text)
    assert isinstance(arguments, dict)
    try:
        return canonical.canonical_arguments(prepare(arguments)).text, None
    except strictjson.BadJSON as error:
        return arguments_text, Fault(error.detail, error.field or "arguments")
    except Exception as error:  # noqa: BLE001 - whatever a tool's own code makes of hostile arguments, they can't run
        return arguments_text, Fault(f"the tool can't take these arguments: {error}"[:500], "arguments")


def _schema_fault(found: Tool, arguments_text: str) -> Fault | None:
    if found._validator is None:
        return None
    worst = best_match(found._validator.iter_errors(strictjson.loads(arguments_text)))
    if worst is None:
        return None
    steps = [str(step) for step in worst.absolute_path]
    if worst.validator == "required" and isinstance(worst.instance, dict):
        steps += [name for name in worst.validator_value if name not in worst.instance][:1]
    elif worst.validator == "additionalProperties" and isinstance(worst.instance, dict):
        known = worst.schema.get("properties", {}) if isinstance(worst.schema, dict) else {}
        steps += [name for name in worst.instance if name not in known][:1]
    field = ".".join(["arguments", *steps])[:400]
    return Fault(f"{field}: {worst.message}"[:500], field)


def _exact(schema: Any) -> Any:
    """Write a schema's floats as the decimals their text says: arguments have no floats to compare with."""
    if isinstance(schema, float):
        return Decimal(repr(schema))
    if isinstance(schema, Mapping):
        return {key: _exact(value) for key, value in schema.items()}
    if isinstance(schema, list | tuple):
        return [_exact(value) for value in schema]
    return schema
