"""One worker's turn at one item."""

import contextlib
from collections.abc import Iterator

from django.db import transaction

from evidence.models import Dossier, Item
from runs.work import Lease


@contextlib.contextmanager
def locked(item: Item, lease: Lease) -> Iterator[Item]:
    """Lock dossier and item, in that order, under this worker's lease, for one transaction."""
    with transaction.atomic():
        lease.guard()
        dossier = (
            Dossier.objects.select_for_update(no_key=True, of=("self",))
            .select_related("run")
            .get(pk=item.dossier_id)
        )
        fresh = Item.objects.select_for_update(no_key=True).get(pk=item.pk)
        fresh.dossier = dossier
        yield fresh
