"""The one right to run an approved action: claim it (contract §5). Keeping and reporting is in `reporting`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import IntegrityError, connection
from django.db.models import Q, QuerySet

from approvals import access, claimtokens, deadlines, refusals, shapes, transitions, waiting
from approvals.claimants import Claimant, tool_named
from approvals.models import ApprovalRequest, Claim, ClaimRequest
from approvals.reporting import MAX_LEASE_SECONDS, Beat, complete, give_up, heartbeat, reap_lost
from approvals.states import State
from streams import clock, log
from streams.log import Held
from streams.problems import Invalid, NotFound

MAX_CLAIMS = 10
RETRIES = 5


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
    if key is None:
        # Others took it all while this one waited in turn. Nothing is stored of this claimId: it may ask again.
        return []
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
        and claimtokens.sha256(claimtokens.token(row.nonce)) == row.token_sha256
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
    return claimant.runnable().filter(tool_named(tools), in_time, state=State.APPROVED).order_by("requested_at", "id")


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
        logged = logged.select_for_update(of=("self", "generation"), skip_locked=True, no_key=True)
        loose = work.filter(generation__isnull=True).select_for_update(of=("self",), skip_locked=True, no_key=True)
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
        rows = work.filter(generation_id=generation_id).select_for_update(of=("self",), no_key=True)[:max_claims]
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
        token_sha256=claimtokens.sha256(claimtokens.token(nonce)),
        lease_seconds=lease_seconds,
        claimed_at=at,
    )
    return _claimed(action, row)


def _claimed(action: ApprovalRequest, row: Claim) -> Claimed:
    return Claimed(
        action_id=action.pk,
        tool=action.tool,
        fence=row.fence,
        claim_token=claimtokens.token(row.nonce),
        effect_key=action.effect_key,
        arguments_text=action.arguments_text,
        digest=action.digest,
        lease_seconds=row.lease_seconds,
    )


__all__ = ["Beat", "Claimant", "Claimed", "claim", "complete", "give_up", "heartbeat", "reap_lost"]
