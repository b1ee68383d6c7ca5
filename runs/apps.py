"""The app that knows runs: who posts, what was posted, and what was seen in it."""

from django.apps import AppConfig


class RunsConfig(AppConfig):
    """Runs, attempts, the receiver, the event log and the frame store."""

    name = "runs"

    def ready(self) -> None:
        """Register the checks and the handlers of this app's work."""
        from runs import checks, compaction  # noqa: F401
        from runs.accounts import audit, groups, mail  # noqa: F401
