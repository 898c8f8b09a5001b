"""The sockets with buttons: a run that can be decided about, and the inbox (contract §4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar
from uuid import UUID

from approvals import access, decisions, feed, represent
from approvals.voted import Decided
from streams import clock, consumers, shape, sockets, strictjson, tail
from streams.access import SEE, Caller, require
from streams.consumers import Frame
from streams.problems import Invalid
from streams.shape import UNSET, Unset, optional
from streams.sockets import Scope, Send

PAGE = 50


class Decide(shape.Shape, frozen=True):
    """What is checked by the verb, in its order and with its codes, is not checked here."""

    type: str
    request_id: str
    action_id: str
    decision: str
    idempotency_key: Any = UNSET
    reason: str = ""
    arguments: dict[str, Any] | Unset = UNSET
    digest: str | Unset = UNSET


async def _decide(consumer: consumers.BaseConsumer, frame: Frame) -> None:
    sent = shape.read(frame, Decide)
    if not 1 <= len(sent.request_id) <= 200:
        raise Invalid("a requestId has 1 to 200 characters", field="requestId")
    answer = await tail.run_verb(_decide_now, consumer.signed_in(), sent)
    await consumer.reply({"type": "decided", "requestId": sent.request_id, **answer})


def _decide_now(caller: Caller, sent: Decide) -> Frame:
    decided = decisions.decide(
        caller=sockets.again(caller),
        action_id=sent.action_id,
        idempotency_key=optional(sent.idempotency_key, None),
        decision=sent.decision,
        reason=sent.reason,
        arguments_text=None if sent.arguments is UNSET else strictjson.dumps(sent.arguments),
        digest=optional(sent.digest, None),
    )
    return decided_json(decided)


def decided_json(decided: Decided) -> Frame:
    shown: Frame = {"replayed": decided.replayed}
    if decided.already_decided:
        shown["alreadyDecided"] = True
    shown["decision"] = represent.decision_json(decided.decision)
    shown["action"] = represent.action_json(decided.action)
    return shown


class GenerationConsumer(consumers.GenerationConsumer):
    """A run, where a person may also decide."""

    __slots__ = ()
    verbs: ClassVar[dict[str, Callable[[Any, Frame], Awaitable[None]]]] = {
        **consumers.GenerationConsumer.verbs,
        "decide": _decide,
    }


class InboxConsumer(consumers.BaseConsumer):
    """`/ws/inbox/`: the first page of the newest requests, then every change this caller may see."""

    __slots__ = ("_behind", "_feed", "_sees_all")

    verbs: ClassVar[dict[str, Callable[[Any, Frame], Awaitable[None]]]] = {"decide": _decide}

    def __init__(self, scope: Scope, send: Send) -> None:
        super().__init__(scope, send)
        # Changes that came before the welcome went out, or while the transport was full: one an action, the newest,
        # so that a reader who never reads costs no more than the actions there are. None: it is live.
        self._behind: dict[UUID, feed.Change] | None = {}
        self._feed: feed.Feed | None = None
        self._sees_all = False

    async def opened(self, hello: Frame, scope: Scope) -> None:
        caller = self.signed_in()
        self._sees_all = await tail.in_database(_sees_all, caller)
        self._feed = feed.feed()
        await self._feed.join(self.told, only_for=None if self._sees_all else caller)
        if self.is_closed:
            self.left()
            return
        await self.reply(await tail.run_verb(_welcome, caller))
        self.drained()

    def left(self) -> None:
        if self._feed is not None:
            self._feed.leave(self.told)
        self._behind = {}

    def acked(self, offset: int) -> None:
        """Take an ack, which means nothing here: an inbox has no offsets."""

    def heartbeat(self) -> str:
        return '{"type":"heartbeat","nextOffset":null}'

    def told(self, changes: list[feed.Change]) -> None:
        """Pass changes on, or keep the newest of each action while the line is not free."""
        for change in changes:
            if self._behind is None and self.is_full:
                self._behind = {}
            if self._behind is None:
                self.say(change.frame_with_counts if self._sees_all else change.frame)
            else:
                self._behind[change.action_id] = change

    def drained(self) -> None:
        behind, self._behind = self._behind, None
        self.told(list((behind or {}).values()))


def _sees_all(caller: Caller) -> bool:
    """Say whether this caller sees every action; raise NotAllowed for who would see none."""
    if caller.token is None:
        require(caller, None, SEE)
        return True
    if not any(map(caller.can, ("approvals:request", "generations:read", "generations:write", "read:all"))):
        require(caller, "approvals:read", None)
    return caller.can("read:all")


def _welcome(caller: Caller) -> Frame:
    # As every list: what is past its time is settled before it is shown.
    decisions.expire_due()
    as_of = clock.rfc3339(clock.now())
    rows = access.visible(caller).prefetch_related("decisions").order_by("-requested_at", "-pk").distinct()[:PAGE]
    return {
        "type": "welcome",
        "asOf": as_of,
        "counts": feed.counts(caller),
        "actions": [represent.summary_json(row) for row in rows],
        "heartbeatSeconds": consumers.heartbeat_seconds(),
    }
