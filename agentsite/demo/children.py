"""Start, watch and end the processes of the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings

END_SECONDS = 10.0
MOST_RESTARTS = 5


class ChildrenKeepDying(Exception):
    """A process of the demo ends again and again; `args` are its name and the end of its log."""


@dataclass
class Child:
    name: str
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0


@dataclass
class Children:
    """The demo's processes. Their output goes to files under `var/demo/logs`."""

    environment: dict[str, str]
    children: list[Child] = field(default_factory=list)
    _ours: int = -1
    _theirs: int = -1

    def __post_init__(self) -> None:
        self._theirs, self._ours = os.pipe()
        self.logs.mkdir(parents=True, exist_ok=True)

    @property
    def logs(self) -> Path:
        return Path(settings.VAR_DIR) / "demo" / "logs"

    def start(self, name: str, *arguments: str) -> None:
        child = Child(name, list(arguments))
        self.children.append(child)
        self._start(child, mode="wb")

    def _start(self, child: Child, mode: str = "ab") -> None:
        command = [sys.executable, "-m", "agentsite.demo.child", str(self._theirs), *child.arguments]
        with (self.logs / f"{child.name}.log").open(mode) as log:
            child.process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                command,
                cwd=settings.BASE_DIR,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self._theirs,),
                # Ctrl-C reaches the demo only, which ends them in order.
                start_new_session=True,
            )

    def alive(self, name: str) -> bool:
        return any(child.name == name and child.process and child.process.poll() is None for child in self.children)

    def tail(self, name: str) -> str:
        try:
            return (self.logs / f"{name}.log").read_text(errors="replace")[-2_000:]
        except OSError:
            return ""

    def restart_dead(self) -> list[str]:
        """Start again what died (somebody tries kill -9); raise ChildrenKeepDying for what won't live."""
        restarted = []
        for child in self.children:
            if child.process is None or child.process.poll() is None:
                continue
            child.deaths += 1
            if child.deaths > MOST_RESTARTS and child.process.returncode != -signal.SIGKILL:
                raise ChildrenKeepDying(child.name, self.tail(child.name))
            self._start(child)
            restarted.append(child.name)
        return restarted

    def end(self) -> None:
        """End them all, the last one first; what does not go in time is killed."""
        living = [child.process for child in reversed(self.children) if child.process is not None]
        for process in living:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + END_SECONDS
        for process in living:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for descriptor in (self._ours, self._theirs):
            if descriptor >= 0:
                os.close(descriptor)
        self._ours = self._theirs = -1
