"""System checks: settings that start well and then do not do what was meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, register

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d{1,5})?")


@register()
def origins_are_exact(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Sockets compare origins exactly, so a wildcard or a path in ALLOWED_ORIGINS would never match."""
    return [
        Error(
            f"ALLOWED_ORIGINS has {origin!r}, which is no exact origin.",
            hint="Write scheme, host and port in small letters, without a path or wildcard: https://agents.example.com",
            id="agentsite.E001",
        )
        for origin in settings.CSRF_TRUSTED_ORIGINS
        if not _ORIGIN.fullmatch(origin)
    ]
