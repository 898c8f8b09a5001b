"""The JSON door of claims (contract §5): the one right to run an action, kept alive, and given back with an outcome."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from drf_spectacular.utils import extend_schema
from msgspec import Meta
from rest_framework.request import Request
from rest_framework.response import Response

from approvals import claims, describe
from approvals.api import json_text, shown
from approvals.claims import Claimant
from streams import docs
from streams.access import Caller
from streams.problems import Invalid
from streams.shape import UNSET, Shape, Unset, optional
from streams.views import View
from streams.waiting import MAX_WAIT_SECONDS, Wait, waiting

Lease = Annotated[int, Meta(ge=1, le=3_600)]


class Wanted(Shape, frozen=True):
    claim_id: str
    action_id: str | Unset = UNSET
    tools: Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=100)] | Unset = UNSET
    max: Annotated[int, Meta(ge=1, le=10)] = 1
    wait_seconds: Annotated[int, Meta(ge=0, le=MAX_WAIT_SECONDS)] = 0
    lease_seconds: Lease = 60
    digest: str | Unset = UNSET


class Beat(Shape, frozen=True):
    claim_token: str
    lease_seconds: Lease = 60


class Report(Shape, frozen=True):
    claim_token: str
    outcome: Literal["done", "failed", "not_started"]
    result: Any = UNSET


class Claims(View):
    """Take the one right to run an action, or to run work of some tools."""

    @extend_schema(
        operation_id="claims_create",
        request=docs.body(Wanted),
        responses=docs.answers({200: describe.CLAIMS}, 403, 404, 409, 422),
    )
    def post(self, request: Request) -> Response:
        sent = self.body(Wanted)
        if (sent.action_id is UNSET) == (sent.tools is UNSET):
            raise Invalid("a claim names an actionId or tools, and not both", field="actionId")

        def claim(caller: Caller) -> list[dict[str, Any]]:
            claimed = claims.claim(
                claimant=Claimant.of(caller),
                claim_id=sent.claim_id,
                action_id=optional(sent.action_id, None),
                tools=tuple(optional(sent.tools, ())),
                max_claims=sent.max,
                lease_seconds=sent.lease_seconds,
                digest=optional(sent.digest, None),
            )
            return [
                {
                    "actionId": str(one.action_id),
                    "tool": one.tool,
                    "fence": one.fence,
                    "claimToken": one.claim_token,
                    "effectKey": one.effect_key,
                    "argumentsText": one.arguments_text,
                    "digest": one.digest,
                    "leaseSeconds": one.lease_seconds,
                }
                for one in claimed
            ]

        def again(caller: Caller) -> Response | None:
            found = claim(caller)
            return Response({"claims": found}) if found else None

        first = claim(self.caller)
        # With nothing to run it tries again, under the same claimId, each time work is rung for.
        wait = Wait(sent.wait_seconds, ("work",), again) if not first else None
        return waiting(Response({"claims": first}), wait)


class Heartbeat(View):
    """Keep a claim alive and learn whether a cancel was asked."""

    @extend_schema(
        operation_id="claims_heartbeat",
        request=docs.body(Beat),
        responses=docs.answers({200: describe.BEAT}, 403, 404, 409),
    )
    def post(self, request: Request) -> Response:
        sent = self.body(Beat)
        beat = claims.heartbeat(
            claim_token=sent.claim_token, lease_seconds=sent.lease_seconds, claimant=Claimant.of(self.caller)
        )
        return Response({"leaseSeconds": beat.lease_seconds, "cancelRequested": beat.cancel_requested})


class Complete(View):
    """Give a claim back with what happened."""

    @extend_schema(
        operation_id="claims_complete",
        request=docs.body(Report),
        responses=docs.answers({200: describe.ACTION}, 403, 404, 409, 413),
    )
    def post(self, request: Request) -> Response:
        sent = self.body(Report)
        action = claims.complete(
            claim_token=sent.claim_token,
            outcome=sent.outcome,
            result_text=json_text(sent.result),
            claimant=Claimant.of(self.caller),
        )
        return shown(action)
