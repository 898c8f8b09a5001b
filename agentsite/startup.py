"""What must be true before a process of the site starts, said in words a person can act on. No Django at import.

`CannotStart` is a SystemExit: whoever starts the process (manage.py, daphne, uvicorn) ends with exit code 1 and the
message, without a traceback. Only a start is refused; a service lost later is waited for by those who need it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

DATABASE_SCHEMES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "postgresql": "PostgreSQL", "psql": "PostgreSQL"}
LOCAL_HOSTS = {"localhost", "127.0.0.1", "[::1]", "::1", "testserver", ".localhost"}

# Commands that look at no row: they work before there is a database.
WITHOUT_DATABASE = {
    *("", "help", "version", "--help", "-h", "--version"),
    *("check", "makemigrations", "collectstatic", "findstatic", "diffsettings", "spectacular", "bench"),
    *("makemessages", "compilemessages", "startapp", "startproject", "test"),
}
# Commands that bring the database up to date themselves, or are how one gets it there.
BEFORE_MIGRATIONS = {
    "demo",
    "migrate",
    "showmigrations",
    "sqlmigrate",
    "optimizemigration",
    "squashmigrations",
    "dbshell",
}
# Commands that wait for or ring the doorbell, and so need the Redis that REDIS_URL names.
WITH_REDIS = {"demo", "runserver", "run_executor", "run_agents", "ask"}


class CannotStart(SystemExit):
    """Something outside the code is missing or wrong. The message says which, where, and what to do."""

    def __init__(self, what: str, *what_to_do: str) -> None:
        self.message = "\n".join([f"Agentsite can't start: {what}", *(f"  {line}" for line in what_to_do)])
        super().__init__(self.message)


def check_database_url(url: str) -> None:
    """Refuse a DATABASE_URL that names no database we know, or whose driver is not installed."""
    scheme = url.partition(":")[0].lower()
    if scheme not in DATABASE_SCHEMES:
        raise CannotStart(
            f"DATABASE_URL begins with {scheme!r}, which is no database it knows.",
            "Use postgres://user:password@host:5432/name, or sqlite:////absolute/path.sqlite3, or leave it unset.",
        )
    if DATABASE_SCHEMES[scheme] == "PostgreSQL":
        missing = [name for name in ("psycopg", "psycopg_pool") if importlib.util.find_spec(name) is None]
        if missing:
            raise CannotStart(
                f"DATABASE_URL names PostgreSQL, but {' and '.join(missing)} is not installed.",
                "Run: uv sync --extra postgres",
            )


def check_redis_url(url: str) -> None:
    if url and urlsplit(url).scheme not in ("redis", "rediss", "unix"):
        raise CannotStart(
            f"REDIS_URL begins with {url.partition(':')[0]!r}.", "Use redis://host:6379/0, or leave it unset."
        )


def check_secret_key(*, is_development_key: bool, debug: bool, https: bool, allowed_hosts: Sequence[str]) -> None:
    """Refuse to serve others with the key that everybody can read in the sources."""
    public = [host for host in allowed_hosts if host not in LOCAL_HOSTS]
    if is_development_key and (https or (public and not debug)):
        why = "HTTPS is on" if https else f"ALLOWED_HOSTS has {', '.join(public)}"
        raise CannotStart(
            f"SECRET_KEY is not set, and {why}: sessions and claim tokens could be forged by anybody.",
            'Set it to a secret of its own: python3 -c "import secrets; print(secrets.token_urlsafe(50))"',
        )


def before_command(command: str) -> None:
    """Refuse a management command whose database or Redis is out of reach, or whose database is old."""
    if command in WITHOUT_DATABASE:
        return
    _in_a_thread(lambda: _require_database(migrated=command not in BEFORE_MIGRATIONS))
    if command in WITH_REDIS:
        require_redis()


def before_server() -> None:
    """Refuse to serve on a database or Redis that is out of reach, or on an old database.

    AGENTSITE_STARTUP_CHECK=0 leaves it out: for a server that is started before its database, and for tests that
    import the application before theirs is made.
    """
    if os.environ.get("AGENTSITE_STARTUP_CHECK", "1") == "0":
        return
    _in_a_thread(lambda: _require_database(migrated=True))
    require_redis()


def _in_a_thread(work: Callable[[], None]) -> None:
    """Run `work` on a thread and raise what it raised: uvicorn imports the application inside its event loop."""
    raised: list[BaseException] = []

    def run() -> None:
        from django.db import connections

        try:
            work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again below
            raised.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _require_database(*, migrated: bool) -> None:
    import django
    from django.db import connection
    from django.db.utils import OperationalError

    # manage.py calls before Django has been set up; a second time does nothing.
    django.setup()
    config = connection.settings_dict
    if connection.vendor == "postgresql":
        reach_postgres(config)
    try:
        connection.ensure_connection()
        pending = _pending_migrations() if migrated else []
    except OperationalError as error:
        if connection.vendor != "sqlite":
            raise
        raise CannotStart(
            f"the SQLite file {config['NAME']} can't be opened: {error}",
            "Look at its folder: it must exist and be writable. DATABASE_URL or AGENTSITE_VAR_DIR choose another.",
        ) from None
    if pending:
        some = ", ".join(pending[:3]) + (", …" if len(pending) > 3 else "")
        raise CannotStart(
            f"the database {config['NAME']} is older than this code ({len(pending)} migrations to go: {some}).",
            "Run: uv run manage.py migrate",
        )


def _pending_migrations() -> list[str]:
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    return [f"{migration.app_label}.{migration.name}" for migration, _ in plan]


def reach_postgres(config: dict[str, Any]) -> None:
    """Connect once without the pool, which would try for ten seconds and then tell only that it did."""
    import psycopg

    host, port = config["HOST"] or "the local socket", config["PORT"] or 5432
    try:
        psycopg.connect(
            host=config["HOST"] or None,
            port=int(port),
            user=config["USER"] or None,
            password=config["PASSWORD"] or None,
            dbname=config["NAME"],
            connect_timeout=5,
        ).close()
    except psycopg.OperationalError as error:
        reason = str(error).strip().splitlines()[-1]
        if f'database "{config["NAME"]}" does not exist' in str(error):
            what_to_do = f"Make it: createdb -h {host} -p {port} -U {config['USER'] or 'postgres'} {config['NAME']}"
        elif "authentication failed" in str(error) or "no password supplied" in str(error):
            what_to_do = "Mend user and password in DATABASE_URL."
        else:
            what_to_do = "Start it, for example: pg_ctlcluster 15 main start   (or: systemctl start postgresql)"
        raise CannotStart(
            f"PostgreSQL at {host}:{port} (DATABASE_URL) does not let us in: {reason}",
            what_to_do,
            "Without DATABASE_URL it uses an SQLite file under var/.",
        ) from None


def require_redis() -> None:
    from django.conf import settings

    if not settings.REDIS_URL:
        return
    address = urlsplit(settings.REDIS_URL)
    if address.scheme == "unix":
        return
    host, port = address.hostname or "localhost", address.port or 6379
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        raise CannotStart(
            f"Redis at {host}:{port} (REDIS_URL) can't be reached: {error.strerror or error}",
            "Start it, for example: redis-server --daemonize yes   (or: systemctl start redis-server)",
            "Without REDIS_URL processes wake each other through the database.",
        ) from None
