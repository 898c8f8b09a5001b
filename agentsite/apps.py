from importlib import import_module

from django.apps import AppConfig
from django.conf import settings


class AgentsiteConfig(AppConfig):
    name = "agentsite"

    def ready(self) -> None:
        from agentsite import checks  # noqa: F401 - importing registers them

        for module in settings.TOOL_MODULES:
            import_module(module)
