"""The app that keeps evidence: dossiers, the vault and its proof."""

from django.apps import AppConfig


class EvidenceConfig(AppConfig):
    """Dossiers, items, stored objects, custody and seals."""

    name = "evidence"

    def ready(self) -> None:
        """Register checks, receivers and the handlers of this app's work."""
        from evidence import (  # noqa: F401
            agents,
            arrivals,
            checks,
            collecting,
            fixity,
            receivers,
            release,
            retention,
            verify_checkpoints,
        )
        from runs import wanted

        wanted.count_by(agents.count_wanted)
