"""`manage.py migrate` as the owner of the tables."""

from typing import Any

from django.conf import settings
from django.core.management.commands import migrate
from django.db import connections


class Command(migrate.Command):
    """Django's command, through `ANDON_DATABASE_OWNER_URL` where that is set.

    The role of the running server owns nothing and may change no table. The default connection
    itself is given the owner's name, so that a data migration that names no database uses it too.
    """

    def handle(self, *args: Any, **options: Any) -> None:
        if "owner" in settings.DATABASES:
            connection, owner = connections["default"], connections.settings["owner"]
            connection.close()
            connection.settings_dict.update(
                {name: owner[name] for name in ("USER", "PASSWORD", "HOST", "PORT", "NAME", "OPTIONS")}
            )
        super().handle(*args, **options)
