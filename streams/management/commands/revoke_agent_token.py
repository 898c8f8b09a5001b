"""Revoke an agent's token: it opens no door any more, and the sockets it holds are closed."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from streams import access
from streams.problems import Problem


class Command(BaseCommand):
    help = "Revoke an agent's token by its prefix, the part between ags_ and the next underscore."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("prefix")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            token = access.revoke_token(prefix=options["prefix"], caller=access.COMMAND)
        except Problem as problem:
            raise CommandError(problem.detail) from None
        self.stdout.write(f"Revoked {token.prefix} ({token.name}) at {token.revoked_at:%Y-%m-%d %H:%M:%S} UTC.")
