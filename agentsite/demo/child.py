"""A process of the demo that can't outlive it: `python -m agentsite.demo.child FD server PORT`, or `… FD manage ARGS`.

FD is the reading end of a pipe whose writing end only the demo holds. When the demo is gone, however it went, the
pipe ends, and so does this process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

GRACE_SECONDS = 8.0


def main(arguments: list[str]) -> None:
    pipe, what, *rest = arguments
    threading.Thread(target=_end_with, args=(int(pipe),), daemon=True).start()
    if what == "server":
        from daphne.cli import CommandLineInterface

        CommandLineInterface().run(["-b", "127.0.0.1", "-p", rest[0], "-v", "0", "agentsite.asgi:application"])
    else:
        import manage

        sys.argv = ["manage.py", *rest]
        manage.main()


def _end_with(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
