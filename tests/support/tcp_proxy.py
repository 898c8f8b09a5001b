"""A TCP proxy on loopback that breaks lines the ways real ones break: cut, reset, frozen, refused."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

_RESET = struct.pack("ii", 1, 0)


class Line:
    """One client connection and its way to the target."""

    def __init__(self, proxy: TcpProxy, client: socket.socket) -> None:
        self.proxy, self.client = proxy, client
        self.upstream = socket.create_connection((proxy.target_host, proxy.target_port), timeout=10)
        self.upstream.settimeout(None)
        self.down_bytes = self.up_bytes = 0

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._pump, args=(self.client, self.upstream, "up"), daemon=True),
            threading.Thread(target=self._pump, args=(self.upstream, self.client, "down"), daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.close(reset=False)

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.proxy._running.wait()
                self.relay(data, sink, way)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def relay(self, data: bytes, sink: socket.socket, way: str) -> None:
        """Pass `data` on, or what may still pass before the cut."""
        limit = self.proxy.cut_after if way == "down" else None
        if limit is not None and self.down_bytes + len(data) >= limit:
            sink.sendall(data[: limit - self.down_bytes])
            self.down_bytes = limit
            self.proxy.cut_after = None
            self.close(reset=True)
            return
        sink.sendall(data)
        if way == "down":
            self.down_bytes += len(data)
        else:
            self.up_bytes += len(data)

    def close(self, *, reset: bool) -> None:
        for end in (self.client, self.upstream):
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                # A close alone does not wake the other thread's recv, which keeps the socket; shutting the reading
                # side does, and sends no FIN before the reset.
                end.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                end.close()


class TcpProxy:
    """Listen on `port` and pass everything to the target until told otherwise. A context manager.

    `cut_after_bytes(n)` resets the line once n more bytes came down from the target (0: with the next one);
    `cut()` resets every line now; `freeze()` keeps lines open and moves nothing, both ways; `refuse()` closes the
    port itself, so that new connections are refused.
    """

    line_type: type[Line] = Line

    def __init__(self, target_port: int, *, target_host: str = "127.0.0.1", port: int = 0) -> None:
        self.target_host, self.target_port, self.port = target_host, target_port, port
        self.cut_after: int | None = None
        self.accepted = 0
        self.lines: list[Line] = []
        self._running = threading.Event()
        self._running.set()
        self._listener: socket.socket | None = None

    def start(self) -> Self:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(512)
        self._listener, self.port = listener, listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return self

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                line = self.line_type(self, client)
            except OSError:
                client.close()
                continue
            self.lines.append(line)
            threading.Thread(target=line.run, daemon=True).start()

    def cut_after_bytes(self, count: int) -> None:
        """Reset the line on which `count` bytes in all have come down."""
        self.cut_after = count

    def cut(self) -> None:
        for line in self.lines:
            line.close(reset=True)
        self.lines.clear()

    def freeze(self) -> None:
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    def refuse(self) -> None:
        if self._listener is not None:
            # A blocked accept keeps the port open over a close; the shutdown wakes it.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def accept_again(self) -> None:
        if self._listener is None:
            self.start()

    def close(self) -> None:
        self.refuse()
        self.thaw()
        self.cut()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
