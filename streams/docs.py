"""What OpenAPI is told beside the code: bodies come from the structs that check them, answers from the contract."""

from __future__ import annotations

from typing import Any

import msgspec
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiRequest, OpenApiResponse

from streams import shape
from streams.protocol import MAX_CHUNKS, Chunk

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}
ANYTHING: Schema = {}


def thing(description: str = "", *, optional: tuple[str, ...] = (), **members: Schema) -> Schema:
    """Describe an object; all members but the optional ones are always there."""
    described: Schema = {
        "type": "object",
        "properties": members,
    }
    # OpenAPI 3.0 has no empty list here.
    if required := [name for name in members if name not in optional]:
        described["required"] = required
    return {**described, "description": description} if description else described


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def nullable(schema: Schema) -> Schema:
    return {**schema, "nullable": True}


def page(schema: Schema) -> Schema:
    return thing(results=listed(schema), next=nullable(TEXT))


ACTOR = thing(
    kind={"type": "string", "enum": ["person", "token", "policy", "clock"]},
    id=TEXT,
    name=TEXT,
)

GENERATION = thing(
    "One agent answer and the head of its log.",
    id={"type": "string", "format": "uuid"},
    state={
        "type": "string",
        "enum": ["open", "waiting", "retrying", "cancelling", "done", "cancelled", "error"],
    },
    title=TEXT,
    conversation=TEXT,
    model=TEXT,
    metadata={"type": "object"},
    epoch=TEXT,
    firstOffset=WHOLE,
    nextOffset=WHOLE,
    attempt=WHOLE,
    nextSeq=WHOLE,
    cancelRequested=FLAG,
    openActions=WHOLE,
    finishReason=nullable({"type": "string", "enum": ["stop", "tool_use", "length", "cancel", "error"]}),
    usage=nullable({"type": "object"}),
    producerTimeoutSeconds=WHOLE,
    createdAt=TIME,
    finishedAt=nullable(TIME),
    metrics=thing(
        ttfbMs=nullable(WHOLE),
        totalMs=nullable(WHOLE),
        chunkCount=WHOLE,
        toolCallCount=WHOLE,
        retryCount=WHOLE,
        tokenUsage=nullable({"type": "object"}),
    ),
    actions=listed({"type": "object", "description": "as GET /approvals/{id} shows it"}),
)

ENTRIES = thing(
    entries=listed(
        thing(
            "One numbered row of the log: a chunk or a notice.",
            optional=("chunk", "notice"),
            offset=WHOLE,
            attempt=WHOLE,
            at=TIME,
            chunk={"type": "object"},
            notice={"type": "object"},
        )
    ),
    nextOffset=WHOLE,
    state=TEXT,
)

CHUNKS: Schema = {"type": "array", "maxItems": MAX_CHUNKS, "items": shape.schema(Chunk)}
APPENDED = thing(
    optional=("duplicate",),
    nextSeq=WHOLE,
    nextOffset=WHOLE,
    cancelRequested=FLAG,
    duplicate=FLAG,
    actions=listed(thing(toolCallId=TEXT, actionId=TEXT, state=TEXT)),
)

PROBLEM = thing(
    "application/problem+json; `code` is stable, further members say where (field, index, limit, action …).",
    type={"type": "string", "enum": ["about:blank"]},
    title=TEXT,
    status=WHOLE,
    code=TEXT,
    detail=TEXT,
)

_WORDS = {
    200: "Done, or was so before",
    201: "Made",
    202: "Asked for",
    204: "Done; nothing to say",
    400: "The shape is wrong",
    401: "Not signed in",
    403: "Not allowed",
    404: "Not there, or not to be seen",
    409: "The state does not allow it",
    410: "Pruned",
    413: "Too large",
    415: "Not application/json",
    422: "Does not fit",
    424: "Another item was refused",
    503: "Try again",
}


def answers(good: dict[int, Schema | None], *refusals: int) -> dict[Any, OpenApiResponse]:
    """Describe the answers: the good ones by schema, the refusals (400, 401 and 503 always) as problems."""
    described: dict[Any, OpenApiResponse] = {
        status: OpenApiResponse(response=schema, description=_WORDS[status]) for status, schema in good.items()
    }
    for status in sorted({400, 401, 503, *refusals}):
        described[(status, "application/problem+json")] = OpenApiResponse(response=PROBLEM, description=_WORDS[status])
    return described


def body(wanted: type[msgspec.Struct], **instead: Schema) -> Any:
    """Describe a body by its struct; `instead` says more of members the struct leaves open."""
    described = shape.schema(wanted)
    described["properties"] |= instead
    return OpenApiRequest(request=described)


def query(name: str, description: str, kind: Any = str) -> OpenApiParameter:
    return OpenApiParameter(name, kind, OpenApiParameter.QUERY, description=description)


def header(name: str, description: str, *, required: bool = False) -> OpenApiParameter:
    return OpenApiParameter(name, str, OpenApiParameter.HEADER, description=description, required=required)


PAGE = (query("cursor", "`next` of the page before"), query("limit", "1 … 200, 50 unless said", int))
ID = OpenApiParameter("generation_id", OpenApiTypes.UUID, OpenApiParameter.PATH)
ACTION_ID = OpenApiParameter("action_id", OpenApiTypes.UUID, OpenApiParameter.PATH)
PREFIX = OpenApiParameter("prefix", str, OpenApiParameter.PATH)
