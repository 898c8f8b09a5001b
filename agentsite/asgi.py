"""One entry for http and sockets: `daphne agentsite.asgi:application`, or uvicorn with `--ws websockets-sansio`."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "agentsite.settings")

from django.core.asgi import get_asgi_application

from agentsite import startup

http = get_asgi_application()
startup.before_server()

from approvals.consumers import GenerationConsumer, InboxConsumer  # noqa: E402
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.urls import path  # noqa: E402
from streams.sockets import Door  # noqa: E402

application = ProtocolTypeRouter(
    {
        "http": http,
        "websocket": Door(
            URLRouter(
                [
                    path("ws/generations/<str:generation_id>/", GenerationConsumer.as_asgi()),
                    path("ws/inbox/", InboxConsumer.as_asgi()),
                ]
            )
        ),
    }
)
