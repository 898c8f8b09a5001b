"""A server process ends what is past its time by itself; no executor runs here."""

from __future__ import annotations

from datetime import timedelta

import pytest

from approvals.models import ApprovalRequest, AuditEvent
from streams import clock
from streams.models import Entry, Generation
from tests.approvals import desk
from tests.support import Server, eventually


@pytest.mark.django_db(transaction=True)
def test_a_site_of_one_server_process_forgets_nothing() -> None:
    here, silent = desk.Desk(), desk.Desk()
    unanswered = here.asked()
    lost = here.asked(desk.call("call-2"))
    desk.approve(lost)
    desk.take(lost)
    past = clock.now() - timedelta(seconds=1)
    ApprovalRequest.objects.filter(pk=unanswered.pk).update(expires_at=past)
    ApprovalRequest.objects.filter(pk=lost.pk).update(lease_expires_at=past)
    Generation.objects.filter(pk=silent.generation.pk).update(producer_seen_at=past - timedelta(seconds=60))
    with Server(env={"AGENTSITE_SWEEP_SECONDS": "0.1"}):
        eventually(lambda: ApprovalRequest.objects.get(pk=unanswered.pk).state == "expired", within_seconds=20)
        eventually(lambda: ApprovalRequest.objects.get(pk=lost.pk).state == "unknown", within_seconds=20)
        eventually(lambda: Generation.objects.get(pk=silent.generation.pk).state == "error", within_seconds=20)
    kinds = AuditEvent.objects.filter(actor_kind="clock").values_list("kind", flat=True)
    assert sorted(kinds) == ["expired", "lease_lost"]
    ends = Entry.objects.filter(generation=silent.generation).order_by("offset").values_list("type", flat=True)
    assert list(ends)[-2:] == ["error", "done"]
