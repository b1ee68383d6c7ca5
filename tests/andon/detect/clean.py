"""Clean training, simulated: nothing in it may hold a run.

A step's loss is the token-weighted mean over all ranks. Three things make it move, and each is drawn as it
comes about: documents differ (noise that is normal by the number of them, with a tail where a few weigh
much), some are odd (a table, base64, another language: far above the rest, in one rank's batch, in one
step, since data is shuffled), and the mixture drifts (neighbouring steps are alike). Runs differ in size,
so in noise; learning-rate decay lowers the curve, and a batch-size ramp the noise. Declared changes of any
size are told to the detector; an undeclared shift of more than a few deviations is what a spike that
stays looks like, and no rule can call it clean before it has lasted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

RUN_STEPS = 100_000
UNDECLARED = 4.0  # deviations; the mean of 4,096 ranks moves so much when a small domain runs out


@dataclass(frozen=True)
class CleanRun:
    """The token-weighted mean of one run's steps, and the steps where a change was declared."""

    loss: np.ndarray
    declared: frozenset[int]
    sigma: float


def clean_runs(steps: int, seed: int) -> Iterator[CleanRun]:
    """Yield runs of up to RUN_STEPS steps, `steps` in all."""
    for number in range((steps + RUN_STEPS - 1) // RUN_STEPS):
        yield clean_run(min(RUN_STEPS, steps - number * RUN_STEPS), seed * 100_003 + number)


def clean_run(steps: int, seed: int) -> CleanRun:
    """Return one run from its first step to the end of its decay."""
    rng = np.random.default_rng(seed)
    sigma = 10 ** rng.uniform(-2.7, -1.3)  # 0.002 (16 M tokens a step) to 0.05 (60 thousand)
    s = np.arange(steps)
    curve = 1.7 + 9.0 * (1 + s / rng.uniform(20, 200)) ** -rng.uniform(0.3, 0.5)
    decay_from = int(steps * rng.uniform(0.7, 0.9))
    curve -= rng.uniform(0.05, 0.3) * np.clip((s - decay_from) / max(1, steps - decay_from), 0, 1)
    noise = rng.standard_t(rng.uniform(4, 30), steps)
    noise += np.repeat(rng.standard_normal(steps // 8 + 1) * rng.uniform(0, 1), 8)[
        :steps
    ]  # drift of the mixture
    scale = np.full(steps, sigma)
    for at in rng.integers(1, steps, rng.poisson(2)).tolist():  # batch-size ramp: twice the tokens
        scale[at:] /= np.sqrt(2)
    odd = rng.poisson(0.02, steps)  # odd documents in the batch of a step …
    size = rng.pareto(2.5, steps) + 1  # … each heavier than any ordinary one, some by far
    shift = np.zeros(steps)
    for at in rng.integers(1, steps, rng.poisson(steps / 10_000)).tolist():
        shift[at:] += scale[at] * rng.uniform(-UNDECLARED, UNDECLARED)
    declared = rng.integers(1, steps, rng.poisson(steps / 25_000)).tolist()
    for at in declared:
        shift[at:] += rng.uniform(-0.5, 0.5)
    return CleanRun(curve + scale * (noise + 2 * odd * size) + shift, frozenset(declared), float(sigma))


def rank_steps(
    steps: int, ranks: int, seed: int, chunk: int = 256
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (loss, tokens), float32 of shape (chunk, ranks), of every rank's own batch.

    A rank's mean over its few documents has a deviation of 0.3; one batch in 100,000 holds an odd document
    with a loss of 6 to 14 over it, and is short as such batches are.
    """
    rng = np.random.default_rng(seed)
    for first in range(0, steps, chunk):
        n = min(chunk, steps - first)
        s = np.arange(first, first + n, dtype=np.float32)[:, None]
        level = 1.9 + 0.5 * np.exp(-s / 40_000)
        loss = rng.standard_normal((n, ranks), np.float32)
        loss *= 0.3
        loss += level
        tokens = 2048 + 2048 * rng.random((n, ranks), np.float32)
        odd = rng.integers(0, n * ranks, rng.poisson(n * ranks / 100_000))
        loss.ravel()[odd] = rng.uniform(6, 14, len(odd))
        tokens.ravel()[odd] *= 0.25
        yield loss, tokens
