"""A client of contract §4 that keeps what it was sent."""

from __future__ import annotations

import itertools
import json
import re
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.support.processes import Server

Frame = dict[str, Any]
_OFFSET = re.compile(r'"offset":(\d+),')


class Wire:
    """One socket. `entries` are those it was given since it was opened, in order."""

    def __init__(
        self,
        server: Server,
        path: str,
        *,
        secret: str | None = None,
        cookie: str | None = None,
        origin: str | None = None,
    ) -> None:
        headers = {}
        if secret is not None:
            headers["Authorization"] = f"Bearer {secret}"
        if cookie is not None:
            headers["Cookie"] = f"sessionid={cookie}"
        self.frames: list[Frame] = []
        self.entries: list[Frame] = []
        # The last offset `skip_to` took.
        self.skipped = -1
        self._stack = ExitStack()
        opening = connect(
            server.ws_url + path,
            origin=origin,  # type: ignore[arg-type]
            additional_headers=headers,
            compression=None,
            ping_interval=None,
            max_size=4 * 1024 * 1024,
            proxy=None,
            close_timeout=2,
        )
        self.connection: ClientConnection = self._stack.enter_context(opening)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def send(self, **frame: Any) -> None:
        self.connection.send(json.dumps(frame))

    def hello(self, **more: Any) -> Self:
        self.send(**{"type": "hello", "protocol": 1, **more})
        return self

    def next(self, *, seconds: float = 10) -> Frame:
        frame: Frame = json.loads(self.connection.recv(timeout=seconds))
        self.frames.append(frame)
        if frame["type"] == "entries":
            self.entries += frame["entries"]
            self.skipped = self.entries[-1]["offset"]
        return frame

    def until(self, kind: str, *, seconds: float = 10) -> Frame:
        """Read on to the next frame of this type."""
        return self.until_that(lambda frame: frame["type"] == kind, seconds=seconds)

    def until_that(self, holds: Callable[[Frame], bool], *, seconds: float = 10) -> Frame:
        while True:
            frame = self.next(seconds=seconds)
            if holds(frame):
                return frame

    def until_offset(self, offset: int, *, ack: bool = True, seconds: float = 10) -> Self:
        """Read until this entry was given."""
        while not self.entries or self.entries[-1]["offset"] < offset:
            self.next(seconds=seconds)
            if ack and self.entries:
                self.send(type="ack", offset=self.entries[-1]["offset"])
        return self

    def skip_to(self, offset: int, *, seconds: float = 20) -> None:
        """Take entries in order up to this one without keeping them, acknowledging each frame."""
        while self.skipped < offset:
            for found in _OFFSET.findall(str(self.connection.recv(timeout=seconds))):
                assert int(found) == self.skipped + 1
                self.skipped += 1
            if self.skipped >= 0:
                self.send(type="ack", offset=self.skipped)

    def close_code(self, *, seconds: float = 10) -> int:
        """Read on until the server closes, and return its code."""
        with suppress(ConnectionClosed):
            while True:
                self.next(seconds=seconds)
        code = self.connection.close_code
        assert code is not None
        assert code != 1006, "it was dropped without a word"
        return code

    def offsets(self) -> list[int]:
        return [entry["offset"] for entry in self.entries]

    def text(self) -> str:
        return "".join(entry["chunk"].get("content", "") for entry in self.entries if "chunk" in entry)


def refused(server: Server, path: str, **how: Any) -> int:
    """Try to open a socket that must not open; return the HTTP status of the refusal."""
    try:
        Wire(server, path, **how)
    except InvalidStatus as refusal:
        return refusal.response.status_code
    raise AssertionError("the handshake was not refused")


def never_reads(server: Server, path: str, header: str) -> socket.socket:
    """Open a socket by hand, say hello and read nothing more."""
    line = socket.create_connection(("127.0.0.1", server.port))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    line.sendall(
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n{header}\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += line.recv(1)
    hello = json.dumps({"type": "hello", "protocol": 1}).encode()
    line.sendall(bytes([0x81, 0x80 | len(hello)]) + b"\0\0\0\0" + hello)
    return line


def drained(line: socket.socket) -> tuple[bool, int]:
    """Read what was on its way until the server's end; return whether it said 4408, and how much it was in all."""
    line.settimeout(30)
    seen, last, close = 0, b"", struct.pack("!H", 4408) + b"too slow, come back with your offset"
    with suppress(ConnectionResetError):
        while close not in last and (data := line.recv(65_536)):
            seen, last = seen + len(data), last[-100:] + data
    return close in last, seen


_keys = itertools.count(1)


def new_key() -> str:
    return f"key-of-a-click-{next(_keys)}"


def own_origin(server: Server) -> str:
    return server.url
