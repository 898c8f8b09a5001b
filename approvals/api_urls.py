"""Addresses under /api/v1/ that this app answers, and at the end the answer to every other one."""

from django.urls import path, re_path

from approvals import api, claims_api
from streams.doors import unknown_address
from streams.waiting import hold

urlpatterns = [
    path("approvals", hold(api.Approvals.as_view())),
    path("approvals/decisions", hold(api.DecideMany.as_view())),
    path("approvals/<str:action_id>", hold(api.OneApproval.as_view())),
    path("approvals/<str:action_id>/decision", hold(api.DecideOne.as_view())),
    path("approvals/<str:action_id>/cancel", hold(api.Cancel.as_view())),
    path("approvals/<str:action_id>/reconcile", hold(api.Reconcile.as_view())),
    path("claims", hold(claims_api.Claims.as_view())),
    path("claims/heartbeat", hold(claims_api.Heartbeat.as_view())),
    path("claims/complete", hold(claims_api.Complete.as_view())),
    re_path(r"^(?P<rest>.*)$", unknown_address),
]
