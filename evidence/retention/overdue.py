"""What was only held when the run went on must be sealed within a day, or it pages."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.utils import timezone

from evidence import custody
from evidence.alarms import alarm
from evidence.models import Dossier, Item
from runs.models import Directive

SEAL_WITHIN = timedelta(hours=24)
_NOTED = "sealing overdue"
_S = Item.State


@dataclass(frozen=True)
class Overdue:
    """A required item whose bytes are not in the vault although the run went on a day ago or earlier."""

    item: Item
    resumed_at: datetime
    due_at: datetime

    @property
    def says(self) -> str:
        """Return the sentence that pages show."""
        return (
            f"{self.item.name} is only {self.item.get_state_display().lower()}: it had to be sealed by "
            f"{self.due_at:%d %b %H:%M} UTC, 24 h after the run went on"
        )


def resumed_at(dossier: Dossier) -> datetime | None:
    """Return when the run was first let go on after the dossier was opened, None while it was not."""
    lets_go = (Directive.Kind.RESUME, Directive.Kind.ROLLBACK)
    rows = Directive.objects.filter(
        run_id=dossier.run_id, kind__in=lets_go, since__gte=dossier.opened_at
    ).order_by("seq")
    return rows.values_list("since", flat=True).first()


def overdue_items(dossier: Dossier | None = None, *, now: datetime | None = None) -> list[Overdue]:
    """Return what had to be sealed by now and is not, of one dossier or of all, the longest due first."""
    now = now or timezone.now()
    held = Item.objects.filter(
        # What was held and then lost has no bytes in the vault either.
        state__in=(_S.HELD, _S.COLLECTING, _S.MISSING),
        held_at__isnull=False,
        required=True,
        waived_at=None,
        dossier__opened_at__lte=now - SEAL_WITHIN,
        dossier__released_at=None,
    )
    if dossier is not None:
        held = held.filter(dossier=dossier)
    went_on: dict[int, datetime | None] = {}
    found = []
    for item in held.defer("files", "source").select_related("dossier__run").order_by("id"):
        if item.dossier_id not in went_on:
            went_on[item.dossier_id] = resumed_at(item.dossier)
        since = went_on[item.dossier_id]
        if since is not None and since + SEAL_WITHIN <= now:
            found.append(Overdue(item, since, since + SEAL_WITHIN))
    return sorted(found, key=lambda one: (one.due_at, one.item.pk))


def sweep() -> int:
    """Say what is overdue, once in its chain of custody and by an alarm; returns how many items are."""
    found = overdue_items()
    for one in found:
        with transaction.atomic():
            dossier = Dossier.objects.select_for_update(no_key=True).get(pk=one.item.dossier_id)
            if dossier.custody.filter(what=_NOTED, item_name=one.item.name).exists():
                continue
            data = {"due": custody.stamp(one.due_at), "state": str(one.item.state)}
            custody.append(dossier, _NOTED, item_name=one.item.name, data=data)
        alarm(one.item.dossier, _NOTED, one.says)
    return len(found)
