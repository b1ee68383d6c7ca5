"""The database engine: Django's own, whose pool asks a connection's socket before it asks the server.

Django's health check sends an empty statement each time a connection is taken from the pool: a round
trip, a third of what a trainer's post costs. A server that ends a connection says so on the socket,
where it can be seen without asking; only a socket that has something to say is asked the long way.
"""

import select
from typing import Any

import psycopg
from django.db.backends.postgresql import base
from psycopg_pool import ConnectionPool


def check(connection: psycopg.Connection[Any]) -> None:
    """Return quietly if a connection of the pool can be used.

    Raises:
        psycopg.Error: it was ended, by the server or on the way.
    """
    if connection.closed:
        raise psycopg.OperationalError("the connection is closed")
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if poll.poll(0):
        ConnectionPool.check_connection(connection)


class DatabaseWrapper(base.DatabaseWrapper):
    """A connection to PostgreSQL."""

    @property
    def pool(self) -> Any:
        """Return the pool of this alias, None where there is none."""
        pool = super().pool
        if pool is not None and self.settings_dict["CONN_HEALTH_CHECKS"]:
            pool._check = check
        return pool
