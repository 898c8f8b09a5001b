"""What an agent's own process imports to write its log, ask, and run what was approved. Pure: no Django, no extras.

Every call may be repeated, so it is: a broken connection, a timeout, 429, 503 or any other 5xx is tried again with
the same body until it is answered or `give_up_after_seconds` has passed. A refusal (4xx) is raised as `Refused` with
its code at once. Blocking; one `Client` may be used by several threads.

    client = Client("http://127.0.0.1:8000", token)
    writer = client.open(title="Refund order 1042")
    writer.text("The parcel is lost, so I would refund it.")
    action = writer.call(id="c1", name="shop.refund", arguments={"order": 1042})
    writer.done("tool_use")
    settled = client.wait_decided(action["actionId"])
"""

from __future__ import annotations

import http.client
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, cast

import msgspec

from streams import strictjson
from streams.protocol import (
    MAX_BODY_BYTES,
    MAX_CHUNKS,
    Chunk,
    Done,
    DoneReason,
    Text,
    ToolCall,
    ToolResult,
    Usage,
    encode,
)

LONG_POLL_SECONDS = 25
_AGAIN = {429, 500, 502, 503, 504}


class Refused(Exception):
    """The server said no. `code` is stable (docs/contract.md §6), `body` the whole problem document."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status, self.body = status, body
        self.code = str(body.get("code", "invalid"))
        super().__init__(f"{status} {self.code}: {body.get('detail', '')}")


class NotAnswered(Exception):
    """No answer came in time. Whether it happened is not known; the same call may be made again."""


class Client:
    """Talk to one site with one agent token."""

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        give_up_after_seconds: float = 300,
        timeout_seconds: float = 40,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        if urllib.parse.urlsplit(base_url).scheme not in ("http", "https"):
            raise ValueError("the address of the site begins with http:// or https://")
        self._base = base_url.rstrip("/") + "/api/v1"
        self._token = token
        self._give_up_after_seconds = give_up_after_seconds
        self._timeout_seconds = timeout_seconds
        self._pause = pause
        # A redirect would carry the token to wherever it points.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send(self, method: str, path: str, body: Any = None, *, key: str = "") -> dict[str, Any]:
        """Make one call until it is answered; raise Refused or NotAnswered. Numbers come as int and Decimal."""
        data = None if body is None else (body if isinstance(body, bytes) else _dumps(body).encode())
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if key:
            headers["Idempotency-Key"] = key
        deadline = time.monotonic() + self._give_up_after_seconds
        pause_seconds = 0.1
        while True:
            request = urllib.request.Request(self._base + path, data=data, headers=headers, method=method)  # noqa: S310 - the scheme is checked above
            try:
                with self._opener.open(request, timeout=self._timeout_seconds) as answer:
                    text = answer.read()
                body = strictjson.loads(text, max_depth=strictjson.MAX_WRITE_DEPTH) if text.strip() else {}
                return cast(dict[str, Any], body)
            except urllib.error.HTTPError as error:
                with error:
                    problem, retry_after = _problem(error), error.headers.get("Retry-After", "")
                again = error.code in _AGAIN or problem.get("code") == "in_flight"
                if not again:
                    raise Refused(error.code, problem) from None
                why = f"the site answered {error.code}"
                wait_seconds = float(retry_after) if retry_after.isdigit() else pause_seconds
            except (OSError, http.client.HTTPException, strictjson.BadJSON) as error:
                why = f"the site can't be reached or broke off ({type(error).__name__})"
                wait_seconds = pause_seconds
            if time.monotonic() + wait_seconds > deadline:
                raise NotAnswered(why)
            self._pause(wait_seconds * (0.5 + random.random() / 2) if wait_seconds == pause_seconds else wait_seconds)  # noqa: S311
            pause_seconds = min(5.0, pause_seconds * 2)

    # --- the log -----------------------------------------------------------------------------------

    def open(self, *, id: str = "", writer: str = "", **fields: Any) -> Writer:
        """Open a generation (or the one with this `id`) and return a writer that stands at its end."""
        generation = self.send("POST", "/generations", {"id": id or str(uuid.uuid4()), **fields})
        return Writer(self, generation, writer=writer or f"client:{uuid.uuid4().hex}")

    def generation(self, generation_id: str) -> dict[str, Any]:
        return self.send("GET", f"/generations/{generation_id}")

    def entries(self, generation_id: str, *, from_offset: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the entries from an offset to today's end."""
        while True:
            page = self.send("GET", f"/generations/{generation_id}/entries?from={from_offset}")
            yield from page["entries"]
            if not page["entries"]:
                return
            from_offset = page["nextOffset"]

    # --- asking ------------------------------------------------------------------------------------

    def ask(self, *, key: str, tool: str, arguments: Any, **fields: Any) -> dict[str, Any]:
        """Ask for one thing outside a log; the same `key` is the same question."""
        return self.send("POST", "/approvals", {"tool": tool, "arguments": arguments, **fields}, key=key)

    def action(self, action_id: str) -> dict[str, Any]:
        return self.send("GET", f"/approvals/{action_id}")

    def wait_decided(self, action_id: str, *, seconds: float | None = None) -> dict[str, Any]:
        """Wait until it is no longer pending, however often the line breaks; with `seconds` return it as it is then."""
        return self._wait(action_id, lambda action: action["state"] != "pending", seconds)

    def wait_settled(self, action_id: str, *, seconds: float | None = None) -> dict[str, Any]:
        """Wait until nothing more will happen by itself (`unknown` needs a person, so it is returned)."""
        moving = ("pending", "approved", "executing")
        return self._wait(action_id, lambda action: action["state"] not in moving, seconds)

    def _wait(self, action_id: str, over: Callable[[dict[str, Any]], bool], seconds: float | None) -> dict[str, Any]:
        deadline = None if seconds is None else time.monotonic() + seconds
        action = self.action(action_id)
        while not over(action):
            left = LONG_POLL_SECONDS if deadline is None else min(LONG_POLL_SECONDS, int(deadline - time.monotonic()))
            if deadline is not None and left <= 0:
                return action
            action = self.send("GET", f"/approvals/{action_id}?version={action['version']}&wait={left}")
        return action

    # --- running -----------------------------------------------------------------------------------

    def claim(self, **fields: Any) -> list[dict[str, Any]]:
        """Claim by `actionId=` or `tools=`; `claimId` is made here unless given. A lost answer locks nothing."""
        answer = self.send("POST", "/claims", {"claimId": uuid.uuid4().hex, **fields})
        return cast(list[dict[str, Any]], answer["claims"])

    def complete(self, claim_token: str, outcome: str, *, result: Any = None) -> dict[str, Any]:
        body: dict[str, Any] = {"claimToken": claim_token, "outcome": outcome}
        if outcome != "not_started":
            body["result"] = result
        return self.send("POST", "/claims/complete", body)

    @contextmanager
    def keep(self, claim: dict[str, Any]) -> Iterator[threading.Event]:
        """Renew a claim's lease while the block runs; the event is set when it should stop (cancel, or lease lost)."""
        should_stop, over = threading.Event(), threading.Event()
        body = {"claimToken": claim["claimToken"], "leaseSeconds": claim["leaseSeconds"]}

        def beat() -> None:
            while not over.wait(claim["leaseSeconds"] / 3):
                try:
                    if self.send("POST", "/claims/heartbeat", body)["cancelRequested"]:
                        should_stop.set()
                except (Refused, NotAnswered):
                    should_stop.set()
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield should_stop
        finally:
            over.set()
            thread.join()


class Writer:
    """Append to one generation. Not for several threads: a log has one writer."""

    def __init__(self, client: Client, generation: dict[str, Any], *, writer: str) -> None:
        self._client, self._writer = client, writer
        self.id = str(generation["id"])
        self.attempt, self.seq = int(generation["attempt"]), int(generation["nextSeq"])
        self.cancel_requested = bool(generation.get("cancelRequested", False))
        self._superseded_from: int | None = None

    def append(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Store chunks in order, in as few calls as the limits allow; return the last answer."""
        answer: dict[str, Any] = {}
        actions: list[Any] = []
        for bodies in _batches([encode(chunk) for chunk in chunks]):
            head: dict[str, Any] = {"attempt": self.attempt, "seq": self.seq, "writer": self._writer}
            if self._superseded_from is not None:
                head["supersededFrom"] = self._superseded_from
            # The chunks' own texts, not parsed again: a result's numbers stay as they are.
            data = _dumps(head).encode()[:-1] + b',"chunks":[' + b",".join(bodies) + b"]}"
            answer = self._client.send("POST", f"/generations/{self.id}/chunks", data)
            self._superseded_from = None
            self.seq += len(bodies)
            self.cancel_requested = self.cancel_requested or bool(answer["cancelRequested"])
            actions += answer.get("actions", [])
        return {**answer, "actions": actions}

    def text(self, content: str) -> dict[str, Any]:
        return self.append([Text(content=content)])

    def call(self, *, id: str, name: str, arguments: Any, index: int = 0) -> dict[str, Any]:
        """Make one tool call; return its action as `{toolCallId, actionId, state}`."""
        text = arguments if isinstance(arguments, str) else _dumps(arguments)
        answer = self.append([ToolCall(id=id, name=name, arguments=text, index=index)])
        return cast(dict[str, Any], answer["actions"][0])

    def result(self, *, tool_call_id: str, result: Any, is_error: bool = False) -> dict[str, Any]:
        """Give the result of a call that policy allowed; a gated call's comes by its claim."""
        raw = msgspec.Raw(_dumps(result).encode())
        return self.append([ToolResult(id=uuid.uuid4().hex, toolCallId=tool_call_id, result=raw, isError=is_error)])

    def done(self, reason: DoneReason = "stop", usage: Usage | None = None) -> dict[str, Any]:
        return self.append([Done(reason=reason, usage=msgspec.UNSET if usage is None else usage)])

    def heartbeat(self) -> bool:
        """Say that the agent lives; return whether somebody asked it to stop."""
        head = {"attempt": self.attempt, "seq": self.seq, "writer": self._writer, "chunks": []}
        answer = self._client.send("POST", f"/generations/{self.id}/chunks", head)
        self.cancel_requested = self.cancel_requested or bool(answer["cancelRequested"])
        return self.cancel_requested

    def start_over(self, *, superseded_from: int | None = None) -> None:
        """Begin a new attempt with the next append; what the last one said from `superseded_from` on is void."""
        self.attempt, self.seq, self._superseded_from = self.attempt + 1, 0, superseded_from


def _batches(bodies: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 1_000
    for body in bodies:
        if batch and (len(batch) == MAX_CHUNKS or size + len(body) + 1 > MAX_BODY_BYTES):
            yield batch
            batch, size = [], 1_000
        batch.append(body)
        size += len(body) + 1
    if batch:
        yield batch


def _dumps(value: Any) -> str:
    return strictjson.dumps(_exact(value))


def _exact(value: Any) -> Any:
    """Take a float as the decimal Python shows for it; everything else is left to the strict writer."""
    if isinstance(value, float):
        return Decimal(repr(value))
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    return value


def _problem(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        body = strictjson.loads(error.read())
    except (strictjson.BadJSON, OSError, http.client.HTTPException):
        return {}
    return cast(dict[str, Any], body) if isinstance(body, dict) else {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
