"""The admin's rooms for policy, requests, decisions and events. Only policy is written here.

Approve and reject are admin actions behind a page that asks again, and go through the same verb as every door.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from approvals import decisions, policies
from approvals.models import ApprovalRequest, AuditEvent, Decision, Policy, PolicyRule
from streams import access
from streams.admin import AsPermitted, ReadOnly
from streams.problems import Problem
from streams.safetext import visible, warnings

AUDIT = "approvals.audit"


# Django's admin classes can be named with their model for the type checker only.
if TYPE_CHECKING:
    Inline = admin.TabularInline[Any, Any]
else:
    Inline = admin.TabularInline


class InlineAsPermitted(Inline):
    """Who has `see` reads; who has `write` (None: nobody) may change."""

    see = access.SEE
    write: str | None = None
    extra = 0

    def _writes(self, request: HttpRequest) -> bool:
        return self.write is not None and request.user.has_perm(self.write)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(self.see)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._writes(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._writes(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._writes(request)


class RuleInline(InlineAsPermitted):
    model = PolicyRule
    see = write = access.CONFIGURE
    extra = 1


@admin.register(Policy)
class PolicyAdmin(AsPermitted):
    see = access.CONFIGURE
    list_display = ("name", "version", "active")
    readonly_fields = ("version",)
    inlines = (RuleInline,)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(access.CONFIGURE)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(access.CONFIGURE)

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Save the rules; an edit raises the version, so that old requests name what judged them."""
        super().save_related(request, form, formsets, change)
        if change and (form.has_changed() or any(formset.has_changed() for formset in formsets)):
            policies.edited(policy_id=form.instance.pk)


class DecisionInline(InlineAsPermitted):
    model = Decision
    fields = readonly_fields = ("at", "decision", "actor_name", "shown_reason", "digest", "idempotency_key")

    @admin.display(description="reason")
    def shown_reason(self, obj: Decision) -> str:
        return visible(obj.reason)


@admin.register(ApprovalRequest)
class ApprovalRequestAdmin(ReadOnly):
    list_display = ("id", "shown_tool", "risk", "state", "shown_requester", "requested_at", "expires_at")
    list_filter = ("state", "risk", "effects", "requested_at")
    search_fields = ("id", "tool", "conversation", "requested_by_name")
    actions = ("approve", "reject")
    inlines = (DecisionInline,)
    fields = (
        "id", "shown_tool", "shown_warnings", "shown_arguments", "digest", "shown_original", "shown_summary", "state",
        "version", "risk", "executor", "effects", "gated", "cancel_requested", "shown_requester", "generation",
        "previous", "policy_name", "policy_version", "policy_rule", "approvals_required", "requested_at", "expires_at",
        "approved_until", "fence", "executor_name", "started_at", "lease_expires_at", "finished_at", "shown_result",
        "is_error",
    )  # fmt: skip

    def has_decide_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(access.DECIDE)

    @admin.display(description="tool")
    def shown_tool(self, obj: ApprovalRequest) -> str:
        return visible(obj.tool)

    @admin.display(description="look closely")
    def shown_warnings(self, obj: ApprovalRequest) -> str:
        return " ".join(warnings(obj.tool + "\n" + obj.arguments_text)) or "–"

    @admin.display(description="arguments")
    def shown_arguments(self, obj: ApprovalRequest) -> str:
        return visible(obj.arguments_text)

    @admin.display(description="proposed arguments, when edited")
    def shown_original(self, obj: ApprovalRequest) -> str:
        return visible(obj.original_arguments_text) or "–"

    @admin.display(description="the agent’s own words")
    def shown_summary(self, obj: ApprovalRequest) -> str:
        return visible(obj.summary) or "–"

    @admin.display(description="asked by")
    def shown_requester(self, obj: ApprovalRequest) -> str:
        return visible(f"{obj.requested_by_name} ({obj.requested_by_kind})")

    @admin.display(description="result")
    def shown_result(self, obj: ApprovalRequest) -> str:
        return visible(obj.result_text) or "–"

    @admin.action(description="Approve the selected requests…", permissions=["decide"])
    def approve(self, request: HttpRequest, queryset: QuerySet[ApprovalRequest]) -> HttpResponse | None:
        return self._decide(request, queryset, "approve")

    @admin.action(description="Reject the selected requests…", permissions=["decide"])
    def reject(self, request: HttpRequest, queryset: QuerySet[ApprovalRequest]) -> HttpResponse | None:
        return self._decide(request, queryset, "reject")

    def _decide(self, request: HttpRequest, queryset: QuerySet[ApprovalRequest], decision: str) -> HttpResponse | None:
        chosen = list(queryset[: decisions.MAX_BATCH + 1])
        if len(chosen) > decisions.MAX_BATCH:
            messages.error(request, f"At most {decisions.MAX_BATCH} requests are decided at once.")
            return None
        if decision == "approve" and len(chosen) > 1 and any(one.risk in ("high", "critical") for one in chosen):
            messages.error(request, "High risk is never approved in a batch: choose it alone. Nothing was decided.")
            return None
        if request.POST.get("confirmed") != "yes":
            context = {
                **self.admin_site.each_context(request),
                "title": f"{decision.capitalize()} – are you sure?",
                "decision": decision,
                "chosen": chosen,
                # One key for this page: sent twice, it decides once.
                "key": secrets.token_hex(16),
                "opts": self.model._meta,
            }
            return TemplateResponse(request, "admin/approvals/confirm_decision.html", context)
        self._record(request, chosen, decision)
        return None

    def _record(self, request: HttpRequest, chosen: list[ApprovalRequest], decision: str) -> None:
        caller = access.caller_for_user(user=request.user, door="admin", address=request.META.get("REMOTE_ADDR", ""))
        key = request.POST.get("key", "")
        for one in chosen:
            try:
                decided = decisions.decide(
                    caller=caller,
                    action_id=one.pk,
                    idempotency_key=f"admin-{key}-{one.pk.hex}",
                    decision=decision,
                    reason=request.POST.get("reason", "").strip() if decision == "reject" else "",
                    # What the confirmation showed, not what the row says by now.
                    digest=request.POST.get(f"digest-{one.pk}", ""),
                )
            except Problem as refusal:
                messages.error(request, f"{visible(one.tool)}: not applied, {refusal.code}: {refusal.detail}")
                continue
            again = decided.replayed or decided.already_decided
            words = "already recorded, not repeated" if again else f"{decision} recorded"
            messages.success(request, f"{visible(one.tool)}: {words}")


@admin.register(Decision)
class DecisionAdmin(ReadOnly):
    list_display = ("at", "decision", "actor_name", "action_id", "idempotency_key")
    list_filter = ("decision", "actor_kind", "at")
    search_fields = ("idempotency_key", "actor_name", "action__id")
    fields = (
        "at",
        "decision",
        "actor_kind",
        "actor_name",
        "action",
        "idempotency_key",
        "shown_reason",
        "digest",
        "shown_arguments",
    )

    @admin.display(description="reason")
    def shown_reason(self, obj: Decision) -> str:
        return visible(obj.reason) or "–"

    @admin.display(description="edited arguments")
    def shown_arguments(self, obj: Decision) -> str:
        return visible(obj.arguments_text) or "–"


@admin.register(AuditEvent)
class AuditEventAdmin(ReadOnly):
    see = AUDIT
    list_display = ("at", "kind", "actor_name", "action_id", "from_state", "to_state", "door", "request_id")
    list_filter = ("kind", "actor_kind", "door", "at")
    search_fields = ("idempotency_key", "request_id", "actor_name", "action__id")
    fields = (
        "at", "kind", "actor_kind", "actor_id", "actor_name", "action", "from_state", "to_state", "version", "digest",
        "shown_reason", "door", "address", "request_id", "idempotency_key", "shown_detail",
    )  # fmt: skip

    @admin.display(description="reason")
    def shown_reason(self, obj: AuditEvent) -> str:
        return visible(obj.reason) or "–"

    @admin.display(description="detail")
    def shown_detail(self, obj: AuditEvent) -> str:
        return visible(obj.detail)
