"""Settings, all from the environment through the typed readers of `config.env`.

docs/settings.md is the table of these variables; a test keeps the two equal.
"""

import os
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import plotly
from django.core.exceptions import ImproperlyConfigured

import andon
from andon import links
from config import env, mail
from config import sign_in as people
from config.embedded import files, servers

BASE_DIR = Path(__file__).resolve().parent.parent
VERSION = andon.__version__
DATA_DIR = Path(
    env.text(
        "ANDON_DATA_DIR",
        str(BASE_DIR / "var"),
        shown="`var` in the checkout",
        about="what this machine keeps: embedded servers, generated secrets, directory vault",
    )
).resolve()

# --- the address people and trainers use

PORT = env.integer("ANDON_PORT", 8000, minimum=1, maximum=65535, about="port of `manage.py up`")
BIND = env.text("ANDON_BIND", "127.0.0.1", about="address `manage.py up` listens on; `0.0.0.0` for all")
PUBLIC_URL = env.text(
    "ANDON_PUBLIC_URL",
    f"http://localhost:{PORT}",
    shown="`http://localhost:PORT`",
    about="what stands in printed and sent links; `https` turns on secure cookies, redirect and HSTS",
).rstrip("/")
_public = urlsplit(PUBLIC_URL)
if _public.scheme not in {"http", "https"} or not _public.hostname or _public.path:
    raise ImproperlyConfigured(f"ANDON_PUBLIC_URL={PUBLIC_URL!r}: expected http(s)://HOST[:PORT] and no path")
IS_HTTPS = _public.scheme == "https"
PUBLIC_HOST: str = _public.hostname
_is_local = _public.hostname in {"localhost", "127.0.0.1", "::1"}
ALLOWED_HOSTS = env.words(
    "ANDON_ALLOWED_HOSTS",
    sorted({"localhost", "127.0.0.1", "[::1]", _public.hostname}),
    shown="localhost and the host of ANDON_PUBLIC_URL",
    about="Host headers that are answered",
)
BEHIND_PROXY = env.boolean(
    "ANDON_BEHIND_PROXY",
    False,
    about="believe X-Forwarded-Proto, and the last of X-Forwarded-For; only behind a proxy that sets both",
)

# --- secrets


def _secret_key() -> str:
    given = env.text(
        "ANDON_SECRET_KEY",
        shown="made in ANDON_DATA_DIR on localhost, else required",
        about="signs sessions and tokens; 50 characters or more, the same on every web process",
    )
    if given:
        return given
    if not _is_local:
        # Two web processes that each invent one would sign each other's people out.
        raise ImproperlyConfigured(
            f"ANDON_SECRET_KEY (or ANDON_SECRET_KEY_FILE) is required when ANDON_PUBLIC_URL is {PUBLIC_URL}: "
            f"set it to 50 random characters, for example {secrets.token_urlsafe(40)}"
        )
    return files.secret(DATA_DIR / "secrets" / "secret-key", length_bytes=48)


SECRET_KEY = _secret_key()
SIGNING_KEY_FILE = Path(
    env.text(
        "ANDON_SIGNING_KEY_FILE",
        str(DATA_DIR / "signing-key.pem"),
        shown="`signing-key.pem` in ANDON_DATA_DIR, made on first use",
        about="Ed25519 key that signs directives, permits and manifests; shared by all processes",
    )
)

# --- database

WEB_WORKERS = env.integer(
    "ANDON_WEB_WORKERS",
    min(4, os.cpu_count() or 1),
    minimum=1,
    maximum=64,
    shown="one per core, at most 4",
    about="web processes of `manage.py up`",
)
WEB_THREADS = env.integer("ANDON_WEB_THREADS", 8, minimum=1, maximum=256, about="threads per web process")
WORKER_THREADS = env.integer("ANDON_WORKER_THREADS", 4, minimum=1, maximum=256, about="threads per worker")
DATABASE_POOL = env.integer(
    "ANDON_DATABASE_POOL",
    max(WEB_THREADS, WORKER_THREADS) + 2,
    minimum=1,
    maximum=512,
    shown="threads + 2",
    about="connections per process at most; not below its threads",
)


def _database(name: str, url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme not in {"postgresql", "postgres"} or not parts.path.strip("/"):
        # The value may hold a password, so it is not repeated.
        raise ImproperlyConfigured(f"{name}: expected postgresql://USER:PASSWORD@HOST[:PORT]/DATABASE")
    options: dict[str, Any] = dict(parse_qsl(parts.query))
    host = options.pop("host", None) or parts.hostname or ""
    return {
        "ENGINE": "config.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": host,
        "PORT": str(parts.port or ""),
        # pgbouncer in transaction mode keeps nothing of a session: no server-side cursor, no prepared
        # statement (psycopg's threshold is off in Django unless set), no connection kept by a thread.
        "DISABLE_SERVER_SIDE_CURSORS": True,
        "CONN_MAX_AGE": 0,
        # A pooled connection may have died with a restarted server.
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {
            **options,
            "connect_timeout": int(options.get("connect_timeout", 5)),
            "pool": {"min_size": 1, "max_size": DATABASE_POOL, "timeout": 10},
        },
    }


_running = servers.running(DATA_DIR)
_database_url = env.text(
    "ANDON_DATABASE_URL",
    _running.get("ANDON_DATABASE_URL", ""),
    shown="embedded",
    about="PostgreSQL 15 or newer, as the role that owns nothing (`andon_app`)",
)
_owner_url = env.text(
    "ANDON_DATABASE_OWNER_URL",
    _running.get("ANDON_DATABASE_OWNER_URL", "")
    if _database_url == _running.get("ANDON_DATABASE_URL")
    else "",
    shown="ANDON_DATABASE_URL",
    about="the same database as the role that owns the tables (`andon_owner`): migrations, partition drops",
)
if _database_url:
    DATABASES = {"default": _database("ANDON_DATABASE_URL", _database_url)}
    if _owner_url:
        # Short and rare work, so no pool. Tests see one database, through one connection.
        _owner = _database("ANDON_DATABASE_OWNER_URL", _owner_url)
        del _owner["OPTIONS"]["pool"]
        DATABASES["owner"] = _owner | {"TEST": {"MIRROR": "default"}}
else:
    DATABASES = {"default": {"ENGINE": "config.embedded.absent", "NAME": "absent"}}

# --- broker and vault

BROKER_URL = env.text(
    "ANDON_BROKER_URL",
    # Port 9 discards: without a server every attempt is refused at once, which the doorbell expects.
    _running.get("ANDON_BROKER_URL", "redis://127.0.0.1:9/0"),
    shown="embedded",
    about="Redis or Valkey, `redis://` or `rediss://`; only rings bells, nothing is lost with it",
)
VAULT_URL = env.text(
    "ANDON_VAULT_URL",
    f"file://{DATA_DIR}/vault",
    shown="`vault` in ANDON_DATA_DIR",
    about="`file:///DIR`, or `s3://BUCKET?endpoint=…&region=…&telemetry=BUCKET` (credentials: boto3's chain)",
)
VAULT_PUBLIC_URL = env.text(
    "ANDON_VAULT_PUBLIC_URL",
    shown="the endpoint of ANDON_VAULT_URL",
    about="S3 endpoint in the upload URLs of node agents, where they reach it by another name",
).rstrip("/")
VAULT_READ_TIMEOUT_S = env.integer(
    "ANDON_VAULT_READ_TIMEOUT_S",
    60,
    minimum=1,
    maximum=3600,
    about="how long an S3 store may say nothing in one try; what is copied then waits, and is tried again",
)
SOURCE_ROOTS = [
    Path(root)
    for root in env.words(
        "ANDON_SOURCE_ROOTS",
        about="directories from which the server itself may read evidence by file:// URI",
    )
]
FIXITY_BYTES = env.integer(
    "ANDON_FIXITY_BYTES",
    1 << 40,
    minimum=0,
    maximum=1 << 60,
    shown="1099511627776 = 1 TiB",
    about="bytes of the vault read back each night, the longest unchecked first; locks are looked at always",
)

# --- limits and watching

RATE_SMALL = env.integer(
    "ANDON_RATE_SMALL",
    0,
    minimum=0,
    maximum=10_000_000,
    shown="0 = the policy's",
    about="posts up to 64 KiB per second and run before 429",
)
RATE_LARGE = env.integer(
    "ANDON_RATE_LARGE",
    0,
    minimum=0,
    maximum=10_000_000,
    shown="0 = the policy's",
    about="larger posts per second and run before 429",
)
# --- paging

PAGING_FILE = env.text(
    "ANDON_PAGING_FILE",
    about="TOML file of channels, escalation steps and on-call list (paging.md); without it nobody is paged",
)
ONCALL_URL = env.text(
    "ANDON_ONCALL_URL",
    about="address that says who is on call, in place of the file's list; asked once a minute by a worker",
)
if ONCALL_URL and urlsplit(ONCALL_URL).scheme not in {"http", "https"}:
    raise ImproperlyConfigured("ANDON_ONCALL_URL: expected http(s)://HOST[:PORT][/PATH]")
SWEEP_MISSED_S = env.integer(
    "ANDON_SWEEP_MISSED_S",
    120,
    minimum=10,
    maximum=3600,
    about="seconds without a sweep (one is due a minute: two missed) before the web process itself pages",
)
BREAKER_RUNS = env.integer(
    "ANDON_BREAKER_RUNS",
    3,
    minimum=2,
    maximum=1000,
    about="runs that one rule version must hold within 10 minutes, and a quarter of all, to drop to observe",
)
_links = env.text(
    "ANDON_LINKS",
    about="links of an incident's page, `NAME=URL` by white space; fields in braces, as in docs/oncall.md",
)
try:
    LINKS = links.parse(_links)
except ValueError as error:
    raise ImproperlyConfigured(f"ANDON_LINKS: {error}") from error
LOG_LEVEL = env.choice(
    "ANDON_LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"), about="least severe line that is logged"
)
DEBUG = env.boolean(
    "ANDON_DEBUG", False, about="error pages with code and values; never where others reach it"
)

# --- Django

INSTALLED_APPS = [
    "config.apps.ConfigConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "config.apps.StaticFiles",
    "django.contrib.postgres",
    "django_htmx",
    "ninja",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.usersessions",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "runs",
    "evidence",
    "incidents",
]
AUTH_USER_MODEL = "runs.Person"
MIDDLEWARE = [
    "config.health.answer_probes",
    "runs.shortcut.answer_posts",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "allauth.account.middleware.AccountMiddleware",
]
ROOT_URLCONF = "config.urls"
WSGI_APPLICATION = "config.wsgi.application"
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
                "incidents.frame.frame",
            ]
        },
    }
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOGIN_URL = "/sign-in"
LOGIN_REDIRECT_URL = "/runs"
SIGN_UP, SSO_PROVIDER = people.SIGN_UP, people.PROVIDER
SSO_ROLES, SSO_GROUPS_CLAIM = people.SSO_ROLES, people.SSO_GROUPS_CLAIM
PROOF_LASTS, INVITATION_LASTS = people.PROOF_LASTS, people.INVITATION_LASTS
globals().update(people.ALLAUTH)
PASSWORD_RESET_TIMEOUT = 3600  # of the link that is mailed, in seconds
globals().update(mail.read(PUBLIC_HOST))
# A passkey belongs to this host; plain http is a secure place for a browser on localhost alone.
MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN = not IS_HTTPS
ALLAUTH_TRUSTED_PROXY_COUNT = int(BEHIND_PROXY)
CSRF_FAILURE_VIEW = "runs.errors.csrf_failure"
# The receiver refuses by its own caps (32 MiB), with a problem body; Django's limit lies just above.
DATA_UPLOAD_MAX_MEMORY_SIZE = 34 << 20

STATIC_URL = "/static/"
STATIC_ROOT = Path(
    env.text(
        "ANDON_STATIC_DIR",
        str(DATA_DIR / "static"),
        shown="`static` in ANDON_DATA_DIR",
        about="where `collectstatic` puts the pages' scripts and styles",
    )
)
# plotly.js comes with the Python package; nothing is loaded from elsewhere.
STATICFILES_DIRS: list[Path | tuple[str, Path]] = [
    BASE_DIR / "static",
    ("plotly", Path(plotly.__file__).parent / "package_data"),
]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "config.static_files.Storage"},
}

# --- security; what follows from the scheme of the public address

SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = IS_HTTPS
SECURE_HSTS_SECONDS = 365 * 86_400 if IS_HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = IS_HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if BEHIND_PROXY else None
SECURE_REFERRER_POLICY = "same-origin"
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
CSRF_TRUSTED_ORIGINS = [PUBLIC_URL]
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'", "'unsafe-inline'"],  # Plotly and Swagger place their elements by style
        "img-src": ["'self'", "data:", "blob:"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'none'"],
    }
}

# Counters of sign-in and codes, shared by the web processes; config.cache says what happens without it.
CACHES = {"default": {"BACKEND": "config.cache.Cache", "LOCATION": BROKER_URL, "KEY_PREFIX": "andon"}}

# --- Celery: a doorbell. The row in PostgreSQL is the work, so nothing here may wait or retry.

_BROKER_TIMEOUT_S = 0.3
CELERY_BROKER_URL = BROKER_URL
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # Redis hands a message out again after this; a lease on the row, not this, decides who works.
    "visibility_timeout": int(timedelta(hours=24).total_seconds()),
    "socket_timeout": _BROKER_TIMEOUT_S,
    "socket_connect_timeout": _BROKER_TIMEOUT_S,
    "retry_on_timeout": False,
    # Without this kombu connects again for four seconds and more before it lets a publisher go (measured
    # with a broker that accepts and never answers: 7 s, with it 0.3 s).
    "max_retries": 0,
}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_TASK_ACKS_LATE = False
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_PUBLISH_RETRY = False
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TASK_DEFAULT_QUEUE = "andon"
CELERY_TIMEZONE = "UTC"
# Sweeps ring again for whatever is due; each is safe to run twice at once. Seconds between runs. A ring that
# waited longer than the interval is dropped: the next one does the same.
_SWEEPS_S = {
    "runs.tasks.sweep_work": 5,
    "runs.tasks.look": 5,
    "incidents.tasks.sweep_findings": 5,
    "incidents.tasks.sweep_incidents": 5,
    "incidents.tasks.sweep_pages": 5,
    "incidents.tasks.ask_on_call": 60,
    "incidents.tasks.forget_pages": 86_400,
    "runs.tasks.make_partitions": 3600,
    "runs.tasks.forget_receipts": 3600,
    "runs.tasks.forget_sessions": 86_400,
    # Asks once for each night (UTC), whichever hour the scheduler was up.
    "evidence.tasks.sweep_fixity": 3600,
    "evidence.tasks.sweep_vault": 3600,
}
CELERY_BEAT_SCHEDULE = {
    name: {"task": name, "schedule": timedelta(seconds=every_s), "options": {"expires": every_s}}
    for name, every_s in _SWEEPS_S.items()
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["hook_tokens"]},
        "none": {"class": "logging.NullHandler"},
    },
    "filters": {"hook_tokens": {"()": "runs.hook_masking.MaskHookTokens"}},
    "root": {"handlers": ["console"], "level": LOG_LEVEL},
    "loggers": {
        # Refused requests (404, 401) are answers, not events of the server.
        "django.request": {"level": "ERROR"},
        "celery": {"level": "WARNING"},
        # What it says of a channel, `incidents.paging` says again without the address.
        "apprise": {"level": "WARNING", "propagate": False, "handlers": ["none"]},
        "celery.beat": {"level": "WARNING"},
    },
}

# What the trainer's side reads; a shell that has them may run manage.py too.
env.refuse_unknown(
    os.environ,
    others={"ANDON_RUN_SECRET", "ANDON_MODE", "ANDON_SPOOL_DIR"},
)
