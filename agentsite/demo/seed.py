"""People, tokens and policy of the demo. Started again, it shows the same secrets: what was printed goes on working.

They lie in `var/demo/secrets.json`, readable by its owner only, which a real site never does.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.db import transaction

from approvals.models import Policy, PolicyRule
from streams import access
from streams.access import Caller
from streams.problems import NotSignedIn

OPERATORS = ("ana", "bruna", "caio")
AGENT_SCOPES = ("generations:write", "generations:read", "approvals:request", "approvals:read")


@dataclass(frozen=True)
class Seeded:
    operators: tuple[tuple[str, str], ...]
    agent_token: str
    executor_token: str
    read_token: str

    def agent(self) -> Caller:
        return access.caller_for_token(secret=self.agent_token, door="loop")


def secrets_path() -> Path:
    return Path(settings.VAR_DIR) / "demo" / "secrets.json"


def known() -> dict[str, Any]:
    """Return what an earlier start kept; empty when there is nothing that can be read."""
    try:
        kept = json.loads(secrets_path().read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def remember(kept: dict[str, Any]) -> None:
    path = secrets_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(kept, file)
    draft.replace(path)


def seed() -> Seeded:
    """Make what is missing, mend what no longer works, touch nothing else."""
    kept = known()
    with transaction.atomic():
        operators = tuple((name, _operator(name, str(kept.get(f"password:{name}", "")))) for name in OPERATORS)
        tokens = {
            "agent": _token(kept, "agent", "demo agent", AGENT_SCOPES),
            "executor": _token(kept, "executor", "demo executor", ("claims",), ("*",)),
            "reader": _token(kept, "reader", "demo reader", ("read:all", "generations:read", "approvals:read")),
        }
        _policy()
    passwords = {f"password:{name}": password for name, password in operators}
    remember({**kept, **passwords, **{f"token:{name}": secret for name, secret in tokens.items()}})
    return Seeded(operators, tokens["agent"], tokens["executor"], tokens["reader"])


def _operator(name: str, password: str) -> str:
    """Make an operator whose password is known; the first may do everything, the others see and decide."""
    user = User.objects.filter(username=name).first()
    if user is None:
        user = User(username=name)
        if name == OPERATORS[0]:
            user.is_staff = user.is_superuser = True
        user.set_unusable_password()
        user.save()
        if name != OPERATORS[0]:
            user.user_permissions.add(
                *Permission.objects.filter(content_type__app_label="approvals", codename__in=["see", "decide"])
            )
    if not password or not user.check_password(password):
        password = secrets.token_urlsafe(9)
        user.set_password(password)
        user.save()
    return password


def _token(
    kept: dict[str, Any], key: str, name: str, scopes: tuple[str, ...], claim_tools: tuple[str, ...] = ()
) -> str:
    secret = str(kept.get(f"token:{key}", ""))
    try:
        access.caller_for_token(secret=secret, door="command")
    except NotSignedIn:
        _, secret = access.create_token(name=name, scopes=scopes, claim_tools=claim_tools)
    return secret


def _policy() -> None:
    """Name what is refused. What no rule names is asked about: that is the policy of every site."""
    if Policy.objects.filter(active=True).exists():
        return
    policy, _ = Policy.objects.get_or_create(name="demo")
    Policy.objects.filter(pk=policy.pk).update(active=True)
    if not policy.rules.exists():
        PolicyRule.objects.create(
            policy=policy,
            position=1,
            name="never delete customers",
            tool_pattern="delete_customer",
            verdict="deny",
        )
