"""First-bad rows of a post of many lanes come out as those of many posts of a few."""

from datetime import UTC, datetime

import numpy as np
import pytest

from andon.detect.nonfinite import bad_cells
from andon.wire import Frame
from runs import minima
from runs.models import FirstBad, Run
from tests.runs.conftest import Trainer

AT = datetime(2026, 3, 1, tzinfo=UTC)
LANES = 200


def dead_frame(step: int, lanes: range) -> Frame:
    count = len(lanes)
    return Frame(
        stream="rank",
        attempt=1,
        step=np.full(count, step, dtype=np.int64),
        lane=np.array(lanes, dtype=np.int32),
        metrics={"loss": np.full(count, np.nan, dtype=np.float32)},
        views={"loss": "local"},
    )


def post(run: Run, step: int, lanes: range) -> int:
    seen = [(bad_cells(dead_frame(step, lanes)), AT)]
    return minima.take(run_id=run.pk, attempt=1, stream="rank", received_at=AT, seen=seen)


def rows_of(run: Run) -> list[tuple[int, int]]:
    rows = FirstBad.objects.filter(run=run, view="local").values_list("lane", "step")
    return sorted((int(lane), int(step)) for lane, step in rows)


@pytest.mark.parametrize("size", [LANES, 7], ids=["all lanes in one post", "seven lanes a post"])
def test_each_lane_keeps_its_earliest_step(trainer: Trainer, size: int) -> None:
    def of(step: int, lanes: range) -> int:
        parts = [lanes[first : first + size] for first in range(0, len(lanes), size)]
        return sum(post(trainer.run, step, part) for part in parts)

    assert of(50, range(100)) == 100
    assert of(60, range(LANES)) == 100, "the first hundred were bad at 50 already"
    assert of(55, range(LANES)) == 100, "only those of 60 move"
    assert of(55, range(LANES)) == 0
    assert of(40, range(80, 180)) == 100
    expected = [(lane, 50 if lane < 80 else 40 if lane < 180 else 55) for lane in range(LANES)]
    assert rows_of(trainer.run) == expected
