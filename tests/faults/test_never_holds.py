"""What must not stop a run: it goes on, and its page shows what was seen."""

import time

import pytest

from andon.wire import Frame, encode_frame
from demo.check import until
from tests.faults.house import House, Poster

pytestmark = pytest.mark.xdist_group("faults")
NAN = float("nan")


def page_says(house: House, poster: Poster, *words: str) -> None:
    """Wait until the run's page shows every one of `words`."""
    alice = house.person("alice", "responder")
    shown = ""

    def says() -> bool:
        nonlocal shown
        page = alice.get(f"/runs/{poster.run}")
        assert page.status == 200
        shown = page.text
        return all(word in shown for word in words)

    try:
        until("the page shows it", says, 20)
    except Exception:
        raise AssertionError(f"{words} not in: {shown}") from None


def goes_on(house: House, poster: Poster) -> None:
    """The directive never changed, by the wire and by its history, and nothing was opened."""
    assert poster.directive()["kind"] == "continue"
    run = house.run_id(poster.run)
    assert house.one("SELECT count(*) FROM runs_directive WHERE run_id = %s AND kind <> 'continue'", run) == 0
    assert [row for row in house.incidents(poster.run) if row[1] != "resolved"] == []


def nothing_waits(house: House, poster: Poster) -> None:
    run = house.run_id(poster.run)
    until(
        "the worker has looked",
        lambda: house.one("SELECT count(*) FROM runs_pending WHERE run_id = %s", run) == 0,
        30,
    )


def test_the_scale_search_at_the_start_of_fp16(house: House, poster: Poster):
    poster.events({"type": "attempt.launched", "attempt": 1, "data": {"world_size": 1, "precision": "fp16"}})
    for step in range(1, 17):
        data = {
            "loss": 10.8,
            "grad_norm": float("inf"),
            "loss_scale": 2.0 ** (32 - step),
            "skipped": True,
            "nonfinite": 8 | 64,
        }
        answer = poster.events({"type": "step", "step": step, "attempt": 1, "data": data})
        assert answer.status == 202
        assert answer.directive["kind"] == "continue", step
    poster.step(17, loss=10.7, grad_norm=3.1, loss_scale=32768.0)
    nothing_waits(house, poster)
    goes_on(house, poster)
    page_says(house, poster, "loss scale", "16 of the newest 17 reported steps of attempt 1 were skipped")


@pytest.mark.parametrize("name", ["eval_loss", "perplexity", "router_z_loss", "my_own_number"])
def test_a_nan_that_says_nothing_about_the_weights(house: House, poster: Poster, name: str):
    poster.step(1, loss=2.5)
    answer = poster.step(2, loss=2.4, **{name: NAN})
    assert (answer.status, answer.directive["kind"]) == (202, "continue")
    nothing_waits(house, poster)
    goes_on(house, poster)
    page_says(house, poster, f"{name} is NaN", "holds nothing")


def test_a_nan_in_an_unknown_column_of_a_frame(house: House, poster: Poster):
    import numpy as np

    frame = Frame(
        stream="rank",
        attempt=1,
        node="node-00",
        step=np.array([5, 5], np.int64),
        lane=np.array([0, 1], np.int32),
        metrics={"loss": np.array([2.0, 2.1]), "cosine_to_ema": np.array([NAN, 0.9])},
    )
    body, kind = encode_frame(frame)
    answer = poster.post(body, "frames", content_type=kind)
    assert (answer.status, answer.directive["kind"]) == (202, "continue")
    nothing_waits(house, poster)
    goes_on(house, poster)
    page_says(house, poster, "cosine_to_ema", "holds nothing")


def test_an_hour_old_nan_out_of_a_spool(house: House, poster: Poster):
    poster.step(100, loss=2.5)
    old = {"type": "step", "step": 50, "rank": 3, "time": time.time() - 3600, "data": {"loss": NAN}}
    answer = poster.events(old)
    assert (answer.status, answer.directive["kind"]) == (202, "continue")
    nothing_waits(house, poster)
    goes_on(house, poster)
    page_says(house, poster, "arrived late", "50")


def test_a_nan_of_the_attempt_before(house: House, poster: Poster):
    for attempt in (1, 2):
        poster.events({"type": "attempt.launched", "attempt": attempt, "data": {"world_size": 4}})
    poster.events({"type": "step", "step": 90, "attempt": 2, "data": {"loss": 2.5}})
    answer = poster.events({"type": "step", "step": 95, "rank": 2, "attempt": 1, "data": {"loss": NAN}})
    assert (answer.status, answer.directive["kind"]) == (202, "continue")
    nothing_waits(house, poster)
    goes_on(house, poster)
    page_says(house, poster, "arrived late", "95", "attempt 1")
