"""Four server tools of a small shop: one of each `effects` kind, and one the demo's policy refuses.

Their effects are real: lines, files and rows under `var/demo`, each with the effect key it was done under.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from django.conf import settings

from approvals.running import ToolFailed
from approvals.tools import tool
from streams import clock, strictjson

NAMES = ("refund_order", "send_message", "update_order", "delete_customer")
_ORDER = {"type": "integer", "minimum": 1, "maximum": 999_999}


def _folder() -> Path:
    folder = Path(settings.VAR_DIR) / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@tool(
    name="refund_order",
    effects="at_most_once",
    risk="high",
    description="Pay money back for an order. It can't be undone.",
    schema={
        "type": "object",
        "properties": {
            "order": _ORDER,
            "amount": {"type": "number", "exclusiveMinimum": 0, "maximum": 10_000},
            "currency": {"type": "string", "enum": ["EUR", "BRL", "USD"]},
            "reason": {"type": "string", "maxLength": 500},
        },
        "required": ["order", "amount", "currency"],
        "additionalProperties": False,
    },
)
def refund_order(arguments: dict[str, Any], effect_key: str) -> Any:
    """Add one line to `refunds.jsonl`: nothing here could recognise a second run, so there must be none."""
    refund = f"R-{effect_key[-6:]}"
    line = {"refund": refund, "effectKey": effect_key, "at": clock.rfc3339(clock.now()), **arguments}
    _append_line(_folder() / "refunds.jsonl", strictjson.dumps(line))
    return {"refund": refund, "order": arguments["order"], "amount": arguments["amount"]}


@tool(
    name="send_message",
    effects="idempotent",
    risk="low",
    description="Send a message to the customer of an order.",
    schema={
        "type": "object",
        "properties": {"order": _ORDER, "text": {"type": "string", "minLength": 1, "maxLength": 2_000}},
        "required": ["order", "text"],
        "additionalProperties": False,
    },
)
def send_message(arguments: dict[str, Any], effect_key: str) -> Any:
    """Put a file named by the effect key into `outbox`: the same key is the same message, however often."""
    outbox = _folder() / "outbox"
    outbox.mkdir(exist_ok=True)
    message = {"effectKey": effect_key, **arguments}
    target = outbox / f"{_file_name(effect_key)}.json"
    draft = target.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(strictjson.dumps(message) + "\n", encoding="utf-8")
    draft.replace(target)
    return {"message": f"M-{effect_key[-6:]}", "order": arguments["order"]}


@tool(
    name="update_order",
    effects="transactional",
    risk="medium",
    description="Set the status of an order and keep a note.",
    schema={
        "type": "object",
        "properties": {
            "order": _ORDER,
            "status": {"type": "string", "enum": ["open", "shipped", "refunded", "closed"]},
            "note": {"type": "string", "maxLength": 500},
        },
        "required": ["order", "status"],
        "additionalProperties": False,
    },
)
def update_order(arguments: dict[str, Any], effect_key: str) -> Any:
    """Change the order and keep the effect key in one transaction of `shop.sqlite3`: a second run changes nothing."""
    with closing(sqlite3.connect(_folder() / "shop.sqlite3", timeout=20)) as shop, shop:
        shop.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, status TEXT, note TEXT)")
        shop.execute(
            "CREATE TABLE IF NOT EXISTS changes (effect_key TEXT PRIMARY KEY, order_id INTEGER, status TEXT, note TEXT)"
        )
        order, status, note = arguments["order"], arguments["status"], arguments.get("note", "")
        done = shop.execute(
            "INSERT INTO changes VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", (effect_key, order, status, note)
        )
        if done.rowcount:
            shop.execute(
                "INSERT INTO orders VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET status=excluded.status,"
                " note=excluded.note",
                (order, status, note),
            )
    return {"order": order, "status": status}


@tool(
    name="delete_customer",
    effects="at_most_once",
    risk="critical",
    description="Delete a customer and everything about them.",
    schema={
        "type": "object",
        "properties": {"customer": {"type": "string", "minLength": 1, "maxLength": 200}},
        "required": ["customer"],
        "additionalProperties": False,
    },
)
def delete_customer(arguments: dict[str, Any], effect_key: str) -> Any:
    """Refuse: the demo's policy never lets it come to this, and the shop has no such button anyway."""
    raise ToolFailed("not_supported", "This shop does not delete customers.")


def _append_line(path: Path, line: str) -> None:
    """Add a line in one write and make it last: an effect that is reported must be on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_name(effect_key: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in effect_key)
