"""Where evidence raises an alarm: damaged or gone, no longer locked, or not sealed in time."""

import logging

from evidence.models import Dossier
from evidence.signals import vault_alarm

log = logging.getLogger(__name__)


def alarm(dossier: Dossier | None, what: str, says: str) -> None:
    """Tell that evidence is in danger, after the commit that recorded it: the one place that pages people.

    Args:
        dossier: None when it is about the store, and so about all of them.
        what: see `evidence.signals.vault_alarm`.
    """
    where = "the store" if dossier is None else f"run {dossier.run}, dossier {dossier.pk}"
    log.error("%s: %s: %s", where, what, says)
    vault_alarm.send_robust(sender=Dossier, dossier=dossier, what=what, says=says)
