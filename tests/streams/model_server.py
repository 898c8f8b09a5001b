"""A model endpoint in this process: real sockets, real HTTP, the real SSE of chat completions, and every fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    """One event of a streamed chat completion."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    text = json.dumps({"id": "c1", "choices": choices, **more}, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def call_delta(index: int | None, *, id: str = "", name: str = "", arguments: str = "") -> dict[str, Any]:
    piece: dict[str, Any] = {"index": index, "type": "function", "function": {"arguments": arguments}}
    if id:
        piece["id"] = id
    if name:
        piece["function"]["name"] = name
    return {"tool_calls": [piece]}


DONE = b"data: [DONE]\n\n"


class Connection:
    """One request as the handler sees it. `closed` is set when the client has hung up."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.reader, self.writer, self.body = reader, writer, body
        self.closed = asyncio.Event()

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def begin(self) -> None:
        await self.raw(HEAD)

    async def send(self, data: bytes) -> None:
        """Send bytes of the event stream as one HTTP chunk."""
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def watch(self) -> None:
        while await self.reader.read(1024):
            pass
        self.closed.set()


Handler = Callable[[Connection], Awaitable[None]]


class ModelServer:
    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.requests: list[dict[str, Any]] = []
        self.connections: list[Connection] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def then(self, handler: Handler) -> None:
        """Answer the next request so; the last handler answers every further one."""
        self.handlers.append(handler)

    def stream(self, *events: bytes) -> None:
        async def handler(connection: Connection) -> None:
            await connection.begin()
            for data in events:
                await connection.send(data)
            await connection.end()

        self.then(handler)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        async def handler(connection: Connection) -> None:
            lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
            lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
            await connection.raw("\r\n".join([*lines, "", ""]).encode() + body)

        self.then(handler)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
            )
            body = json.loads(await reader.readexactly(length))
            connection = Connection(reader, writer, body)
            self.requests.append(body)
            self.connections.append(connection)
            watch = asyncio.create_task(connection.watch())
            handler = self.handlers.pop(0) if len(self.handlers) > 1 else self.handlers[0]
            try:
                await handler(connection)
            finally:
                watch.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def model_server() -> AsyncIterator[ModelServer]:
    model = ModelServer()
    server = await asyncio.start_server(model.serve, "127.0.0.1", 0)
    model.port = server.sockets[0].getsockname()[1]
    try:
        yield model
    finally:
        server.close()
