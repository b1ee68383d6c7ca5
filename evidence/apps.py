"""The app that keeps evidence: dossiers, the vault and its proof."""

from django.apps import AppConfig


class EvidenceConfig(AppConfig):
    """Dossiers, items, stored objects, custody and seals."""

    name = "evidence"

    def ready(self) -> None:
        """Register checks, receivers and the handlers of this app's work."""
        from evidence import checks, receivers  # noqa: F401
        from evidence.agents import arrivals, node_trees, node_work  # noqa: F401
        from evidence.collecting import work  # noqa: F401
        from evidence.freezing import verify_checkpoints  # noqa: F401
        from evidence.proof import fixity, leftovers  # noqa: F401
        from evidence.retention import dates, release  # noqa: F401
        from evidence.stores import probe  # noqa: F401
        from runs import wanted

        wanted.count_by(node_work.count_wanted)
