"""The ledger: every automatic action and every decision about a run, chained and append-only."""

from datetime import datetime
from typing import Any

from incidents.models import Incident, LedgerRow
from runs.models import Run


class Incomplete(ValueError):
    """A row was refused: a field is missing and nobody said why there is none."""


def append(
    *,
    run: Run,
    action: str,
    why: str,
    decided_by: str,
    attempt: int | None = None,
    step: int | None = None,
    ranks: list[int] | None = None,
    before: dict[str, int | None] | None = None,
    after: dict[str, int | None] | None = None,
    checkpoint: dict[str, Any] | None = None,
    detector: dict[str, Any] | None = None,
    samples_skipped: int | None = None,
    steps_lost: int | None = None,
    gpu_hours_lost: float | None = None,
    none_because: dict[str, str] | None = None,
    budget: dict[str, Any] | None = None,
    incident: Incident | None = None,
    at: datetime | None = None,
) -> LedgerRow:
    """Append one row to the chain of `run`, inside the caller's transaction.

    Raises:
        Incomplete: a required field is missing and `none_because` does not say why.
    """
    raise NotImplementedError


def verify(run: Run) -> list[str]:
    """Recompute the chain of `run`; returns one sentence per row that does not fit, [] when all do."""
    raise NotImplementedError
