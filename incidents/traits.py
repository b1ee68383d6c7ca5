"""What incidents are compared by: five traits, two of them looked up once and kept on the row.

Symptom, scope and tensor follow from the incident itself. The node and the data shard have to be looked up
among a fleet's nodes and a run's events, so the sweep keeps them: a page compares hundreds of rows by
columns alone.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from incidents import data_read, launched
from incidents.models import Incident

NAMES = ("symptom", "scope", "tensor", "node", "data shard")
_AT_ONCE = 50
_MOST_VALUES = 16
_MOST_CHARS = 200


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of one incident; an empty set is "not known", and is shared with nobody."""

    symptom: frozenset[str]
    scope: frozenset[str]
    tensor: frozenset[str]
    nodes: frozenset[str]
    shards: frozenset[str]

    def by_name(self) -> dict[str, frozenset[str]]:
        """Return the traits under `NAMES`."""
        return dict(zip(NAMES, (self.symptom, self.scope, self.tensor, self.nodes, self.shards), strict=True))


def of(symptom: str, first_bad: Mapping[str, Any], kept: Mapping[str, Any] | None) -> Traits:
    """Return the traits of an incident from its columns.

    Args:
        symptom: key of the playbook's table.
        kept: what `looked_up` found, None while the sweep has not looked.
    """
    kept = kept or {}
    known = symptom not in ("", "unknown")
    return Traits(
        symptom=frozenset({symptom} if known else ()),
        scope=frozenset(filter(None, (_scope(first_bad),))),
        tensor=frozenset(filter(None, (tensor_kind(first_bad.get("layer")),))),
        nodes=frozenset(map(str, kept.get("nodes") or ())),
        shards=frozenset(map(str, kept.get("shards") or ())),
    )


def _scope(first_bad: Mapping[str, Any]) -> str:
    if first_bad.get("step") is None:
        return ""
    ranks = first_bad.get("ranks") or []
    if not ranks:
        return "reduced value, rank not known"
    return "one rank" if len(ranks) == 1 else "several ranks"


def tensor_kind(layer: object) -> str:
    """Return `attn.qkv` of `layers.6.attn.qkv`: what stands behind the number in the layer's name."""
    if layer is None:
        return ""
    pieces = [piece for piece in re.split(r"[./]", str(layer)) if piece]
    numbers = [index for index, piece in enumerate(pieces) if piece.isdecimal()]
    kind = pieces[numbers[-1] + 1 :] if numbers else pieces
    return ".".join(kind)[:_MOST_CHARS]


def looked_up(incident: Incident) -> dict[str, list[str]]:
    """Return the node and the data shard of an incident's first bad cell, [] for what is not known."""
    first = incident.first_bad
    ranks = list(first.get("ranks") or [])
    nodes = [place.node for place in launched.places(incident.run_id, incident.attempt, ranks)]
    # Of all ranks together a step reads a thousand shards: only a rank that is known has one.
    shards = data_read.shards(incident.run_id, incident.attempt, first.get("step"), ranks) if ranks else []
    return {
        "nodes": [node[:_MOST_CHARS] for node in nodes[:_MOST_VALUES]],
        "shards": [shard[:_MOST_CHARS] for shard in shards[:_MOST_VALUES]],
    }


def sweep() -> int:
    """Look up the traits of incidents that have none yet; returns how many."""
    waiting = list(Incident.objects.filter(traits__isnull=True).order_by("-id")[:_AT_ONCE])
    for incident in waiting:
        # Not what moved meanwhile: that row waits for the next sweep.
        Incident.objects.filter(pk=incident.pk, first_bad=incident.first_bad, traits__isnull=True).update(
            traits=looked_up(incident)
        )
    return len(waiting)
