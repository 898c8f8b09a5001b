"""A warm process that forks executors, agents and servers in milliseconds, so that hundreds can be killed.

It reads lines from stdin: `fork KIND NAME [ENV=VALUE …]` and answers with the child's pid; it ends at the end of
stdin, and its children with it. No connection, thread or event loop exists before a fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import traceback


def main() -> None:
    import django

    django.setup()
    import uvicorn

    import agentsite.asgi
    import tests.faults.sink  # noqa: F401 - registers the tools
    from approvals.agent import Worker
    from approvals.executor import Executor
    from approvals.management.serving import serve
    from streams.adapters.scripted import ScriptedAdapter

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        _, kind, name, *variables = line.split()
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The kernel ends the child when this process is gone.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        os.environ.update(variable.split("=", 1) for variable in variables)
        try:
            if kind == "executor":
                executor = Executor(name=name, concurrency=3, lease_seconds=1)
                serve(executor.run(), executor.stop)
            elif kind == "agents":
                worker = Worker(name=name, makers={"scripted": ScriptedAdapter}, lease_seconds=1)
                serve(worker.run(), worker.stop)
            else:
                app = agentsite.asgi.application
                asyncio.run(
                    uvicorn.Server(
                        uvicorn.Config(
                            app,
                            host="127.0.0.1",
                            port=int(name),
                            log_level="error",
                            lifespan="off",
                            ws="websockets-sansio",
                        )
                    ).serve()
                )
        except Exception:  # noqa: BLE001 - told, then gone
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
