"""Many sockets that read one generation, as a process of its own and as light as Python allows. No Django.

`python -m agentsite.bench.reader '{"port":…,"path":…,"token":…,"sockets":n,"phases":[["paced",200],…]}'`: opens n
sockets, prints `{"event":"caught_up"}` when each has, then for each phase one line when every socket has seen that
many stamped chunks more. A chunk is stamped by its writer with the time, `@1764536400.123456@`; the clock is this
machine's. It speaks just as much WebSocket as our servers do on loopback.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
import time
from array import array
from typing import Any

_STAMP = re.compile(rb"@(\d+\.\d+)@")
_OFFSET = re.compile(rb'"offset":\s*(\d+)')
ACK_EVERY = 400
GIVE_UP_SECONDS = 180.0


class Crowd:
    """What all sockets of this process have seen together."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.sockets = int(config["sockets"])
        self.phases: list[tuple[str, int]] = [(name, count) for name, count in config["phases"]]
        self.caught_up = 0
        self.seen = 0
        self.latencies = array("d")
        self.first_at = 0.0
        self.finished = asyncio.Event()

    def opened(self) -> None:
        self.caught_up += 1
        if self.caught_up == self.sockets:
            say(event="caught_up", at=time.time())
            if not self.phases:
                self.finished.set()

    def arrived(self, stamps: list[bytes]) -> None:
        now = time.time()
        if not self.seen:
            self.first_at = now
        self.seen += len(stamps)
        for stamp in stamps:
            self.latencies.append(now - float(stamp))
        if self.phases and self.seen >= self.phases[0][1] * self.sockets:
            name, _ = self.phases.pop(0)
            ordered = sorted(self.latencies)
            count = len(ordered)
            say(
                event=name,
                deliveries=count,
                seconds=now - self.first_at,
                at=now,
                p50_ms=round(1_000 * ordered[count // 2], 2),
                p99_ms=round(1_000 * ordered[min(count - 1, count * 99 // 100)], 2),
                max_ms=round(1_000 * ordered[-1], 2),
            )
            self.seen, self.latencies = 0, array("d")
            if not self.phases:
                self.finished.set()


class Reader(asyncio.Protocol):
    """One socket: upgrade, hello, count, acknowledge."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.buffer = bytearray()
        self.upgraded = False
        self.unacked = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        config = self.crowd.config
        transport.write(
            f"GET {config['path']} HTTP/1.1\r\nHost: 127.0.0.1:{config['port']}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YmVuY2hiZW5jaGJlbmNoIQ==\r\n"
            f"Authorization: Bearer {config['token']}\r\n\r\n".encode()
        )

    def connection_lost(self, error: Exception | None) -> None:
        if not self.crowd.finished.is_set():
            fail(f"a socket was closed: {error}")

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.upgraded:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            if b" 101 " not in self.buffer[:20]:
                fail(f"no upgrade: {bytes(self.buffer[:200])!r}")
            del self.buffer[: end + 4]
            self.upgraded = True
            self.send(b'{"type":"hello","protocol":1,"from":0}')
        self.frames()

    def frames(self) -> None:
        buffer, place = self.buffer, 0
        while len(buffer) - place >= 2:
            code, size, start = buffer[place] & 0x0F, buffer[place + 1] & 0x7F, place + 2
            if size == 126:
                size, start = int.from_bytes(buffer[place + 2 : place + 4]), place + 4
            elif size == 127:
                size, start = int.from_bytes(buffer[place + 2 : place + 10]), place + 10
            if len(buffer) < start + size or (start > place + 2 and len(buffer) < start):
                break
            self.frame(code, bytes(buffer[start : start + size]))
            place = start + size
        del buffer[:place]

    def frame(self, code: int, payload: bytes) -> None:
        if code == 9:
            self.send(payload, code=10)
        elif code == 8:
            fail(f"a socket was closed with {int.from_bytes(payload[:2])}: {payload[2:].decode(errors='replace')}")
        elif b'"entries"' in payload[:40]:
            stamps = _STAMP.findall(payload)
            self.unacked += payload.count(b'"offset"')
            if self.unacked >= ACK_EVERY:
                self.unacked = 0
                self.send(b'{"type":"ack","offset":%s}' % _OFFSET.findall(payload)[-1])
            if stamps:
                self.crowd.arrived(stamps)
        elif b'"caught_up"' in payload[:40]:
            self.crowd.opened()
        elif b'"error"' in payload[:40]:
            fail(payload.decode())

    def send(self, payload: bytes, *, code: int = 1) -> None:
        size = len(payload)
        head = bytes([0x80 | code, 0x80 | size]) if size < 126 else bytes([0x80 | code, 0xFE]) + size.to_bytes(2)
        # A mask of zeros is a mask.
        self.transport.write(head + b"\0\0\0\0" + payload)


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def fail(why: str) -> None:
    say(event="failed", why=why)
    raise SystemExit(1)


async def main(config: dict[str, Any]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = asyncio.get_running_loop()
    crowd = Crowd(config)
    for number in range(crowd.sockets):
        await loop.create_connection(lambda: Reader(crowd), "127.0.0.1", config["port"])
        # A crowd that comes at once is another measurement.
        while number - crowd.caught_up > 50:  # noqa: ASYNC110 - a pace, not a wait for one thing
            await asyncio.sleep(0.01)
    try:
        await asyncio.wait_for(crowd.finished.wait(), GIVE_UP_SECONDS)
    except TimeoutError:
        fail(f"gave up after {GIVE_UP_SECONDS} s: {crowd.caught_up} caught up, {crowd.seen} seen of {crowd.phases}")
    # Idle sockets stay until whoever asked for them closes the pipe.
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
