"""The app that handles incidents: opening, plan, approval, permit, ledger."""

from django.apps import AppConfig


class IncidentsConfig(AppConfig):
    """Incidents and what lets a held run go on."""

    name = "incidents"

    def ready(self) -> None:
        """Connect the receivers of the signals that lower apps send, the work and the checks."""
        from incidents import (  # noqa: F401
            bag,
            checks,
            fleet,
            launches,
            opening,
            reports,
            review,
            run_columns,
            run_marks,
        )
        from incidents.paging import raising, sending  # noqa: F401
