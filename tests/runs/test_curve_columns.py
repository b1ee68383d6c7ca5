"""Curves lose nothing on the way to a picture: extremes, nonfinite steps and a spike of one step stay."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runs import curve_columns, curve_values, curves
from runs.blocks import FACTOR, TOP, steps_of
from runs.curve_columns import REDUCED, Columns, Reports

FINITE = st.floats(-1e6, 1e6, allow_nan=False)
VALUES = st.one_of(FINITE, st.sampled_from([float("nan"), float("inf"), float("-inf")]))


@st.composite
def posted(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Some steps of an attempt with a value each, close together or far apart."""
    steps = sorted(draw(st.sets(st.integers(0, 70_000), min_size=1, max_size=120)))
    values = draw(st.lists(VALUES, min_size=len(steps), max_size=len(steps)))
    return np.array(steps, np.int64), np.array(values)


def at_level(columns: Columns, level: int) -> Columns:
    """Build a level as the store does: from the one below, again and again."""
    for below in range(level):
        columns = curve_columns.grouped(columns, steps_of(below + 1))
    return columns


@given(posted(), st.integers(0, TOP), st.integers(1, 5))
def test_every_bucket_keeps_its_least_its_greatest_and_all_that_was_nonfinite(
    series: tuple[np.ndarray, np.ndarray], level: int, times: int
) -> None:
    steps, values = series
    width = steps_of(level) * times
    columns = at_level(curve_columns.settled(Reports.of(steps, values)), level)
    columns = curve_columns.grouped(columns, width) if times > 1 else columns
    assert columns["at"].tolist() == sorted({step // width * width for step in steps.tolist()})
    for column in columns:
        inside = (steps >= column["at"]) & (steps < column["at"] + width)
        finite = inside & np.isfinite(values)
        assert column["n"] == finite.sum()
        if finite.any():
            assert (column["lo"], column["hi"]) == (values[finite].min(), values[finite].max())
            assert values[steps == column["lo_at"]] == column["lo"]
            assert values[steps == column["hi_at"]] == column["hi"]
            assert np.isclose(column["total"], values[finite].sum())
        bad = inside & ~np.isfinite(values)
        assert column["bad"] == bad.sum()
        if bad.any():
            assert column["bad_at"] == steps[bad][0]
            kind: dict[str, Any] = {"nan": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}
            assert kind[curve_columns.KINDS[column["kind"]]](values[bad][0])


@given(st.data())
def test_a_spike_of_one_step_is_at_its_step_in_every_window_that_holds_it(data: Any) -> None:
    last = data.draw(st.integers(10, 3_000_000))
    spike = data.draw(st.integers(0, last))
    first = data.draw(st.integers(0, spike))
    end = data.draw(st.integers(spike, last))
    most = data.draw(st.integers(1, 2_000))
    shown = curves.window(first, end, most)
    assert shown.first <= first
    assert shown.last >= end
    assert (shown.last - shown.first + 1) // shown.width <= most or shown.width == 1
    assert shown.width % steps_of(shown.level) == 0
    # Beside the spike every step of its column, and its neighbours.
    near = np.arange(max(0, spike - 40), min(last, spike + 40) + 1)
    values = np.where(near == spike, 99.0, 2.0)
    columns = at_level(curve_columns.settled(Reports.of(near, values)), shown.level)
    columns = columns[(columns["at"] >= shown.first) & (columns["at"] <= shown.last)]
    columns = curve_columns.grouped(columns, shown.width, start=shown.first)
    drawn = {point["step"]: point["value"] for point in curves.points(columns)}
    assert drawn[spike] == 99.0


@given(posted(), st.integers(0, 119))
def test_it_does_not_matter_how_posts_were_split(series: tuple[np.ndarray, np.ndarray], cut: int) -> None:
    steps, values = series
    whole = curve_columns.settled(Reports.of(steps, values))
    parts = [Reports.of(steps[:cut], values[:cut]), Reports.of(steps[cut:], values[cut:])]
    one, other = (curve_columns.settled(part) for part in parts)
    assert (curve_columns.merged(one, other) == whole).all()
    assert (curve_columns.merged(other, one) == whole).all()
    assert (curve_columns.merged(whole, whole) == whole).all()


@given(
    st.lists(st.tuples(st.integers(0, 3), FINITE, st.booleans()), min_size=1, max_size=40), st.integers(0, 40)
)
def test_single_ranks_become_one_value_and_a_reduced_one_stands_before_them(
    rows: list[tuple[int, float, bool]], cut: int
) -> None:
    def reports(part: list[tuple[int, float, bool]]) -> Columns:
        found = Reports.of(np.array([r[0] for r in part], np.int64), np.array([r[1] for r in part]))
        found.weights[:] = [REDUCED if reduced else 1 for _, _, reduced in part]
        return curve_columns.settled(found, how)

    for how, rule in (("mean", np.mean), ("max", np.max), ("min", np.min), ("sum", np.sum)):
        columns = curve_columns.merged(reports(rows[:cut]), reports(rows[cut:]), how)
        for column in columns:
            said = [value for step, value, reduced in rows if step == column["at"] and reduced]
            if said:
                assert (column["lo"], column["hi"]) == (min(said), max(said))
            else:
                of_ranks = [value for step, value, _ in rows if step == column["at"]]
                assert np.isclose(column["hi"], rule(of_ranks), rtol=1e-9, atol=1e-6)


@given(posted(), st.integers(0, TOP))
def test_what_is_packed_is_unpacked(series: tuple[np.ndarray, np.ndarray], level: int) -> None:
    columns = at_level(curve_columns.settled(Reports.of(*series)), level)
    for number in np.unique(columns["at"] // (256 * FACTOR**level)).tolist():
        part = columns[columns["at"] // (256 * FACTOR**level) == number]
        after = curve_columns.unpack(curve_columns.pack(part, level, number), level, number)
        for name in ("at", "lo", "hi", "total", "n", "bad", "who", "weight", "kind"):
            assert (after[name] == part[name]).all(), name
        has, bad = part["n"] > 0, part["bad"] > 0
        assert (after["hi_at"] == part["hi_at"])[has].all()
        assert (after["lo_at"] == part["lo_at"])[has].all()
        assert (after["bad_at"] == part["bad_at"])[bad].all()


@given(st.dictionaries(st.text(min_size=1, max_size=20), posted(), max_size=4))
def test_what_waits_for_a_worker_is_kept_as_it_was_said(
    said: dict[str, tuple[np.ndarray, np.ndarray]],
) -> None:
    before = {name: Reports.of(*series) for name, series in said.items()}
    after = curve_values.unpack(curve_values.pack(before))
    assert after.keys() == before.keys()
    for name, reports in before.items():
        assert after[name].steps.tolist() == reports.steps.tolist()
        assert after[name].kinds.tolist() == reports.kinds.tolist()
        finite = reports.kinds == 0
        assert after[name].values[finite].tolist() == reports.values[finite].tolist()
