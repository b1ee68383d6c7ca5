"""What was posted of the layers of an attempt: every replica's value, and the table of the worst of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from andon.wire import decode_frame
from runs.ingest_frames import with_masks
from runs.models import Frame, Run

MAX_FRAMES = 400  # layer frames read for one picture
UNTOLD = -1  # of a value whose rank was not told


@dataclass(frozen=True, slots=True)
class LayerCells:
    """Values by layer, replica and step, one per entry of four arrays of equal length.

    Attributes:
        names: of the layers, as first met.
        layer: int64[n], index into `names`.
        rank: int64[n], of the replica that reported it, `UNTOLD` where it did not say.
        step: int64[n].
        value: float64[n], NaN where it was nonfinite.
    """

    names: list[str]
    layer: NDArray[np.int64]
    rank: NDArray[np.int64]
    step: NDArray[np.int64]
    value: NDArray[np.float64]

    @property
    def replicas(self) -> list[int]:
        """The ranks that reported any, ascending."""
        return [rank for rank in np.unique(self.rank).tolist() if rank != UNTOLD]

    def of(self, *, rank: int | None = None, layer: str | None = None) -> "LayerCells":
        """Return the cells of one replica, of one layer, or both; what told no rank is of every replica."""
        keep = np.ones(len(self.step), np.bool_)
        if rank is not None:
            keep &= (self.rank == rank) | (self.rank == UNTOLD)
        if layer is not None:
            keep &= self.layer == (self.names.index(layer) if layer in self.names else -2)
        return LayerCells(self.names, self.layer[keep], self.rank[keep], self.step[keep], self.value[keep])

    def table(self) -> tuple[list[str], NDArray[np.int64], NDArray[np.float64]]:
        """Return names, steps and values float64[layers, steps] (NaN = nonfinite or not posted).

        Where several replicas reported a layer the largest value stands, and a nonfinite one above all.
        """
        steps, column = np.unique(self.step, return_inverse=True)
        table = np.full((len(self.names), len(steps)), -np.inf)
        np.maximum.at(table, (self.layer, column), np.where(np.isnan(self.value), np.inf, self.value))
        return self.names, steps, np.where(np.isfinite(table), table, np.nan)

    def nonfinite(self) -> NDArray[np.bool_]:
        """Return which cells of `table` were nonfinite in any replica, and not merely not posted."""
        steps, column = np.unique(self.step, return_inverse=True)
        bad = np.zeros((len(self.names), len(steps)), np.bool_)
        at = np.isnan(self.value)
        bad[self.layer[at], column[at]] = True
        return bad


_NONE = np.zeros(0, np.int64)
_NOTHING = LayerCells([], _NONE, _NONE, _NONE, np.zeros(0))


def layer_cells(run: Run, attempt: int, metric: str, step_first: int, step_last: int) -> LayerCells:
    """Return one metric of every layer and replica over a range of steps."""
    frames = Frame.objects.filter(
        run_id=run.pk, attempt=attempt, stream="layer", step_first__lte=step_last, step_last__gte=step_first
    ).order_by("step_first", "pk")
    ids = list(frames.values_list("pk", "received_at", "bad_cells"))
    if len(ids) > MAX_FRAMES:
        stride = -(-len(ids) // MAX_FRAMES)
        ids = [one for i, one in enumerate(ids) if i % stride == 0 or one[2]][: 2 * MAX_FRAMES]
    if not ids:
        return _NOTHING
    times = [received_at for _, received_at, _ in ids]
    wanted = frames.filter(
        pk__in=[pk for pk, _, _ in ids], received_at__range=(min(times), max(times))
    ).values_list("body", "content_type")
    names: dict[str, int] = {}
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
    for body, content_type in wanted:
        frame = with_masks(decode_frame(bytes(body), content_type))
        column = frame.metrics.get(metric)
        if column is None:
            continue
        known = ~np.ma.getmaskarray(column) & (frame.step >= step_first) & (frame.step <= step_last)
        lanes = frame.lane if isinstance(frame.lane, list) else [str(lane) for lane in frame.lane.tolist()]
        layer = np.array([names.setdefault(lane, len(names)) for lane in lanes], np.int64)
        rank = np.full(frame.rows, UNTOLD, np.int64) if frame.rank is None else frame.rank.astype(np.int64)
        values = np.ma.getdata(column).astype(np.float64)
        values[~np.isfinite(values)] = np.nan
        parts.append((layer[known], rank[known], frame.step[known], values[known]))
    if not parts:
        return _NOTHING
    layer, rank, step, value = (np.concatenate(one) for one in zip(*parts, strict=True))
    return LayerCells(list(names), layer, rank, step, value)


def layer_series(
    run: Run, attempt: int, metric: str, step_first: int, step_last: int
) -> tuple[list[str], NDArray[np.int64], NDArray[np.float64]]:
    """Return layer names, steps and the worst value of all replicas; see `LayerCells.table`."""
    return layer_cells(run, attempt, metric, step_first, step_last).table()


def has_layers(run: Run, attempt: int) -> bool:
    """Return whether anything was posted of the attempt's layers."""
    return Frame.objects.filter(run_id=run.pk, attempt=attempt, stream="layer").exists()
