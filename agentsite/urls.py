"""Every address of the site."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/v1/", include("streams.urls")),
    path("api/v1/", include("approvals.api_urls")),
    path("", include("approvals.urls")),
]
