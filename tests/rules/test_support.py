"""The tools the other tests lean on do what they say."""

from __future__ import annotations

import signal
import socket
import threading

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db import connection

from tests.support import PostgresProxy, TcpProxy, database_url, eventually, factories, in_threads, run_manage
from tests.support.processes import Child


def echo_server() -> tuple[socket.socket, int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                try:
                    while data := line.recv(1024):
                        line.sendall(data)
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    return listener, listener.getsockname()[1]


def test_eventually_gives_up_and_says_what_it_saw_last() -> None:
    with pytest.raises(AssertionError, match="last seen: 0"):
        eventually(lambda: 0, within_seconds=0.05)


def test_the_proxy_cuts_after_so_many_bytes_and_takes_the_next_line() -> None:
    listener, port = echo_server()
    with listener, TcpProxy(port) as proxy:
        proxy.cut_after_bytes(3)
        with socket.create_connection(("127.0.0.1", proxy.port), 5) as line:
            line.sendall(b"hello")
            assert line.recv(10) == b"hel"
            with pytest.raises(ConnectionResetError):
                line.recv(10)
        with socket.create_connection(("127.0.0.1", proxy.port), 5) as line:
            line.sendall(b"hello")
            assert line.recv(10) == b"hello"
        listener.shutdown(socket.SHUT_RDWR)


def test_the_proxy_freezes_and_refuses() -> None:
    listener, port = echo_server()
    with listener, TcpProxy(port) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), 5) as line:
            line.sendall(b"a")
            assert line.recv(1) == b"a"
            proxy.freeze()
            line.sendall(b"b")
            line.settimeout(0.2)
            with pytest.raises(TimeoutError):
                line.recv(1)
            proxy.thaw()
            line.settimeout(5)
            assert line.recv(1) == b"b"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), 5)
        proxy.accept_again()
        socket.create_connection(("127.0.0.1", proxy.port), 5).close()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("when", "rows"), [("after", 1), ("before", 0)])
def test_the_answer_to_commit_is_lost_and_the_row_is_there_or_not(when: str, rows: int) -> None:
    with PostgresProxy() as proxy:
        line = psycopg.connect(proxy.url)
        line.execute("SELECT 1")
        line.commit()
        proxy.lose_commit(when)  # type: ignore[arg-type]
        line.execute(
            "INSERT INTO auth_user (username, password, is_superuser, is_staff, is_active, first_name, last_name,"
            " email, date_joined) VALUES ('ghost', '', false, false, true, '', '', '', now())"
        )
        with pytest.raises(psycopg.OperationalError):
            line.commit()
        line.close()
        assert proxy.lost == 1
        # The backend may still be rolling back.
        eventually(lambda: User.objects.filter(username="ghost").count() == rows)


@pytest.mark.django_db(transaction=True)
def test_threads_race_on_connections_of_their_own() -> None:
    def make() -> object:
        factories.person()
        return connection.connection

    made = in_threads(make, times=4)
    assert len({id(one) for one in made}) == 4 or connection.vendor == "postgresql", made
    assert User.objects.count() == 4


@pytest.mark.django_db(transaction=True)
def test_a_child_command_sees_what_the_test_wrote() -> None:
    user = factories.operator("ana")
    assert user.has_perms([factories.SEE, factories.DECIDE])
    shown = run_manage("shell", "-c", "from django.contrib.auth.models import User; print(User.objects.get().username)")
    assert shown.returncode == 0, shown.stderr
    assert "ana" in shown.stdout
    assert database_url().startswith(("sqlite:////", "postgres://"))


def test_a_child_is_killed_with_all_it_started() -> None:
    child = Child(["sh", "-c", "sleep 300 & echo $!; wait"])
    with child:
        grandchild = int(eventually(child.output).strip())
        assert child.alive
    assert child.process is not None
    assert child.process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        eventually(lambda: _signal_nothing(grandchild))


def _signal_nothing(pid: int) -> None:
    import os

    os.kill(pid, 0)
