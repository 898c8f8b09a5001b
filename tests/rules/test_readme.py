"""What the README tells people to type works, as it is typed there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from approvals import decisions
from approvals.models import ApprovalRequest, AuditEvent
from streams import access, log
from tests.support import Server, eventually, factories
from tests.support.processes import environment

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("curl") is None, reason="without curl: apt-get install curl")
@pytest.mark.django_db(transaction=True)
def test_the_agent_of_the_readme_asks_waits_claims_and_reports() -> None:
    section = README.split("## An agent over HTTP")[1].split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4
    _, secret = factories.agent_token()
    person = factories.operator("ana")
    with Server() as server:
        env = environment(URL=server.url, TOKEN=secret)
        agent = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", "\n".join(blocks[1:])],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            eventually(ApprovalRequest.objects.filter(tool="shop.refund").exists, within_seconds=90)
            action = ApprovalRequest.objects.get(tool="shop.refund")
            assert action.state == "pending"
            decided = decisions.decide(
                caller=access.caller_for_user(user=person, door="http"),
                action_id=action.pk,
                idempotency_key="readme-decision-1",
                decision="approve",
                digest=action.digest,
            )
            assert decided.action.state == "approved"
            said, _ = agent.communicate(timeout=120)
        finally:
            agent.kill()
    assert agent.returncode == 0, said
    assert "it is approved" in said
    action.refresh_from_db()
    assert action.state == "done"
    assert action.result_text == '{"refund":"R-77"}'
    assert AuditEvent.objects.filter(action=action, to_state="done").count() == 1
    assert action.generation_id is not None
    rows = log.read(generation_id=action.generation_id, from_offset=0)
    results = [row.body for row in rows if '"tool_result"' in row.body]
    assert len(results) <= 1, "a result stands once in the log, or in the notice when the log has its done"
    assert any("R-77" in row.body for row in rows)


def test_the_readme_begins_with_the_two_commands() -> None:
    assert README.split("```")[1].split("\n") == ["", "pip install uv && uv run manage.py demo", "uv run pytest", ""]


def test_every_link_of_the_pages_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
        if not target.startswith(("http://", "https://", "mailto:")) and not (page.parent / target).exists()
    ]
    assert broken == []
