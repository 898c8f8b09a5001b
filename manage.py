#!/usr/bin/env python
"""Run a Django command of this project: `uv run manage.py demo` is the first to try."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "agentsite.settings")
    from django.core.management import execute_from_command_line

    from agentsite import startup

    # A command's own help needs no database.
    if not {"--help", "-h"} & set(sys.argv[2:]):
        startup.before_command(sys.argv[1] if len(sys.argv) > 1 else "")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
