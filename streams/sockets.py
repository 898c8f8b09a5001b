"""The door of all sockets: who may open one, known by what, and whether that still holds.

A browser sends its Origin: it must be this site's own or an allowed one, letter for letter, and only then does its
cookie count. Who sends no Origin is no browser: cookies are ignored, a token is needed (contract §4).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY, get_user_model
from django.contrib.sessions.backends.db import SessionStore as DatabaseSessions
from django.contrib.sessions.models import Session
from django.db.models import Q
from django.db.models.functions import Now
from django.http import parse_cookie
from django.utils.crypto import constant_time_compare

from streams import access
from streams.access import Caller
from streams.problems import NotSignedIn, Problem
from streams.tail import in_database

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Any]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Credential:
    """What a socket was opened with. When it stops being good, the socket is closed."""

    token_id: int | None = None
    scopes: tuple[str, ...] = ()
    user_id: int | None = None
    session_key: str = ""
    session_hash: str = ""


class Door:
    """ASGI middleware: refuse strange origins, and put `caller` and `credential` (or `refusal`) into the scope."""

    def __init__(self, inner: Application) -> None:
        self.inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _Headers(scope)
        origin = headers.one("origin")
        if origin is not None and not access.origin_allowed(
            origin=origin, host=headers.host(), scheme=headers.scheme(scope)
        ):
            # RFC 6455 §4.2.2: an origin one does not accept gets 403 in place of the handshake.
            await receive()
            await send({"type": "websocket.close", "code": 4403})
            return
        address = _address(scope)
        scope["address"] = address
        authorization = headers.one("authorization")
        try:
            if authorization is not None:
                scope["caller"], scope["credential"] = await in_database(_by_header, authorization, address)
            elif origin is not None and (cookie := headers.one("cookie")) is not None:
                found = await in_database(_by_cookie, cookie, address)
                if found is not None:
                    scope["caller"], scope["credential"] = found
        except Problem as problem:
            scope["refusal"] = problem
        await self.inner(scope, receive, send)


async def nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse the handshake at an address where no socket lives."""
    await receive()
    await send({"type": "websocket.close", "code": 4404})


class _Headers:
    def __init__(self, scope: Scope) -> None:
        self._all: list[tuple[bytes, bytes]] = scope["headers"]

    def one(self, name: str) -> str | None:
        """Return a header; one that is there twice is as if it said nonsense."""
        wanted = name.encode()
        values = [value for key, value in self._all if key.lower() == wanted]
        if not values:
            return None
        if name == "cookie":
            return b"; ".join(values).decode("latin-1")
        return values[0].decode("latin-1") if len(values) == 1 else ""

    def host(self) -> str:
        if settings.USE_X_FORWARDED_HOST and (forwarded := self.one("x-forwarded-host")) is not None:
            return forwarded
        return self.one("host") or ""

    def scheme(self, scope: Scope) -> str:
        """http or https, as the browser saw it: a proxy in front may have taken the s away."""
        told: tuple[str, str] | None = settings.SECURE_PROXY_SSL_HEADER
        if told is not None:
            value = self.one(told[0].removeprefix("HTTP_").replace("_", "-").lower())
            if value is not None:
                return "https" if value.split(",")[0].strip() == told[1] else "http"
        return "https" if scope.get("scheme") in ("wss", "https") else "http"


def held_back(send: Send) -> int:
    """Return how many bytes daphne holds for a peer that does not read; 0 for servers that make `send` wait.

    daphne's `send` takes everything at once and never says that the line is full. Twisted's transport under it knows;
    there is no public way to ask.
    """
    protocol = next(iter(getattr(send, "args", ())), None)
    transport = getattr(protocol, "transport", None)
    while transport is not None and not hasattr(transport, "_tempDataLen"):
        transport = getattr(transport, "transport", None)
    if transport is None:
        return 0
    return int(len(transport.dataBuffer) - transport.offset + transport._tempDataLen)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0])[:64] if client else ""


def by_token(secret: str, address: str) -> tuple[Caller, Credential]:
    """Return who carries this token; raises NotSignedIn."""
    caller = access.caller_for_token(secret=secret, door="socket", address=address)
    assert caller.token is not None
    return caller, Credential(token_id=caller.token.pk, scopes=tuple(caller.token.scopes))


def _by_header(authorization: str, address: str) -> tuple[Caller, Credential]:
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise NotSignedIn("Authorization is Bearer and a token")
    return by_token(secret.strip(), address)


def _by_cookie(cookie: str, address: str) -> tuple[Caller, Credential] | None:
    """Return who is signed in by this cookie, as Django's own middleware would find it; None for nobody."""
    session_key = parse_cookie(cookie).get(settings.SESSION_COOKIE_NAME)
    if not session_key:
        return None
    session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    model = get_user_model()
    try:
        user = model._default_manager.get(pk=model._meta.pk.to_python(session[SESSION_KEY]))
        known_backend = session[BACKEND_SESSION_KEY] in settings.AUTHENTICATION_BACKENDS
    except (KeyError, model.DoesNotExist):
        return None
    session_hash = session.get(HASH_SESSION_KEY, "")
    if not known_backend or not _same_hash(user, session_hash):
        return None
    try:
        caller = access.caller_for_user(user=user, door="socket", address=address)
    except NotSignedIn:
        return None
    return caller, Credential(user_id=user.pk, session_key=session_key, session_hash=session_hash)


def _same_hash(user: Any, session_hash: str) -> bool:
    """A changed password ends every session made with the old one."""
    good = [user.get_session_auth_hash(), *user.get_session_auth_fallback_hash()]
    return any(constant_time_compare(session_hash, one) for one in good)


def again(caller: Caller) -> Caller:
    """Return the caller as it is now, for a verb: a socket lives for hours, a permission may not. NotSignedIn."""
    if caller.token is not None:
        token = access.live_tokens().select_related("owner").filter(pk=caller.token.pk).first()
        if token is None:
            raise NotSignedIn("the token is not valid")
        return Caller(actor=caller.actor, token=token, user=None, door=caller.door, address=caller.address)
    user = get_user_model()._default_manager.filter(pk=caller.user.pk).first() if caller.user else None
    if user is None:
        raise NotSignedIn("sign in first")
    return access.caller_for_user(user=user, door=caller.door, address=caller.address)


def ended(credentials: Iterable[Credential]) -> dict[Credential, int]:
    """Return which of these are no longer good, with the close code; three queries at most, however many they are."""
    asked = set(credentials)
    codes: dict[Credential, int] = {}
    tokens = {one.token_id for one in asked if one.token_id is not None}
    if tokens:
        scopes = dict(access.live_tokens().filter(pk__in=tokens).values_list("pk", "scopes"))
        for one in asked:
            if one.token_id is not None and one.token_id not in scopes:
                codes[one] = 4401
            elif one.token_id is not None and not set(one.scopes) <= set(scopes[one.token_id]):
                codes[one] = 4403
    people = {one.user_id for one in asked if one.user_id is not None}
    if people:
        model = get_user_model()
        users = {user.pk: user for user in model._default_manager.filter(pk__in=people, is_active=True)}
        seeing = _who_may_see(people)
        sessions = _living_sessions({one.session_key for one in asked if one.user_id is not None})
        for one in asked:
            if one.user_id is None:
                continue
            user = users.get(one.user_id)
            if user is None or one.session_key not in sessions or not _same_hash(user, one.session_hash):
                codes[one] = 4401
            elif one.user_id not in seeing:
                codes[one] = 4403
    return codes


def _who_may_see(people: set[int]) -> set[int]:
    app, _, codename = access.SEE.partition(".")
    named = {"content_type__app_label": app, "codename": codename}
    direct = {f"user_permissions__{key}": value for key, value in named.items()}
    by_group = {f"groups__permissions__{key}": value for key, value in named.items()}
    rows = get_user_model()._default_manager.filter(Q(is_superuser=True) | Q(**direct) | Q(**by_group), pk__in=people)
    return set(rows.values_list("pk", flat=True))


def _living_sessions(keys: set[str]) -> set[str]:
    store = import_module(settings.SESSION_ENGINE).SessionStore
    if issubclass(store, DatabaseSessions):
        rows = Session.objects.filter(session_key__in=keys, expire_date__gt=Now())
        return set(rows.values_list("session_key", flat=True))
    return {key for key in keys if store().exists(key)}
