"""Every address of the site."""

from django.contrib import admin
from django.urls import include, path, re_path

from streams.doors import unknown_address

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/v1/", include("streams.urls")),
    path("api/v1/", include("approvals.api_urls")),
    # Programs get a problem document, also from an address that never was.
    re_path(r"^api/", unknown_address),
    path("", include("approvals.urls")),
]
