"""PostgreSQL's backend for a process that has no server: it knows the dialect and refuses to connect.

Commands that need no database (`check`, `makemigrations`, `collectstatic`) work with it; any other
gets one sentence that says what to do instead of a socket error.
"""

from typing import Any

from django.conf import settings
from django.db import OperationalError
from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    """Refuses to connect and says how to get a server."""

    def get_new_connection(self, conn_params: Any) -> Any:
        raise OperationalError(
            f"no database: ANDON_DATABASE_URL is not set and no `python manage.py up` runs with "
            f"ANDON_DATA_DIR={settings.DATA_DIR}. Start it in another terminal, or set ANDON_DATABASE_URL."
        )
