"""`manage.py bench` measures what it says, in a database of its own, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection

from agentsite.bench import report
from approvals.models import ApprovalRequest
from streams.models import Entry, Generation
from tests.support import run_manage


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("server", ["uvicorn", "daphne"])
def test_every_figure_is_there_and_the_real_database_untouched(server: str) -> None:
    before = left_behind()
    parts = [] if server == "uvicorn" else ["--only", "deliveries,idle_memory"]
    ran = run_manage("bench", "--quick", "--json", "--server", server, *parts, seconds=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    figures = json.loads(ran.stdout)
    assert figures["machine"]["server"] == server
    assert figures["machine"]["database"].lower().startswith(connection.vendor)
    first, last = figures["deliveries"][0], figures["deliveries"][-1]
    assert (first["sockets"], last["sockets"]) == (1, 3)
    assert all(row["p99_ms"] >= row["p50_ms"] > 0 for row in figures["deliveries"])
    assert all(row["burst_deliveries_per_second"] > 0 for row in figures["deliveries"])
    assert figures["idle_memory"]["kb_per_socket"] >= 0
    if not parts:
        assert {(row["writers"], row["batch"]) for row in figures["appends"]} == {(1, 1), (1, 10), (2, 1), (2, 10)}
        assert figures["catch_up"]["entries"] == 500
        assert figures["decide_to_effect"]["decisions"] == 3
        few, many = figures["inbox_queries"]
        assert few["requests"] < many["requests"]
    assert Generation.objects.count() == Entry.objects.count() == ApprovalRequest.objects.count() == 0
    assert left_behind() == before


def left_behind() -> set[str]:
    """Name the throwaway databases there are."""
    if connection.vendor == "sqlite":
        return {path.name for path in Path(settings.VAR_DIR).glob("bench-*")}
    with connection.cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database WHERE datname LIKE 'agentsite_bench_%'")
        return {name for (name,) in cursor.fetchall()}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.django_db(transaction=True)
def test_a_page_of_the_inbox_costs_the_same_queries_however_many_requests() -> None:
    ran = run_manage("bench", "--quick", "--json", "--only", "inbox_queries", seconds=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    few, many = json.loads(ran.stdout)["inbox_queries"]
    assert (few["inbox_queries"], few["list_queries"]) == (many["inbox_queries"], many["list_queries"])


@pytest.mark.django_db
def test_an_unknown_part_is_refused() -> None:
    ran = run_manage("bench", "--only", "everything", env={"DATABASE_URL": ""})
    assert ran.returncode == 1
    assert "no such measure: everything" in ran.stderr


def test_figures_are_laid_out_as_tables() -> None:
    table = report.tables(
        {"appends": [{"batch": 1, "chunks_per_second": 1234}, {"batch": 100, "chunks_per_second": 5}]}
    )
    assert table.splitlines() == [
        "### appends",
        "",
        "| batch | chunks_per_second |",
        "|-------|-------------------|",
        "| 1     | 1,234             |",
        "| 100   | 5                 |",
    ]
