from django.apps import AppConfig


class AgentsiteConfig(AppConfig):
    name = "agentsite"
