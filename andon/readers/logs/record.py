"""What one printed step says, in the wire's names and units, whoever printed it."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from andon.readers.logs.lines import number, slug
from andon.wire_event_data import SENTINELS

Kind = Literal["train", "eval", "overflow"]


class Record(msgspec.Struct, kw_only=True):
    """One record of a training log.

    Attributes:
        trainer: which reader took it.
        step: the optimizer step as printed; None where the format prints none.
        values: metrics under the wire's names (loss, grad_norm, lr, loss_scale, step_time_s in seconds,
            tokens, consumed_samples) and others under their own; nonfinite values stay nonfinite.
        omits_nan: this format leaves a NaN loss out of the line, so that its absence says something.
        skipped: updates dropped since the record before; `skipped_total` the same as a running count.
        nan_steps: steps since the record before whose loss was NaN.
        notes: what a reader of the record should know.
    """

    trainer: str
    step: int | None
    kind: Kind = "train"
    values: dict[str, float] = {}
    omits_nan: bool = False
    skipped: int | None = None
    skipped_total: int | None = None
    nan_steps: int | None = None
    notes: list[str] = []


# Names of the field, as slugs, and the wire's. What is not here keeps its own slug.
NAMES: Mapping[str, str] = {
    "lm_loss": "loss",
    "loss": "loss",
    "reduced_train_loss": "loss",
    "train_ce_loss": "loss",
    "train_crossentropyloss": "loss",
    "grad_norm": "grad_norm",
    "gradient_norm": "grad_norm",
    "optim_total_grad_norm": "grad_norm",
    "learning_rate": "lr",
    "lr": "lr",
    "optim_lr_group_0": "lr",
    "optim_learning_rate_group0": "lr",
    "loss_scale": "loss_scale",
    "consumed_samples": "consumed_samples",
    "tokens": "tokens",
    "elapsed_time_per_iteration_s": "step_time_s",
    "train_step_timing_in_s": "step_time_s",
    "iter_time_s": "step_time_s",
    "step_time": "step_time_s",
    "throughput_per_gpu_tflop_s_gpu": "tflops",
    "samples_per_second": "samples_per_s",
    "samples_sec": "samples_per_s",
}
WHOLE = frozenset({"consumed_samples", "loader_position", "tokens"})


def take(values: dict[str, float], name: str, text: str) -> None:
    """Put one printed value under the wire's name; what is no number, or a logger's sentinel, is left out."""
    value = number(text)
    key = slug(name)
    key = NAMES.get(key, key)
    if value is None or not key or value in SENTINELS.get(key, ()):
        return
    if key in WHOLE:
        if value.is_integer() and 0 <= value <= 2**53:
            values[key] = int(value)
        return
    values[key] = value
