"""The pages of runs: their curves over one attempt or all, their marks, and a list that stays quick."""

import time

import numpy as np
import pytest

from incidents.models import Incident
from runs import curve_store, curve_values
from runs.actions import create_run
from runs.curve_columns import Reports
from runs.models import Attempt, Checkpoint, Grid, RunProgress, Work
from tests.pages import seed
from tests.pages.words import text_of

pytestmark = pytest.mark.django_db(transaction=True)


def figure(client, slug, query=""):
    answer = client.get(f"/runs/{slug}/figure.json?{query}")
    assert answer.status_code == 200
    return answer.json()


def trace(found, name):
    return next(one for one in found["data"] if one.get("name") == name)


def drawn(found, name):
    one = trace(found, name)
    return {x: y for x, y in zip(one["x"], one["y"], strict=True) if y is not None}


def words_of(found):
    return " ".join(note["text"] for note in found["layout"]["annotations"])


@pytest.fixture
def rolled_back(project, alice, bob):
    """Attempt 1 ran to step 60, attempt 2 began again at 41; step 50 of the first was a spike."""
    made = create_run(name="two")
    for attempt, first, last in ((1, 0, 60), (2, 41, 80)):
        seed.post_events(
            "two",
            made.secret,
            [{"type": "attempt.launched", "attempt": attempt, "data": {"world_size": 8}}]
            + [
                {
                    "type": "step",
                    "step": step,
                    "attempt": attempt,
                    "time": time.time() - 100 + step,
                    "data": {"loss": 9.0 if (attempt, step) == (1, 50) else 2.0 + attempt / 10},
                }
                for step in range(first, last + 1)
            ]
            + [
                {
                    "type": "schedule.boundary",
                    "step": 30,
                    "attempt": attempt,
                    "data": {"name": "warm-up ends"},
                }
            ],
        )
        seed.work_through()
    Work.objects.filter(kind="grid").update(not_before=made.run.created_at)
    seed.work_through()
    return made


@pytest.fixture
def long(project, alice, bob):
    """A million steps with one spike and one NaN, stored by the store's own function."""
    made = create_run(name="long")
    last = 999_999
    loss = np.full(last + 1, 2.0)
    loss[654_321], loss[123_456] = 9.5, np.nan
    every = np.arange(last + 1)
    skips = Reports.of(every, (every % 1_000 == 7).astype(float), weight=1)
    said = {"loss": Reports.of(every, loss), curve_values.SKIPPED: skips}
    curve_store.take(made.run.pk, 1, said)
    Grid.objects.create(run=made.run, attempt=1, step_first=0, step_last=last)
    Attempt.objects.create(run=made.run, number=1, launched_at=made.run.created_at, first_step=0)
    RunProgress.objects.update_or_create(run=made.run, defaults={"attempt": 1, "step": last})
    return made


class TestCurves:
    def test_a_million_steps_show_the_spike_and_the_nan_at_their_own_steps(self, as_bob, long):
        found = figure(as_bob, "long", "range=attempt&width=856")
        assert drawn(found, "Loss")[654_321] == 9.5
        assert trace(found, "Loss nonfinite")["x"] == [123_456]
        assert len(trace(found, "Loss")["x"]) <= 2 * 856
        rates = drawn(found, "Updates skipped, %")
        assert 0 < max(rates.values()) < 1  # one of a thousand, whatever the zoom
        near = figure(as_bob, "long", "steps=654300-654340")
        assert drawn(near, "Loss")[654_321] == 9.5
        assert len(trace(near, "Loss")["x"]) == 41

    def test_it_says_the_same_as_text(self, as_bob, long):
        meta = figure(as_bob, "long", "range=attempt")["layout"]["meta"]
        loss = next(row for row in meta["text"] if row[0] == "Loss")
        assert loss[2] == "9.500 at step 654,321"
        assert loss[4] == "1\u00a0step, first at 123,456"
        assert meta["extent"] == [0, 999_999]
        assert meta["column"] > 1

    def test_all_attempts_break_at_each_launch_and_keep_what_was_left(self, as_bob, rolled_back):
        found = figure(as_bob, "two", "range=all")
        kept = trace(found, "Loss")
        assert None in kept["y"]
        xs = [x for x, y in zip(kept["x"], kept["y"], strict=True) if y is not None]
        assert xs == sorted(xs)
        left = drawn(found, "Loss, run again later")
        assert left[50] == 9.0
        assert set(left) == set(range(41, 61))
        assert "attempt 2" in words_of(found)
        assert found["layout"]["meta"]["steps"] == [0, 80]

    def test_one_attempt_is_drawn_alone(self, as_bob, rolled_back):
        assert max(drawn(figure(as_bob, "two", "attempt=1&range=attempt"), "Loss")) == 60
        assert min(drawn(figure(as_bob, "two", "attempt=2&range=attempt"), "Loss")) == 41

    def test_by_time_the_steps_stand_where_they_were_over(self, as_bob, rolled_back):
        found = figure(as_bob, "two", "attempt=1&range=attempt&x=time")
        clock = found["layout"]["meta"]["clock"]
        assert clock["begin"] <= trace(found, "Loss")["x"][0] <= clock["end"]

    def test_marks_name_incidents_checkpoints_and_boundaries(self, as_bob, incident):
        Checkpoint.objects.filter(run=incident.run, step=60).update(state="bad")
        words = words_of(figure(as_bob, "gpt-16", "range=attempt&width=1700"))
        assert f"▼ incident {incident.id}" in words
        assert "✕ checkpoint 60, bad" in words
        assert "◆ checkpoint 120, verified" in words

    def test_boundaries_are_marked(self, as_bob, rolled_back):
        assert "boundary warm-up ends" in words_of(figure(as_bob, "two", "attempt=1&range=attempt"))

    @pytest.mark.parametrize(
        "query", ["steps=9-1", "steps=a-b", "attempt=99", "range=no", "steps=5-9223372036854775807", "x=time"]
    )
    def test_a_view_that_makes_no_sense_is_the_opening_one(self, as_bob, rolled_back, query):
        assert figure(as_bob, "two", query)["data"]
        assert as_bob.get(f"/runs/two?{query}").status_code == 200

    def test_what_did_not_change_is_a_304_and_a_new_step_is_not(self, as_bob, rolled_back):
        address = "/runs/two/figure.json?range=1k"
        tag = as_bob.head(address)["ETag"]
        assert as_bob.head(address, headers={"if-none-match": tag}).status_code == 304
        step = {"type": "step", "step": 81, "attempt": 2, "data": {"loss": 3.0}}
        seed.post_events("two", rolled_back.secret, [step])
        assert as_bob.head(address, headers={"if-none-match": tag}).status_code == 200

    def test_a_run_without_a_step_says_how_to_post_one(self, as_bob, project):
        create_run(name="quiet")
        words = text_of(as_bob.get("/runs/quiet"))
        assert "No steps received" in words
        assert "send_events" in words


class TestList:
    def test_200_runs_take_as_many_statements_as_two(self, as_bob, project, django_assert_max_num_queries):
        for n in range(200):
            create_run(name=f"run-{n:03d}")
        with django_assert_max_num_queries(14):
            words = text_of(as_bob.get("/runs"))
        assert "All 200" in words
        assert "page 1 of 4" in words
        assert "run-199" in text_of(as_bob.get("/runs?page=4"))
        assert "run-199" in text_of(as_bob.get("/runs?q=199"))

    def test_small_curves_keep_a_spike_and_mark_a_nan(self, as_bob, incident):
        Work.objects.filter(kind="grid").update(not_before=incident.row.opened_at)
        seed.work_through()
        page = as_bob.get("/runs").content.decode()
        assert page.count('class="spark"') == 2
        assert "<path" in page.split('class="spark"')[2].split("</svg>")[0]
        assert Incident.objects.filter(pk=incident.id).exists()
