"""The JSON door of approval requests (contract §5): parse, call one verb, map its answer."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from django.db.models import Q, QuerySet
from drf_spectacular.utils import extend_schema
from msgspec import Meta
from rest_framework.request import Request
from rest_framework.response import Response

from approvals import access, decisions, describe, represent, settling
from approvals.models import RISKS, ApprovalRequest
from approvals.refusals import BatchRefused, KeyInvalid
from approvals.requesting import request as ask
from approvals.states import OPEN, State
from approvals.voted import Decided
from streams import docs, doors, queries, strictjson
from streams.access import SEE, Caller, require
from streams.problems import Invalid
from streams.protocol import MAX_COUNT
from streams.shape import UNSET, Shape, Unset, optional
from streams.views import View
from streams.waiting import MAX_WAIT_SECONDS, Wait, waiting

Verdict = Literal["approve", "reject"]


class Question(Shape, frozen=True):
    tool: str
    arguments: dict[str, Any]
    generation_id: str | Unset = UNSET
    tool_call_id: str | Unset = UNSET
    conversation: str = ""
    summary: str = ""
    context: Any = UNSET
    risk: str | Unset = UNSET
    expires_in_seconds: int | Unset = UNSET
    executor: str | Unset = UNSET
    effects: str | Unset = UNSET


class Answer(Shape, frozen=True):
    """`idempotencyKey` is checked by the verb, which has its own codes for it."""

    decision: Verdict
    idempotency_key: Any = UNSET
    reason: str = ""
    arguments: dict[str, Any] | Unset = UNSET
    digest: str | Unset = UNSET


class ItemAnswer(Answer, frozen=True):
    action_id: str = ""


class Answers(Shape, frozen=True):
    decisions: Annotated[list[ItemAnswer], Meta(min_length=1, max_length=100)]
    all_or_nothing: bool = False


class Withdrawal(Shape, frozen=True):
    reason: str = ""


class Finding(Shape, frozen=True):
    outcome: Literal["done", "failed", "retry"]
    note: str
    idempotency_key: Any = UNSET
    result: Any = UNSET


def json_text(value: Any) -> str | None:
    """Give a member that may be any JSON to a verb as a text; None when it was not sent."""
    return None if value is UNSET else strictjson.dumps(value)


def key_of(request: Request, sent: Any) -> Any:
    """Return the key of a request, from its body or the header; both are fine when they agree."""
    header = request.META.get("HTTP_IDEMPOTENCY_KEY")
    if header is None:
        return None if sent is UNSET else sent
    if sent is not UNSET and sent is not None and sent != header:
        raise KeyInvalid("the body and the header carry different keys", field="idempotencyKey")
    return header


def _id(text: str) -> UUID:
    return doors.path_uuid(text, what="approval request")


def shown(action: ApprovalRequest, *, status: int = 200, replayed: bool = False) -> Response:
    response = Response(represent.action_json(action), status=status)
    if replayed:
        response["Idempotent-Replayed"] = "true"
    return response


class Approvals(View):
    """Ask for an approval, or list the requests one may see, newest first."""

    @extend_schema(
        operation_id="approvals_request",
        request=docs.body(Question),
        parameters=[docs.header("Idempotency-Key", "8 to 255 visible ASCII characters", required=True)],
        responses=docs.answers({201: describe.ACTION, 200: describe.ACTION}, 403, 404, 409, 413, 422),
    )
    def post(self, request: Request) -> Response:
        sent = self.body(Question)
        asked = ask(
            caller=self.caller,
            idempotency_key=key_of(request, UNSET) or "",
            tool=sent.tool,
            arguments_text=strictjson.dumps(sent.arguments),
            generation_id=optional(sent.generation_id, None),
            tool_call_id=optional(sent.tool_call_id, None),
            conversation=sent.conversation,
            summary=sent.summary,
            context_text=json_text(sent.context) or "",
            risk=optional(sent.risk, None),
            expires_in_seconds=optional(sent.expires_in_seconds, None),
            executor=optional(sent.executor, None),
            effects=optional(sent.effects, None),
        )
        return shown(asked.action, status=201 if asked.created else 200, replayed=asked.replayed)

    @extend_schema(
        operation_id="approvals_list",
        parameters=[
            docs.query("state", "one state, or several with commas between"),
            docs.query("tool", "exactly this tool"),
            docs.query("conversation", "exactly this conversation"),
            docs.query("requestedBy", "id or name of the requester"),
            docs.query("risk", "low, medium, high or critical"),
            docs.query("q", "words in tool, summary, conversation or arguments"),
            docs.query("since", "requested at this time (with zone) or later"),
            *docs.PAGE,
        ],
        responses=docs.answers({200: docs.page(describe.SUMMARY)}, 403),
    )
    def get(self, request: Request) -> Response:
        _require_reading(self.caller)
        rows = _filtered(access.visible(self.caller), request)
        limit = queries.page_limit(request)
        if cursor := queries.cursor(request):
            moment, key = cursor
            rows = rows.filter(Q(requested_at__lt=moment) | Q(requested_at=moment, id__lt=key))
        # What is past its time is shown as what it is, whether or not a sweep came by.
        decisions.expire_due()
        page = list(rows.order_by("-requested_at", "-id").prefetch_related("decisions")[: limit + 1])
        return Response(queries.page(page, limit, represent.summary_json, _place))


def _place(action: ApprovalRequest) -> tuple[datetime, UUID]:
    return action.requested_at, action.pk


def _require_reading(caller: Caller) -> None:
    """Refuse a list to whoever could see no action at all, so that an empty list means what it says."""
    scopes = ("approvals:read", "approvals:request", "generations:read", "generations:write", "read:all")
    if not any(map(caller.can, (*scopes, SEE))):
        require(caller, "approvals:read", SEE)


def _filtered(rows: QuerySet[ApprovalRequest], request: Request) -> QuerySet[ApprovalRequest]:
    if states := queries.text(request, "state"):
        wanted = states.split(",")
        if unknown := next((state for state in wanted if state not in set(State)), None):
            raise Invalid(f"there is no state {unknown!r}", field="state")
        rows = rows.filter(state__in=wanted)
    if risk := queries.text(request, "risk"):
        if risk not in dict(RISKS):
            raise Invalid("risk is one of low, medium, high, critical", field="risk")
        rows = rows.filter(risk=risk)
    if tool := queries.text(request, "tool"):
        rows = rows.filter(tool=tool)
    if conversation := queries.text(request, "conversation"):
        rows = rows.filter(conversation=conversation)
    if requester := queries.text(request, "requestedBy"):
        rows = rows.filter(Q(requested_by_id=requester) | Q(requested_by_name=requester))
    if since := queries.moment(request, "since"):
        rows = rows.filter(requested_at__gte=since)
    if words := queries.text(request, "q"):
        for word in words.split():
            rows = rows.filter(
                Q(tool__icontains=word)
                | Q(summary__icontains=word)
                | Q(conversation__icontains=word)
                | Q(arguments_text__icontains=word)
            )
    return rows


class OneApproval(View):
    """Show a request, at once or when it has a newer version."""

    @extend_schema(
        operation_id="approvals_get",
        parameters=[
            docs.ACTION_ID,
            docs.query("wait", "seconds to wait for a newer version, 0 … 30", int),
            docs.query("version", "the version the caller knows", int),
        ],
        responses=docs.answers({200: describe.ACTION}, 404),
    )
    def get(self, request: Request, action_id: str) -> Response:
        seconds = queries.whole(request, "wait", low=0, high=MAX_WAIT_SECONDS, default=0)
        version = queries.whole(request, "version", low=0, high=MAX_COUNT, default=0)
        action = access.find(self.caller, _id(action_id))
        response = shown(action)
        if action.version > version:
            return response

        def again(caller: Caller) -> Response | None:
            now = access.find(caller, action.pk)
            return shown(now) if now.version > version else None

        return waiting(response, Wait(seconds, (f"a:{action.pk}",), again))


def _decided_json(decided: Decided, *, action: ApprovalRequest | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"replayed": decided.replayed}
    if decided.already_decided:
        body["alreadyDecided"] = True
    body["decision"] = represent.decision_json(decided.decision)
    body["action"] = represent.action_json(action or decided.action)
    return body


def _decided(decided: Decided, *, action: ApprovalRequest | None = None) -> Response:
    response = Response(_decided_json(decided, action=action))
    if decided.replayed:
        response["Idempotent-Replayed"] = "true"
    return response


class DecideOne(View):
    """Approve or reject, once a key."""

    @extend_schema(
        operation_id="approvals_decide",
        request=docs.body(Answer),
        parameters=[
            docs.ACTION_ID,
            docs.header("Idempotency-Key", "may stand here instead of in the body"),
            docs.query("wait", "seconds to hold the answer until the action is finished, 0 … 30", int),
        ],
        responses=docs.answers({200: describe.DECIDED}, 403, 404, 409, 413, 422),
    )
    def post(self, request: Request, action_id: str) -> Response:
        seconds = queries.whole(request, "wait", low=0, high=MAX_WAIT_SECONDS, default=0)
        sent = self.body(Answer)
        decided = decisions.decide(
            caller=self.caller,
            action_id=_id(action_id),
            idempotency_key=key_of(request, sent.idempotency_key),
            decision=sent.decision,
            reason=sent.reason,
            arguments_text=json_text(sent.arguments),
            digest=optional(sent.digest, None),
        )
        response = _decided(decided)
        if decided.action.state not in OPEN:
            return response

        def again(caller: Caller) -> Response | None:
            now = access.find(caller, decided.action.pk)
            return None if now.state in OPEN else _decided(decided, action=now)

        return waiting(response, Wait(seconds, (f"a:{decided.action.pk}",), again))


class DecideMany(View):
    """Decide up to 100 requests, each on its own or all together."""

    @extend_schema(
        operation_id="approvals_decide_many",
        request=docs.body(Answers),
        responses=docs.answers({200: describe.OUTCOMES}, 403, 409, 413),
    )
    def post(self, request: Request) -> Response:
        sent = self.body(Answers)
        items = [
            decisions.Item(
                action_id=item.action_id,
                idempotency_key=optional(item.idempotency_key, None),
                decision=item.decision,
                reason=item.reason,
                arguments_text=json_text(item.arguments),
                digest=optional(item.digest, None),
            )
            for item in sent.decisions
        ]
        try:
            outcomes = decisions.decide_many(caller=self.caller, all_or_nothing=sent.all_or_nothing, items=items)
        except BatchRefused as refused:
            told = BatchRefused(refused.detail, results=[_outcome(one) for one in refused.fields["outcomes"]])
            return doors.problem_answer(told)
        return Response({"results": [_outcome(one) for one in outcomes]})


def _outcome(outcome: decisions.Outcome) -> dict[str, Any]:
    shown: dict[str, Any] = {"actionId": outcome.action_id, "status": outcome.status}
    if outcome.decided is not None:
        return {**shown, **_decided_json(outcome.decided)}
    if outcome.code is not None:
        shown["code"] = outcome.code
    if outcome.problem is not None:
        shown["detail"] = outcome.problem.detail
        shown |= {name: value for name, value in outcome.problem.fields.items() if name in ("action", "field")}
    return shown


class Cancel(View):
    """Withdraw or revoke a request."""

    @extend_schema(
        operation_id="approvals_cancel",
        request=docs.body(Withdrawal),
        parameters=[docs.ACTION_ID],
        responses=docs.answers({200: describe.ACTION, 202: describe.ACTION}, 403, 404, 409),
    )
    def post(self, request: Request, action_id: str) -> Response:
        sent = self.body(Withdrawal)
        cancelled = settling.cancel(caller=self.caller, action_id=_id(action_id), reason=sent.reason)
        return shown(cancelled.action, status=202 if cancelled.requested else 200)


class Reconcile(View):
    """Say what became of an action nobody knows the end of. For people with that permission."""

    @extend_schema(
        operation_id="approvals_reconcile",
        request=docs.body(Finding),
        parameters=[docs.ACTION_ID, docs.header("Idempotency-Key", "may stand here instead of in the body")],
        responses=docs.answers({200: describe.DECIDED}, 403, 404, 409, 413, 422),
    )
    def post(self, request: Request, action_id: str) -> Response:
        sent = self.body(Finding)
        return _decided(
            settling.reconcile(
                caller=self.caller,
                action_id=_id(action_id),
                idempotency_key=key_of(request, sent.idempotency_key),
                outcome=sent.outcome,
                note=sent.note,
                result_text=json_text(sent.result),
            )
        )
