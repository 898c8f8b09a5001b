"""Load the policy that judges now. It is read anew for every question: an edit counts from the next one on."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import F

from approvals import policy
from approvals.models import Policy
from streams.protocol import Actor


@dataclass(frozen=True)
class Loaded:
    """The rules of one policy version; without an active policy an empty one, which asks about everything."""

    name: str
    version: int
    rules: tuple[policy.Rule, ...]

    def judge(self, tool: str) -> policy.Verdict:
        return policy.judge(self.rules, tool)

    @property
    def actor(self) -> Actor:
        """Who decided when the policy did: by name and version."""
        return Actor(kind="policy", id=f"{self.name}@{self.version}"[:64], name=f"{self.name} v{self.version}"[:150])


def active() -> Loaded:
    found = Policy.objects.filter(active=True).prefetch_related("rules").first()
    if found is None:
        return Loaded(name="default", version=0, rules=())
    rules = tuple(
        policy.Rule(
            name=row.name,
            tool_pattern=row.tool_pattern,
            verdict=row.verdict,
            risk=row.risk,
            approvals_required=row.approvals_required,
            expires_in_seconds=row.expires_in_seconds,
            approval_valid_seconds=row.approval_valid_seconds,
        )
        for row in found.rules.all()
    )
    return Loaded(name=found.name, version=found.version, rules=rules)


def edited(*, policy_id: int) -> None:
    """Raise the version after its rules were edited; call it in the transaction of the edit."""
    Policy.objects.filter(pk=policy_id).update(version=F("version") + 1)
