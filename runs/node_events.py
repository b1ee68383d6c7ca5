"""What happens on nodes, as posts tell it: Xid and ECC errors, heat, links, another state, a preflight."""

import logging
from collections.abc import Iterable

from django.db import transaction

from runs.models import Event, NodeEvent

log = logging.getLogger(__name__)

NODE_EVENTS = {
    "hardware.xid": "xid",
    "hardware.ecc": "ecc",
    "hardware.thermal": "thermal",
    "hardware.link": "link",
    "node.state": "state",
    "preflight.report": "preflight",
}


def keep(run_id: int, events: Iterable[Event]) -> None:
    """Keep what named a node, by node. Runs in the transaction that deletes the pending rows."""
    rows = [
        NodeEvent(
            run_id=run_id,
            attempt=event.attempt,
            node=node[:200],
            kind=NODE_EVENTS[event.type],
            step=event.step,
            rank=event.rank,
            occurred_at=event.occurred_at,
            received_at=event.received_at,
            data=event.data,
        )
        for event in events
        if event.type in NODE_EVENTS and (node := event.node or str(event.data.get("node") or ""))
    ]
    if not rows:
        return
    try:
        # A savepoint: the pages of nodes must never keep a detector from looking.
        with transaction.atomic():
            NodeEvent.objects.bulk_create(rows)
    except Exception:
        log.exception("run %s: %s events of nodes are not shown", run_id, len(rows))
