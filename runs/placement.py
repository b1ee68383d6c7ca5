"""Where the ranks of an attempt stand: its nodes and its parallel groups.

At 16,384 ranks either is a quarter of a megabyte of JSON, which pages ask for many times over. It is read
once per version of the attempt's row: PostgreSQL tells each version of a row by its xmin and ctid.
"""

from functools import lru_cache

from django.db.models import TextField
from django.db.models.expressions import RawSQL

from andon.detect.topology import Topology
from runs.models import Attempt, Run
from runs.reading import kept

Node = tuple[str, list[int], list[str]]
VERSION = "runs_attempt.xmin::text || runs_attempt.ctid::text"  # of an attempt's row, as it is now
_KEPT = 32  # attempts: a few megabytes each at the largest


def nodes_of(run: Run, attempt: int) -> list[Node]:
    """Return (node, ranks ascending, GPU uuids) of an attempt by lowest rank; empty when not reported."""
    row = _version(run, attempt)
    return [] if row is None else _nodes(*row)


def topology_of(run: Run, attempt: int) -> Topology | None:
    """Return the groups of an attempt; None when it told none, or none that can be read."""
    row = _version(run, attempt)
    return None if row is None else topology_at(*row)


def _version(run: Run, attempt: int) -> tuple[int, str] | None:
    known = RawSQL(VERSION, (), output_field=TextField())  # noqa: S611 (a constant)
    rows = Attempt.objects.filter(run=run, number=attempt).annotate(version=known)
    return kept(("placement", run.pk, attempt), rows.values_list("pk", "version").first)


@lru_cache(maxsize=_KEPT)
def _nodes(pk: int, version: str) -> list[Node]:
    told = Attempt.objects.filter(pk=pk).values_list("nodes", flat=True).first() or []
    known = []
    for entry in told:
        held = sorted(rank for rank in expanded(entry.get("ranks")) if rank >= 0)
        if held:
            uuids = entry.get("gpu_uuids")
            known.append((str(entry.get("node", "")), held, uuids if isinstance(uuids, list) else []))
    return sorted(known, key=lambda node: node[1][0])


@lru_cache(maxsize=_KEPT)
def topology_at(pk: int, version: str) -> Topology | None:
    """Return the groups of the attempt with this key, of which a row of this `VERSION` was just seen."""
    groups = Attempt.objects.filter(pk=pk).values_list("groups", flat=True).first()
    try:
        return Topology.from_groups(groups) if groups else None
    except ValueError:
        return None  # a launch that names unreadable groups must not hide the first bad cell


def expanded(value: object) -> list[int]:
    """Return ranks from a list of integers or from ranges such as `0-3,6`; [] for anything else."""
    if isinstance(value, list):
        return [rank for rank in value if isinstance(rank, int)]
    found: list[int] = []
    for piece in str(value or "").split(","):
        low, dash, high = piece.strip().partition("-")
        if low.isdecimal() and (not dash or high.isdecimal()):
            found.extend(range(int(low), int(high if dash else low) + 1)[:1_000_000])
    return found
