"""Where a spike was highest: the first flagged step is where it began, and not what the eye finds."""

from typing import Any

from incidents import rules
from incidents.models import Incident
from runs import formatting as words
from runs import queries

_WORDS = {"loss": "loss", "grad_norm": "gradient norm"}
_AFTER = 128  # steps looked at from where it began
_POINTS = 2 * _AFTER


def highest(incident: Incident, document: dict[str, Any]) -> str:
    """Return "Highest at step 109: gradient norm 11,100."; "" where it began at its highest, or is no spike.

    Args:
        document: the first-bad cell of the incident.
    """
    first = document["step"]
    if first is None or not rules.is_spike(incident.kind) or incident.kind.startswith("layer_"):
        return ""
    name = "grad_norm" if incident.kind.startswith("grad_norm") else "loss"
    found = queries.series(incident.run, incident.attempt, [name], first, first + _AFTER, _POINTS)
    seen = [(value, point["step"]) for point in found.get(name, []) if (value := point["value"]) is not None]
    value, step = max(seen, default=(0.0, first))
    if step == first:
        return ""
    return f"Highest at step {words.count(step)}: {_WORDS[name]} {words.metric(name, value)}."
