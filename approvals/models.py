"""Rows of the approval story. Only `approvals.transitions` writes `ApprovalRequest.state`."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from approvals.states import State
from streams.models import AgentToken, Generation

ACTOR_KINDS = [("person", "person"), ("token", "token"), ("policy", "policy"), ("clock", "clock")]
RISKS = [("low", "low"), ("medium", "medium"), ("high", "high"), ("critical", "critical")]
EFFECTS = [("at_most_once", "at most once"), ("idempotent", "idempotent"), ("transactional", "transactional")]
EXECUTORS = [("agent", "agent"), ("server", "server")]


class Policy(models.Model):
    """A named list of rules, first match wins, what no rule names is asked about. `version` grows with each edit."""

    name = models.CharField(max_length=100, unique=True)
    version = models.IntegerField(default=1, editable=False)
    active = models.BooleanField(default=True, help_text="The active policy judges; only one can be active.")

    class Meta:
        verbose_name_plural = "policies"
        constraints = [
            models.UniqueConstraint(fields=["active"], condition=Q(active=True), name="policy_one_active"),
        ]

    def __str__(self) -> str:
        return f"{self.name} v{self.version}"


class PolicyRule(models.Model):
    """Tool name pattern (`*` and `?`) → verdict, and what it sets on a request it matched."""

    policy = models.ForeignKey(Policy, on_delete=models.CASCADE, related_name="rules")
    position = models.PositiveIntegerField()
    name = models.CharField(max_length=100)
    tool_pattern = models.CharField(max_length=200)
    verdict = models.CharField(max_length=5, choices=[("allow", "allow"), ("ask", "ask"), ("deny", "deny")])
    risk = models.CharField(max_length=8, choices=RISKS, blank=True, help_text="Empty: what the tool declares.")
    approvals_required = models.PositiveIntegerField(default=1)
    expires_in_seconds = models.PositiveIntegerField(default=86_400)
    approval_valid_seconds = models.PositiveIntegerField(default=3_600)

    class Meta:
        ordering = ["position"]
        constraints = [
            models.UniqueConstraint(fields=["policy", "position"], name="rule_position_once"),
            models.CheckConstraint(condition=Q(approvals_required__range=(1, 20)), name="rule_approvals_range"),
            models.CheckConstraint(condition=Q(expires_in_seconds__range=(1, 2_592_000)), name="rule_expiry_range"),
            models.CheckConstraint(
                condition=Q(approval_valid_seconds__range=(1, 2_592_000)), name="rule_validity_range"
            ),
            models.CheckConstraint(condition=Q(verdict__in=["allow", "ask", "deny"]), name="rule_verdict"),
        ]

    def __str__(self) -> str:
        return f"{self.position}. {self.name}"


class ApprovalRequest(models.Model):
    """One thing an agent wants done: the question, its answers, and what became of it. `id` is the `actionId`.

    Also the outbox: `state = approved` is the executor's work list. Actors are kept by kind, id and name, so that
    the story survives the account. Texts ending in `_text` are exact canonical JSON; numbers never pass a float.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    generation = models.ForeignKey(Generation, null=True, blank=True, on_delete=models.PROTECT, related_name="actions")
    tool_call_id = models.CharField(max_length=200, blank=True)
    call_offset = models.BigIntegerField(null=True, help_text="Offset of the tool_call chunk.")
    attempt = models.IntegerField(null=True)
    superseded = models.BooleanField(default=False, help_text="Its call is void: it gets no tool_result.")
    conversation = models.CharField(max_length=200, blank=True)

    tool = models.CharField(max_length=200)
    arguments_text = models.TextField()
    digest = models.CharField(max_length=71)
    original_arguments_text = models.TextField(blank=True)
    original_digest = models.CharField(max_length=71, blank=True)
    summary = models.TextField(blank=True)
    context_text = models.TextField(blank=True)
    previous = models.ForeignKey("self", null=True, blank=True, on_delete=models.PROTECT, related_name="repeats")

    state = models.CharField(max_length=9, choices=[(s.value, s.value) for s in State])
    version = models.IntegerField(default=1)
    risk = models.CharField(max_length=8, choices=RISKS)
    executor = models.CharField(max_length=6, choices=EXECUTORS)
    effects = models.CharField(max_length=13, choices=EFFECTS, default="at_most_once")
    gated = models.BooleanField()
    cancel_requested = models.BooleanField(default=False)

    requested_by_kind = models.CharField(max_length=6, choices=ACTOR_KINDS)
    requested_by_id = models.CharField(max_length=64)
    requested_by_name = models.CharField(max_length=150)
    token = models.ForeignKey(AgentToken, null=True, blank=True, on_delete=models.PROTECT)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        help_text="The requester, or the owner of its token: may not approve it.",
    )
    request_key = models.CharField(max_length=255, blank=True)
    request_sha256 = models.CharField(max_length=64, blank=True)

    policy_name = models.CharField(max_length=100, blank=True)
    policy_version = models.IntegerField(default=0)
    policy_rule = models.CharField(max_length=100, blank=True)
    approvals_required = models.PositiveIntegerField(default=1)
    approval_valid_seconds = models.PositiveIntegerField(default=3_600)

    requested_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True, help_text="Empty for what policy decided: nobody has to answer.")
    approved_until = models.DateTimeField(null=True)

    effect_key = models.CharField(max_length=64)
    fence = models.IntegerField(default=0)
    fence_base = models.IntegerField(default=0, help_text="The fence when the newest decision fell; five more at most.")
    executor_name = models.CharField(max_length=200, blank=True)
    started_at = models.DateTimeField(null=True)
    lease_expires_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    result_text = models.TextField(blank=True)
    is_error = models.BooleanField(null=True)

    class Meta:
        permissions = [
            ("see", "May see approval requests and runs"),
            ("decide", "May approve and reject"),
            ("reconcile", "May say what happened to an unknown action"),
            ("audit", "May read the audit trail"),
        ]
        constraints = [
            models.CheckConstraint(condition=Q(state__in=[s.value for s in State]), name="request_state"),
            models.CheckConstraint(condition=Q(version__gte=1), name="request_version"),
            models.CheckConstraint(condition=Q(fence__gte=F("fence_base")), name="request_fence_grows"),
            models.CheckConstraint(
                condition=~Q(state="executing") | Q(lease_expires_at__isnull=False, fence__gte=1),
                name="request_executing_has_lease",
            ),
            models.CheckConstraint(
                condition=~Q(state="pending") | Q(expires_at__isnull=False), name="request_pending_expires"
            ),
            models.UniqueConstraint(
                fields=["generation", "attempt", "tool_call_id"],
                condition=~Q(tool_call_id=""),
                name="request_one_action_a_call",
            ),
            models.UniqueConstraint(
                fields=["requested_by_kind", "requested_by_id", "request_key"],
                condition=~Q(request_key=""),
                name="request_key_once",
            ),
        ]
        indexes = [
            models.Index(fields=["-requested_at", "-id"], name="request_newest"),
            models.Index(fields=["state", "-requested_at", "-id"], name="request_by_state"),
            models.Index(fields=["tool", "requested_at"], condition=Q(state="approved"), name="request_work_list"),
            models.Index(fields=["expires_at"], condition=Q(state="pending"), name="request_pending_due"),
            models.Index(fields=["approved_until"], condition=Q(state="approved"), name="request_approved_due"),
            models.Index(fields=["lease_expires_at"], condition=Q(state="executing"), name="request_lease_due"),
            models.Index(fields=["conversation", "digest"], name="request_repeats"),
        ]

    def __str__(self) -> str:
        return f"{self.tool} ({self.state})"


class Decision(models.Model):
    """A person's or a policy's answer. A person's key is used once over all actions, verbs and doors."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    action = models.ForeignKey(ApprovalRequest, on_delete=models.PROTECT, related_name="decisions")
    person = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.PROTECT)
    actor_kind = models.CharField(max_length=6, choices=ACTOR_KINDS)
    actor_id = models.CharField(max_length=64)
    actor_name = models.CharField(max_length=150)
    idempotency_key = models.CharField(max_length=255, blank=True)
    decision = models.CharField(
        max_length=16, help_text="approve, reject, reconcile_done, reconcile_failed, reconcile_retry"
    )
    body_sha256 = models.CharField(
        max_length=64, help_text="Of what the key was bound to; digest and key are no part of it."
    )
    reason = models.TextField(blank=True)
    arguments_text = models.TextField(blank=True, help_text="An edit's arguments, canonical.")
    digest = models.CharField(max_length=71, help_text="Of the arguments that were approved or rejected.")
    at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["person", "idempotency_key"],
                condition=Q(person__isnull=False),
                name="decision_key_once_a_person",
            ),
            models.UniqueConstraint(
                fields=["action", "person"],
                condition=Q(person__isnull=False, decision__in=["approve", "reject"]),
                name="decision_one_vote_a_person",
            ),
        ]
        ordering = ["at", "id"]

    def __str__(self) -> str:
        return f"{self.decision} by {self.actor_name}"


class ClaimRequest(models.Model):
    """One `claimId` of one claimant: what it asked for, so that asking again gives the same claims."""

    token = models.ForeignKey(AgentToken, null=True, on_delete=models.PROTECT)
    claimant = models.CharField(max_length=200, help_text="token:PREFIX or server:NAME.")
    claim_id = models.CharField(max_length=255)
    body_sha256 = models.CharField(max_length=64)
    at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["claimant", "claim_id"], name="claim_id_once")]

    def __str__(self) -> str:
        return f"{self.claimant} {self.claim_id}"


class Claim(models.Model):
    """One run of one action: its fence, its hashed token, its lease, how it ended."""

    request = models.ForeignKey(ClaimRequest, on_delete=models.PROTECT, related_name="claims")
    action = models.ForeignKey(ApprovalRequest, on_delete=models.PROTECT, related_name="claims")
    fence = models.IntegerField()
    nonce = models.CharField(max_length=64, help_text="256 random bits; the token is their HMAC under SECRET_KEY.")
    token_sha256 = models.CharField(max_length=64, unique=True)
    lease_seconds = models.IntegerField()
    claimed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    outcome = models.CharField(max_length=12, blank=True, help_text="done, failed, not_started, lease_lost")
    result_sha256 = models.CharField(max_length=64, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["action", "fence"], name="claim_fence_once")]

    def __str__(self) -> str:
        return f"{self.action_id}@{self.fence}"


class AuditEvent(models.Model):
    """Who did what, through which door, in the transaction that did it. Refusals and replays too."""

    at = models.DateTimeField(db_default=Now())
    action = models.ForeignKey(ApprovalRequest, null=True, on_delete=models.PROTECT, related_name="events")
    kind = models.CharField(max_length=40)
    actor_kind = models.CharField(max_length=6, choices=ACTOR_KINDS)
    actor_id = models.CharField(max_length=64)
    actor_name = models.CharField(max_length=150)
    door = models.CharField(max_length=20, blank=True)
    address = models.CharField(max_length=64, blank=True)
    request_id = models.CharField(max_length=64, blank=True)
    idempotency_key = models.CharField(max_length=255, blank=True)
    from_state = models.CharField(max_length=9, blank=True)
    to_state = models.CharField(max_length=9, blank=True)
    version = models.IntegerField(null=True)
    digest = models.CharField(max_length=71, blank=True)
    reason = models.TextField(blank=True)
    detail = models.TextField(default="{}", help_text="Exact JSON text.")

    class Meta:
        indexes = [
            models.Index(fields=["action", "id"], name="audit_by_action"),
            models.Index(fields=["-at", "-id"], name="audit_newest"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} by {self.actor_name}"


class AgentRun(models.Model):
    """A generation that this site's own agent loop drives. Its lease is the loop's, its words are in the log.

    `phase`: `ready` (a turn can be taken), `running` (somebody holds the lease), `waiting` (calls are open, no
    coroutine is), `ended`.
    """

    generation = models.OneToOneField(Generation, primary_key=True, on_delete=models.PROTECT, related_name="run")
    adapter = models.CharField(max_length=40, help_text="scripted or openai")
    config = models.TextField(default="{}", help_text="Exact JSON text: the script, or model and settings.")
    messages = models.TextField(help_text="Exact JSON text: what was said before the log began.")
    tools = models.JSONField(default=list, help_text="Names of the server tools the model is told of.")
    phase = models.CharField(
        max_length=8,
        default="ready",
        choices=[("ready", "ready"), ("running", "running"), ("waiting", "waiting"), ("ended", "ended")],
    )
    turns = models.IntegerField(default=0)
    max_turns = models.IntegerField(default=20)
    failures = models.IntegerField(default=0, help_text="Attempts in a row that broke off in this turn.")
    not_before = models.DateTimeField(null=True)
    worker = models.CharField(max_length=100, blank=True)
    lease_expires_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=~Q(phase="running") | Q(lease_expires_at__isnull=False),
                name="run_running_has_lease",
            ),
        ]
        indexes = [models.Index(fields=["phase", "lease_expires_at"], name="run_due")]

    def __str__(self) -> str:
        return f"{self.adapter} run {self.generation_id}"
