"""The pages people see. What may change something is under /api/v1: a GET here never decides anything."""

from django.contrib.auth import views as auth
from django.urls import path

from approvals import views

urlpatterns = [
    path("", views.inbox, name="inbox"),
    path("approvals/<uuid:action_id>/", views.request_page, name="request"),
    path("runs/<uuid:generation_id>/", views.run_page, name="run"),
    path("runs/", views.runs, name="runs"),
    path("accounts/login/", auth.LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("accounts/logout/", auth.LogoutView.as_view(), name="logout"),
]
