"""A start that can't work is refused in words, without a traceback, by real processes."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from django.core.checks import run_checks

from agentsite import logging as site_logging
from agentsite import startup
from tests.support import TcpProxy, free_port, run_manage
from tests.support.processes import ROOT, Child, environment

# Each child names a database of its own; the mark is for the environment that says where the test's is.
# Each starts whole processes, which on a busy machine take their time.
pytestmark = [pytest.mark.django_db, pytest.mark.timeout(300)]


def refused(*arguments: str, **env: str | None) -> str:
    done = run_manage(*arguments, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("Agentsite can't start: "), done.stderr
    return done.stderr


def settings_refused(**env: str) -> str:
    """Load the settings alone, which is all these refusals need, and a tenth of a command's time."""
    command = [sys.executable, "-c", "import agentsite.settings"]
    done = subprocess.run(command, cwd=ROOT, env=environment(**env), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert (done.returncode == 1) == bool(done.stderr)
    return done.stderr


def test_an_unknown_database_scheme_is_named() -> None:
    said = refused("check", DATABASE_URL="oracle://somewhere/x")
    assert "'oracle'" in said
    assert "postgres://user:password@host:5432/name" in said


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="uv sync --extra postgres"):
        startup.check_database_url("postgres://postgres@localhost/test")


def test_a_database_out_of_reach_says_which_where_and_how_to_start_it() -> None:
    port = free_port()
    said = refused("createsuperuser", DATABASE_URL=f"postgres://postgres@127.0.0.1:{port}/test")
    assert f"PostgreSQL at 127.0.0.1:{port} (DATABASE_URL)" in said
    assert "Start it" in said


@pytest.mark.postgres
def test_a_database_that_does_not_exist_says_how_to_make_it() -> None:
    from django.db import connection

    config = connection.settings_dict
    url = f"postgres://{config['USER']}@{config['HOST']}:{config['PORT'] or 5432}/agentsite_nobody_made_this"
    said = refused("shell", "-c", "1", DATABASE_URL=url)
    assert "createdb" in said
    assert "agentsite_nobody_made_this" in said


def test_redis_out_of_reach_says_which_where_and_how_to_start_it(tmp_path: Path) -> None:
    port = free_port()
    database = f"sqlite:///{tmp_path / 'x.sqlite3'}"
    # A server command looks at Redis; so does nothing that runs without a doorbell.
    assert run_manage("migrate", env={"DATABASE_URL": database, "REDIS_URL": ""}).returncode == 0
    said = refused("runserver", DATABASE_URL=database, REDIS_URL=f"redis://127.0.0.1:{port}/0")
    assert f"Redis at 127.0.0.1:{port} (REDIS_URL) can't be reached" in said
    assert "redis-server" in said
    assert "REDIS_URL begins with 'http'" in settings_refused(REDIS_URL="http://127.0.0.1")


def test_an_old_database_is_refused_with_the_command_to_run(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'old.sqlite3'}"
    said = refused("createsuperuser", "--noinput", DATABASE_URL=database)
    assert "is older than this code" in said
    assert "Run: uv run manage.py migrate" in said
    assert run_manage("migrate", env={"DATABASE_URL": database}).returncode == 0
    assert run_manage("shell", "-c", "pass", env={"DATABASE_URL": database}).returncode == 0


def test_a_command_that_needs_no_database_asks_for_none() -> None:
    nowhere = f"postgres://postgres@127.0.0.1:{free_port()}/test"
    for arguments in (["check"], ["migrate", "--help"]):
        done = run_manage(*arguments, env={"DATABASE_URL": nowhere})
        assert done.returncode == 0, done.stderr


def test_an_sqlite_file_in_no_folder_is_named(tmp_path: Path) -> None:
    said = refused("migrate", DATABASE_URL=f"sqlite:///{tmp_path / 'no' / 'such' / 'x.sqlite3'}")
    assert "can't be opened" in said


@pytest.mark.parametrize("server", ["daphne", "uvicorn"])
def test_a_server_refuses_an_old_database(tmp_path: Path, server: str) -> None:
    port = str(free_port())
    command = {
        "daphne": ["daphne", "-b", "127.0.0.1", "-p", port, "agentsite.asgi:application"],
        "uvicorn": ["uvicorn", "--host", "127.0.0.1", "--port", port, "agentsite.asgi:application"],
    }[server]
    database = f"sqlite:///{tmp_path / 'old.sqlite3'}"
    with Child([sys.executable, "-m", *command], env=environment(DATABASE_URL=database, REDIS_URL="")) as child:
        assert child.wait(seconds=90) == 1
        assert "Run: uv run manage.py migrate" in child.output()
        assert "Traceback" not in child.output()


def test_the_development_key_serves_nobody_but_this_machine() -> None:
    assert "SECRET_KEY is not set, and HTTPS is on" in settings_refused(HTTPS="1", SECRET_KEY="")
    assert "ALLOWED_HOSTS has agents.example" in settings_refused(ALLOWED_HOSTS="localhost,agents.example")
    assert settings_refused(ALLOWED_HOSTS="agents.example", SECRET_KEY="k" * 50) == ""
    assert settings_refused(ALLOWED_HOSTS="localhost,127.0.0.1") == ""


def test_a_database_that_answers_nothing_is_not_waited_for_long() -> None:
    with TcpProxy(free_port()) as silent:
        silent.freeze()
        said = refused("shell", "-c", "1", DATABASE_URL=f"postgres://postgres@127.0.0.1:{silent.port}/test")
    assert "PostgreSQL at 127.0.0.1" in said


def test_an_origin_that_could_never_match_is_refused(settings: object) -> None:
    settings.CSRF_TRUSTED_ORIGINS = ["https://good.example", "https://*.example.com", "https://a.example/x"]  # type: ignore[attr-defined]
    found = [message.msg for message in run_checks() if message.id == "agentsite.E001"]
    assert len(found) == 2


def test_logs_are_json_lines_and_never_carry_a_token() -> None:
    root, stderr = logging.getLogger(), sys.stderr
    handlers, level = root.handlers[:], root.level
    sys.stderr = io.StringIO()
    try:
        site_logging.configure({"format": "json", "level": "INFO"})
        logging.getLogger("anywhere").info("called with %s", "ags_abc123_s3cr3t-s3cr3t")
        structlog.get_logger("ours").info("claimed", claim_token="s3cr3t", header="Bearer ags_abc123_s3cr3t", offset=3)
        lines = [json.loads(line) for line in sys.stderr.getvalue().splitlines()]
    finally:
        sys.stderr = stderr
        root.handlers[:] = handlers
        root.setLevel(level)
    assert "s3cr3t" not in json.dumps(lines)
    assert lines[0]["event"] == "called with ags_abc123_[redacted]"
    assert lines[1] == {
        "event": "claimed",
        "claim_token": "[redacted]",
        "header": "Bearer ags_abc123_[redacted]",
        "offset": 3,
        "level": "info",
        "logger": "ours",
        "timestamp": lines[1]["timestamp"],
    }
