"""Tiles as the browser gets them: rows in any order, by step or by time, and the states a run can yield."""

from datetime import timedelta

import numpy as np
import pytest
from django.utils import timezone

from andon.detect.planes import HEALTHY, HELD, MISSING, NO_PROGRESS, NONFINITE, SPREAD
from runs import grid, grid_tiles
from runs.cellmap import Bins
from runs.models import Attempt, Finding, RunProgress
from tests.pages import seed
from tests.pages.test_grid_png import decode
from tests.runs.cells import compact, store_plane
from tests.runs.conftest import new_trainer

pytestmark = pytest.mark.django_db

RANKS = 32
GROUPS = {
    "tp": [list(range(n, n + 4)) for n in range(0, RANKS, 4)],
    "dp": [list(range(n, RANKS, 4)) for n in range(4)],
}


@pytest.fixture
def run(project):
    """A run of 32 ranks on four nodes that knows its tensor and data groups."""
    made = new_trainer().run
    nodes = [{"node": f"node-{n}", "ranks": list(range(8 * n, 8 * n + 8))} for n in range(4)]
    Attempt.objects.create(
        run=made, number=1, launched_at=timezone.now(), world_size=RANKS, nodes=nodes, groups=GROUPS
    )
    return made


def view(run, *, steps=None, kind="", sort="", by_time=False):
    extent = grid.extent(run, 1)
    rows = grid.rows(run, 1, extent, kind, sort)
    first, last = steps or (extent.step_first, extent.step_last)
    return grid.View(run, 1, grid.Window(first, last, 0, RANKS - 1), rows, extent, by_time)


def post(run, first, last, bad=(), ranks=None):
    """Store steps `first` to `last`, healthy but for `bad` cells of (step, rank, code)."""
    ranks = np.arange(RANKS) if ranks is None else np.asarray(ranks)
    codes = np.full((last - first + 1, len(ranks)), HEALTHY, np.uint8)
    for step, rank, code in bad:
        codes[step - first, np.flatnonzero(ranks == rank)] = code
    store_plane(run.pk, np.arange(first, last + 1), ranks, codes)


def states(looked):
    window = looked.window
    plane = grid_tiles.states(
        looked, Bins(window.step_first, window.step_last, 0), Bins(window.row_first, window.row_last, 0)
    )
    return {(step + window.step_first, row): int(plane[row, step]) for row, step in np.argwhere(plane > 1)}


@pytest.mark.parametrize("kind", ["", "node", "rank", "tp", "dp"])
@pytest.mark.parametrize("sort", ["rank", "failure"])
def test_every_order_of_rows_shows_each_cell_in_the_row_of_its_rank(run, kind, sort):
    post(run, 0, 99, [(90, 13, NONFINITE), (90, 21, SPREAD)])
    compact(run.pk)
    looked = view(run, kind=kind, sort=sort)
    row = looked.rows.row
    assert states(looked) == {(90, row(13)): NONFINITE, (90, row(21)): SPREAD}
    assert sorted(looked.rows.rank(n) for n in range(RANKS)) == list(range(RANKS))
    body = grid_tiles.tile(looked, width=40, height=8, theme="light")
    plane, _ = decode(body)
    assert 9 in plane
    if sort == "failure":
        name, members = {
            "rank": ("", [13]),
            "tp": ("TP 3", [12, 13, 14, 15]),
            "dp": ("DP 1", GROUPS["dp"][1]),
        }.get(kind, ("node-1", list(range(8, 16))))
        assert [looked.rows.rank(n) for n in range(len(members))] == members
        assert not looked.rows.groups or looked.rows.groups[0] == (name, 0)


def test_only_groups_that_the_launch_told_are_offered(run):
    from runs.grid_rows import kinds

    assert kinds(run, 1) == ["node", "rank", "tp", "dp"]
    assert kinds(run, 2) == ["rank"]
    assert grid.rows(run, 1, grid.extent(run, 1), "pp", "").kind == "rank"


def test_a_tile_of_pixels_is_the_worst_of_their_bins(run):
    rng = np.random.default_rng(3)
    places = zip(rng.integers(0, 3_000, 40).tolist(), rng.integers(0, 32, 40).tolist(), strict=True)
    bad = [(step, rank, SPREAD if n % 2 else NONFINITE) for n, (step, rank) in enumerate(places)]
    for first in range(0, 3_000, 300):
        post(run, first, first + 299, [one for one in bad if first <= one[0] < first + 300])
    compact(run.pk)
    since = min(step for step, _, _ in bad)
    for (first, last), width, height in (((0, 2_999), 100, 8), ((7, 2_990), 333, 20), ((100, 163), 64, 32)):
        looked = view(run, steps=(first, last))
        plane, _ = decode(grid_tiles.tile(looked, width=width, height=height, theme="dark"))
        steps, rows = Bins.over(first, last, width), Bins.over(0, RANKS - 1, height)
        want = np.ones((height, width), np.uint8)
        for step, rank, code in bad:
            if not steps.start <= step >> steps.shift < steps.start + steps.count:
                continue
            x = _pixels(step >> steps.shift, first, last, width, steps.shift)
            y = _pixels(rank >> rows.shift, 0, RANKS - 1, height, rows.shift)
            want[np.ix_(y, x)] = np.maximum(want[np.ix_(y, x)], SPREAD if step > since else code)
        assert (plane == want).all()


def _pixels(bin_, first, last, pixels, shift):
    """Pixels that begin in a bin; of a bin at the end in which none begins, the last one."""
    size = last - first + 1
    mine = [px for px in range(pixels) if (first + px * size // pixels) >> shift == bin_]
    return mine or [pixels - 1]


def test_steps_after_the_held_one_are_held_and_a_finding_names_its_state(run):
    from runs.models import DirectiveAck

    post(run, 0, 49)
    DirectiveAck.objects.create(
        run=run,
        attempt=1,
        seq=1,
        state="held",
        step=49,
        ranks=[],
        occurred_at=timezone.now(),
        received_at=timezone.now(),
    )
    for rule, step, code in (("straggler", 5, 5), ("corruption", 6, 8), ("hang", 7, 7), ("spike", 8, 6)):
        Finding.objects.create(
            run=run,
            attempt=1,
            kind=rule,
            rule=rule,
            mode="observe",
            severity="warn",
            step=step,
            lanes=[3],
            view="local",
            detector=rule,
            detector_version="1",
            policy_digest="",
            occurred_at=timezone.now(),
            received_at=timezone.now(),
        )
        assert states(view(run, steps=(0, 55)))[step, 3] == code
    found = states(view(run, steps=(40, 55)))
    assert {code for (step, _), code in found.items() if step > 49} == {HELD}
    assert {step for step, _ in found} == set(range(50, 56))


def test_a_standing_run_names_the_ranks_that_are_not_there_yet(run):
    post(run, 0, 20)
    post(run, 21, 21, ranks=[r for r in range(RANKS) if r != 9])
    compact(run.pk)
    quiet = timezone.now() - timedelta(minutes=3)
    RunProgress.objects.update_or_create(run=run, defaults={"attempt": 1, "step": 21, "step_at": quiet})
    looked = view(run)
    assert looked.extent.step_last == 22
    assert looked.extent.progress.waiting_for == [9]
    found = states(looked)
    assert {found[21, 9], found[22, 9]} == {NO_PROGRESS}
    assert found[22, 8] == SPREAD
    # It went on in reduced values: nobody waits in the step after the last cell of a rank.
    RunProgress.objects.filter(run=run).update(step=30)
    assert grid.extent(run, 1).progress is None
    RunProgress.objects.filter(run=run).update(step=21, step_at=timezone.now())
    assert grid.extent(run, 1).progress is None


def test_a_version_changes_with_every_cell_and_is_the_same_otherwise(run):
    post(run, 0, 9)
    one = grid.extent(run, 1).version
    assert grid.extent(run, 1).version == one
    compact(run.pk)
    two = grid.extent(run, 1).version
    post(run, 10, 19)
    three = grid.extent(run, 1).version
    compact(run.pk)
    assert len({one, two, three, grid.extent(run, 1).version}) == 4


def test_by_time_a_pause_is_wide_and_no_bad_cell_is_lost(run):
    trainer_at = timezone.now().replace(microsecond=0) - timedelta(hours=3)
    from runs.models import GridWaiting
    from runs.points import Points

    rows = []
    for step in range(200):
        at = trainer_at + timedelta(seconds=10 * step + (3_600 if step >= 100 else 0))
        rows += [(step, rank, HEALTHY, int(at.timestamp() * 1000)) for rank in range(RANKS)]
    rows += [(150, 13, NONFINITE, 0)]
    GridWaiting.objects.create(run=run, attempt=1, points=Points.of(rows).pack(), received_at=timezone.now())
    for done in (False, True):
        if done:
            from runs import work

            work.enqueue(kind="grid", key=str(run.pk), payload={"run": run.pk})
            compact(run.pk)
        looked = view(run, by_time=True)
        clock = looked.clock(600)
        assert clock is not None
        plane, _ = decode(grid_tiles.tile(looked, width=600, height=32, theme="light"))
        begin, end = clock.times[0], clock.times[-1]
        assert round(end - begin) == 200 * 10 + 3_600
        x = int((clock.at(150) - begin) / (end - begin) * 600)
        assert plane[13, x] == NONFINITE
        pause = int((990 + 1_800) / (end - begin) * 600)
        assert set(plane[:, pause]) == {0}
        assert MISSING not in plane


@pytest.mark.django_db(transaction=True)
def test_the_readout_says_where_a_cell_stands_and_why_it_has_no_value(as_bob, incident):
    def says(step, rank):
        answer = as_bob.get(f"/incidents/{incident.id}/cell.json?step={step}&rank={rank}")
        return answer.json()["says"]

    assert says(incident.step, 13).startswith(
        "DP 0; flagged by the trainer in backward, local value; loss 2.113"
    )
    compact(incident.run.pk)
    assert f"the last of this rank is of step {incident.step + 1}" in says(incident.step + 50, 2)
    late = {"type": "step", "step": incident.step + 2, "rank": 3, "attempt": 1, "data": {"loss": 2.0}}
    seed.post_events(incident.run.slug, incident.secret, [late])
    assert "posts are being taken in" in says(incident.step + 50, 2)
    compact(incident.run.pk)
    assert "this rank posted nothing in this attempt" in says(incident.step, 99)
