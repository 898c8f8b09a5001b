"""Addresses under /api/v1/ that this app answers. `approvals.api_urls` follows, and ends the list."""

from django.urls import path
from drf_spectacular.views import SpectacularJSONAPIView

from streams import api, events
from streams.waiting import hold

urlpatterns = [
    path("schema", SpectacularJSONAPIView.as_view(authentication_classes=[]), name="schema"),
    path("generations", hold(api.Generations.as_view())),
    path("generations/<str:generation_id>", hold(api.OneGeneration.as_view())),
    path("generations/<str:generation_id>/chunks", api.chunks),
    path("generations/<str:generation_id>/entries", hold(api.Entries.as_view())),
    path("generations/<str:generation_id>/events", events.events),
    path("generations/<str:generation_id>/cancel", hold(api.Cancel.as_view())),
    path("tokens/<str:prefix>", hold(api.OneToken.as_view())),
]
