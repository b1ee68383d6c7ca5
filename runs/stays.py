"""Where runs were: a row per node of each attempt, written when its launch names its nodes."""

from runs.models import Attempt, NodeStay
from runs.placement import expanded

MAX_NODES = 50_000


def keep(attempt: Attempt) -> None:
    """Write the nodes that an attempt's launch named; a launch that is told again changes nothing."""
    told = attempt.nodes if isinstance(attempt.nodes, list) else []
    rows = []
    for entry in told[:MAX_NODES]:
        if not isinstance(entry, dict) or not entry.get("node"):
            continue
        ranks = sorted(rank for rank in expanded(entry.get("ranks")) if 0 <= rank < 2**31)
        uuids = entry.get("gpu_uuids")
        rows.append(
            NodeStay(
                run_id=attempt.run_id,
                attempt=attempt.number,
                node=str(entry["node"])[:200],
                ranks=ranks,
                rank_first=ranks[0] if ranks else None,
                rank_last=ranks[-1] if ranks else None,
                gpu_uuids=uuids if isinstance(uuids, list) else [],
                switch=str(entry.get("switch") or entry.get("leaf_switch") or "")[:100],
            )
        )
    NodeStay.objects.bulk_create(rows, batch_size=2_000, ignore_conflicts=True)
