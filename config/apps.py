"""The project as an app: its commands, its checks."""

from django.apps import AppConfig
from django.contrib.staticfiles.apps import StaticFilesConfig


class ConfigConfig(AppConfig):
    """Commands of the whole (`up`, `migrate`) and checks that need the whole."""

    name = "config"

    def ready(self) -> None:
        from config import checks  # noqa: F401


class StaticFiles(StaticFilesConfig):
    """Static files, without what Plotly's package keeps beside its script (8 MB of sample data)."""

    ignore_patterns = [*StaticFilesConfig.ignore_patterns, "datasets", "templates", "widgetbundle.js"]
