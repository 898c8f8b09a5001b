"""Rules of the house that no type checker sees, read from the sources themselves."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
APPS = ("agentsite", "approvals", "streams")
# Why each may be long. A file that is not here stays under 400 lines, a test file under 600.
LONG_FILES: dict[str, str] = {
    "approvals/agent.py": "one turn of the loop, told from beginning to end",
    "tests/approvals/test_api_approvals.py": "one door, every call and refusal of it",
    "streams/consumers.py": "the life of a socket is one story; the inbox's part lives with approvals",
    "streams/log.py": "one writer: append's rules are read together or not at all",
    "streams/pump.py": "retries, cancel and heartbeat meet in one loop",
    "streams/strictjson.py": "one grammar, parsed and written by the same rules",
    "streams/tail.py": "ring, window and reading behind share their invariants",
}


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if "/migrations/" not in name:
                yield name, ast.parse(path.read_text(), filename=name)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.fail("this rule reads git's list of files and needs git and a clone")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


_WRITES = {
    *("create", "bulk_create", "get_or_create", "update_or_create"),
    *("update", "bulk_update", "delete", "_raw_delete", "acreate", "aupdate", "adelete"),
}


def _manager_root(node: ast.expr) -> str:
    """Return the model's name in `Model.objects.filter(…)…`, however long the chain."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr in ("objects", "_default_manager", "_base_manager"):
            inner = node.value
            return inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
        node = node.func if isinstance(node, ast.Call) else node.value
    return ""


def writes_of(tree: ast.AST, models: set[str], *, only_fields: set[str] | None = None) -> list[int]:
    """Return lines that write rows of these models through a manager, by making one, or in SQL.

    With `only_fields`, an `update` that names none of them is let be, and so is an instance that is only built: its
    `save` is another's. `update(**unknown)` never is.
    """
    tables = {
        "Entry": "streams_entry",
        "Generation": "streams_generation",
        "ApprovalRequest": "approvals_approvalrequest",
    }
    sql = "|".join(re.escape(tables[model]) for model in models)
    write_sql = re.compile(rf'(?is)\b(insert\s+into|update|delete\s+from)\s+"?({sql})\b')

    def guilty(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and bool(write_sql.search(node.value))
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            if node.func.attr not in _WRITES or _manager_root(node.func.value) not in models:
                return False
            named = {keyword.arg for keyword in node.keywords}
            return not (only_fields and node.func.attr == "update" and not named & {*only_fields, None})
        return only_fields is None and isinstance(node.func, ast.Name) and node.func.id in models

    return [getattr(node, "lineno", 0) for node in ast.walk(tree) if guilty(node)]


def test_only_the_log_writes_entries_and_generations() -> None:
    guilty = [
        f"{name}:{line}"
        for name, tree in sources(*APPS)
        if name != "streams/log.py"
        for line in writes_of(tree, {"Entry", "Generation"})
    ]
    assert guilty == []


def test_only_transitions_writes_the_state_of_approval_requests() -> None:
    guilty = [
        f"{name}:{line}"
        for name, tree in sources(*APPS)
        if name != "approvals/transitions.py"
        for line in writes_of(tree, {"ApprovalRequest"}, only_fields={"state", "version"})
    ]
    assert guilty == []


def test_nobody_assigns_an_approval_state_and_saves_it() -> None:
    """An assignment `action.state = …` outside transitions is how a guarded move gets passed by."""
    guilty = [
        f"{name}:{node.lineno}"
        for name, tree in sources("approvals", "agentsite")
        if name != "approvals/transitions.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "state" and getattr(target.value, "id", "") != "self"
    ]
    assert guilty == []


@pytest.mark.parametrize(
    "code",
    [
        "Entry.objects.create(offset=1)",
        "models.Entry.objects.filter(pk=1).exclude(a=2).update(body='')",
        "Entry(offset=1)",
        "cursor.execute('INSERT INTO streams_entry (a) VALUES (1)')",
        "cursor.execute(f'''\nUPDATE streams_generation\nSET x = {y}''')",
        "Generation.objects.select_for_update().filter(a=1).delete()",
    ],
)
def test_the_rule_sees_a_write(code: str) -> None:
    assert writes_of(ast.parse(code), {"Entry", "Generation"})


@pytest.mark.parametrize(
    "code", ["Entry.objects.filter(a=1)", "Other.objects.update(a=1)", "x = 'select streams_entry'"]
)
def test_the_rule_lets_reads_be(code: str) -> None:
    assert writes_of(ast.parse(code), {"Entry", "Generation"}) == []


def test_the_rule_of_states_sees_every_way_to_write_one() -> None:
    def seen(code: str) -> bool:
        return bool(writes_of(ast.parse(code), {"ApprovalRequest"}, only_fields={"state", "version"}))

    assert seen("ApprovalRequest.objects.filter(pk=1).update(state='done')")
    assert seen("ApprovalRequest.objects.filter(pk=1).update(**changes)")
    assert seen("ApprovalRequest.objects.create(state='done')")
    assert not seen("ApprovalRequest.objects.filter(state='executing').update(lease_expires_at=later)")


def test_no_file_names_a_machine_or_a_registry() -> None:
    """A clone elsewhere must not find this machine's paths, nor hosts that it can't reach. uv.lock's own lines may."""
    # Written in pieces, so that this file does not find itself.
    homes = "|".join(["/wo" + "rk/", "/ro" + "ot/", "/ho" + r"me/\w"])
    hosts = "|".join(["pypi" + r"\.org", "python" + "hosted", "registry" + r"\.npmjs", "deb" + r"\.debian"])
    forbidden = re.compile(rf"(?<![\w.]){homes}|https?://[^\s\"']*({hosts})")
    guilty = []
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if name == "uv.lock" or path.suffix in {".png", ".ico", ".woff2", ".mo"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if forbidden.search(line):
                guilty.append(f"{name}:{number}: {line.strip()[:100]}")
    assert guilty == []


def test_long_files_say_why() -> None:
    long = {
        path.relative_to(ROOT).as_posix()
        for path in tracked()
        if path.suffix in {".py", ".js", ".css"}
        and len(path.read_text().splitlines()) > (600 if path.is_relative_to(ROOT / "tests") else 400)
    }
    assert sorted(long - set(LONG_FILES)) == []
    assert sorted(set(LONG_FILES) - long) == [], "these are short now: strike them from the list"


def _codes() -> Iterator[tuple[str, str]]:
    """Yield (code, place) of every code a Problem can carry: class attributes and `code=` of its calls."""
    problems = {"Problem"}
    trees = list(sources("streams", "approvals"))
    for _ in range(6):
        for _name, tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and any(
                    getattr(base, "id", getattr(base, "attr", "")) in problems for base in node.bases
                ):
                    problems.add(node.name)
    for name, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in problems:
                for inner in node.body:
                    yield from ((code, f"{name}:{inner.lineno}") for code in _class_codes(inner))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in problems:
                for keyword in node.keywords:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        yield str(keyword.value.value), f"{name}:{node.lineno}"


def _class_codes(node: ast.stmt) -> Iterator[str]:
    target: ast.expr | None = None
    value: ast.expr | None = None
    if isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign):
        target, value = node.target, node.value
    pairs = (
        zip(target.elts, value.elts, strict=True)
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        else [(target, value)]
    )
    for name, given in pairs:
        if getattr(name, "id", "") == "code" and isinstance(given, ast.Constant):
            yield str(given.value)


def test_every_code_a_client_may_get_stands_in_the_contract() -> None:
    contract = (ROOT / "docs" / "contract.md").read_text()
    known = set(re.findall(r"`([a-z][a-z_]+)`", contract))
    found = list(_codes())
    assert len(found) > 15, "the rule lost sight of the problems"
    assert sorted(f"{code} ({place})" for code, place in found if code not in known) == []
