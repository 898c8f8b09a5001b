"""Judge the tool calls of a log as they are appended, and settle their actions when the log turns or ends.

Everything here runs inside the append's transaction with the generation locked (streams.gate).
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from approvals import asking, canonical, deadlines, refusals, represent, tools, transitions
from approvals.models import ApprovalRequest
from approvals.states import OPEN, State
from streams.log import Held, PlacedCall, PlacedResult
from streams.problems import Invalid
from streams.protocol import Actor
from streams.strictjson import BadJSON


class ApprovalGate:
    """The gate `streams` asks (streams.gate.Gate)."""

    def call(self, held: Held, call: PlacedCall, *, actor: Actor) -> dict[str, Any]:
        sent = call.call
        try:
            arguments = canonical.parse_arguments(sent.arguments)
        except BadJSON as error:
            raise refusals.bad_json(error, index=call.index) from None
        ready = tools.make_ready(tool_name=sent.name, arguments_text=arguments.text)
        known = _born_in(held).filter(attempt=held.generation.attempt, tool_call_id=sent.id).first()
        if known is not None:
            if known.tool != sent.name or (known.original_digest or known.digest) != ready.digest:
                raise refusals.with_action(
                    refusals.ToolCallConflict,
                    "another call has this id in this attempt",
                    known,
                    index=call.index,
                )
            return _brief(known)
        generation = held.generation
        owner_id = generation.user_id or (generation.token.owner_id if generation.token is not None else None)
        action = asking.ask(
            held=held,
            at=held.at,
            asker=asking.Asker(actor=actor, token_id=generation.token_id, person_id=owner_id),
            who=actor,
            tool=sent.name,
            ready=ready,
            conversation=generation.conversation,
            origin=asking.Origin(tool_call_id=sent.id, call_offset=call.offset),
            wishes=asking.Wishes(),
        )
        if generation.cancel_requested and action.state in OPEN:
            # It was on its way when the cancel came: kept in the log, never to be run.
            _cancel(held, action, actor, "the run was cancelled")
        return _brief(action)

    def known_calls(self, generation_id: UUID, tool_call_ids: list[str]) -> list[dict[str, Any]]:
        newest: dict[str, ApprovalRequest] = {}
        rows = ApprovalRequest.objects.filter(generation_id=generation_id, tool_call_id__in=tool_call_ids)
        for action in rows.order_by("attempt"):
            newest[action.tool_call_id] = action
        return [_brief(newest[tool_call_id]) for tool_call_id in tool_call_ids if tool_call_id in newest]

    def result(self, held: Held, result: PlacedResult, *, actor: Actor) -> None:
        sent = result.result
        action = _born_in(held).filter(tool_call_id=sent.toolCallId).order_by("-attempt").first()
        if action is None:
            raise Invalid("no call of this log has this id", index=result.index, field="toolCallId")
        if action.gated:
            raise refusals.with_action(
                refusals.ResultNeedsClaim,
                "the result of this call comes by a claim",
                action,
                index=result.index,
            )
        if action.state != State.APPROVED:
            raise refusals.not_claimable(action, index=result.index)
        try:
            text = canonical.parse_result(bytes(sent.result)).text
        except BadJSON as error:
            raise refusals.bad_json(error, index=result.index) from None
        transitions.move(
            held=held,
            action=action,
            to=State.FAILED if sent.isError else State.DONE,
            who=actor,
            kind="result",
            told_already=True,
            result_text=text,
            is_error=sent.isError,
            finished_at=held.at,
        )

    def superseded(self, held: Held, *, from_offset: int, actor: Actor) -> None:
        born = _born_in(held).filter(call_offset__gte=from_offset)
        # Not part of the representation: it only says that the call is void, so nothing is told to the model.
        born.update(superseded=True)
        self._stop(held, born, actor, "its attempt was started over")

    def cancel_requested(self, held: Held, *, actor: Actor) -> None:
        self._stop(held, _of(held), actor, "the run was cancelled")

    def closing(self, held: Held, *, reason: str, actor: Actor) -> None:
        # An allowed call may have been run by the producer without a word: that is not "cancelled".
        unsaid = _born_in(held).filter(state=State.APPROVED, gated=False)
        for action in _locked(unsaid):
            transitions.move(held=held, action=action, to=State.UNKNOWN, who=actor, kind="result_missing")
        if reason == "cancel":
            self._stop(held, _of(held), actor, "the run was cancelled")
        elif reason == "error":
            for action in _locked(_of(held).filter(state__in=[State.PENDING, State.APPROVED])):
                _cancel(held, action, actor, "the run ended with an error")

    def actions(self, generation_id: UUID) -> list[dict[str, Any]]:
        rows = ApprovalRequest.objects.filter(generation_id=generation_id).prefetch_related("decisions")
        return [represent.action_json(action) for action in rows.order_by("requested_at", "call_offset", "id")]

    def _stop(self, held: Held, rows: QuerySet[ApprovalRequest], actor: Actor, reason: str) -> None:
        """Cancel what has not begun; ask what runs to stop, once."""
        for action in _locked(rows.filter(state__in=OPEN)):
            if action.state != State.EXECUTING:
                _cancel(held, action, actor, reason)
            elif not action.cancel_requested:
                transitions.move(
                    held=held,
                    action=action,
                    to=State.EXECUTING,
                    who=actor,
                    kind="cancel_requested",
                    reason=reason,
                    cancel_requested=True,
                )


def _of(held: Held) -> QuerySet[ApprovalRequest]:
    return ApprovalRequest.objects.filter(generation=held.generation)


def _born_in(held: Held) -> QuerySet[ApprovalRequest]:
    return _of(held).filter(call_offset__isnull=False)


def _locked(rows: QuerySet[ApprovalRequest]) -> list[ApprovalRequest]:
    return list(rows.select_for_update(no_key=True).order_by("pk"))


def _cancel(held: Held, action: ApprovalRequest, actor: Actor, reason: str) -> None:
    if deadlines.is_due(action, at=held.at):
        deadlines.expire(held, action)
        return
    deadlines.end_unused(held, action, to=State.CANCELLED, who=actor, kind="cancelled", reason=reason)


def _brief(action: ApprovalRequest) -> dict[str, Any]:
    return {"toolCallId": action.tool_call_id, "actionId": str(action.pk), "state": str(action.state)}
