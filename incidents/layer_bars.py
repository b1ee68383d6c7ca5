"""Layers by how much their gradient norm changed from the last good step to the first bad one."""

import numpy as np

from andon.detect.cells import depth_key
from andon.policy import Policy
from incidents.figures import first_bad_step
from incidents.layer_figure import layer_began
from incidents.models import Incident
from runs import queries
from runs.layers import has_layers


def layer_bars(incident: Incident, good_step: int | None, policy: Policy) -> list[dict[str, object]]:
    """Return layers by how much their gradient norm changed from the last good step to the first bad one.

    Each has `name`, `before`, `after` (None = nonfinite), `ratio` and `width` (0–100 of the widest bar);
    nonfinite layers first, then by ratio. The newest posted step at or before each end is used.
    """
    step = first_bad_step(incident)
    if step is None or not has_layers(incident.run, incident.attempt):
        return []
    good = min(good_step if good_step is not None else step - 1, step - 1)
    # The two ends only: between a last good checkpoint and the failure lie thousands of steps.
    good_at, before = _layers_at(incident, good, policy.layer.window)
    bad_at, after = _layers_at(incident, step, step - good)
    if good_at is None or bad_at is None:
        return []
    began = layer_began(incident.run_id, incident.attempt)
    bars: list[dict[str, object]] = []
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        nonfinite = bool(np.isnan(new)) and began.get(name, step + 1) <= step
        ratio = new / old if np.isfinite(new) and np.isfinite(old) and old > 0 else None
        if ratio is None and not nonfinite:
            continue
        bars.append(
            {
                "name": name,
                "before": None if np.isnan(old) else old,
                "after": "nan" if nonfinite else new,
                "ratio": ratio,
                "nonfinite": nonfinite,
                "origin": str(incident.first_bad.get("layer")) == name,
                # Bars carry the steps they compare: the page names them in its caption.
                "good_step": good_at,
                "bad_step": bad_at,
            }
        )
    widest = max((float(str(bar["ratio"])) for bar in bars if bar["ratio"] is not None), default=1.0)
    for bar in bars:
        bar["width"] = 100 if bar["nonfinite"] else round(100 * float(str(bar["ratio"])) / widest, 1)
    return sorted(
        bars,
        key=lambda bar: (
            not bar["origin"],
            not bar["nonfinite"],
            -float(str(bar["ratio"] or 0)),
            depth_key(str(bar["name"])),
        ),
    )


def _layers_at(incident: Incident, step: int, back: int) -> tuple[int | None, dict[str, float]]:
    """Return the newest posted step at or before `step`, at most `back` steps, and its norm by layer."""
    for reach in sorted({0, min(8, back), back}):
        names, steps, values = queries.layer_series(
            incident.run, incident.attempt, "grad_norm", max(0, step - reach), step
        )
        if len(names) and len(steps):
            return int(steps[-1]), dict(zip(names, values[:, -1].tolist(), strict=True))
    return None, {}
