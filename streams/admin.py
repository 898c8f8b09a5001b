"""The admin's rooms for tokens and runs. Runs are read-only: only the log writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from streams import access
from streams.models import AgentToken, Generation
from streams.problems import Problem
from streams.safetext import visible

# Django's admin classes can be named with their model for the type checker only.
if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    TokenModelForm = forms.ModelForm[AgentToken]
else:
    ModelAdmin = admin.ModelAdmin
    TokenModelForm = forms.ModelForm


class AsPermitted(ModelAdmin):
    """Rights are the site's own permissions, not Django's one per model; who has none does not see the model."""

    see = access.SEE

    def has_module_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(self.see)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(self.see)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        # Title and breadcrumb carry the object's name, which an agent may have chosen.
        if context.get("original") is not None:
            context["original"] = context["subtitle"] = visible(str(context["original"]))
        return super().render_change_form(request, context, *args, **kwargs)


class ReadOnly(AsPermitted):
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class TokenForm(TokenModelForm):
    """What a new token may do. Nothing of it can be changed later: revoke it and make another."""

    scopes = forms.MultipleChoiceField(
        choices=[(scope, scope) for scope in access.SCOPES], widget=forms.CheckboxSelectMultiple
    )
    claim_tools = forms.CharField(
        required=False,
        help_text="Patterns of the tools a token with the scope claims may run, one a line; * is any.",
        widget=forms.Textarea(attrs={"rows": 3}),
    )

    class Meta:
        model = AgentToken
        fields = ("name", "owner", "scopes", "claim_tools", "expires_at")

    def clean_claim_tools(self) -> list[str]:
        return [line.strip() for line in self.cleaned_data["claim_tools"].splitlines() if line.strip()]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("claim_tools") and "claims" not in cleaned.get("scopes", ()):
            self.add_error("claim_tools", "A token that names tools to claim needs the scope claims.")
        return cleaned


@admin.register(AgentToken)
class AgentTokenAdmin(AsPermitted):
    see = access.CONFIGURE
    form = TokenForm
    list_display = ("prefix", "name", "owner", "scopes", "created_at", "expires_at", "revoked_at", "last_used_at")
    list_filter = ("revoked_at",)
    search_fields = ("prefix", "name")
    actions = ("revoke",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(access.CONFIGURE)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(access.CONFIGURE)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is None:
            return super().get_fields(request, obj)
        return (
            "prefix",
            "name",
            "owner",
            "scopes",
            "claim_tools",
            "created_at",
            "expires_at",
            "revoked_at",
            "last_used_at",
        )

    def save_model(self, request: HttpRequest, obj: AgentToken, form: Any, change: bool) -> None:
        """Make the token by its verb; say its secret once, here, and never again."""
        made, secret = access.create_token(
            name=form.cleaned_data["name"],
            scopes=form.cleaned_data["scopes"],
            owner=form.cleaned_data["owner"],
            claim_tools=form.cleaned_data["claim_tools"],
            expires_at=form.cleaned_data["expires_at"],
        )
        obj.pk = made.pk
        obj.refresh_from_db()
        messages.warning(request, f"The token is {secret} – copy it now: it is shown this once and kept nowhere.")

    @admin.action(description="Revoke the selected tokens", permissions=["revoke"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[AgentToken]) -> None:
        caller = access.caller_for_user(user=request.user, door="admin", address=request.META.get("REMOTE_ADDR", ""))
        for token in queryset:
            try:
                access.revoke_token(prefix=token.prefix, caller=caller)
            except Problem as refusal:
                messages.error(request, f"{token.prefix}: {refusal.detail}")
            else:
                messages.success(request, f"{token.prefix} is revoked; its live sockets close within five seconds.")


@admin.register(Generation)
class GenerationAdmin(ReadOnly):
    list_display = ("id", "shown_title", "shown_state", "open_actions", "attempt", "next_offset", "created_at")
    list_filter = ("finish_reason", "created_at")
    search_fields = ("id", "title", "conversation")
    fields = (
        "id", "shown_title", "shown_state", "shown_conversation", "shown_model", "token", "user", "attempt",
        "first_offset", "next_offset", "open_actions", "cancel_requested", "finish_reason", "created_at",
        "first_chunk_at", "finished_at", "producer_seen_at", "chunk_count", "tool_call_count",
    )  # fmt: skip

    @admin.display(description="title")
    def shown_title(self, obj: Generation) -> str:
        return visible(obj.title)

    @admin.display(description="state")
    def shown_state(self, obj: Generation) -> str:
        return obj.state

    @admin.display(description="conversation")
    def shown_conversation(self, obj: Generation) -> str:
        return visible(obj.conversation)

    @admin.display(description="model")
    def shown_model(self, obj: Generation) -> str:
        return visible(obj.model)
