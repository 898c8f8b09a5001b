"""The demo as a person meets it: started, worked with, ended. Every process is real."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.polling import eventually
from tests.support.processes import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
START_SECONDS = 120


def processes(folder: Path) -> list[int]:
    """List the living processes that were started for this folder."""
    mark, found = f"AGENTSITE_VAR_DIR={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


class Demo:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment(AGENTSITE_VAR_DIR=str(folder), DATABASE_URL=None, REDIS_URL=None)
        self.process: subprocess.Popen[bytes] | None = None
        self.browsers: list[httpx.Client] = []
        self.info: dict[str, Any] = {}
        self.output = folder / "output"

    def start(self, *options: str) -> dict[str, Any]:
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "demo", "--json", "--port", "0", *options],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def first_line() -> str:
            text = self.output.read_text()
            return text.split("\n")[0] if "\n" in text else ""

        line = eventually(first_line, within_seconds=START_SECONDS)
        assert line.startswith("{"), self.output.read_text()
        self.info = json.loads(line)
        return self.info

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "manage.py", "demo", *options]
        return subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(40)

    def read(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.info['readToken']}"}
        return httpx.get(self.info["url"] + path, headers=headers, timeout=20).raise_for_status().json()

    def browser(self, **cookies: str) -> httpx.Client:
        made = httpx.Client(base_url=self.info["url"], cookies=cookies, follow_redirects=True, timeout=40)
        self.browsers.append(made)
        return made

    def sign_in(self, place: int = 0) -> httpx.Client:
        """Sign in as a browser does: the form, its token, the cookie."""
        browser = self.browser()
        form = browser.get("/accounts/login/").raise_for_status().text
        token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', form)
        assert token is not None
        operator = self.info["operators"][place]
        home = browser.post(
            "/accounts/login/",
            data={**operator, "csrfmiddlewaretoken": token[1]},
            headers={"Referer": self.info["url"], "Origin": self.info["url"]},
        )
        assert home.url.path == "/", "signing in leads to the inbox"
        browser.headers.update({"X-CSRFToken": browser.cookies["csrftoken"], "Origin": self.info["url"]})
        return browser

    def pending(self, *tools: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            rows = {row["tool"]: row for row in self.read("/api/v1/approvals?state=pending")["results"]}
            return rows if set(tools) <= set(rows) else None

        found = eventually(look, within_seconds=60, every_seconds=0.3)
        assert found is not None
        return found

    def decide(self, browser: httpx.Client, action_id: str, decision: str, *, key: str = "") -> Any:
        digest = self.read(f"/api/v1/approvals/{action_id}")["digest"]
        body = {"idempotencyKey": key or f"demo-{action_id}", "decision": decision, "digest": digest}
        answer = browser.post(f"/api/v1/approvals/{action_id}/decision?wait=20", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self) -> None:
        for browser in self.browsers:
            browser.close()
        for pid in processes(self.folder):
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(20)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    made = Demo(tmp_path)
    try:
        yield made
    finally:
        made.close()


def run_text(demo: Demo) -> str:
    (run,) = demo.read("/api/v1/generations")["results"]
    entries = demo.read(f"/api/v1/generations/{run['id']}/entries")["entries"]
    return "".join(entry["chunk"].get("content", "") for entry in entries if "chunk" in entry)


def test_the_story_is_worked_through_by_hand_and_ends_without_a_process_left(demo: Demo) -> None:
    info = demo.start()
    assert set(info) == {"url", "operators", "agentToken", "executorToken", "readToken"}
    assert len(info["operators"]) == 3
    first, second = demo.sign_in(0), demo.sign_in(1)
    assert first.get("/admin/").status_code == 200
    asked = demo.pending("refund_order", "send_message")
    done = demo.decide(second, asked["refund_order"]["actionId"], "approve")
    assert done["action"]["state"] == "done"
    again = demo.decide(second, asked["refund_order"]["actionId"], "approve")
    assert again["replayed"] is True
    demo.decide(first, asked["send_message"]["actionId"], "reject")
    closing = demo.pending("update_order")
    demo.decide(first, closing["update_order"]["actionId"], "approve")

    def over() -> bool:
        return demo.read("/api/v1/generations")["results"][0]["state"] == "done"

    eventually(over, within_seconds=60, every_seconds=0.3)
    text = run_text(demo)
    assert "The refund is paid. Marta was not written to." in text
    assert text.endswith("That is all for order 1042.")
    states = {row["tool"]: row["state"] for row in demo.read("/api/v1/approvals")["results"]}
    assert states == {
        "refund_order": "done",
        "send_message": "rejected",
        "update_order": "done",
        "delete_customer": "rejected",
    }
    refunds = (demo.folder / "demo" / "refunds.jsonl").read_text().splitlines()
    assert [json.loads(line)["order"] for line in refunds] == [1042]
    assert not (demo.folder / "demo" / "outbox").exists()
    assert demo.end(signal.SIGINT) == 0
    assert processes(demo.folder) == []
    assert demo.output.read_text().rstrip().endswith("Ended; no process is left.")


def test_kill_9_of_everything_in_mid_story_loses_nothing_and_the_old_button_counts(demo: Demo) -> None:
    """C20: same id, the decision counts, the poll answers; the printed secrets go on working."""
    before = demo.start()
    asked = demo.pending("refund_order", "send_message")
    browser = demo.sign_in(0)
    cookies = dict(browser.cookies)
    for pid in processes(demo.folder):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: processes(demo.folder) == [])
    assert demo.process is not None
    demo.process.wait(20)
    after = demo.start()
    assert {**after, "url": ""} == {**before, "url": ""}
    same = demo.pending("refund_order", "send_message")
    assert {row["actionId"] for row in same.values()} == {row["actionId"] for row in asked.values()}
    again = demo.browser(**cookies)
    again.headers.update({"X-CSRFToken": cookies["csrftoken"], "Origin": after["url"]})
    decided = demo.decide(again, asked["refund_order"]["actionId"], "approve")
    assert decided["action"]["state"] == "done"
    polled = httpx.get(
        f"{after['url']}/api/v1/approvals/{asked['refund_order']['actionId']}",
        headers={"Authorization": f"Bearer {after['agentToken']}"},
        timeout=20,
    )
    assert polled.json()["state"] == "done"
    demo.decide(again, asked["send_message"]["actionId"], "approve")
    demo.pending("update_order")
    assert "The refund is paid. Marta has her message." in run_text(demo)
    refunds = (demo.folder / "demo" / "refunds.jsonl").read_text().splitlines()
    assert len(refunds) == 1
    # The parent alone is killed now: its children must not outlive it.
    demo.process.kill()
    demo.process.wait(20)
    eventually(lambda: processes(demo.folder) == [], within_seconds=30)


def test_a_terminal_that_dies_takes_the_demo_with_it(demo: Demo) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "manage.py", "demo", "--json", "--port", "0", "--no-agent"]
    # A session of its own whose terminal is the pty, as a terminal window has it.
    demo.process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command], cwd=ROOT, env=demo.env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while b'"url"' not in seen:
        seen += os.read(ours, 4096)
    assert len(processes(demo.folder)) >= 3
    os.close(ours)
    eventually(lambda: processes(demo.folder) == [], within_seconds=40)


def test_a_taken_port_says_so_and_names_the_option(demo: Demo) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = demo.run("--port", str(port))
    assert ended.returncode == 1
    assert f"Port {port}" in ended.stderr
    assert "--port" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert processes(demo.folder) == []
