"""What the batch of the first bad step was like, against the other batches of the window."""

from statistics import median
from typing import Any

from andon.diagnose.fact import Fact, step_words
from andon.diagnose.record import NEAR_STEPS, Posted, Record

_OVERLONG = 4.0  # times the usual longest sample: cost and range grow with the square of it
_LENGTHS = ("lengths", "seq_lens")


def facts(record: Record) -> list[Fact]:
    """Return what was read at the first bad step, and which boundary lies near it."""
    step = record.step
    if step is None:
        return []
    seen = record.of_type("batch.seen")
    ranks = set(record.ranks)
    mine = [one for one in seen if one.step == step and (one.rank in ranks or one.rank is None or not ranks)]
    # The first-bad ranks' own batches are judged; the batches before them are what is usual.
    others = [one for one in seen if one.step is not None and one.step < step]
    return [*_batches(mine, others), *_boundaries(record, step)]


def _batches(mine: list[Posted], others: list[Posted]) -> list[Fact]:
    usual = [max(found) for one in others if (found := _numbers(one, *_LENGTHS))]
    read = {mark: one for one in others for mark in _marks(one)}
    odd: list[Fact] = []
    for one in mine:
        whose = "every rank" if one.rank is None else f"rank {one.rank}"
        who = f"the batch of {whose} at {step_words(one.step)}"
        lengths = _numbers(one, *_LENGTHS)
        if lengths and usual and max(lengths) >= _OVERLONG * median(usual):
            times = max(lengths) / median(usual)
            text = f"{who} holds a sample of {max(lengths):,.0f} tokens, {times:.0f} times the usual longest"
            odd.append(Fact(id=one.id, kind="batch_overlong", text=text))
        density = _numbers(one, "mask_density", "loss_mask_density")
        if density and min(density) <= 0:
            odd.append(
                Fact(id=one.id, kind="batch_masked_out", text=f"{who} holds a sample without a target")
            )
        again = [read[mark] for mark in _marks(one) if mark in read]
        if again:
            text = f"{who} repeats {len(again)} of its samples, first read at {step_words(again[0].step)}"
            odd.append(Fact(id=one.id, kind="batch_duplicate", text=text))
    if odd or not mine or not usual or not any(_numbers(one, *_LENGTHS) for one in mine):
        return odd
    text = f"lengths and targets of the batch at {step_words(mine[0].step)} are like those before it"
    return [Fact(id=mine[0].id, kind="batch_ordinary", text=text, more=len(mine) - 1)]


def _boundaries(record: Record, step: int) -> list[Fact]:
    found = []
    for one in record.of_type("schedule.boundary"):
        if one.step is not None and 0 <= step - one.step < NEAR_STEPS:
            name = one.data.get("name") or one.data.get("kind") or one.data.get("boundary") or "a boundary"
            text = f"{name} was declared at {step_words(one.step)}, {step - one.step} steps before"
            found.append(Fact(id=one.id, kind="boundary_near", text=text))
    return found


def _numbers(event: Posted, *names: str) -> list[float]:
    for name in names:
        value: Any = event.data.get(name)
        if isinstance(value, list):
            kept = [v for v in value if isinstance(v, int | float) and not isinstance(v, bool)]
            if kept:
                return kept
    return []


def _marks(event: Posted) -> list[str]:
    value = event.data.get("fingerprints")
    return [str(mark) for mark in value] if isinstance(value, list) else []
