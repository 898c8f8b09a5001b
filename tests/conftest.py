"""What every test gets: the services it may count on, said aloud, and a run that leaves nothing behind.

A plain `uv run pytest` needs no service: it uses SQLite and says what it did without. `DATABASE_URL` and `REDIS_URL`
bring the services in; with `AGENTSITE_REQUIRE_SERVICES=1` a skipped test is a failed one.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from django.db import connection
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.database import DirectoryBasedExampleDatabase

from streams import doorbell
from tests.support import services
from tests.support.polling import eventually

# Every process that a test starts inherits this mark, so that none can outlive the run unseen.
RUN_MARK = f"AGENTSITE_TEST_RUN={uuid.uuid4()}"
os.environ["AGENTSITE_TEST_RUN"] = RUN_MARK.partition("=")[2]
# A test may import the application before its database is made; children that serve do look (support.processes).
os.environ["AGENTSITE_STARTUP_CHECK"] = "0"
# Tests start hundreds of processes: each would compile the world anew, three times as slow.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A test says itself when time is up; one that proves the servers' own sweep turns it on.
os.environ["AGENTSITE_SWEEP_SECONDS"] = "0"
STRICT = os.environ.get("AGENTSITE_REQUIRE_SERVICES") == "1"
ROOT = Path(__file__).resolve().parent.parent

_quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
_examples = DirectoryBasedExampleDatabase(ROOT / "var" / "hypothesis")
hypothesis_settings.register_profile(
    "default", max_examples=50, deadline=None, suppress_health_check=_quiet, database=_examples
)
hypothesis_settings.register_profile(
    "ci", max_examples=150, deadline=None, suppress_health_check=_quiet, database=None, print_blob=True
)
hypothesis_settings.register_profile(
    "long",
    max_examples=2_000,
    deadline=None,
    suppress_health_check=_quiet,
    database=_examples,
    print_blob=True,
)
hypothesis_settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def pytest_report_header() -> list[str]:
    lines = [f"database: {services.database_name()}"]
    lines += [f"{name}: {service.found or 'not used'}" for name, service in services.all_services().items()]
    return lines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a service that is not there; leave out, unskipped, what only SQLite can show."""
    known = services.all_services()
    only_sqlite = [item for item in items if item.get_closest_marker("sqlite") and services.on_postgres()]
    if only_sqlite:
        config.hook.pytest_deselected(items=only_sqlite)
        items[:] = [item for item in items if item not in only_sqlite]
    for item in items:
        for name, service in known.items():
            if service.found is None and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"without {service.label}: {service.how}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = [service for service in services.all_services().values() if service.found is None]
    if missing:
        terminalreporter.section("services this run did without")
        for service in missing:
            terminalreporter.line(f"{service.label}: {service.how}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An expected failure reports as skipped too; only a real skip hides something.
    if STRICT and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"AGENTSITE_REQUIRE_SERVICES=1 and yet: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if STRICT and report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"AGENTSITE_REQUIRE_SERVICES=1 and yet {collector.nodeid} was left out: {reason}"
    return report


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix: None) -> None:
    """Clear what a killed child left beside an earlier test database.

    Django removes the SQLite file alone; a `-wal` of a file that is gone makes the next one a "disk I/O error".
    """
    name = connection.settings_dict["TEST"]["NAME"] if connection.vendor == "sqlite" else None
    for ending in ("-wal", "-shm") if name else ():
        Path(f"{name}{ending}").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> Iterator[None]:
    """Let the doorbell's thread go first: PostgreSQL drops no database that somebody still listens on."""
    yield
    doorbell.close()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    """Fail the run when a process that a test started still lives at its end, and end that process."""
    yield
    left: list[tuple[int, str]] = []

    def all_gone() -> bool:
        left[:] = _processes_of_this_run()
        return not left

    try:
        eventually(all_gone, within_seconds=10)
    except AssertionError:
        for pid, _ in left:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"tests left processes running: {left}")


def _processes_of_this_run() -> list[tuple[int, str]]:
    mark, found = RUN_MARK.encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            # A zombie has no command line: it has ended and only waits to be asked about.
            if pid != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:
                    found.append((pid, command))
        except OSError:
            continue
    return found
