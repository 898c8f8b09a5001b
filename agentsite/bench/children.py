"""Child processes of the bench: the server, the executor, the readers; and what they cost."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from django.conf import settings

ServerKind = Literal["uvicorn", "daphne"]
_TICKS = os.sysconf("SC_CLK_TCK")


def allow_many_sockets() -> None:
    """Lift the soft limit of open files to the hard one, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time a process has used. The kernel counts it in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def child(command: list[str], database_url: str, *, talk: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a child on the throwaway database and end it; with `talk` its stdin and stdout are pipes."""
    pipe = subprocess.PIPE if talk else subprocess.DEVNULL
    process = subprocess.Popen(  # noqa: S603 - our own modules
        [sys.executable, *command],
        cwd=settings.BASE_DIR,
        env={**os.environ, "DATABASE_URL": database_url, "LOG_LEVEL": "ERROR"},
        stdin=pipe,
        stdout=pipe,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@contextmanager
def server(kind: ServerKind, database_url: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve the site on a free port; yield the process and the port when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = {
        "uvicorn": [
            *("-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port), "--ws", "websockets-sansio"),
            *("--ws-max-size", "1048576", "--lifespan", "off", "--no-access-log", "--log-level", "error"),
            *("--ws-per-message-deflate", "false", "--backlog", "4096", "agentsite.asgi:application"),
        ],
        "daphne": ["-m", "daphne", "-b", "127.0.0.1", "-p", str(port), "-v", "0", "agentsite.asgi:application"],
    }[kind]
    with child(command, database_url) as process:
        deadline = time.monotonic() + 60
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{kind} ended with {process.returncode} while starting")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{kind} does not answer")
            time.sleep(0.05)
        yield process, port


class Readers:
    """A process of socket readers on one generation; see `agentsite.bench.reader`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def wait(self, event: str, *, seconds: float) -> dict[str, Any]:
        """Return the next line the readers print, which must be `event`."""
        assert self.process.stdout is not None
        # The child gives up by itself and says so: a pipe can't be waited for with a deadline in a portable way.
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the readers ended while {event!r} was awaited ({seconds} s)")
        said: dict[str, Any] = json.loads(line)
        if said["event"] != event:
            raise RuntimeError(f"the readers said {said} where {event!r} was awaited")
        return said


@contextmanager
def readers(config: dict[str, Any], database_url: str) -> Iterator[Readers]:
    with child(["-m", "agentsite.bench.reader", json.dumps(config)], database_url, talk=True) as process:
        yield Readers(process)
