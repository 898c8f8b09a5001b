"""`manage.py demo`: everything at once, on this machine, and gone again at Ctrl-C."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection, connections

from agentsite.demo import seed, story, tools  # noqa: F401 - importing the tools registers them
from agentsite.demo.children import Children, ChildrenKeepDying

START_SECONDS = 120.0


class Command(BaseCommand):
    help = "Start the whole site with people, tokens, tools and an agent that works, and print where to look."
    # Warnings about a development key would be the first line of --json.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
        parser.add_argument("--reset", action="store_true", help="begin with an empty SQLite file and no effects")
        parser.add_argument(
            "--drop-at", type=int, default=0, metavar="N", help="cut the run page's socket once, at its N-th token"
        )
        parser.add_argument("--json", action="store_true", help="print address and secrets as one line of JSON first")
        parser.add_argument("--no-agent", action="store_true", help="do not start the scripted agent")

    def handle(self, **options: Any) -> None:
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: ended.set())
        lock = _alone()
        port = _free_port(options["port"])
        if options["reset"]:
            _reset()
        call_command("migrate", verbosity=0, interactive=False)
        seeded = seed.seed()
        url = f"http://127.0.0.1:{port}"
        seed.remember({**seed.known(), "url": url})
        children = Children(_environment(options["drop_at"]))
        try:
            children.start("server", "server", str(port))
            children.start("executor", "manage", "run_executor", "--name", "demo")
            if not options["no_agent"]:
                children.start("agents", "manage", "run_agents", "--name", "demo")
            if not _wait_ready(children, port, ended):
                return
            self._say(_as_json(url, seeded) if options["json"] else _as_text(url, seeded))
            if not options["no_agent"]:
                run = story.begin(caller=seeded.agent())
                self._say(f"The agent's run:  {url}/runs/{run.pk}/")
            connections.close_all()
            self._say(f"Effects and logs: {Path(settings.VAR_DIR) / 'demo'}\nCtrl-C ends it all.")
            while not ended.wait(0.5):
                for name in children.restart_dead():
                    self._say(f"the {name} process had died and is started again")
        except ChildrenKeepDying as dying:
            name, tail = dying.args
            raise CommandError(f"the {name} process ends again and again. The end of its log:\n{tail}") from None
        finally:
            children.end()
            lock.close()
        self._say("Ended; no process is left.")

    def _say(self, text: str) -> None:
        """Print; a terminal that died, or a pipe nobody reads, must not keep the demo from ending cleanly."""
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except (OSError, ValueError):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for the rest of this process


def _alone() -> IO[str]:
    """Hold the folder: two demos on one would reset or restart each other's."""
    folder = Path(settings.VAR_DIR) / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise CommandError(
            f"Another demo runs on {folder}. End it first, or let AGENTSITE_VAR_DIR name another folder."
        ) from None
    return lock


def _free_port(port: int) -> int:
    if not 0 <= port <= 65_535:
        raise CommandError("--port is a number from 0 to 65535.")
    with socket.socket() as probe:
        # As the server will: a port that only lingers after a server that just ended is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            raise CommandError(f"Port {port} needs rights this user has not. Try: demo --port 8000") from None
        except OSError:
            raise CommandError(
                f"Port {port} on 127.0.0.1 is taken by another program. "
                f"Choose another: uv run manage.py demo --port {port + 1 if port < 65_535 else 8000}"
            ) from None
        return int(probe.getsockname()[1])


def _reset() -> None:
    if connection.vendor != "sqlite":
        raise CommandError("--reset empties the SQLite file only; on PostgreSQL drop and create the database instead.")
    connections.close_all()
    name = str(connection.settings_dict["NAME"])
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(name + suffix).unlink(missing_ok=True)
    folder = Path(settings.VAR_DIR) / "demo"
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _environment(drop_at: int) -> dict[str, str]:
    """What the children see: plain http on this machine, whatever the shell says about the real site."""
    return {
        **os.environ,
        "AGENTSITE_TOOL_MODULES": "agentsite.demo.tools",
        "AGENTSITE_DROP_AT": str(max(0, drop_at)),
        "ALLOWED_HOSTS": "127.0.0.1,localhost,[::1]",
        "HTTPS": "0",
        "BEHIND_PROXY": "0",
        "PYTHONUNBUFFERED": "1",
    }


def _wait_ready(children: Children, port: int, ended: threading.Event) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while not ended.wait(0.1):
        if not children.alive("server"):
            raise ChildrenKeepDying("server", children.tail("server"))
        with suppress(OSError, http.client.HTTPException):
            asking = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                asking.request("GET", "/accounts/login/")
                asking.getresponse().read()
                return True
            finally:
                asking.close()
        if time.monotonic() > deadline:
            raise CommandError(f"the server does not answer. The end of its log:\n{children.tail('server')}")
    return False


def _as_json(url: str, seeded: seed.Seeded) -> str:
    return json.dumps(
        {
            "url": url,
            "operators": [{"username": name, "password": password} for name, password in seeded.operators],
            "agentToken": seeded.agent_token,
            "executorToken": seeded.executor_token,
            "readToken": seeded.read_token,
        }
    )


def _as_text(url: str, seeded: seed.Seeded) -> str:
    lines = [f"\nOpen {url} and sign in:\n"]
    rights = ["may do everything", *["sees and decides"] * (len(seeded.operators) - 1)]
    for (name, password), right in zip(seeded.operators, rights, strict=True):
        lines.append(f"  {name:<8} {password:<16} {right}")
    lines += [
        "",
        f"Agent token:      {seeded.agent_token}",
        f"Executor token:   {seeded.executor_token}",
        f"Read token:       {seeded.read_token}",
    ]
    return "\n".join(lines)
