"""Settings for every deployment; the environment decides, nothing else.

Embedded default: SQLite under `var/`, one process, no Redis. `DATABASE_URL` takes PostgreSQL, `REDIS_URL` the
doorbell between processes. See docs/operations.md for every variable.
"""

import os
from pathlib import Path
from typing import Any

import environ

from agentsite import startup

BASE_DIR = Path(__file__).resolve().parent.parent
VAR_DIR = Path(os.environ.get("AGENTSITE_VAR_DIR", BASE_DIR / "var"))

env = environ.Env()

DEBUG = env.bool("DEBUG", default=False)
_DEVELOPMENT_KEY = "insecure-development-key-set-SECRET_KEY-in-production-0000000000"
SECRET_KEY = env.str("SECRET_KEY", default="") or _DEVELOPMENT_KEY
ALLOWED_HOSTS: list[str] = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]", "testserver"])
# Exact origins (scheme, host, port) browsers may open sockets and POST from. Empty: the request's own origin only.
CSRF_TRUSTED_ORIGINS: list[str] = env.list("ALLOWED_ORIGINS", default=[])

INSTALLED_APPS = [
    "daphne",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "streams",
    "approvals",
    "agentsite",
]

MIDDLEWARE = [
    "agentsite.csp.content_security_policy",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "agentsite.urls"
ASGI_APPLICATION = "agentsite.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]


# Several test runs at once on one machine each take a name of their own.
TEST_DB_SUFFIX = env.str("AGENTSITE_TEST_DB_SUFFIX", default="")


def database(url: str) -> dict[str, Any]:
    """Turn DATABASE_URL into Django's dict with the options each engine needs here.

    SQLite: IMMEDIATE, or a read-then-write transaction fails at once under a second writer; WAL; the connection
    kept, which is 0.4 ms an append against 2.5. PostgreSQL: a pool, because an async server makes threads freely.
    """
    startup.check_database_url(url)
    config: dict[str, Any] = env.db_url_config(url)
    if config["ENGINE"] == "django.db.backends.sqlite3":
        config["CONN_MAX_AGE"] = None
        config["OPTIONS"] = {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA busy_timeout=20000;",
        }
        # A file, not memory: sockets, doors and tests reach it from several threads and processes.
        config["TEST"] = {"NAME": str(VAR_DIR / f"test{TEST_DB_SUFFIX}.sqlite3")}
    elif config["ENGINE"] == "django.db.backends.postgresql":
        config["CONN_MAX_AGE"] = 0
        config["OPTIONS"] = {
            **config.get("OPTIONS", {}),
            "pool": {"min_size": 0, "max_size": env.int("DATABASE_POOL_SIZE", default=20), "timeout": 10},
        }
        config["TEST"] = {"NAME": f"test_agentsite{TEST_DB_SUFFIX}"}
    return config


# An empty variable is an unset one: compose files and CI say it so.
DATABASES = {"default": database(env.str("DATABASE_URL", default="") or f"sqlite:///{VAR_DIR / 'agentsite.sqlite3'}")}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    VAR_DIR.mkdir(parents=True, exist_ok=True)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# How often a server process ends what is past its time (agentsite.sweeper); 0 leaves it to run_executor.
SWEEP_SECONDS = env.float("AGENTSITE_SWEEP_SECONDS", default=1.0)

REDIS_URL = env.str("REDIS_URL", default="")
startup.check_redis_url(REDIS_URL)
# The layer carries the doorbell only, never a chunk; without Redis the doorbell has its own ways (streams.doorbell).
CHANNEL_LAYERS: dict[str, dict[str, Any]] = (
    {
        "default": {
            "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
            "CONFIG": {"hosts": [REDIS_URL], "prefix": env.str("REDIS_PREFIX", default="agentsite")},
        }
    }
    if REDIS_URL
    else {}
)

# Modules that register server tools (approvals.tools). Every process of the site needs the same ones. The demo's
# pretend to refund; a site with a key of its own never has them unasked.
TOOL_MODULES: list[str] = env.list(
    "AGENTSITE_TOOL_MODULES", default=["agentsite.demo.tools"] if SECRET_KEY == _DEVELOPMENT_KEY else []
)

# Contract §4 names these times; tests shorten them.
SOCKET_HEARTBEAT_SECONDS = env.int("SOCKET_HEARTBEAT_SECONDS", default=15)
SOCKET_FULL_SECONDS = env.float("SOCKET_FULL_SECONDS", default=30.0)
# `demo --drop-at N`: the server cuts one person's socket at the N-th text chunk, once. 0: never.
DEMO_DROP_AT = env.int("AGENTSITE_DROP_AT", default=0)

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "login"

LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("pt-br", "Português (Brasil)")]
USE_I18N = True
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = VAR_DIR / "static"
STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # WhiteNoise warns where it is missing; the finders serve without it
WHITENOISE_USE_FINDERS = True

SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
SESSION_COOKIE_HTTPONLY = True
# HTTPS=1 says the site is reached by https (directly or behind a proxy): cookies and redirects follow.
HTTPS = env.bool("HTTPS", default=False)
startup.check_secret_key(
    is_development_key=SECRET_KEY == _DEVELOPMENT_KEY, debug=DEBUG, https=HTTPS, allowed_hosts=ALLOWED_HOSTS
)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = HTTPS
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
if env.bool("BEHIND_PROXY", default=False):
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")

# A body of chunks is at most 1 MiB of text; JSON escapes may take six bytes for one.
DATA_UPLOAD_MAX_MEMORY_SIZE = 8 * 1024 * 1024

REST_FRAMEWORK: dict[str, Any] = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["streams.doors.ActorAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_PARSER_CLASSES": ["streams.doors.StrictJSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["streams.doors.ExactJSONRenderer"],
    "EXCEPTION_HANDLER": "streams.doors.problem_response",
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {"TITLE": "Agentsite", "VERSION": "1", "SERVE_INCLUDE_SCHEMA": False}

LOGGING_CONFIG = "agentsite.logging.configure"
LOGGING = {"level": env.str("LOG_LEVEL", default="INFO").upper(), "format": env.str("LOG_FORMAT", default="")}
