"""Which verdict a tool call gets. Pure: no Django. First matching rule wins; what no rule names is asked about.

A rule that can't be read (an unknown verdict, a number out of range, no pattern) never means allow and never hides
what it may have stood before: it asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

VerdictName = Literal["allow", "ask", "deny"]
RISKS = ("low", "medium", "high", "critical")
DEFAULT_EXPIRES_IN_SECONDS = 86_400
DEFAULT_APPROVAL_VALID_SECONDS = 3_600
MAX_SECONDS = 2_592_000
MAX_APPROVALS = 20


@dataclass(frozen=True)
class Rule:
    """One row as it stands in the policy, not yet believed."""

    name: str
    tool_pattern: str
    verdict: str
    risk: str = ""
    approvals_required: int = 1
    expires_in_seconds: int = DEFAULT_EXPIRES_IN_SECONDS
    approval_valid_seconds: int = DEFAULT_APPROVAL_VALID_SECONDS

    @property
    def readable(self) -> bool:
        return (
            bool(self.tool_pattern)
            and self.verdict in ("allow", "ask", "deny")
            and self.risk in ("", *RISKS)
            and _within(self.approvals_required, MAX_APPROVALS)
            and _within(self.expires_in_seconds, MAX_SECONDS)
            and _within(self.approval_valid_seconds, MAX_SECONDS)
        )


@dataclass(frozen=True)
class Verdict:
    """What the policy says, kept on the request and never worked out again. `risk` is empty when it has no say."""

    verdict: VerdictName
    rule: str
    risk: str = ""
    approvals_required: int = 1
    expires_in_seconds: int = DEFAULT_EXPIRES_IN_SECONDS
    approval_valid_seconds: int = DEFAULT_APPROVAL_VALID_SECONDS


def judge(rules: Sequence[Rule], tool: str) -> Verdict:
    """Return the verdict of the first rule that names the tool; ask when none does."""
    for rule in rules:
        # An unreadable pattern may have been meant for this tool; a later rule must not allow it then.
        if rule.tool_pattern and not matches(rule.tool_pattern, tool):
            continue
        if not rule.readable:
            return Verdict("ask", rule.name or "unreadable")
        return Verdict(
            cast("VerdictName", rule.verdict),
            rule.name,
            rule.risk,
            rule.approvals_required,
            rule.expires_in_seconds,
            rule.approval_valid_seconds,
        )
    return Verdict("ask", "default")


def matches(pattern: str, name: str) -> bool:
    """Match a whole name, letter for letter; `*` is any run of characters and `?` any one.

    Two pointers and one place to go back to: no pattern can make it slow, as a regular expression could.
    """
    at, place, star, mark = 0, 0, -1, 0
    while place < len(name):
        if at < len(pattern) and pattern[at] == "*":
            star, mark = at, place
            at += 1
        elif at < len(pattern) and pattern[at] in ("?", name[place]):
            at += 1
            place += 1
        elif star >= 0:
            mark += 1
            at, place = star + 1, mark
        else:
            return False
    return all(letter == "*" for letter in pattern[at:])


def higher_risk(one: str, other: str) -> str:
    return max(one, other, key=RISKS.index)


def _within(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
