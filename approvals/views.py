"""The pages: each is readable as the server made it, and kept true by its own ES module from then on."""

from __future__ import annotations

import json
from typing import Any, Final, cast
from urllib.parse import urlencode
from uuid import UUID

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Substr
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from approvals.models import RISKS, ApprovalRequest, Decision
from approvals.states import State
from streams.access import DECIDE, SEE
from streams.models import Generation

PAGE: Final = 50
# What a row shows of arguments; inbox.js counts with the same number.
PREVIEW: Final = 160
RECONCILE: Final = "approvals.reconcile"
DECIDED: Final = (State.APPROVED, State.EXECUTING, State.DONE, State.FAILED, State.REJECTED, State.CANCELLED)
TABS: Final = (
    ("waiting", "Waiting"),
    ("mine", "Decided by me"),
    ("look", "Needs a look"),
    ("decided", "Decided"),
    ("expired", "Expired"),
)
# The tabs whose numbers the inbox's socket keeps current, by the name it counts them under.
LIVE_COUNTS: Final = {"waiting": "pending", "look": "unknown", "expired": "expired"}


def _me(request: HttpRequest) -> User:
    return cast(User, request.user)


def _tab_filter(tab: str, person: User) -> Q:
    match tab:
        case "mine":
            return Q(Exists(Decision.objects.filter(action=OuterRef("pk"), person=person)))
        case "look":
            return Q(state=State.UNKNOWN)
        case "decided":
            return Q(state__in=DECIDED)
        case "expired":
            return Q(state=State.EXPIRED)
    return Q(state=State.PENDING)


def _filtered(request: HttpRequest, tab: str) -> QuerySet[ApprovalRequest]:
    """Return what the address asks for, newest first. An unknown filter value filters nothing out."""
    found = ApprovalRequest.objects.filter(_tab_filter(tab, _me(request)))
    if (risk := request.GET.get("risk", "")) in {name for name, _ in RISKS}:
        found = found.filter(risk=risk)
    if text := request.GET.get("q", "").strip().replace("\0", "")[:200]:
        found = found.filter(
            Q(tool__icontains=text) | Q(requested_by_name__icontains=text) | Q(conversation__icontains=text)
        )
    if before := request.GET.get("before", ""):
        try:
            edge = ApprovalRequest.objects.filter(pk=UUID(before)).values_list("requested_at", "pk").first()
        except ValueError:
            edge = None
        if edge is not None:
            found = found.filter(Q(requested_at__lt=edge[0]) | Q(requested_at=edge[0], pk__lt=edge[1]))
    return found.order_by("-requested_at", "-pk")


@never_cache
@require_safe
@login_required
def inbox(request: HttpRequest) -> HttpResponse:
    """Show a page of requests. The number of queries is the same for ten of them and for ten thousand."""
    person = _me(request)
    if not person.has_perm(SEE):
        raise PermissionDenied
    tab = request.GET.get("tab", "waiting")
    if tab not in dict(TABS):
        tab = "waiting"
    rows = list(
        _filtered(request, tab)
        .defer("arguments_text", "original_arguments_text", "context_text", "result_text", "summary")
        .annotate(arguments_head=Substr("arguments_text", 1, 2001))
        .prefetch_related("decisions")[: PAGE + 1]
    )
    by_state = dict(
        ApprovalRequest.objects.order_by().values_list("state").annotate(n=Count("pk")).values_list("state", "n")
    )
    mine = ApprovalRequest.objects.filter(_tab_filter("mine", person)).count()
    numbers = {
        "waiting": by_state.get(State.PENDING, 0),
        "mine": mine,
        "look": by_state.get(State.UNKNOWN, 0),
        "decided": sum(by_state.get(state, 0) for state in DECIDED),
        "expired": by_state.get(State.EXPIRED, 0),
    }
    kept = {name: request.GET[name] for name in ("q", "risk") if request.GET.get(name)}
    older = urlencode({"tab": tab, **kept, "before": str(rows[PAGE - 1].pk)}) if len(rows) > PAGE else ""
    return render(
        request,
        "approvals/inbox.html",
        {
            "rows": rows[:PAGE],
            "tab": tab,
            "tabs": [
                (name, label, numbers[name], urlencode({"tab": name, **kept}), LIVE_COUNTS.get(name, name))
                for name, label in TABS
            ],
            "counts": json.dumps({"pending": numbers["waiting"], "unknown": numbers["look"]}),
            "older": older,
            "risks": RISKS,
            "q": kept.get("q", ""),
            "risk": kept.get("risk", ""),
            "preview": PREVIEW,
            "may_decide": person.has_perm(DECIDE),
        },
    )


@never_cache
@require_safe
@login_required
def request_page(request: HttpRequest, action_id: UUID) -> HttpResponse:
    person = _me(request)
    action = (
        ApprovalRequest.objects.select_related("generation").filter(pk=action_id).first()
        if person.has_perm(SEE)
        else None
    )
    if action is None:
        raise Http404
    earlier = (
        ApprovalRequest.objects.filter(tool=action.tool)
        .exclude(pk=action.pk)
        .exclude(state=State.PENDING)
        .defer("arguments_text", "original_arguments_text", "context_text", "result_text", "summary")
        .prefetch_related("decisions")
        .order_by("-requested_at", "-pk")[:5]
    )
    return render(
        request,
        "approvals/request.html",
        {
            "action": action,
            "decisions": action.decisions.all(),
            "earlier": earlier,
            "repeats": action.repeats.order_by("-requested_at")[:5],
            "may_decide": person.has_perm(DECIDE),
            "may_reconcile": person.has_perm(RECONCILE),
        },
    )


@never_cache
@require_safe
@login_required
def runs(request: HttpRequest) -> HttpResponse:
    """List the newest runs."""
    if not _me(request).has_perm(SEE):
        raise PermissionDenied
    newest = Generation.objects.order_by("-created_at", "-pk")[:PAGE]
    return render(request, "streams/runs.html", {"runs": newest})


@never_cache
@require_safe
@login_required
def run_page(request: HttpRequest, generation_id: UUID) -> HttpResponse:
    person = _me(request)
    generation = Generation.objects.filter(pk=generation_id).first() if person.has_perm(SEE) else None
    if generation is None:
        raise Http404
    context: dict[str, Any] = {"generation": generation, "may_decide": person.has_perm(DECIDE)}
    return render(request, "streams/run.html", context)
