"""The one right to run an approved action: claim it, keep it, report, or lose it (contract §5)."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.db.models import Q, QuerySet

from approvals import access, audit, deadlines, refusals, shapes, transitions, waiting
from approvals.models import ApprovalRequest, Claim, ClaimRequest
from approvals.states import MAX_FENCES_A_DECISION, State
from streams import clock, log
from streams.access import Caller
from streams.log import Held
from streams.models import AgentToken
from streams.problems import Invalid, NotAllowed, NotFound, Problem
from streams.protocol import Actor

MAX_CLAIMS = 10
MAX_LEASE_SECONDS = 3_600
RETRIES = 5
OUTCOMES = ("done", "failed", "not_started")


@dataclass(frozen=True)
class Claimant:
    """Who runs actions: a token, or an executor of this server, which runs registered tools only."""

    name: str
    token: AgentToken | None
    who: audit.Who

    @classmethod
    def of(cls, caller: Caller) -> Claimant:
        """Take a token's caller; PeopleOnly's opposite is NotAllowed: people do not run actions."""
        if caller.token is None:
            raise NotAllowed("claims are for tokens and executors, not for people")
        return cls(name=f"token:{caller.token.prefix}", token=caller.token, who=caller)

    @classmethod
    def server(cls, name: str) -> Claimant:
        actor = Actor(kind="token", id=f"server:{name}"[:64], name=f"executor {name}"[:150])
        return cls(name=f"server:{name}"[:200], token=None, who=actor)

    def may_run(self, action: ApprovalRequest) -> bool:
        if self.token is None:
            return action.executor == "server"
        assert isinstance(self.who, Caller)
        return access.asked_by(self.who, action) or access.may_run(self.who, action.tool)

    def runnable(self) -> QuerySet[ApprovalRequest]:
        """The actions this claimant may run, whatever their state."""
        rows = ApprovalRequest.objects.all()
        if self.token is None:
            return rows.filter(executor="server")
        assert isinstance(self.who, Caller)
        own = Q(requested_by_kind=self.who.actor.kind, requested_by_id=self.who.actor.id)
        if self.who.can("claims"):
            return rows.filter(own | _tools(self.token.claim_tools))
        return rows.filter(own)


@dataclass(frozen=True)
class Claimed:
    """One right to run one action. `claim_token` is told again for the same claim id while the lease lives."""

    action_id: UUID
    tool: str
    fence: int
    claim_token: str
    effect_key: str
    arguments_text: str
    digest: str
    lease_seconds: int


@dataclass(frozen=True)
class Beat:
    lease_seconds: int
    cancel_requested: bool


def claim(
    *,
    claimant: Claimant,
    claim_id: str,
    action_id: UUID | str | None = None,
    tools: Sequence[str] = (),
    max_claims: int = 1,
    lease_seconds: int = 60,
    digest: str | None = None,
) -> list[Claimed]:
    """Take approved actions, oldest first, at most `max_claims`; or the one named. Does not wait for work.

    The same `claim_id` gives the same claims while their lease lives, so a lost answer locks nothing; after an empty
    answer it tries again. Raises ClaimIdReused, ClaimOver; NotFound, and for an action that is named NotApproved,
    AlreadyClaimed, Rejected, Expired, Cancelled, Unknown, AlreadyTerminal, DigestMismatch.
    """
    shapes.claim_id(claim_id)
    shapes.whole(max_claims, field="max", least=1, most=MAX_CLAIMS)
    shapes.whole(lease_seconds, field="leaseSeconds", least=1, most=MAX_LEASE_SECONDS)
    if (action_id is None) == (not tools):
        raise Invalid("name one actionId, or tools", field="actionId")
    for pattern in tools:
        shapes.text(pattern, field="tools", min_chars=1, max_chars=200)
    if digest is not None:
        shapes.text(digest, field="digest", max_chars=200)
        if action_id is None:
            raise Invalid("a digest belongs to one actionId", field="digest")
    key = None if action_id is None else access.as_id(action_id)
    body = shapes.sha256(str(key or ""), list(tools), max_claims, lease_seconds, digest)
    for attempt in range(RETRIES):
        try:
            if key is not None:
                return _claim_one(claimant, claim_id, body, key, lease_seconds, digest)
            return _claim_some(claimant, claim_id, body, tools, max_claims, lease_seconds, waits=attempt > 0)
        except deadlines.Due:
            assert key is not None
            deadlines.settle(action_id=key)
        except (transitions.Missed, IntegrityError, _TooBusy):
            continue
    raise refusals.InFlight


class _TooBusy(Exception):
    """There is work, but every row of it was locked at this moment."""


def _known_request(claimant: Claimant, claim_id: str, body: str) -> tuple[ClaimRequest, list[Claimed]]:
    """Find or make the row of this claim id, locked; and its claims, when it has some and they live."""
    defaults = {"body_sha256": body, "token": claimant.token}
    asked, created = ClaimRequest.objects.get_or_create(claimant=claimant.name, claim_id=claim_id, defaults=defaults)
    if created:
        return asked, []
    asked = ClaimRequest.objects.select_for_update(of=("self",)).get(pk=asked.pk)
    if asked.body_sha256 != body:
        raise refusals.ClaimIdReused("this claimId asked for something else before", field="claimId")
    claims = list(asked.claims.select_related("action").order_by("pk"))
    if not claims:
        return asked, []
    now = clock.now()
    living = [_claimed(row.action, row) for row in claims if _lives(row, now)]
    if not living:
        raise refusals.ClaimOver("what this claimId took has ended, or its lease is over", field="claimId")
    return asked, living


def _lives(row: Claim, now: datetime) -> bool:
    action = row.action
    return (
        row.ended_at is None
        and action.state == State.EXECUTING
        and action.fence == row.fence
        and action.lease_expires_at is not None
        and action.lease_expires_at > now
        # Another SECRET_KEY since: the token can't be told again.
        and _sha256(_token(row.nonce)) == row.token_sha256
    )


def _claim_one(
    claimant: Claimant, claim_id: str, body: str, action_id: UUID, lease_seconds: int, digest: str | None
) -> list[Claimed]:
    with waiting.briefly():
        asked, living = _known_request(claimant, claim_id, body)
        if living:
            return living
        with transitions.lock_one(action_id) as (action, held):
            if not claimant.may_run(action):
                raise NotFound("no such approval request")
            at = deadlines.refuse_if_due(action, held)
            if action.state != State.APPROVED:
                raise refusals.not_claimable(action)
            if digest is not None and digest != action.digest:
                raise refusals.with_action(
                    refusals.DigestMismatch, "what you would run is not what was approved", action
                )
            return [_take(held, action, asked, claimant, lease_seconds, at)]


def _claim_some(
    claimant: Claimant,
    claim_id: str,
    body: str,
    tools: Sequence[str],
    max_claims: int,
    lease_seconds: int,
    *,
    waits: bool,
) -> list[Claimed]:
    with waiting.briefly():
        asked, living = _known_request(claimant, claim_id, body)
        if living:
            return living
        at = clock.now()
        work = _work(claimant, tools, at)
        if waits:
            return _take_waiting(claimant, asked, work, max_claims, lease_seconds)
        taken = _take_free(claimant, asked, work, max_claims, lease_seconds)
        if taken or connection.vendor != "postgresql" or not work.exists():
            return taken
        raise _TooBusy


def _work(claimant: Claimant, tools: Sequence[str], at: datetime) -> QuerySet[ApprovalRequest]:
    in_time = Q(approved_until__isnull=True) | Q(approved_until__gt=at)
    return claimant.runnable().filter(_tools(tools), in_time, state=State.APPROVED).order_by("requested_at", "id")


def _take_free(
    claimant: Claimant,
    asked: ClaimRequest,
    work: QuerySet[ApprovalRequest],
    max_claims: int,
    lease_seconds: int,
) -> list[Claimed]:
    """Take what nobody holds, waiting for nothing: neither for an action nor for a log that is being written.

    Since nothing is waited for, locking the action before its generation can't close a circle.
    """
    skip = connection.features.has_select_for_update_skip_locked
    logged = work.filter(generation__isnull=False).select_related("generation")
    if skip:
        logged = logged.select_for_update(of=("self", "generation"), skip_locked=True)
        loose = work.filter(generation__isnull=True).select_for_update(of=("self",), skip_locked=True)
    else:
        loose = work.filter(generation__isnull=True)
    found = sorted([*logged[:max_claims], *loose[:max_claims]], key=lambda row: (row.requested_at, row.pk))
    with ExitStack() as stack:
        held: dict[UUID, Held] = {}
        taken = []
        for action in found[:max_claims]:
            generation_id = action.generation_id
            if generation_id is not None and generation_id not in held:
                held[generation_id] = stack.enter_context(log.hold(generation_id))
            its = held[generation_id] if generation_id is not None else None
            taken.append(_take(its, action, asked, claimant, lease_seconds, transitions.moment(its)))
        return taken


def _take_waiting(
    claimant: Claimant,
    asked: ClaimRequest,
    work: QuerySet[ApprovalRequest],
    max_claims: int,
    lease_seconds: int,
) -> list[Claimed]:
    """Take from one log, or one loose action, that others are busy with: wait for its turn, then look again.

    Which one is chance, so that many who wait do not all stand behind the same row.
    """
    candidates = list(work.only("pk", "generation_id")[:32])
    if not candidates:
        return []
    chosen = secrets.choice(candidates)
    generation_id = chosen.generation_id
    if generation_id is None:
        with transitions.lock_one(chosen.pk) as (action, _):
            if action.state != State.APPROVED or deadlines.is_due(action, at=clock.now()):
                raise _TooBusy
            return [_take(None, action, asked, claimant, lease_seconds, clock.now())]
    with log.hold(generation_id) as held:
        rows = work.filter(generation_id=generation_id).select_for_update(of=("self",))[:max_claims]
        taken = [_take(held, action, asked, claimant, lease_seconds, held.at) for action in rows]
        if not taken:
            raise _TooBusy
        return taken


def _take(
    held: Held | None,
    action: ApprovalRequest,
    asked: ClaimRequest,
    claimant: Claimant,
    lease_seconds: int,
    at: datetime,
) -> Claimed:
    """Move a locked, approved action to executing under the next fence."""
    nonce = secrets.token_hex(32)
    transitions.move(
        held=held,
        action=action,
        to=State.EXECUTING,
        who=claimant.who,
        kind="claimed",
        detail={"fence": action.fence + 1, "executor": claimant.name},
        fence=action.fence + 1,
        executor_name=claimant.name,
        started_at=at,
        finished_at=None,
        lease_expires_at=at + timedelta(seconds=lease_seconds),
    )
    row = Claim.objects.create(
        request=asked,
        action=action,
        fence=action.fence,
        nonce=nonce,
        token_sha256=_sha256(_token(nonce)),
        lease_seconds=lease_seconds,
        claimed_at=at,
    )
    return _claimed(action, row)


def _claimed(action: ApprovalRequest, row: Claim) -> Claimed:
    return Claimed(
        action_id=action.pk,
        tool=action.tool,
        fence=row.fence,
        claim_token=_token(row.nonce),
        effect_key=action.effect_key,
        arguments_text=action.arguments_text,
        digest=action.digest,
        lease_seconds=row.lease_seconds,
    )


def heartbeat(*, claim_token: str, lease_seconds: int, claimant: Claimant) -> Beat:
    """Keep the lease for `lease_seconds` from now. LeaseLost when it is over or somebody has a newer fence.

    Raises no version and writes no notice: the lease is no part of the story.
    """
    shapes.whole(lease_seconds, field="leaseSeconds", least=1, most=MAX_LEASE_SECONDS)
    row = _find(claim_token, claimant)
    now = clock.now()
    kept = ApprovalRequest.objects.filter(
        pk=row.action_id, state=State.EXECUTING, fence=row.fence, lease_expires_at__gt=now
    ).update(lease_expires_at=now + timedelta(seconds=lease_seconds))
    if kept:
        asked_to_stop = ApprovalRequest.objects.values_list("cancel_requested", flat=True).get(pk=row.action_id)
        return Beat(lease_seconds=lease_seconds, cancel_requested=asked_to_stop)
    deadlines.settle(action_id=row.action_id)
    action = ApprovalRequest.objects.get(pk=row.action_id)
    raise refusals.with_action(refusals.LeaseLost, "the lease is over", action)


def complete(*, claim_token: str, outcome: str, result_text: str | None = None, claimant: Claimant) -> ApprovalRequest:
    """Report how a run ended; repeatable. The newest fence may also report after its lease was lost.

    `failed` says that it surely did not happen or surely went wrong. Raises NotFound, OutcomeConflict, StaleClaim,
    LeaseLost (a late `not_started` where nobody knows any more).
    """
    shapes.one_of(outcome, OUTCOMES, field="outcome")
    if result_text is not None:
        if outcome == "not_started":
            raise Invalid("what was not started has no result", field="result")
        result_text = shapes.result(result_text)
    row = _find(claim_token, claimant)
    for _ in range(RETRIES):
        try:
            with waiting.briefly(), transitions.lock_one(row.action_id) as (action, held):
                return _complete(claimant, row.pk, action, held, outcome, result_text or "")
        except transitions.Missed:
            continue
        except Problem as refusal:
            _record_refusal(claimant, row, outcome, result_text, refusal)
            raise
    raise refusals.InFlight


def _complete(
    claimant: Claimant,
    claim_pk: int,
    action: ApprovalRequest,
    held: Held | None,
    outcome: str,
    result_text: str,
) -> ApprovalRequest:
    row = Claim.objects.get(pk=claim_pk)
    result_sha256 = _sha256(result_text) if result_text else ""
    if row.outcome in OUTCOMES:
        if (row.outcome, row.result_sha256) == (outcome, result_sha256):
            return action
        raise refusals.with_action(refusals.OutcomeConflict, f"it was reported as {row.outcome} before", action)
    if action.fence != row.fence:
        raise refusals.with_action(refusals.StaleClaim, "somebody has claimed it since", action)
    at = transitions.moment(held)
    changes: dict[str, Any] = {}
    if outcome != "not_started":
        if action.state in (State.DONE, State.FAILED):  # a person said so meanwhile
            raise refusals.with_action(refusals.OutcomeConflict, f"it was settled as {action.state}", action)
        if action.state not in (State.EXECUTING, State.APPROVED, State.UNKNOWN):
            raise refusals.with_action(refusals.StaleClaim, f"it is {action.state}", action)
        to = State.DONE if outcome == "done" else State.FAILED
        changes = {"result_text": result_text, "is_error": to == State.FAILED, "finished_at": at}
    elif action.state == State.APPROVED:  # the lease was lost, and it waits for another run already
        to = None
    elif action.state != State.EXECUTING:
        raise refusals.with_action(refusals.LeaseLost, "the lease is over", action)
    elif action.fence - action.fence_base >= MAX_FENCES_A_DECISION:
        to = State.FAILED
        changes = {"result_text": '"not started in five runs"', "is_error": True, "finished_at": at}
    else:
        to = State.CANCELLED if action.cancel_requested else State.APPROVED
    late = action.state != State.EXECUTING
    Claim.objects.filter(pk=row.pk).update(ended_at=at, outcome=outcome, result_sha256=result_sha256)
    if to is None:
        return action
    return transitions.move(
        held=held,
        action=action,
        to=to,
        who=claimant.who,
        kind="reported_late" if late else outcome,
        reason="it was cancelled before it started" if to == State.CANCELLED else "",
        detail={"fence": row.fence, "outcome": outcome},
        **changes,
    )


def reap_lost(*, limit: int = 100) -> int:
    """End the runs whose lease is over; return how many."""
    return deadlines.settle_all(Q(state=State.EXECUTING), limit=limit)


def _find(claim_token: str, claimant: Claimant) -> Claim:
    if not isinstance(claim_token, str) or not claim_token:
        raise Invalid("a claimToken is needed", field="claimToken")
    row = Claim.objects.filter(token_sha256=_sha256(claim_token), request__claimant=claimant.name).first()
    if row is None:
        raise NotFound("no such claim")
    return row


def _record_refusal(claimant: Claimant, row: Claim, outcome: str, result_text: str | None, refusal: Problem) -> None:
    """Keep a report that came too late with what it said: it may be all that is known about an effect."""
    with transaction.atomic():
        audit.record(
            kind="report_refused",
            who=claimant.who,
            action=ApprovalRequest.objects.get(pk=row.action_id),
            reason=refusal.code,
            detail={"fence": row.fence, "outcome": outcome, "resultText": result_text},
        )


def _tools(patterns: Sequence[str]) -> Q:
    """Select tools by name or by a pattern of `*` and `?`."""
    plain = [pattern for pattern in patterns if "*" not in pattern and "?" not in pattern]
    wanted = Q(tool__in=plain)
    for pattern in patterns:
        if pattern == "*":
            return ~Q(tool="")
        if pattern not in plain:
            letters = [{"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern]
            wanted |= Q(tool__regex=f"^{''.join(letters)}$")
    return wanted


def _token(nonce: str) -> str:
    """Make the claim token: 256 bits nobody can guess, and that need not be kept to be told again."""
    return hmac.new(settings.SECRET_KEY.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
