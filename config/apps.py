"""The project as an app: its commands, its checks."""

from django.apps import AppConfig


class ConfigConfig(AppConfig):
    """Commands of the whole (`up`, `migrate`) and checks that need the whole."""

    name = "config"

    def ready(self) -> None:
        from config import checks  # noqa: F401
