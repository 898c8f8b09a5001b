"""A database of the bench's own, of the configured kind and on the configured server; real rows are never touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.db import connection


def url(config: dict[str, Any]) -> str:
    """Return the DATABASE_URL of a Django database dict, for a child process."""
    if config["ENGINE"].endswith("sqlite3"):
        return f"sqlite:///{config['NAME']}"
    secret = f":{quote(config['PASSWORD'])}" if config["PASSWORD"] else ""
    host = config["HOST"] or "127.0.0.1"
    return f"postgres://{quote(config['USER'] or '')}{secret}@{host}:{config['PORT'] or 5432}/{config['NAME']}"


@contextmanager
def throwaway_database() -> Iterator[str]:
    """Make a migrated database, point this process's connection at it, yield its URL, and drop it at the end.

    PostgreSQL: `agentsite_bench_<pid>` on the same server. SQLite: a folder beside the configured file, because the
    disk is part of what is measured. A bench that was killed leaves it behind; nothing else uses these names.
    """
    config = connection.settings_dict
    real_name = str(config["NAME"])
    folder: Path | None = None
    if connection.vendor == "sqlite":
        folder = settings.VAR_DIR / f"bench-{os.getpid()}"
        folder.mkdir(parents=True)
        name = str(folder / "bench.sqlite3")
    else:
        name = f"agentsite_bench_{os.getpid()}"
    test = dict(config.get("TEST") or {})
    config["TEST"] = {**test, "NAME": name}
    made = False
    try:
        connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
        made = True
        if str(connection.settings_dict["NAME"]) == real_name:
            raise RuntimeError("the bench would have used the real database")
        yield url(connection.settings_dict)
    finally:
        if made:
            connection.creation.destroy_test_db(real_name, verbosity=0)
        config["TEST"] = test
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
