"""The app that keeps evidence: dossiers, the vault and its proof."""

from django.apps import AppConfig


class EvidenceConfig(AppConfig):
    """Dossiers, items, stored objects, custody and seals."""

    name = "evidence"
