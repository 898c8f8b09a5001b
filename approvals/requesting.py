"""Ask for an approval over a door: `POST /approvals` (contract §5)."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.db import IntegrityError

from approvals import access, asking, refusals, shapes, tools, waiting
from approvals.models import ApprovalRequest
from approvals.policy import MAX_SECONDS, RISKS
from streams import clock, log
from streams.access import SEE, Caller, find_generation, require
from streams.log import GenerationClosed
from streams.problems import Invalid, NotAllowed, NotFound

MAX_SUMMARY_CHARS = 2_000


class NoSuchToolCall(NotFound):
    code = "no_such_tool_call"


@dataclass(frozen=True)
class Requested:
    """`created` is a new question (201); `replayed` the same key and body again (200); neither: a log's own call."""

    action: ApprovalRequest
    replayed: bool
    created: bool


@dataclass(frozen=True)
class _Question:
    tool: str
    arguments_text: str
    generation_id: UUID | None
    tool_call_id: str | None
    conversation: str
    wishes: asking.Wishes


def request(
    *,
    caller: Caller,
    idempotency_key: str,
    tool: str,
    arguments_text: str,
    generation_id: UUID | str | None = None,
    tool_call_id: str | None = None,
    conversation: str = "",
    summary: str = "",
    context_text: str = "",
    risk: str | None = None,
    expires_in_seconds: int | None = None,
    executor: str | None = None,
    effects: str | None = None,
) -> Requested:
    """Ask about one thing, once a key. With `tool_call_id` it names the action that call of the log has made.

    Raises Invalid and its like, NotAllowed, NotFound, NoSuchToolCall, ToolCallDiffers, KeyReused, ArgumentsInvalid,
    GenerationClosed (the run was cancelled or broke off), InFlight.
    """
    idempotency_key = shapes.key(idempotency_key)
    question = _shape(
        idempotency_key,
        tool,
        arguments_text,
        generation_id,
        tool_call_id,
        conversation,
        summary,
        context_text,
        risk,
        expires_in_seconds,
        executor,
        effects,
    )
    require(caller, "approvals:request", SEE)
    if question.generation_id is not None:
        generation = find_generation(caller, question.generation_id)
        # Seeing a log is not owning it: its story is told by whoever opened it.
        if caller.token is not None and generation.token_id != caller.token.pk:
            raise NotAllowed("only the token that opened a generation asks in it")
    if question.tool_call_id is not None:
        # Found as `GET` finds it: what is past its time is settled first.
        return Requested(access.find(caller, _named(question).pk), replayed=False, created=False)
    for _ in range(3):
        try:
            return _once(caller, question)
        except IntegrityError:  # the same key, at the same moment: look again, it is stored now
            continue
    raise refusals.InFlight


def _shape(
    idempotency_key: str,
    tool: str,
    arguments_text: str,
    generation_id: UUID | str | None,
    tool_call_id: str | None,
    conversation: str,
    summary: str,
    context_text: str,
    risk: str | None,
    expires_in_seconds: int | None,
    executor: str | None,
    effects: str | None,
) -> _Question:
    shapes.text(tool, field="tool", min_chars=1, max_chars=200)
    arguments_text = shapes.arguments(arguments_text)
    shapes.text(conversation, field="conversation", max_chars=200)
    shapes.text(summary, field="summary", max_chars=MAX_SUMMARY_CHARS)
    context_text = shapes.result(context_text, field="context") if context_text else ""
    generation_key = None if generation_id is None else _generation_key(generation_id)
    if risk is not None:
        shapes.one_of(risk, RISKS, field="risk")
    if expires_in_seconds is not None:
        shapes.whole(expires_in_seconds, field="expiresInSeconds", least=1, most=MAX_SECONDS)
    if executor is not None:
        shapes.one_of(executor, ("agent", "server"), field="executor")
    if effects is not None:
        shapes.one_of(effects, ("at_most_once", "idempotent", "transactional"), field="effects")
        registered = tools.registered(tool)
        if registered is not None and registered.effects != effects:
            raise Invalid(f"{tool} is registered as {registered.effects}", field="effects")
    if tool_call_id is not None:
        shapes.text(tool_call_id, field="toolCallId", min_chars=1, max_chars=200)
        if generation_key is None:
            raise Invalid("a toolCallId needs its generationId", field="generationId")
        beside = {"effects": effects, "risk": risk, "expiresInSeconds": expires_in_seconds}
        for field, value in beside.items():
            if value is not None:
                raise Invalid(f"{field} of a log's call comes from its registration and the policy", field=field)
    body = shapes.sha256(
        tool,
        arguments_text,
        str(generation_key or ""),
        conversation,
        summary,
        context_text,
        risk,
        expires_in_seconds,
        executor,
        effects,
    )
    wishes = asking.Wishes(
        summary=summary,
        context_text=context_text,
        risk=risk,
        expires_in_seconds=expires_in_seconds,
        executor=executor,
        effects=effects,
        request_key=idempotency_key,
        request_sha256=body,
    )
    return _Question(tool, arguments_text, generation_key, tool_call_id, conversation, wishes)


def _generation_key(value: UUID | str) -> UUID:
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise Invalid("generationId is a UUID", field="generationId") from None


def _named(question: _Question) -> ApprovalRequest:
    """Return the action that a tool call of the log made."""
    assert question.generation_id is not None
    calls = ApprovalRequest.objects.filter(
        generation_id=question.generation_id, tool_call_id=question.tool_call_id, call_offset__isnull=False
    )
    action = calls.order_by("-attempt").first()
    if action is None:
        raise NoSuchToolCall("no call of this log has this id", field="toolCallId")
    ready = tools.make_ready(tool_name=question.tool, arguments_text=question.arguments_text)
    if action.tool != question.tool or ready.digest not in (action.digest, action.original_digest):
        raise refusals.with_action(refusals.ToolCallDiffers, "the call names another tool or other arguments", action)
    return action


def _once(caller: Caller, question: _Question) -> Requested:
    wishes = question.wishes
    with waiting.briefly():
        known = ApprovalRequest.objects.filter(
            requested_by_kind=caller.actor.kind,
            requested_by_id=caller.actor.id,
            request_key=wishes.request_key,
        ).first()
        if known is None:
            return Requested(_create(caller, question), replayed=False, created=True)
    if known.request_sha256 != wishes.request_sha256:
        raise refusals.with_action(refusals.KeyReused, "this key asked for something else before", known)
    return Requested(access.find(caller, known.pk), replayed=True, created=False)


def _create(caller: Caller, question: _Question) -> ApprovalRequest:
    ready = tools.make_ready(tool_name=question.tool, arguments_text=question.arguments_text)
    if ready.fault is not None:
        raise refusals.ArgumentsInvalid(ready.fault.detail, field=ready.fault.field)
    if question.generation_id is None:
        return _ask(caller, question, ready, None)
    with log.hold(question.generation_id) as held:
        generation = held.generation
        if generation.cancel_requested or generation.finish_reason in ("cancel", "error"):
            raise GenerationClosed("nothing more is done for a run that was cancelled", state=generation.state)
        return _ask(caller, question, ready, held)


def _ask(caller: Caller, question: _Question, ready: tools.Ready, held: log.Held | None) -> ApprovalRequest:
    conversation = question.conversation or (held.generation.conversation if held is not None else "")
    return asking.ask(
        held=held,
        at=held.at if held is not None else clock.now(),
        asker=asking.Asker(
            actor=caller.actor, token_id=caller.token.pk if caller.token else None, person_id=caller.owner_id
        ),
        who=caller,
        tool=question.tool,
        ready=ready,
        conversation=conversation,
        origin=asking.Origin(),
        wishes=question.wishes,
    )
