"""Make an agent's token and print its secret, once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser

from streams import access, clock
from streams.problems import Problem

DEFAULT_SCOPES = ("generations:write", "generations:read", "approvals:request", "approvals:read")


class Command(BaseCommand):
    help = "Make an agent's token. The secret is printed once and kept nowhere."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="what people see as the requester")
        parser.add_argument(
            "--scope",
            action="append",
            choices=access.SCOPES,
            help=f"may be given several times; without it: {', '.join(DEFAULT_SCOPES)}",
        )
        parser.add_argument(
            "--owner", metavar="USER", help="who answers for the agent, and may not approve what it asks"
        )
        parser.add_argument(
            "--claims",
            action="append",
            metavar="PATTERN",
            help="tools it may run for others, as in 'mail_*' or '*'; gives it the scope claims",
        )
        parser.add_argument("--expires-days", type=int, metavar="N", help="ends by itself after N days")

    def handle(self, *args: Any, **options: Any) -> None:
        scopes = list(options["scope"] or DEFAULT_SCOPES)
        tools = list(options["claims"] or [])
        if tools and "claims" not in scopes:
            scopes.append("claims")
        days = options["expires_days"]
        if days is not None and not 1 <= days <= 36_500:
            raise CommandError("--expires-days is a number of days from 1 to 36500")
        try:
            token, secret = access.create_token(
                name=options["name"],
                scopes=scopes,
                owner=self._owner(options["owner"]),
                claim_tools=tools,
                expires_at=clock.now() + timedelta(days=days) if days is not None else None,
            )
        except Problem as problem:
            raise CommandError(problem.detail) from None
        # The secret alone on stdout, so that a script can take it; what people read goes to stderr.
        self.stdout.write(secret)
        until = f" until {token.expires_at:%Y-%m-%d %H:%M} UTC" if token.expires_at else ""
        self.stderr.write(
            f"Token {token.prefix} for {token.name}{until}, scopes {', '.join(scopes)}. "
            f"The line above is shown only now. Revoke it with: manage.py revoke_agent_token {token.prefix}"
        )

    def _owner(self, username: str | None) -> User | None:
        if username is None:
            return None
        try:
            return User.objects.get(username=username)
        except User.DoesNotExist:
            raise CommandError(f"there is no user {username!r}") from None
