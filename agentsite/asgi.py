"""One entry for http and sockets: `daphne agentsite.asgi:application`, or uvicorn.

With uvicorn: `--ws websockets-sansio --ws-per-message-deflate false`. The protocol has no compression (contract §4):
it would pack each frame anew for each of a thousand sockets.
"""

import os
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "agentsite.settings")

from django.core.asgi import get_asgi_application

from agentsite import startup

get_asgi_application()
startup.before_server()

from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.urls import path  # noqa: E402

from agentsite import sweeper  # noqa: E402
from approvals.consumers import GenerationConsumer, InboxConsumer  # noqa: E402
from streams.shortcut import Handler  # noqa: E402
from streams.sockets import Door, nowhere  # noqa: E402

# django-stubs knows `path` as made for views only; Channels' router takes ASGI applications.
_applications: list[tuple[str, Any]] = [
    ("ws/generations/<str:generation_id>/", GenerationConsumer.as_asgi()),
    ("ws/inbox/", InboxConsumer.as_asgi()),
    ("<path:rest>", nowhere),
    ("", nowhere),
]

application = ProtocolTypeRouter(
    {"http": Handler(), "websocket": Door(URLRouter([path(address, target) for address, target in _applications]))}
)

sweeper.start()
