"""Andon's settings for the tests, after real servers were started for whatever has no URL yet.

pytest-django reads settings before any conftest.py is imported, so the servers start here.
"""

import os

from tests import servers

servers.start_what_is_missing()
os.environ.setdefault("ANDON_SECRET_KEY", "only-for-tests-" + "0123456789abcdef" * 4)
os.environ.setdefault("ANDON_DATA_DIR", str(servers.session_dir() / "data"))

from config.settings import *  # noqa: E402, F403

# WhiteNoise looks for it when it starts.
STATIC_ROOT.mkdir(mode=0o700, parents=True, exist_ok=True)  # noqa: F405

# Race tests open a connection per thread and close it themselves; a pool would keep them open past
# the end of the test database. The pool is exercised by the tests that run `up`.
DATABASES["default"]["OPTIONS"].pop("pool", None)  # noqa: F405
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# The manifest needs `collectstatic`; tests read the files where they lie.
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
# Workers of a parallel run share the server, and must not count each other's failures.
CACHES["default"]["KEY_PREFIX"] = f"andon-test-{os.getpid()}"  # noqa: F405
