"""A PostgreSQL proxy that loses the answer to COMMIT: the server has committed, the client never learns it."""

from __future__ import annotations

import socket
import struct
from typing import Literal

from django.db import connection

from tests.support.processes import database_url
from tests.support.tcp_proxy import Line, TcpProxy

_SSL_REQUEST, _GSS_REQUEST = 80877103, 80877104


class _PostgresLine(Line):
    """Follows the messages of one connection just enough to see a COMMIT go up and its answer come down."""

    def __init__(self, proxy: TcpProxy, client: socket.socket) -> None:
        super().__init__(proxy, client)
        self.up_buffer, self.down_buffer = b"", b""
        self.started = self.commit_sent = False

    def relay(self, data: bytes, sink: socket.socket, way: str) -> None:
        assert isinstance(self.proxy, PostgresProxy)
        if way == "up":
            self._up(data, self.proxy)
        elif self.commit_sent:
            self._await_commit(data, self.proxy)
        else:
            sink.sendall(data)

    def _up(self, data: bytes, proxy: PostgresProxy) -> None:
        self.up_buffer += data
        while True:
            head = 1 if self.started else 0
            if len(self.up_buffer) < head + 4:
                return
            size = head + struct.unpack_from("!i", self.up_buffer, head)[0]
            if len(self.up_buffer) < size:
                return
            message, self.up_buffer = self.up_buffer[:size], self.up_buffer[size:]
            if not self.started:
                if struct.unpack_from("!i", message, 4)[0] in (_SSL_REQUEST, _GSS_REQUEST):
                    self.client.sendall(b"N")
                    continue
                self.started = True
            elif proxy.armed and message[:1] in b"QP" and b"COMMIT" in message[:24].upper():
                proxy.commits_seen += 1
                if proxy.commits_seen > proxy.skip:
                    if proxy.armed == "before":
                        self._lose(proxy)
                        return
                    self.commit_sent = True
            self.upstream.sendall(message)

    def _await_commit(self, data: bytes, proxy: PostgresProxy) -> None:
        self.down_buffer += data
        # ReadyForQuery: the server has committed and said so; nobody else will hear it.
        if b"COMMIT\0" in self.down_buffer and b"Z\0\0\0\5" in self.down_buffer:
            self._lose(proxy)

    def _lose(self, proxy: PostgresProxy) -> None:
        proxy.armed = ""
        proxy.lost += 1
        self.close(reset=True)


class PostgresProxy(TcpProxy):
    """A proxy before the test's PostgreSQL; give `proxy.url` as DATABASE_URL to a `Server`.

    `lose_commit("after")` cuts the line when the server has answered the next COMMIT (it happened, nobody knows);
    `"before"` cuts it before COMMIT arrives (it did not happen, nobody knows). `skip` lets that many commits pass.
    """

    line_type = _PostgresLine

    def __init__(self) -> None:
        config = connection.settings_dict
        super().__init__(int(config["PORT"] or 5432), target_host=config["HOST"] or "127.0.0.1")
        self.armed: Literal["", "after", "before"] = ""
        self.skip = self.commits_seen = self.lost = 0

    @property
    def url(self) -> str:
        return database_url(host="127.0.0.1", port=self.port)

    def lose_commit(self, when: Literal["after", "before"] = "after", *, skip: int = 0) -> None:
        self.armed, self.skip, self.commits_seen = when, skip, 0
