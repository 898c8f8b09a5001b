"""Run an asyncio service as a command: ends on SIGTERM, Ctrl-C or a dead terminal, finishing what it holds."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Coroutine
from typing import Any


def serve(service: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Run `service` until it ends; the first signal sets `stop`, the second one kills as if there were no handler."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def asked_to_end(number: signal.Signals) -> None:
            stop.set()
            loop.remove_signal_handler(number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, asked_to_end, number)
        await service

    asyncio.run(main())


def process_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
