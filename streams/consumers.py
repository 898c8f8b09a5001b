"""The sockets of contract §4: parse a frame, call one verb, map the answer.

Plain ASGI applications instead of channels' AsyncConsumer: that one keeps two tasks and a layer channel a socket and
crosses to a thread for every message. These keep the server's own task and a few slots.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar
from uuid import UUID

import msgspec
from django.conf import settings

from streams import access, doors, handshake, log, snapshots, sockets, strictjson, tail
from streams.access import Caller
from streams.problems import Invalid, NotAllowed, NotFound, NotSignedIn, Problem, RateLimited, TooLarge, TryAgain
from streams.sockets import Credential, Receive, Scope, Send
from streams.vigil import vigil

logger = logging.getLogger("streams.sockets")

# Contract §4.
MAX_FRAME_BYTES = 65_536
FRAMES_A_SECOND = 20
HELLO_SECONDS = 10.0
FULL_SECONDS = 30.0
# What a server may hold back for a socket before no more is said to it.
HELD_BYTES = 262_144
# A server whose peer is gone may never say so; what was closed is let go after this.
_LET_GO_SECONDS = 30.0

BAD_PROTOCOL, SIGN_IN, NOT_ALLOWED, NO_SUCH, TOO_SLOW, TOO_MANY = 4400, 4401, 4403, 4404, 4408, 4429
# Of the private range because daphne refuses to send 1013.
TRY_AGAIN_LATER = 4503

Frame = dict[str, Any]


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="ack"):
    offset: int


_ack = msgspec.json.Decoder(Ack)


def heartbeat_seconds() -> int:
    return int(getattr(settings, "SOCKET_HEARTBEAT_SECONDS", 15))


class BaseConsumer:
    """One socket: accept, hello first, then frames by their `type`. Subclasses say what a hello opens.

    Everything it sends goes through `say` (never waits) or `reply` (waits for the transport).
    """

    __slots__ = (
        "_allowance",
        "_allowance_at",
        "_beat_at",
        "_closed_at",
        "_deadline",
        "_full_since",
        "_rests",
        "_scope",
        "_send",
        "_task",
        "caller",
        "credential",
        "greeted",
    )
    # What may be said after hello, beside `ack`. Subclasses add their own.
    verbs: ClassVar[dict[str, Callable[[Any, Frame], Awaitable[None]]]] = {}

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope: Scope | None = scope
        self._send = send
        self._task = asyncio.current_task()
        now = asyncio.get_running_loop().time()
        self._deadline = now + HELLO_SECONDS
        self._beat_at = now
        self._allowance, self._allowance_at = float(FRAMES_A_SECOND), now
        self._closed_at: float | None = None
        self._full_since: float | None = None
        self._rests: set[asyncio.Task[None]] | None = None
        self.greeted = False
        self.caller: Caller | None = None
        self.credential: Credential | None = None

    @classmethod
    def as_asgi(cls) -> sockets.Application:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await cls(scope, send).serve(receive)

        return functools.update_wrapper(application, cls, updated=())

    # What subclasses fill in

    async def opened(self, hello: Frame, scope: Scope) -> None:
        """Welcome the caller, whom `signed_in` names. A Problem closes the socket with the code that belongs to it."""
        raise NotImplementedError

    def acked(self, offset: int) -> None:
        """Take the client's ack; raise Invalid for one that can't be."""

    def left(self) -> None:
        """Let go of everything; the socket is gone."""

    def heartbeat(self) -> str:
        """Return the frame that says it lives; a string, since it is made for every socket."""
        return '{"type":"heartbeat"}'

    def full_since(self) -> float | None:
        """Since when the client could not be given what there is."""
        return self._full_since

    def drained(self) -> None:
        """The transport took everything again."""

    @property
    def is_closed(self) -> bool:
        return self._closed_at is not None

    @property
    def is_full(self) -> bool:
        """Whether the transport holds back what was said."""
        return self._full_since is not None

    # The socket's life

    async def serve(self, receive: Receive) -> None:
        message = await receive()
        if message["type"] != "websocket.connect":
            return
        await self._send({"type": "websocket.accept"})
        vigil().add(self)
        try:
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    return
                if self._closed_at is None:
                    await self._heard(message.get("text"))
        except asyncio.CancelledError:
            if self._closed_at is None:
                raise
        except OSError:
            # uvicorn's way to say that the line is gone.
            return
        finally:
            vigil().discard(self)
            self._closed_at = self._closed_at or asyncio.get_running_loop().time()
            self.left()

    def tick(self, now: float) -> None:
        if self._closed_at is not None:
            if now - self._closed_at > _LET_GO_SECONDS and self._task is not None:
                self._task.cancel()
        elif not self.greeted:
            if now >= self._deadline:
                self.shut(BAD_PROTOCOL, "say hello first")
        else:
            if self._full_since is not None and self._rests is None and not sockets.held_back(self._send):
                self._full_since = None
                self.drained()
            full = self.full_since()
            if full is not None and now - full >= float(getattr(settings, "SOCKET_FULL_SECONDS", FULL_SECONDS)):
                self.shut(TOO_SLOW, "too slow, come back with your offset")
            elif now >= self._beat_at:
                self._beat_at = now + heartbeat_seconds()
                if self._full_since is None:
                    self.say(self.heartbeat())

    def shut(self, code: int, detail: str = "") -> None:
        """Close with this code; what was not sent yet stays unsent."""
        if self._closed_at is not None:
            return
        self._closed_at = asyncio.get_running_loop().time()
        self.left()
        self._offer({"type": "websocket.close", "code": code, "reason": detail[:100]})

    def say(self, text: str) -> None:
        """Send a frame without waiting; what the transport doesn't take now goes when it can."""
        if self._closed_at is None:
            self._offer({"type": "websocket.send", "text": text})
            if self._full_since is None and sockets.held_back(self._send) > HELD_BYTES:
                self._full_since = asyncio.get_running_loop().time()

    def _offer(self, message: Frame) -> None:
        try:
            rest = tail.offer(self._send(message))
        except Exception:  # noqa: BLE001 - servers raise what they like on a dead line; `receive` will tell
            return
        if rest is not None:
            self._full_since = self._full_since or asyncio.get_running_loop().time()
            if self._rests is None:
                self._rests = set()
            task = asyncio.create_task(self._wait_for(rest))
            self._rests.add(task)
            task.add_done_callback(self._rested)

    async def _wait_for(self, rest: Coroutine[Any, Any, None]) -> None:
        try:
            await rest
        except Exception:  # noqa: BLE001 - as in _offer
            return

    def _rested(self, task: asyncio.Task[None]) -> None:
        if self._rests is not None:
            self._rests.discard(task)
            if not self._rests:
                self._full_since = self._rests = None
                if self._closed_at is None:
                    self.drained()

    async def reply(self, frame: Frame) -> None:
        if self._closed_at is None:
            await self._send({"type": "websocket.send", "text": strictjson.dumps(frame)})

    # What the client says

    async def _heard(self, text: str | None) -> None:
        request_id: object = None
        try:
            if text is None:
                raise Invalid("a frame is a text")
            if len(text) > MAX_FRAME_BYTES or (len(text) * 4 > MAX_FRAME_BYTES and _bytes(text) > MAX_FRAME_BYTES):
                raise FrameTooLarge(f"a frame is at most {MAX_FRAME_BYTES} bytes", limit=MAX_FRAME_BYTES)
            if self.greeted and (ack := _read_ack(text)) is not None:
                self.acked(ack.offset)
                return
            self._count()
            frame = _read(text)
            request_id = frame.get("requestId")
            await self._do(frame)
        except Exception as error:
            problem = doors.as_problem(error)
            if problem is None:
                logger.exception("a frame could not be answered")
                problem = TryAgain("this could not be answered; send the same request again")
            await self._refuse(problem, request_id)

    async def _do(self, frame: Frame) -> None:
        kind = frame["type"]
        if kind == "hello":
            if self.greeted:
                raise SecondHello("hello is said once")
            await self._hello(frame)
            return
        if not self.greeted:
            raise Invalid("say hello first", field="type")
        if kind == "ack":
            raise Invalid("an ack is {type, offset}, the offset a whole number", field="offset")
        verb = self.verbs.get(kind)
        if verb is None:
            raise Invalid("there is no such frame", code="unknown_frame", field="type")
        await verb(self, frame)

    async def _hello(self, frame: Frame) -> None:
        hello = handshake.read_hello(frame)
        scope = self._scope
        assert scope is not None
        try:
            if hello.token is not None:
                self.caller, self.credential = await tail.in_database(
                    sockets.by_token, hello.token, scope.get("address", "")
                )
            elif "refusal" in scope:
                raise scope["refusal"]
            else:
                self.caller, self.credential = scope.get("caller"), scope.get("credential")
            if self.caller is None:
                raise NotSignedIn("sign in, or send a token")
            await self.opened(frame, scope)
        except Exception as error:
            problem = doors.as_problem(error)
            if problem is None:
                logger.exception("a socket could not be opened")
                problem = TryAgain("this could not be answered; come back")
            raise NotOpened(problem) from error
        self.greeted = True
        self._beat_at = asyncio.get_running_loop().time() + heartbeat_seconds()
        # The scope has done its work; a socket that idles for hours need not hold its headers.
        self._scope = None

    def _count(self) -> None:
        now = asyncio.get_running_loop().time()
        self._allowance = min(FRAMES_A_SECOND, self._allowance + (now - self._allowance_at) * FRAMES_A_SECOND)
        self._allowance_at = now
        if self._allowance < 1:
            raise RateLimited(f"{FRAMES_A_SECOND} frames a second are enough", limit=FRAMES_A_SECOND)
        if self.greeted:
            self._allowance -= 1

    async def _refuse(self, problem: Problem, request_id: object) -> None:
        opening = problem.problem if isinstance(problem, NotOpened) else None
        shown = opening or problem
        frame = {"type": "error", "code": shown.code, "detail": shown.detail, **shown.fields}
        if isinstance(request_id, str):
            frame["requestId"] = request_id[:200]
        await self.reply(frame)
        code = _close_code(problem)
        if code is not None:
            self.shut(code, shown.detail)

    def signed_in(self) -> Caller:
        assert self.caller is not None
        return self.caller


class SecondHello(Problem):
    code = "second_hello"


class FrameTooLarge(TooLarge):
    """Over what a client's frame may be; the socket is closed with 4429."""


class NotOpened(Problem):
    """What a hello asked for can't be; the socket is closed for it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail, code=problem.code)
        self.problem = problem


def _close_code(problem: Problem) -> int | None:
    match problem:
        case SecondHello() | handshake.UnknownProtocol():
            return BAD_PROTOCOL
        case RateLimited() | FrameTooLarge():
            return TOO_MANY
        case NotOpened(problem=NotSignedIn()):
            return SIGN_IN
        case NotOpened(problem=NotAllowed()):
            return NOT_ALLOWED
        case NotOpened(problem=NotFound()):
            return NO_SUCH
        case NotOpened():
            return TRY_AGAIN_LATER
    return None


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _read_ack(text: str) -> Ack | None:
    if len(text) > 100 or '"ack"' not in text:
        return None
    try:
        return _ack.decode(text)
    except msgspec.MsgspecError:
        return None


def _read(text: str) -> Frame:
    value = strictjson.loads(text, max_depth=strictjson.MAX_BODY_DEPTH)
    if not isinstance(value, dict):
        raise Invalid("a frame is a JSON object")
    if not isinstance(value.get("type"), str):
        raise Invalid("a frame has a type", field="type")
    return value


class GenerationConsumer(BaseConsumer):
    """`/ws/generations/{id}/`: one log, replayed and live."""

    __slots__ = ("generation_id", "reader", "tail")

    def __init__(self, scope: Scope, send: Send) -> None:
        super().__init__(scope, send)
        self.generation_id: UUID | None = None
        self.reader: tail.Reader | None = None
        self.tail: tail.Tail | None = None

    async def opened(self, hello: Frame, scope: Scope) -> None:
        said, snapshot = (
            handshake.read_hello(hello),
            await self._snapshot(scope["url_route"]["kwargs"]["generation_id"]),
        )
        reason = handshake.reset_reason(snapshot, said)
        if self._closed_at is None:
            await self._send({"type": "websocket.send", "text": snapshot.welcome})
        if reason is not None:
            await self.reply(handshake.reset_frame(snapshot, reason))
        cursor = said.from_ if reason is None else snapshot.first_offset
        self.generation_id = snapshot.generation_id
        reader = tail.Reader(send=self._send, cursor=cursor, target=snapshot.next_offset, lost=self._lost)
        if self.signed_in().user is not None:
            reader.texts_left = demo_cut.armed()
        hub_tail = await tail.hub().tail(self.generation_id)
        if self._closed_at is None:
            self.reader, self.tail = reader, hub_tail
            hub_tail.join(reader)
        elif not hub_tail.readers:
            tail.hub().forget(hub_tail)

    async def _snapshot(self, generation_id: str) -> handshake.Snapshot:
        """Return the log as it is now; what this caller may not see is not there."""
        caller = self.signed_in()
        try:
            key = UUID(generation_id)
        except ValueError:
            raise NotFound("no such generation") from None
        snapshot = await snapshots.snapshots().fresh(key, heartbeat_seconds=heartbeat_seconds())
        if caller.user is None:
            may = access.may_read(caller, token_id=snapshot.token_id)
        else:
            may = await tail.in_database(access.may_read, caller, token_id=snapshot.token_id)
        if not may:
            raise NotFound("no such generation")
        return snapshot

    def acked(self, offset: int) -> None:
        assert self.reader is not None
        assert self.tail is not None
        if not self.reader.acked <= offset < self.reader.cursor:
            if 0 <= offset < self.reader.acked:
                return
            raise Invalid("an ack names an offset that was sent", field="offset")
        self.tail.ack(self.reader, offset)

    def heartbeat(self) -> str:
        assert self.reader is not None
        assert self.tail is not None
        # All that is known to be there: a client that stays below it has lost something, or is told too slowly.
        return f'{{"type":"heartbeat","nextOffset":{max(self.reader.cursor, self.tail.edge)}}}'

    def full_since(self) -> float | None:
        assert self.reader is not None
        return self.reader.full_since or self._full_since

    def left(self) -> None:
        if self.tail is not None and self.reader is not None:
            self.tail.leave(self.reader)

    def _lost(self, code: int | None) -> None:
        if code == demo_cut.CODE and self.reader is not None and not demo_cut.take():
            self.reader.texts_left = None
        elif code is not None:
            self.shut(code)

    async def _cancel(self, frame: Frame) -> None:
        if set(frame) - {"type", "requestId"}:
            raise Invalid("a cancel has no other member")
        assert self.generation_id is not None
        await tail.run_verb(_cancel, self.signed_in(), self.generation_id)
        await self.reply({"type": "cancel_accepted"})

    verbs: ClassVar[dict[str, Callable[[Any, Frame], Awaitable[None]]]] = {"cancel": _cancel}


def _cancel(caller: Caller, generation_id: UUID) -> None:
    caller = sockets.again(caller)
    access.find_cancellable_generation(caller, generation_id)
    log.request_cancel(generation_id=generation_id, actor=caller.actor)


class DemoCut:
    """`demo --drop-at N`: cut a person's socket once, after its N-th text chunk. Off unless the setting says so."""

    # daphne sends 1000 and 3000 … 4999 only; any code but 4400 … 4404 is one a client comes back from.
    CODE = tail.CUT

    def __init__(self) -> None:
        self._done = False

    def armed(self) -> int | None:
        at = int(getattr(settings, "DEMO_DROP_AT", 0))
        return at if at > 0 and not self._done else None

    def take(self) -> bool:
        """Say whether this is the one cut; True once in a process."""
        first, self._done = not self._done, True
        return first


demo_cut = DemoCut()
