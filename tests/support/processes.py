"""Real processes under a test: a server, a management command; started, watched, killed, started again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self
from urllib.parse import quote

from django.conf import settings
from django.db import connection

ROOT = Path(__file__).resolve().parent.parent.parent
Kind = Literal["daphne", "uvicorn"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def database_url(*, host: str | None = None, port: int | None = None) -> str:
    """Return DATABASE_URL of the database this test uses; `host` and `port` put a proxy in between."""
    config = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{config['NAME']}"
    user = quote(config["USER"] or "")
    secret = f":{quote(config['PASSWORD'])}" if config["PASSWORD"] else ""
    place = f"{host or config['HOST'] or '127.0.0.1'}:{port or config['PORT'] or 5432}"
    return f"postgres://{user}{secret}@{place}/{config['NAME']}"


def environment(**changes: str | None) -> dict[str, str]:
    """Return the environment of a child on this test's database; None takes a variable away."""
    values: dict[str, str | None] = {
        **os.environ,
        "DATABASE_URL": database_url(),
        "REDIS_URL": settings.REDIS_URL,
        "PYTHONUNBUFFERED": "1",
        "AGENTSITE_STARTUP_CHECK": None,
        # A child is judged by what it does, not by the warnings of this run's filter.
        "PYTHONWARNINGS": "",
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


class Child:
    """A child process in its own group, its output in a file. Use it as a context manager: leaving kills it."""

    def __init__(self, command: list[str], *, env: dict[str, str] | None = None) -> None:
        self.command, self.env = command, env if env is not None else environment()
        self.process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def start(self) -> Self:
        assert self.process is None or self.process.poll() is not None, "it runs already"
        if self._output is None:
            self._output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def output(self) -> str:
        """Return everything it has printed so far."""
        if self._output is None:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def signal(self, number: int) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def wait(self, *, seconds: float = 20) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def interrupt(self, *, seconds: float = 20) -> int:
        """Send what Ctrl-C sends to the whole group and return the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)
        return self.wait(seconds=seconds)

    def kill(self) -> None:
        """kill -9, it and what it started; returns when it is gone."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def close(self) -> None:
        self.kill()
        if self._output is not None:
            self._output.close()
            self._output = None

    def __enter__(self) -> Self:
        return self if self.alive else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and hasattr(error, "add_note"):
            error.add_note(f"--- output of {' '.join(self.command[:4])} …\n{self.output()[-4000:]}")
        self.close()


class Server(Child):
    """The site as a child process on a free port of 127.0.0.1, on this test's database.

    `restart()` after `kill()` keeps port and output. `env` adds to or (None) takes from the environment.
    """

    def __init__(
        self,
        kind: Kind = "daphne",
        *,
        port: int | None = None,
        env: dict[str, str | None] | None = None,
        application: str = "agentsite.asgi:application",
        start_seconds: float = 60,
    ) -> None:
        self.port, self.start_seconds = port or free_port(), start_seconds
        address = ["127.0.0.1", str(self.port)]
        command = {
            "daphne": [sys.executable, "-m", "daphne", "-b", address[0], "-p", address[1], application],
            "uvicorn": [
                *(sys.executable, "-m", "uvicorn", "--host", address[0], "--port", address[1]),
                *(
                    "--ws",
                    "websockets-sansio",
                    "--ws-max-size",
                    "1048576",
                    "--ws-per-message-deflate",
                    "false",
                    "--lifespan",
                    "off",
                    "--no-access-log",
                ),
                application,
            ],
        }[kind]
        super().__init__(command, env=environment(**(env or {})))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def start(self) -> Self:
        super().start()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while True:
            if not self.alive:
                raise AssertionError(f"the server ended while starting:\n{self.output()[-4000:]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if time.monotonic() > deadline:
                output = self.output()
                self.close()
                raise AssertionError(f"the server does not answer:\n{output[-4000:]}")
            time.sleep(0.05)

    def restart(self) -> Self:
        self.kill()
        return self.start()


def start_manage(*arguments: str, env: dict[str, str | None] | None = None) -> Child:
    """Start `manage.py …` on this test's database and return it running."""
    return Child([sys.executable, "manage.py", *arguments], env=environment(**(env or {}))).start()


def run_manage(
    *arguments: str, env: dict[str, str | None] | None = None, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `manage.py …` on this test's database to its end; never raises for its exit code."""
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
