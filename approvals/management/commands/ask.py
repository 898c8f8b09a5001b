"""`manage.py ask "refund order 1042"`: one question to an OpenAI-compatible model, by the same loop as the demo's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import UUID

from channels.db import database_sync_to_async
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from approvals import agent, tools
from approvals.management.serving import process_name, serve
from approvals.models import ApprovalRequest
from approvals.providers import available, missing
from streams import access, doorbell, log, strictjson
from streams.access import Caller
from streams.adapters import Message
from streams.models import AgentToken
from streams.protocol import Actor

INSTRUCTIONS = (
    "You work in the support of a small shop. Use the tools to act. A person decides about each call; "
    "if a call was rejected, do not repeat it."
)


class Command(BaseCommand):
    help = "Ask an OpenAI-compatible model; people approve what it wants to do."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("text", help='what you want, for example "refund order 1042"')
        parser.add_argument("--site", default="", help="address of the running site (default: the demo's)")
        parser.add_argument("--system", default=INSTRUCTIONS, help="instead of the built-in instructions")

    def handle(self, **options: Any) -> None:
        wanted = missing()
        if wanted:
            raise CommandError("ask needs an OpenAI-compatible endpoint:\n  " + "\n  ".join(wanted))
        if not options["text"].strip():
            raise CommandError('say what you want: manage.py ask "refund order 1042"')
        site = (options["site"] or _demo_url() or "http://127.0.0.1:8000").rstrip("/")
        generation = agent.start(
            caller=_caller(),
            adapter="openai",
            messages=[
                Message(role="system", content=options["system"]),
                Message(role="user", content=options["text"]),
            ],
            tool_names=[tool.name for tool in tools.all_tools()],
            title=options["text"][:200],
        )
        self.stdout.write(f"Run: {site}/runs/{generation.pk}/")
        asking = _Asking(self, generation.pk, site)
        serve(asking.run(), asking.stop)
        if asking.reason != "stop":
            raise CommandError(asking.why or f"the run ended: {asking.reason or 'interrupted'}")


class _Asking:
    """Drive runs in this process and print this one's log as it grows. A worker elsewhere may take turns of it too."""

    def __init__(self, command: BaseCommand, generation_id: UUID, site: str) -> None:
        self._command, self._id, self._site = command, generation_id, site
        self._providers = available()
        self._worker = agent.Worker(name=f"ask:{process_name()}", makers={"openai": self._providers.makers["openai"]})
        self.stop = self._worker.stop
        self.reason, self.why = "", ""

    async def run(self) -> None:
        working = asyncio.create_task(self._worker.run())
        try:
            await self._follow()
            if not self.stop.is_set():
                # The log has its end; the worker that wrote it has still to say so of the run.
                await self._worker.settle(seconds=5)
        finally:
            self.stop.set()
            await working
            await self._providers.aclose()

    async def _follow(self) -> None:
        place = 0
        async with doorbell.listen(f"g:{self._id}") as bell:
            while True:
                rows = await database_sync_to_async(log.read)(generation_id=self._id, from_offset=place)
                for row in rows:
                    place = row.offset + 1
                    body: Any = strictjson.loads(row.body)
                    await self._tell(body)
                    if body["type"] == "done":
                        self.reason = body["reason"]
                        self._print("\n")
                        return
                if self.stop.is_set():
                    await self._leave()
                    return
                if not rows:
                    await bell.wait(0.5)

    async def _tell(self, body: Any) -> None:
        if body["type"] == "text":
            self._print(body["content"])
        elif body["type"] == "tool_call":
            rows = ApprovalRequest.objects.filter(generation=self._id, tool_call_id=body["id"])
            action = await database_sync_to_async(rows.order_by("-attempt").first)()
            if action is not None and action.state == "pending":
                self._print(
                    f"\n→ {action.tool} {action.arguments_text}\n  approve: {self._site}/approvals/{action.pk}/\n"
                )
        elif body["type"] == "tool_result":
            self._print(f"\n← {strictjson.dumps(body['result'])}\n")
        elif body["type"] == "error":
            self.why = f"{body['error']['code']}: {body['error']['message']}"
            self._print(f"\n! {self.why}\n")
        elif body["type"] == "restart":
            self._print("\n(started over)\n")

    async def _leave(self) -> None:
        """Stop the run when its person leaves: nobody would read on."""
        person = Actor(kind="person", id="command", name="manage.py")
        await database_sync_to_async(log.request_cancel)(generation_id=self._id, actor=person)
        self.reason = "cancel"
        self._print("\nstopped\n")

    def _print(self, text: str) -> None:
        self._command.stdout.write(text, ending="")
        self._command.stdout.flush()


def _caller() -> Caller:
    """Ask as a token nobody has the secret of, so that any operator may decide."""
    token = AgentToken.objects.filter(name="ask", revoked_at__isnull=True, expires_at__isnull=True).first()
    if token is None:
        token, _ = access.create_token(name="ask", scopes=["generations:write", "approvals:request"])
    return Caller(actor=Actor(kind="token", id=token.prefix, name=token.name), token=token, user=None, door="command")


def _demo_url() -> str:
    try:
        kept = json.loads((Path(settings.VAR_DIR) / "demo" / "secrets.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(kept.get("url", ""))
