"""Which services this run has. `found` says what was found, or None; `how` says how to bring it in."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from django.conf import settings


@dataclass(frozen=True)
class Service:
    label: str
    how: str
    found: str | None


def on_postgres() -> bool:
    return str(settings.DATABASES["default"]["ENGINE"]).endswith("postgresql")


def database_name() -> str:
    database = settings.DATABASES["default"]
    if on_postgres():
        return f"PostgreSQL at {database['HOST']}:{database['PORT'] or 5432}"
    return f"SQLite, {database['TEST']['NAME']}"


def chromium() -> str | None:
    """Return the path of a Chromium: AGENTSITE_CHROMIUM, or the system's."""
    named = os.environ.get("AGENTSITE_CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@cache
def all_services() -> dict[str, Service]:
    """Return every service by the name of its marker."""
    return {
        "postgres": Service(
            "PostgreSQL",
            "set DATABASE_URL=postgres://user@host:5432/name (the role must be able to create databases)",
            database_name() if on_postgres() else None,
        ),
        "redis": Service("Redis", "set REDIS_URL=redis://host:6379/0", _redis()),
        "browser": Service("Chromium", "apt-get install chromium, or set AGENTSITE_CHROMIUM", chromium()),
        "node": Service("Node", "install Node 20 or newer, then: npm ci --prefix tests/js", shutil.which("node")),
    }


def _redis() -> str | None:
    if not settings.REDIS_URL:
        return None
    address = urlsplit(settings.REDIS_URL)
    place = (address.hostname or "localhost", address.port or 6379)
    try:
        with socket.create_connection(place, timeout=2):
            return f"{place[0]}:{place[1]}"
    except OSError:
        return None
