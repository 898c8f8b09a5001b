"""Who runs actions, and which of them each may run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from django.db import connection
from django.db.models import Q, QuerySet

from approvals import access, audit
from approvals.models import ApprovalRequest
from streams.access import Caller
from streams.models import AgentToken
from streams.problems import NotAllowed
from streams.protocol import Actor


@dataclass(frozen=True)
class Claimant:
    """Who runs actions: a token, or an executor of this server, which runs registered tools only."""

    name: str
    token: AgentToken | None
    who: audit.Who

    @classmethod
    def of(cls, caller: Caller) -> Claimant:
        """Take a token's caller; PeopleOnly's opposite is NotAllowed: people do not run actions."""
        if caller.token is None:
            raise NotAllowed("claims are for tokens and executors, not for people")
        return cls(name=f"token:{caller.token.prefix}", token=caller.token, who=caller)

    @classmethod
    def server(cls, name: str) -> Claimant:
        actor = Actor(kind="token", id=f"server:{name}"[:64], name=f"executor {name}"[:150])
        return cls(name=f"server:{name}"[:200], token=None, who=actor)

    def may_run(self, action: ApprovalRequest) -> bool:
        if self.token is None:
            return action.executor == "server"
        assert isinstance(self.who, Caller)
        return access.asked_by(self.who, action) or access.may_run(self.who, action.tool)

    def runnable(self) -> QuerySet[ApprovalRequest]:
        """The actions this claimant may run, whatever their state."""
        rows = ApprovalRequest.objects.all()
        if self.token is None:
            return rows.filter(executor="server")
        assert isinstance(self.who, Caller)
        own = Q(requested_by_kind=self.who.actor.kind, requested_by_id=self.who.actor.id)
        if self.who.can("claims"):
            return rows.filter(own | tool_named(self.token.claim_tools))
        return rows.filter(own)


def tool_named(patterns: Sequence[str]) -> Q:
    """Select tools by name or by a pattern of `*` and `?`, as `policy.matches` reads it.

    SQLite matches by Python's expressions, which go back on their steps: each run of characters that is found stays
    found (`(?>…)`), or a pattern of many `*` would stop the site inside a transaction. PostgreSQL never goes back.
    """
    plain = [pattern for pattern in patterns if "*" not in pattern and "?" not in pattern]
    wanted = Q(tool__in=plain)
    for pattern in patterns:
        if pattern == "*":
            return ~Q(tool="")
        if pattern not in plain:
            wanted |= Q(tool__regex=_expression(pattern))
    return wanted


def _expression(pattern: str) -> str:
    between = [
        "".join("." if letter == "?" else re.escape(letter) for letter in part)
        for part in re.sub(r"\*+", "*", pattern).split("*")
    ]
    if connection.vendor != "sqlite":
        return f"^{'.*'.join(between)}$"
    if len(between) == 1:
        return rf"(?s)\A{between[0]}\Z"
    first, *middle, last = between
    return rf"(?s)\A{first}{''.join(f'(?>.*?{part})' for part in middle)}.*{last}\Z"
