"""Settings, all from the environment through the typed readers of `config.env`."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from config import env

BASE_DIR = Path(__file__).resolve().parent.parent
DATA_DIR = Path(env.text("ANDON_DATA_DIR", str(BASE_DIR / "var"))).resolve()

DEBUG = env.boolean("ANDON_DEBUG", False)
SECRET_KEY = env.text("ANDON_SECRET_KEY", "insecure-replace-me")
PUBLIC_URL = env.text("ANDON_PUBLIC_URL", "http://localhost:8000")
ALLOWED_HOSTS = env.words("ANDON_ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_htmx",
    "ninja",
    "runs",
    "evidence",
    "incidents",
]
AUTH_USER_MODEL = "runs.Person"
MIDDLEWARE = [
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
            ]
        },
    }
]


def _database(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
    }


DATABASES = {"default": _database(env.text("ANDON_DATABASE_URL"))}
BROKER_URL = env.text("ANDON_BROKER_URL")
VAULT_URL = env.text("ANDON_VAULT_URL", f"file://{DATA_DIR}/vault")
SIGNING_KEY_FILE = Path(env.text("ANDON_SIGNING_KEY_FILE", str(DATA_DIR / "signing-key.pem")))
# Directories from which the server itself may read evidence (checkpoints and logs by file:// URI).
SOURCE_ROOTS = [Path(root) for root in env.words("ANDON_SOURCE_ROOTS")]

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "/static/"
STATIC_ROOT = DATA_DIR / "static"
STATICFILES_DIRS = [BASE_DIR / "static"]
LOGIN_URL = "/sign-in"
LOGIN_REDIRECT_URL = "/runs"
