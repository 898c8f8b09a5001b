"""Rows of the log. Only `streams.log` writes generations and entries, only `streams.access` writes tokens."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now


class AgentToken(models.Model):
    """A key an agent, an executor or a reader carries. The secret is shown once and kept as SHA-256 only."""

    prefix = models.CharField(max_length=16, unique=True)
    secret_sha256 = models.CharField(max_length=64, editable=False)
    name = models.CharField(max_length=100)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        help_text="Who answers for this agent. The owner can't approve what the token asks for.",
    )
    scopes = models.JSONField(default=list, help_text="For example ['generations:write', 'approvals:request'].")
    claim_tools = models.JSONField(
        default=list, blank=True, help_text="Patterns of the tools a token with the scope 'claims' may run, or ['*']."
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        permissions = [("configure", "May create and revoke agent tokens and edit policy")]

    def __str__(self) -> str:
        return f"{self.name} (ags_{self.prefix}_…)"


class Generation(models.Model):
    """One agent answer and the head of its log.

    `next_offset` is the only source of offsets; it moves by a guarded UPDATE in the transaction that inserts the
    entries. `open_actions` counts the pending, approved and executing actions, `open_gated` those of them that
    were asked about or denied; `approvals.transitions` moves both through `streams.log`.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    epoch = models.CharField(max_length=32)
    title = models.CharField(max_length=200, blank=True)
    conversation = models.CharField(max_length=200, blank=True, db_index=True)
    model = models.CharField(max_length=200, blank=True)
    metadata = models.TextField(default="{}", help_text="Exact JSON text.")
    create_sha256 = models.CharField(max_length=64, blank=True, help_text="Of the body it was created with.")

    token = models.ForeignKey(AgentToken, null=True, blank=True, on_delete=models.PROTECT)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.PROTECT)

    first_offset = models.BigIntegerField(default=0)
    next_offset = models.BigIntegerField(default=0)
    attempt = models.IntegerField(default=1)
    next_seq = models.BigIntegerField(default=0)
    attempt_from = models.BigIntegerField(default=0, help_text="Offset where the newest attempt began.")
    writer = models.CharField(max_length=200, blank=True)
    newest = models.CharField(
        max_length=24,
        blank=True,
        help_text="Type of the newest chunk: text, tool_call, tool_result, error, recoverable.",
    )

    cancel_requested = models.BooleanField(default=False)
    finish_reason = models.CharField(max_length=16, blank=True)
    usage = models.TextField(blank=True, help_text="Exact JSON text from the done chunk.")
    open_actions = models.IntegerField(default=0)
    open_gated = models.IntegerField(default=0)

    producer_timeout_seconds = models.IntegerField(default=60)
    producer_seen_at = models.DateTimeField(db_default=Now())
    created_at = models.DateTimeField(db_default=Now(), db_index=True)
    first_chunk_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    chunk_count = models.BigIntegerField(default=0)
    tool_call_count = models.IntegerField(default=0)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(next_offset__gte=F("first_offset")), name="generation_offsets_grow"),
            models.CheckConstraint(condition=Q(attempt__gte=1, next_seq__gte=0), name="generation_attempt_and_seq"),
            models.CheckConstraint(
                condition=Q(open_gated__gte=0, open_actions__gte=F("open_gated")), name="generation_open_counts"
            ),
            models.CheckConstraint(
                condition=Q(producer_timeout_seconds__range=(5, 86_400)), name="generation_timeout_range"
            ),
            models.CheckConstraint(
                condition=Q(finish_reason="", finished_at__isnull=True)
                | (~Q(finish_reason="") & Q(finished_at__isnull=False)),
                name="generation_finished_together",
            ),
        ]
        indexes = [
            models.Index(fields=["producer_seen_at"], condition=Q(finish_reason=""), name="generation_open_by_seen"),
        ]

    def __str__(self) -> str:
        return self.title or str(self.id)

    @property
    def state(self) -> str:
        """The name of contract §2, derived: open, waiting, retrying, cancelling, done, cancelled or error."""
        if self.finish_reason:
            return {"cancel": "cancelled", "error": "error"}.get(self.finish_reason, "done")
        if self.cancel_requested:
            return "cancelling"
        if self.newest == "recoverable":
            return "retrying"
        if self.newest in ("tool_call", "tool_result") and self.open_gated > 0:
            return "waiting"
        return "open"


class Entry(models.Model):
    """One numbered row of a log: a chunk from the agent or a notice from the server. Never changed."""

    pk = models.CompositePrimaryKey("generation", "offset")
    generation = models.ForeignKey(Generation, on_delete=models.CASCADE, related_name="entries", db_index=False)
    offset = models.BigIntegerField()
    attempt = models.IntegerField()
    seq = models.BigIntegerField(null=True, help_text="The writer's count; empty for what the server wrote.")
    kind = models.CharField(max_length=6, choices=[("chunk", "chunk"), ("notice", "notice")])
    type = models.CharField(max_length=24)
    body = models.TextField(help_text="The exact JSON of the chunk or notice.")
    at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["generation", "attempt", "seq"],
                condition=Q(seq__isnull=False),
                name="entry_seq_once_an_attempt",
            ),
            models.CheckConstraint(condition=Q(offset__gte=0), name="entry_offset_from_zero"),
            models.CheckConstraint(condition=Q(kind__in=["chunk", "notice"]), name="entry_kind"),
        ]

    def __str__(self) -> str:
        return f"{self.generation_id}#{self.offset}"
