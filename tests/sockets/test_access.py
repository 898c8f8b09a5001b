"""Who may open a socket, known by what; and that a right that ends closes what it opened within five seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.utils import timezone

from streams import access
from streams.models import AgentToken
from tests.sockets.logs import story
from tests.sockets.wire import Wire, own_origin, refused
from tests.support import factories
from tests.support.processes import Server


def test_a_signed_in_browser_of_this_site_is_known_by_its_session(server: Server) -> None:
    told = story("a")
    cookie = factories.session_cookie(factories.operator())
    with Wire(server, told.path, cookie=cookie, origin=own_origin(server)) as wire:
        wire.hello().until("caught_up")


@pytest.mark.parametrize(
    "origin",
    [
        "http://127.0.0.1:1",
        "https://127.0.0.1:{port}",
        "http://localhost:{port}",
        "http://127.0.0.1.evil.example:{port}",
        "http://evil.example",
        "null",
    ],
)
def test_another_origin_is_refused_whatever_it_carries(server: Server, origin: str) -> None:
    told = story("a")
    cookie = factories.session_cookie(factories.operator())
    wrong = origin.format(port=server.port)
    assert refused(server, told.path, cookie=cookie, origin=wrong, secret=told.secret) == 403


@pytest.mark.parametrize("origin", ["", "http://127.0.0.1:{port}.evil.example", "nonsense"])
def test_an_origin_that_is_none_is_refused_by_the_server_or_by_us(server: Server, origin: str) -> None:
    told = story("a")
    cookie = factories.session_cookie(factories.operator())
    wrong = origin.format(port=server.port)
    # daphne reads the header too and calls this a bad request, before any of ours is asked.
    refusal = 400 if "daphne" in server.command else 403
    assert refused(server, told.path, cookie=cookie, origin=wrong, secret=told.secret) == refusal


def test_without_an_origin_a_cookie_is_ignored(server: Server) -> None:
    told = story("a")
    cookie = factories.session_cookie(factories.operator())
    with Wire(server, told.path, cookie=cookie) as wire:
        wire.hello()
        assert wire.next()["code"] == "not_signed_in"
        assert wire.close_code() == 4401


def test_a_token_may_come_in_hello(uvicorn: Server) -> None:
    told = story("a")
    with Wire(uvicorn, told.path) as wire:
        wire.hello(token=told.secret).until("caught_up")


@pytest.mark.parametrize("secret", ["", "ags_x_y", "nonsense", "ags_" + "0" * 12 + "_" + "a" * 43])
def test_a_wrong_token_is_4401(uvicorn: Server, secret: str) -> None:
    told = story("a")
    for how in ({"secret": secret}, {}):
        with Wire(uvicorn, told.path, **how) as wire:
            wire.hello(**({} if how else {"token": secret}))
            assert wire.next()["code"] == "not_signed_in"
            assert wire.close_code() == 4401


def test_what_one_may_not_see_looks_like_what_does_not_exist(uvicorn: Server) -> None:
    told = story("a")
    _, other = factories.agent_token()
    stranger = factories.session_cookie(factories.person())
    with Wire(uvicorn, told.path, secret=other) as wire:
        wire.hello()
        assert wire.next()["code"] == "not_found"
        assert wire.close_code() == 4404
    with Wire(uvicorn, told.path, cookie=stranger, origin=own_origin(uvicorn)) as wire:
        wire.hello()
        assert wire.next()["code"] == "not_found"
        assert wire.close_code() == 4404


def test_the_inbox_is_not_for_those_who_see_nothing(uvicorn: Server) -> None:
    cookie = factories.session_cookie(factories.person())
    with Wire(uvicorn, "/ws/inbox/", cookie=cookie, origin=own_origin(uvicorn)) as wire:
        wire.hello()
        assert wire.next()["code"] == "not_allowed"
        assert wire.close_code() == 4403


def test_an_address_without_a_socket_is_refused(server: Server) -> None:
    assert refused(server, "/ws/elsewhere/") == 403


def _sign_out(user: User) -> None:
    Session.objects.all().delete()


def _session_runs_out(user: User) -> None:
    Session.objects.update(expire_date=timezone.now() - timedelta(seconds=1))


def _deactivate(user: User) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)


def _new_password(user: User) -> None:
    user.set_password("another horse")
    user.save()


def _lose_permission(user: User) -> None:
    user.user_permissions.clear()


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (_sign_out, 4401),
        (_session_runs_out, 4401),
        (_deactivate, 4401),
        (_new_password, 4401),
        (_lose_permission, 4403),
    ],
)
def test_a_person_who_loses_the_right_loses_the_sockets(
    uvicorn: Server, loss: Callable[[User], None], code: int
) -> None:
    told = story("a")
    user = factories.operator()
    cookie = factories.session_cookie(user)
    with (
        Wire(uvicorn, told.path, cookie=cookie, origin=own_origin(uvicorn)) as run,
        Wire(uvicorn, "/ws/inbox/", cookie=cookie, origin=own_origin(uvicorn)) as inbox,
        Wire(uvicorn, told.path, secret=told.secret) as other,
    ):
        for wire in (run, other):
            wire.hello().until("caught_up")
        inbox.hello().until("welcome")
        loss(user)
        lost_at = time.monotonic()
        assert run.close_code() == code
        assert inbox.close_code() == code
        assert time.monotonic() - lost_at < 5
        told.write("b")
        other.until_offset(1)


def _revoke(token: AgentToken) -> None:
    access.revoke_token(prefix=token.prefix, caller=access.COMMAND)


def _expire(token: AgentToken) -> None:
    AgentToken.objects.filter(pk=token.pk).update(expires_at=timezone.now() - timedelta(seconds=1))


def _lose_scope(token: AgentToken) -> None:
    AgentToken.objects.filter(pk=token.pk).update(scopes=["claims"])


@pytest.mark.parametrize(("loss", "code"), [(_revoke, 4401), (_expire, 4401), (_lose_scope, 4403)])
def test_a_token_that_ends_closes_its_sockets(server: Server, loss: Callable[[AgentToken], None], code: int) -> None:
    told = story("a")
    with Wire(server, told.path, secret=told.secret) as wire:
        wire.hello().until("caught_up")
        loss(told.token)
        lost_at = time.monotonic()
        assert wire.close_code() == code
        assert time.monotonic() - lost_at < 5


def test_one_generation_is_read_by_whom_the_list_shows_it(db: None) -> None:
    told, other = story(), story()
    callers = [access.COMMAND]
    for scopes in (["generations:write"], ["generations:read"], ["read:all"], ["approvals:read"], ["claims"]):
        _, secret = factories.agent_token(*scopes)
        callers.append(access.caller_for_token(secret=secret, door="socket"))
        AgentToken.objects.filter(pk=told.token.pk).update(scopes=scopes)
        callers.append(access.caller_for_token(secret=told.secret, door="socket"))
    callers += [access.caller_for_user(user=user, door="socket") for user in (factories.person(), factories.operator())]
    answers = []
    for caller in callers:
        for one in (told, other):
            listed = access.readable_generations(caller).filter(pk=one.generation.pk).exists()
            answers.append(listed)
            assert access.may_read(caller, token_id=one.generation.token_id) == listed
    assert len(set(answers)) == 2
