"""The JSON door of generations and tokens (contract §3). Chunks come by a plain view, since they are the hot path."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from drf_spectacular.utils import extend_schema
from msgspec import Meta
from rest_framework.request import Request
from rest_framework.response import Response

from streams import access, docs, doors, log, queries, represent, strictjson
from streams.models import Generation
from streams.problems import Invalid, TooLarge
from streams.protocol import MAX_BODY_BYTES, MAX_CHUNKS, MAX_COUNT, MEMBER, BadChunk, decode_chunks
from streams.shape import UNSET, Shape, Unset, optional, refusal, text
from streams.strictjson import MAX_BODY_DEPTH
from streams.views import View
from streams.waiting import run

MAX_METADATA_BYTES = 65_536
MAX_ATTEMPT = 2**31 - 1

Line = Annotated[str, Meta(max_length=200)]


class NewGeneration(Shape, frozen=True):
    id: UUID | Unset = UNSET
    title: Line = ""
    conversation: Line = ""
    model: Line = ""
    metadata: dict[str, Any] | Unset = UNSET
    producer_timeout_seconds: Annotated[int, Meta(ge=5, le=86_400)] = 60


class Nothing(Shape, frozen=True):
    """A body that says nothing: empty, or `{}`."""


class Generations(View):
    """Open a generation, or list those one may see, newest first."""

    @extend_schema(
        operation_id="generations_create",
        request=docs.body(NewGeneration),
        responses=docs.answers({201: docs.GENERATION, 200: docs.GENERATION}, 409, 413),
    )
    def post(self, request: Request) -> Response:
        access.require(self.caller, "generations:write", None)
        sent = self.body(NewGeneration)
        metadata_text = strictjson.dumps(optional(sent.metadata, {}))
        if len(metadata_text.encode()) > MAX_METADATA_BYTES:
            raise TooLarge(
                f"metadata is at most {MAX_METADATA_BYTES} bytes", field="metadata", limit=MAX_METADATA_BYTES
            )
        generation, created = log.create(
            actor_token=self.caller.token,
            user_id=None,
            id=optional(sent.id, None),
            title=sent.title,
            conversation=sent.conversation,
            model=sent.model,
            metadata_text=metadata_text,
            producer_timeout_seconds=sent.producer_timeout_seconds,
        )
        return Response(represent.generation_json(generation), status=201 if created else 200)

    @extend_schema(
        operation_id="generations_list",
        parameters=[
            docs.query("state", "open, waiting, retrying, cancelling, done, cancelled or error"),
            docs.query("conversation", "exactly this conversation"),
            docs.query("since", "created at this time (with zone) or later"),
            *docs.PAGE,
        ],
        responses=docs.answers({200: docs.page(docs.GENERATION)}),
    )
    def get(self, request: Request) -> Response:
        _require_reading(self.caller)
        rows = access.readable_generations(self.caller).order_by("-created_at", "-id")
        if state := queries.text(request, "state"):
            if state not in represent.STATES:
                raise Invalid(f"state is one of {', '.join(represent.STATES)}", field="state")
            rows = rows.filter(represent.STATES[state])
        if conversation := queries.text(request, "conversation"):
            rows = rows.filter(conversation=conversation)
        if since := queries.moment(request, "since"):
            rows = rows.filter(created_at__gte=since)
        if cursor := queries.cursor(request):
            moment, key = cursor
            rows = rows.filter(Q(created_at__lt=moment) | Q(created_at=moment, id__lt=key))
        limit = queries.page_limit(request)
        page = list(rows[: limit + 1])
        return Response(queries.page(page, limit, represent.generation_json, _place))


def _place(generation: Generation) -> tuple[datetime, UUID]:
    return generation.created_at, generation.pk


def _require_reading(caller: access.Caller) -> None:
    """Refuse a list to whoever could see no generation at all, so that an empty list means what it says."""
    if not any(map(caller.can, ("generations:read", "generations:write", "read:all", access.SEE))):
        access.require(caller, "generations:read", access.SEE)


class OneGeneration(View):
    """Show a generation with its actions."""

    @extend_schema(
        operation_id="generations_get", responses=docs.answers({200: docs.GENERATION}, 404), parameters=[docs.ID]
    )
    def get(self, request: Request, generation_id: str) -> Response:
        generation = access.find_generation(self.caller, doors.path_uuid(generation_id, what="generation"))
        return Response(represent.generation_json(generation))


class Entries(View):
    """Read the log from an offset on; empty at the tail."""

    @extend_schema(
        operation_id="generations_entries",
        parameters=[
            docs.ID,
            docs.query("from", "offset of the first entry wanted", int),
            docs.query("limit", "1 … 1,000", int),
        ],
        responses=docs.answers({200: docs.ENTRIES}, 404, 410),
    )
    def get(self, request: Request, generation_id: str) -> Response:
        # The head first: its state may be older than the entries then, never newer.
        head = access.find_generation(self.caller, doors.path_uuid(generation_id, what="generation"))
        first = queries.whole(request, "from", low=0, high=MAX_COUNT, default=head.first_offset)
        limit = queries.page_limit(request, default=200, most=1_000)
        if first < head.first_offset:
            raise log.OffsetGone("these entries were pruned", firstOffset=head.first_offset)
        rows = log.read(generation_id=head.pk, from_offset=first, limit=limit)
        next_offset = rows[-1].offset + 1 if rows else min(first, head.next_offset)
        page = f'{{"entries":[{",".join(row.text for row in rows)}],"nextOffset":{next_offset},"state":"{head.state}"}}'
        return Response(page.encode())


class Cancel(View):
    """Ask the producer to stop; what is pending or approved is cancelled at once."""

    @extend_schema(
        operation_id="generations_cancel",
        request=docs.body(Nothing),
        parameters=[docs.ID],
        responses=docs.answers({202: docs.GENERATION, 200: docs.GENERATION}, 403, 404),
    )
    def post(self, request: Request, generation_id: str) -> Response:
        self.body(Nothing)
        key = doors.path_uuid(generation_id, what="generation")
        access.find_cancellable_generation(self.caller, key)
        asked = log.request_cancel(generation_id=key, actor=self.caller.actor)
        generation = access.find_generation(self.caller, key)
        return Response(represent.generation_json(generation), status=202 if asked else 200)


class OneToken(View):
    """Revoke an agent's token. For people who may configure."""

    @extend_schema(
        operation_id="tokens_revoke", responses=docs.answers({204: None}, 403, 404), parameters=[docs.PREFIX]
    )
    def delete(self, request: Request, prefix: str) -> Response:
        if "\0" in prefix or len(prefix) > 16:
            prefix = ""
        access.revoke_token(prefix=prefix, caller=self.caller)
        return Response(status=204)


# --- chunks -------------------------------------------------------------------------------------------------------


class Envelope(Shape, frozen=True):
    """The body of an append; what the chunks are is decoded one by one, so that a fault has its index."""

    attempt: Annotated[int, Meta(ge=1, le=MAX_ATTEMPT)]
    seq: Annotated[int, Meta(ge=0, le=MAX_COUNT)]
    chunks: list[msgspec.Raw] = []
    writer: Annotated[str, Meta(min_length=1, max_length=200)] | Unset = UNSET
    superseded_from: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | Unset = UNSET


_envelope = msgspec.json.Decoder(Envelope)


def read_envelope(data: bytes) -> Envelope:
    """Decode an append's body, or raise what names the place."""
    try:
        sent = _envelope.decode(data)
    except RecursionError:
        raise Invalid("the body is nested too deep") from None
    except msgspec.ValidationError as error:
        raise refusal(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The quick reader can't say in which chunk; the strict one can.
        _read_strictly(data)
        raise Invalid(str(error)) from None
    if len(sent.chunks) > MAX_CHUNKS:
        raise TooLarge(f"a request carries at most {MAX_CHUNKS} chunks", field="chunks", limit=MAX_CHUNKS)
    members = len(MEMBER.findall(data)) - sum(len(MEMBER.findall(bytes(raw))) for raw in sent.chunks)
    given = (sent.writer is not UNSET) + (sent.superseded_from is not UNSET) + (b'"chunks"' in data)
    if members > 2 + given:
        # More members than this envelope has: a key stands twice, or only looks so inside `writer`.
        _read_strictly(data)
    if sent.writer is not UNSET:
        text(sent.writer, field="writer", low=1, high=200)
    return sent


def _read_strictly(data: bytes) -> None:
    try:
        strictjson.loads(data, max_depth=MAX_BODY_DEPTH)
    except strictjson.BadJSON as bad:
        within, _, path = (bad.field or "").partition(".")
        index, _, field = path.partition(".")
        if within != "chunks" or not index.isdigit():
            raise
        raise BadChunk(bad.detail, index=int(index), field=field or None, code=bad.code, limit=bad.limit) from None


@doors.answering
def append(request: HttpRequest, generation_id: str) -> HttpResponse:
    """Append chunks: authenticate, decode, one verb, encode. 201, or 200 when all were stored before."""
    caller = doors.caller_of(request)
    if request.content_type != "application/json":
        raise doors.WrongMediaType("chunks come as application/json")
    sent = read_envelope(doors.read_body(request, limit=MAX_BODY_BYTES, declared=request.META.get("CONTENT_LENGTH")))
    chunks = decode_chunks(sent.chunks)
    key = doors.path_uuid(generation_id, what="generation")
    access.require_writable(caller, key)
    appended = log.append(
        generation_id=key,
        attempt=sent.attempt,
        seq=sent.seq,
        chunks=chunks,
        writer=optional(sent.writer, caller.writer),
        actor=caller.actor,
        superseded_from=optional(sent.superseded_from, None),
    )
    answer: dict[str, Any] = {
        "nextSeq": appended.next_seq,
        "nextOffset": appended.next_offset,
        "cancelRequested": appended.cancel_requested,
        "actions": appended.actions,
    }
    if appended.duplicate:
        answer["duplicate"] = True
    return HttpResponse(
        strictjson.dumps_bytes(answer),
        status=200 if appended.duplicate else 201,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


class Append(View):
    """Append chunks, all or nothing; without chunks it is the producer's heartbeat."""

    @extend_schema(
        operation_id="generations_append",
        request=docs.body(Envelope, chunks=docs.CHUNKS),
        parameters=[docs.ID],
        responses=docs.answers({201: docs.APPENDED, 200: docs.APPENDED}, 403, 404, 409, 413, 415),
    )
    def post(self, request: Request, generation_id: str) -> Response:
        raise NotImplementedError("only described: `append` answers")


@csrf_exempt
async def chunks(request: HttpRequest, generation_id: str) -> HttpResponse:
    if request.method != "POST":
        return doors.method_not_allowed("POST")
    return await run(append, request, generation_id)


chunks.cls, chunks.initkwargs = Append, {}  # type: ignore[attr-defined]
