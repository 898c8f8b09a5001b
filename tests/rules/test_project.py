"""The project as a whole: migrations, schema, contracts of imports, and the run's own rules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import call_command

from tests.support import run_manage

# Whole commands and pytest inside pytest: on a busy machine they take their time.
pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.django_db
def test_models_and_migrations_agree() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_the_import_contracts_hold() -> None:
    kept = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert kept.returncode == 0, kept.stdout[-3000:] + kept.stderr[-1000:]


@pytest.mark.django_db(transaction=True)
def test_the_openapi_schema_builds_without_a_warning() -> None:
    built = run_manage("spectacular", "--validate", "--fail-on-warn", "--file", "/dev/null")
    assert built.returncode == 0, built.stderr[-3000:]


def test_every_variable_of_the_environment_is_documented() -> None:
    """docs/operations.md has a row for each variable the code reads, and none it does not."""
    read: set[str] = set()
    for folder in ("agentsite", "approvals", "streams"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            read.update(re.findall(r"\benv(?:\.\w+)?\(\s*\"([A-Z][A-Z0-9_]+)\"", text))
            read.update(re.findall(r"\bos\.environ(?:\.get\(|\[|\.setdefault\(|\.pop\()\s*\"([A-Z][A-Z0-9_]+)\"", text))
            read.update(re.findall(r"\bos\.getenv\(\s*\"([A-Z][A-Z0-9_]+)\"", text))
    read.discard("DJANGO_SETTINGS_MODULE")
    documented = set(
        re.findall(r"^\| `([A-Z][A-Z0-9_]+)`", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    )
    assert sorted(read - documented) == [], "read, and not in docs/operations.md"
    assert sorted(documented - read) == [], "in docs/operations.md, and never read"


def _inner_run(tmp_path: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with this project's conftest on one test file of its own."""
    (tmp_path / "test_inner.py").write_text(code)
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_inner.py")],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": "", "REDIS_URL": "", "AGENTSITE_REQUIRE_SERVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_a_missing_service_is_a_skip_that_says_how_to_get_it(tmp_path: Path) -> None:
    run = _inner_run(tmp_path, "import pytest\n@pytest.mark.redis\ndef test_it(): assert 0\n")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "services this run did without" in run.stdout
    assert "set REDIS_URL=" in run.stdout


def test_a_skip_is_a_failure_where_services_are_required(tmp_path: Path) -> None:
    code = "import pytest\n@pytest.mark.redis\ndef test_it(): pass\n"
    run = _inner_run(tmp_path, code, AGENTSITE_REQUIRE_SERVICES="1")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "AGENTSITE_REQUIRE_SERVICES=1 and yet" in run.stdout
    module = "import pytest\npytest.skip('not today', allow_module_level=True)\n"
    assert "was left out: " in _inner_run(tmp_path, module, AGENTSITE_REQUIRE_SERVICES="1").stdout


def test_a_process_left_running_fails_the_run(tmp_path: Path) -> None:
    code = "import subprocess\nkept = []\n"
    code += "def test_it(): kept.append(subprocess.Popen(['sleep', '60'], start_new_session=True))\n"
    run = _inner_run(tmp_path, code)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "tests left processes running" in run.stdout
