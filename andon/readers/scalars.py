"""Scalars that a tracker logged, whichever wrote them: the training curve among them, and steps to post."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from andon.detect.series import Row, Series, SeriesError

# In the order in which they are looked for: "train/loss", "Loss/train", "lm loss".
_LOSSES = (
    "train_loss",
    "training_loss",
    "lm_loss",
    "reduced_train_loss",
    "train_ce_loss",
    "loss_train",
    "loss",
)
_NORMS = ("grad_norm", "train_grad_norm", "gradient_norm", "optim_total_grad_norm")
_RATES = ("lr", "learning_rate", "train_learning_rate", "train_lr", "optim_learning_rate")
_MOST = 200  # metrics of one step: a histogram spelled out must not fill the run


class Scalar(msgspec.Struct, frozen=True):
    """One value as written: wall clock in seconds since 1970, step, tag, value (also nonfinite)."""

    wall_time: float
    step: int
    tag: str
    value: float


def plain(tag: str) -> str:
    """Return a tag as a name: "train/loss" → "train_loss"."""
    return "".join(letter if letter.isalnum() else "_" for letter in tag.lower()).strip("_")


def series(scalars: Sequence[Scalar], source: str) -> Series:
    """Return the training curve among scalars.

    Args:
        source: who wrote them, for the note.

    Raises:
        SeriesError: there is no scalar, or none that is a training loss.
    """
    if not scalars:
        raise SeriesError("the file holds no scalar: the run ended before it logged any")
    by_name: dict[str, list[Scalar]] = {}
    for one in scalars:
        by_name.setdefault(plain(one.tag), []).append(one)
    name = _loss(by_name)
    if name is None:
        tags = ", ".join(sorted({one.tag for one in scalars})[:12])
        raise SeriesError(f"no training loss among {tags}")
    loss = by_name[name]
    norms = {one.step: one.value for name in _NORMS for one in by_name.get(name, ())}
    # A tag written twice at one step, as by a train and a validation writer: the last is the value.
    last = {one.step: one.value for one in loss}
    rows = [Row(number, step, value, norms.get(step)) for number, (step, value) in enumerate(last.items(), 1)]
    return Series(rows, bool(norms), [f"{source}: {loss[0].tag}, {len(rows)} values"])


def _loss(names: Any) -> str | None:
    found = next((name for name in _LOSSES if name in names), None)
    return found or next((name for name in names if name.endswith(("train_loss", "lm_loss"))), None)


def events(scalars: Sequence[Scalar]) -> list[dict[str, Any]]:
    """Return one `step` event per step, ascending: loss, gradient norm and rate under the wire's names, all
    others under their own. A step logged in parts is one."""
    names = {plain(one.tag): None for one in scalars}
    called = {_loss(names): "loss"}
    called |= {next((n for n in _NORMS if n in names), None): "grad_norm"}
    called |= {next((n for n in _RATES if n in names), None): "lr"}
    steps: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    for one in scalars:
        data = steps.setdefault(one.step, {})
        name = called.get(plain(one.tag)) or one.tag[:100]
        if name in data or len(data) < _MOST:
            data[name] = one.value
        times[one.step] = max(times.get(one.step, 0.0), one.wall_time)
    return [
        {"type": "step", "step": step, "data": data, **({"time": times[step]} if times[step] > 0 else {})}
        for step, data in sorted(steps.items())
    ]


def is_step(value: Any) -> bool:
    """Return whether a number can be a step."""
    return math.isfinite(value) and 0 <= value < 2**63 and float(value).is_integer()
