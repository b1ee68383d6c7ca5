"""What all ranks agreed on in one step."""

import msgspec
import numpy as np

from andon.local_norms import LocalNorms, LocalReading, reading
from andon.monitor_decide import Decision
from andon.monitor_rows import StateAfter
from andon.step_times import Mark


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks agreed on in one step.

    Attributes:
        step: which step this is about; with `deferred` the one before, and −1 before the first.
        loss: token-weighted mean over the ranks whose loss was finite; NaN when none was.
        nonfinite_ranks: how many ranks had a nonfinite loss, output or gradient of their own.
        reduced_ranks: how many held a nonfinite gradient after the reduce.
        nonfinite_losses: how many had a nonfinite loss; the mean over all ranks is then NaN.
        hold: rank 0 had an order to hold; it takes effect at the end of this step.
        skip: this update is dropped, on all ranks.
        halt: stop by the trainer's own decision; this step's update is dropped.
        decision: why, and what the detectors said.
        grad_norm: global L2 of the reduced gradient, unscaled, before clipping; NaN where it is nonfinite.
        loss_scale: of an fp16 scaler, else None.
        local_loss: this rank's mean; NaN with `measured` False on a pipeline stage without loss.
        micro_batch: this rank's first micro-batch with a nonfinite loss, where micro-batches are told.
    """

    step: int
    loss: float
    nonfinite_ranks: int
    reduced_ranks: int
    nonfinite_losses: int
    hold: bool
    skip: bool
    halt: bool
    decision: Decision
    reading: LocalReading
    grad_norm: float
    loss_scale: float | None
    local_loss: float
    tokens: int
    total_tokens: int
    measured: bool
    compute_s: float
    wait_s: float
    micro_batch: int | None = None

    @property
    def bad(self) -> bool:
        """Whether anything was nonfinite on any rank."""
        return self.nonfinite_ranks > 0 or self.reduced_ranks > 0


class Pending(msgspec.Struct, frozen=True):
    """A step whose numbers are on their way to the host."""

    step: int
    tokens: int
    measured: bool
    after: StateAfter | None  # of an earlier step, moving with it
    times: Mark | None


def first_bad(losses: np.ndarray | None) -> int | None:
    """Return the index of the first nonfinite value."""
    if losses is None or np.isfinite(losses).all():
        return None
    return int(np.argmin(np.isfinite(losses)))


def nothing_yet(norms: LocalNorms) -> Agreement:
    """Return what a deferred monitor knows in its first step."""
    nan = float("nan")
    return Agreement(
        step=-1,
        loss=nan,
        nonfinite_ranks=0,
        reduced_ranks=0,
        nonfinite_losses=0,
        hold=False,
        skip=False,
        halt=False,
        decision=Decision(),
        reading=reading(None, None, None, layers=len(norms.layers)),
        grad_norm=nan,
        loss_scale=None,
        local_loss=nan,
        tokens=0,
        total_tokens=0,
        measured=False,
        compute_s=nan,
        wait_s=nan,
    )
