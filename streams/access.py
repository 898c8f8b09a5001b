"""Who calls, what they may do, and which generations they may see. The only writer of agent tokens.

An agent's token reads what it made, with `read:all` everything, and decides nothing. People act by permission. What
a caller may not see is `NotFound`, word for word like what does not exist.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit
from uuid import UUID

from django.conf import settings
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http.request import split_domain_port, validate_host

from streams import clock
from streams.models import AgentToken, Generation
from streams.problems import Invalid, NotAllowed, NotFound, NotSignedIn
from streams.protocol import Actor

if TYPE_CHECKING:
    from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User

SCOPES: Final = (
    "generations:write",
    "generations:read",
    "approvals:request",
    "approvals:read",
    "claims",
    "read:all",
)
# Permissions people act by. They are rows of two apps, but words to this one.
SEE: Final = "approvals.see"
DECIDE: Final = "approvals.decide"
CONFIGURE: Final = "streams.configure"

LAST_USE_RESOLUTION = timedelta(minutes=1)


@dataclass(frozen=True)
class Caller:
    """Whoever stands at a door: a token, a person, or (door `command`, `loop`, `server`) this site itself.

    `door` is http, socket, page, admin, batch, command, loop or server; `address` and `request_id` are for the audit.
    """

    actor: Actor
    token: AgentToken | None
    user: User | None
    door: str
    address: str = ""
    request_id: str = ""

    def can(self, scope_or_permission: str) -> bool:
        """Say whether this token has the scope, or this person the permission. The site itself has none."""
        if self.token is not None:
            return scope_or_permission in self.token.scopes
        return self.user is not None and self.user.has_perm(scope_or_permission)

    @property
    def owner_id(self) -> int | None:
        """The person behind it: the user, or the owner of the token."""
        if self.user is not None:
            return self.user.pk
        return self.token.owner_id if self.token is not None else None

    @property
    def writer(self) -> str:
        """The name an append is fenced by when the producer gives none."""
        return f"{self.actor.kind}:{self.actor.id}"


COMMAND: Final = Caller(
    actor=Actor(kind="person", id="command", name="manage.py"), token=None, user=None, door="command"
)


def create_token(
    *,
    name: str,
    scopes: Iterable[str],
    owner: User | None = None,
    claim_tools: Iterable[str] = (),
    expires_at: datetime | None = None,
) -> tuple[AgentToken, str]:
    """Make a token and return it with its secret, which is kept nowhere: only its SHA-256 is."""
    wanted, tools = list(dict.fromkeys(scopes)), list(dict.fromkeys(claim_tools))
    unknown = [scope for scope in wanted if scope not in SCOPES]
    if unknown:
        raise Invalid(f"no such scope: {unknown[0]}; there are {', '.join(SCOPES)}", field="scopes")
    if not 1 <= len(name) <= 100:
        raise Invalid("a token's name has 1 to 100 characters", field="name", limit=100)
    if tools and "claims" not in wanted:
        raise Invalid("a token that names tools to claim needs the scope claims", field="claim_tools")
    prefix = secrets.token_hex(6)
    secret = f"ags_{prefix}_{secrets.token_urlsafe(32)}"
    token = AgentToken.objects.create(
        prefix=prefix,
        secret_sha256=_sha256(secret),
        name=name,
        owner=owner,
        scopes=wanted,
        claim_tools=tools,
        expires_at=expires_at,
    )
    return token, secret


def revoke_token(*, prefix: str, caller: Caller) -> AgentToken:
    """Revoke a token, also one that is revoked already; the time of the first revocation stays.

    Raises NotAllowed for who may not configure, then NotFound.
    """
    if caller.door != "command":
        require(caller, None, CONFIGURE)
    AgentToken.objects.filter(prefix=prefix, revoked_at__isnull=True).update(revoked_at=clock.now())
    try:
        return AgentToken.objects.get(prefix=prefix)
    except AgentToken.DoesNotExist:
        raise NotFound("no such token") from None


def live_tokens() -> QuerySet[AgentToken]:
    """Tokens that open doors at this moment: not revoked, not expired, the owner not deactivated."""
    return AgentToken.objects.filter(
        Q(expires_at__isnull=True) | Q(expires_at__gt=Now()),
        Q(owner__isnull=True) | Q(owner__is_active=True),
        revoked_at__isnull=True,
    )


def caller_for_token(*, secret: str, door: str, address: str = "", request_id: str = "") -> Caller:
    """Return the token's Caller; raise NotSignedIn for anything else, without saying what was wrong with it."""
    match secret.split("_", 2):
        case ["ags", prefix, rest] if prefix and rest and prefix.isascii() and len(prefix) <= 16 and "\0" not in prefix:
            token = live_tokens().filter(prefix=prefix).first()
        case _:
            token = None
    # "surrogatepass": a header may carry anything, and a strange secret is a wrong secret.
    if token is None or not secrets.compare_digest(token.secret_sha256, _sha256(secret)):
        raise NotSignedIn("the token is not valid")
    _note_use(token)
    actor = Actor(kind="token", id=token.prefix, name=token.name)
    return Caller(actor=actor, token=token, user=None, door=door, address=address, request_id=request_id)


def _note_use(token: AgentToken) -> None:
    """Keep the time of last use, at most once a minute, so that reading stays reading."""
    now = datetime.now(UTC)
    if token.last_used_at is not None and now - token.last_used_at < LAST_USE_RESOLUTION:
        return
    AgentToken.objects.filter(pk=token.pk).filter(
        Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - LAST_USE_RESOLUTION)
    ).update(last_used_at=now)


def caller_for_user(
    *, user: AbstractBaseUser | AnonymousUser, door: str, address: str = "", request_id: str = ""
) -> Caller:
    """Return a signed-in person's Caller; raise NotSignedIn for strangers and deactivated accounts."""
    from django.contrib.auth.models import User

    if not isinstance(user, User) or not user.is_active:
        raise NotSignedIn("sign in first")
    actor = Actor(kind="person", id=str(user.pk), name=user.get_username())
    return Caller(actor=actor, token=None, user=user, door=door, address=address, request_id=request_id)


def require(caller: Caller, scope: str | None, permission: str | None) -> None:
    """Raise NotAllowed unless the token has the scope or the person the permission. None: nobody of that kind may."""
    needed = scope if caller.token is not None else permission
    if needed is not None and caller.can(needed):
        return
    if needed is None:
        raise NotAllowed(f"this is not for {'tokens' if caller.token is not None else 'people'}")
    raise NotAllowed(f"this needs the {'scope' if caller.token is not None else 'permission'} {needed}")


def readable_generations(caller: Caller) -> QuerySet[Generation]:
    """The generations this caller may see. A token that may write or read sees what it made."""
    rows = Generation.objects.all()
    if caller.token is None:
        return rows if caller.can(SEE) else rows.none()
    if caller.can("read:all"):
        return rows
    if caller.can("generations:read") or caller.can("generations:write"):
        return rows.filter(token=caller.token)
    return rows.none()


def may_read(caller: Caller, *, token_id: int | None) -> bool:
    """Say of one generation, by the token that made it, what `readable_generations` says of all.

    For a token this asks nothing of the database; a person's permissions may.
    """
    if caller.token is None:
        return caller.can(SEE)
    if caller.can("read:all"):
        return True
    return token_id == caller.token.pk and (caller.can("generations:read") or caller.can("generations:write"))


def find_generation(caller: Caller, generation_id: UUID | str) -> Generation:
    """Return the generation as this caller may see it, or raise NotFound."""
    try:
        key = generation_id if isinstance(generation_id, UUID) else UUID(generation_id)
        return readable_generations(caller).get(pk=key)
    except (ValueError, Generation.DoesNotExist):
        raise NotFound("no such generation") from None


def require_writable(caller: Caller, generation_id: UUID) -> None:
    """Let pass who may write to this generation: its own token. NotFound when unseen, NotAllowed when seen only.

    It stands in the hot path and reads one column.
    """
    owner = Generation.objects.filter(pk=generation_id).values_list("token_id", flat=True).first()
    own = caller.token is not None and owner == caller.token.pk
    if not (own and caller.can("generations:write")):
        find_generation(caller, generation_id)
        require(caller, "generations:write", None)
        raise NotAllowed("only the token that opened a generation writes to it")


def find_cancellable_generation(caller: Caller, generation_id: UUID | str) -> Generation:
    """Return a generation this caller may stop: its own, or for people any they see, if they may decide."""
    generation = find_generation(caller, generation_id)
    require(caller, "generations:write", DECIDE)
    if caller.token is not None and generation.token_id != caller.token.pk:
        raise NotAllowed("only the token that opened a generation may cancel it")
    return generation


def origin_allowed(*, origin: str, host: str, scheme: str) -> bool:
    """Say whether a browser's Origin is this site's own or one of CSRF_TRUSTED_ORIGINS, letter for letter.

    Scheme and port count, wildcards do not. `host` must be one of ALLOWED_HOSTS, or a rebound name would be "own".
    """
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    domain, _ = split_domain_port(host.lower())
    return (
        origin == f"{parts.scheme}://{parts.netloc}"
        and origin.lower() == f"{scheme}://{host}".lower()
        and bool(domain)
        and validate_host(domain, settings.ALLOWED_HOSTS)
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
