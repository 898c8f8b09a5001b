"""Structured logs by structlog, for our own lines and for everybody else's.

One event a line on stderr: `LOG_FORMAT=json` for machines, `console` for people (the default on a terminal). Tokens
and claim tokens never reach a log, whoever tries to write one.
"""

from __future__ import annotations

import logging.config
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_TOKEN = re.compile(r"\b(ags_[A-Za-z0-9]+_)[A-Za-z0-9_-]+")
_SECRET_KEYS = frozenset({"token", "claim_token", "claimToken", "secret", "password", "authorization", "cookie"})


def redact(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Blank out secrets: values under telling names, and agent tokens inside any text."""
    for key, value in event.items():
        if key.lower() in _SECRET_KEYS:
            event[key] = "[redacted]"
        elif isinstance(value, str):
            event[key] = _TOKEN.sub(r"\1[redacted]", value)
    return event


def configure(config: dict[str, Any]) -> None:
    """Set up structlog and the standard library's logging alike. Django calls it with settings.LOGGING."""
    as_json = config["format"] == "json" or (config["format"] == "" and not sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Any] = (
        [structlog.processors.format_exc_info, redact, structlog.processors.JSONRenderer(ensure_ascii=False)]
        if as_json
        # Colours and tracebacks are the renderer's own; what it prints passed the redaction before.
        else [redact, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "structured": {
                    "()": structlog.stdlib.ProcessorFormatter,
                    "foreign_pre_chain": shared,
                    "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
                }
            },
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "structured"}},
            "root": {"handlers": ["stderr"], "level": config["level"]},
            "loggers": {
                # Django's defaults mail and print on their own; here every line goes one way.
                "django": {"handlers": [], "propagate": True, "level": config["level"]},
                "django.server": {"handlers": [], "propagate": True, "level": "WARNING"},
                # 4xx are answers, not incidents; the doors log what matters themselves.
                "django.request": {"level": "ERROR"},
                "daphne": {"level": "WARNING"},
                "asyncio": {"level": "WARNING"},
            },
        }
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared[:4],
            *shared[5:],
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
