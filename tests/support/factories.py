"""People, tokens, policies and generations for a test, each made by the verb that makes them in earnest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import Permission, User
from django.contrib.sessions.backends.db import SessionStore

from approvals.models import Policy, PolicyRule
from streams import access, log
from streams.models import AgentToken, Generation

SEE = "approvals.see"
DECIDE = "approvals.decide"
RECONCILE = "approvals.reconcile"
AUDIT = "approvals.audit"
CONFIGURE = "streams.configure"
PASSWORD = "correct horse battery staple"

_count = itertools.count(1)


def person(name: str = "", *permissions: str, password: str | None = None, **fields: Any) -> User:
    """Make a user with these permissions; without `password` nobody can sign in as it (use `session_cookie`)."""
    user = User(username=name or f"person{next(_count)}", **fields)
    if password is None:
        user.set_unusable_password()
    else:
        user.set_password(password)
    user.save()
    for permission in permissions:
        app, codename = permission.split(".")
        user.user_permissions.add(Permission.objects.get(content_type__app_label=app, codename=codename))
    return User.objects.get(pk=user.pk)


def operator(name: str = "", **fields: Any) -> User:
    """Make a person who sees and decides."""
    return person(name, SEE, DECIDE, **fields)


def chief(name: str = "", **fields: Any) -> User:
    """Make a person with every permission of the contract, and no superuser."""
    return person(name, SEE, DECIDE, RECONCILE, AUDIT, CONFIGURE, **fields)


def session_cookie(user: User) -> str:
    """Sign `user` in and return the value of the session cookie."""
    store = SessionStore()
    store[SESSION_KEY] = str(user.pk)
    store[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    store[HASH_SESSION_KEY] = user.get_session_auth_hash()
    store.save()
    return str(store.session_key)


def agent_token(
    *scopes: str,
    name: str = "",
    owner: User | None = None,
    claim_tools: Iterable[str] = (),
    expires_at: datetime | None = None,
) -> tuple[AgentToken, str]:
    """Make a token and return it with its secret; without scopes it has those of an agent that writes and asks."""
    return access.create_token(
        name=name or f"agent{next(_count)}",
        scopes=list(scopes) or ["generations:write", "generations:read", "approvals:request", "approvals:read"],
        owner=owner,
        claim_tools=tuple(claim_tools),
        expires_at=expires_at,
    )


def bearer(secret: str) -> dict[str, str]:
    """Return the header of a token, for httpx, websockets and curl alike."""
    return {"Authorization": f"Bearer {secret}"}


def policy(
    *rules: tuple[str, str] | tuple[str, str, dict[str, Any]], name: str = "test", active: bool = True
) -> Policy:
    """Make the active policy: `policy(("ls", "allow"), ("rm*", "deny"), ("pay", "ask", {"approvals_required": 2}))`."""
    if active:
        Policy.objects.filter(active=True).update(active=False)
    made = Policy.objects.create(name=name if active else f"{name}{next(_count)}", active=active)
    for position, rule in enumerate(rules):
        fields: dict[str, Any] = rule[2] if len(rule) == 3 else {}
        PolicyRule.objects.create(
            policy=made,
            position=position,
            name=f"{rule[1]} {rule[0]}",
            tool_pattern=rule[0],
            verdict=rule[1],
            **fields,
        )
    return made


def generation(*, token: AgentToken | None = None, user: User | None = None, **fields: Any) -> Generation:
    """Open a generation; without `token` and `user` a new token's."""
    if token is None and user is None:
        token, _ = agent_token()
    made, _ = log.create(actor_token=token, user_id=user.pk if user else None, **fields)
    return made


def texts(*contents: str) -> Sequence[Any]:
    """Make text chunks."""
    from streams.protocol import Text

    return [Text(content=content) for content in contents]
