"""What a nonfinite value does, through HTTP: what holds, what is only shown."""

import time
from typing import Any

import numpy as np
import pytest

from andon import wire
from runs import watching
from runs.models import Directive, Event, Finding, FirstBad
from tests.runs.conftest import Trainer, rank_frame

pytestmark = pytest.mark.django_db

NAN = float("nan")


def kind(answer: Any) -> str:
    assert answer.status_code == 202, answer.content
    return str(answer.json()["directive"]["kind"])


class TestHolds:
    @pytest.mark.parametrize(
        "data",
        [
            {"loss": NAN},
            {"loss": "Infinity"},
            {"loss": 2.0, "grad_norm": "-inf"},
            {"loss": 2.0, "nonfinite": 4},
        ],
    )
    def test_an_applied_nonfinite_value_holds_in_the_same_reply(
        self, trainer: Trainer, data: dict[str, Any]
    ) -> None:
        assert kind(trainer.step(1, rank=3, loss=2.0)) == "continue"
        answer = trainer.step(2, rank=3, **data)
        assert kind(answer) == "hold"
        assert answer.json()["directive"]["incident"]
        finding = Finding.objects.get(run=trainer.run)
        assert (finding.severity, finding.step, finding.mode) == ("halt", 2, "act")
        assert finding.incident == answer.json()["directive"]["incident"]

    def test_a_local_loss_names_its_rank_and_a_reduced_one_names_none(self, trainer: Trainer) -> None:
        trainer.step(5, rank=3, loss=NAN)
        trainer.step(6, grad_norm=NAN)
        local, reduced = FirstBad.objects.filter(run=trainer.run).order_by("step")
        assert (local.lane, local.view, local.series, local.value) == ("3", "local", "loss", "nan")
        assert (reduced.lane, reduced.view, reduced.series) == ("-1", "reduced", "grad_norm")

    def test_a_frame_holds_and_its_first_bad_lane_is_found(self, trainer: Trainer) -> None:
        trainer.frame(rank_frame(steps=range(1, 3), ranks=range(64)))
        loss = np.full((3, 64), 2.0, dtype=np.float32)
        loss[1, 41] = np.nan
        loss[2, :] = np.nan
        answer = trainer.frame(rank_frame(steps=range(3, 6), ranks=range(64), loss=loss))
        assert kind(answer) == "hold"
        from runs.queries import first_bad

        found = first_bad(trainer.run, 1)
        assert found is not None
        assert (found.step, found.ranks, found.phase.name, found.tie) == (4, (41,), "FORWARD", False)

    def test_layer_norms_hold(self, trainer: Trainer) -> None:
        frame = wire.Frame(
            stream="layer",
            attempt=1,
            step=np.array([3, 3], dtype=np.int64),
            lane=["layers.0", "layers.1"],
            metrics={"grad_norm": np.array([0.2, np.inf], dtype=np.float32)},
        )
        assert kind(trainer.frame(frame)) == "hold"

    def test_weights_hold_even_when_the_update_was_skipped(self, trainer: Trainer) -> None:
        assert kind(trainer.step(4, loss=2.0, nonfinite=32, skipped=True)) == "hold"

    def test_two_skipped_in_a_row_hold(self, trainer: Trainer) -> None:
        assert kind(trainer.step(1, loss=2.0)) == "continue"
        for step in (2, 3):
            assert kind(trainer.step(step, loss=NAN, skipped=True)) == "continue"
        watching.look(trainer.run.pk)
        assert kind(trainer.step(4, loss=2.0)) == "hold"

    def test_one_skipped_step_warns_and_continues(self, trainer: Trainer) -> None:
        trainer.step(1, loss=2.0)
        trainer.step(2, loss=NAN, skipped=True)
        trainer.step(3, loss=2.0)
        watching.look(trainer.run.pk)
        assert kind(trainer.step(4, loss=2.0)) == "continue"
        assert Finding.objects.get(run=trainer.run).severity == "warn"


class TestShownOnly:
    def test_the_scale_search_of_fp16_holds_nothing_and_is_counted(self, trainer: Trainer) -> None:
        scale = 2.0**32
        for step in range(20):
            assert (
                kind(trainer.step(step, loss=9.1, grad_norm=NAN, skipped=True, loss_scale=scale))
                == "continue"
            )
            scale /= 2
        watching.look(trainer.run.pk)
        assert kind(trainer.step(20, loss=9.0, grad_norm=1.0, loss_scale=scale)) == "continue"
        assert not Finding.objects.filter(run=trainer.run, severity="halt").exists()
        assert Event.objects.filter(run_id=trainer.run.pk, flags__has_key="data.grad_norm").count() == 20

    @pytest.mark.parametrize(
        "event",
        [
            {"type": "step", "step": 3, "data": {"loss": 2.0, "eval_loss": "nan"}},
            {"type": "step", "step": 3, "data": {"loss": 2.0, "router_z_loss": "inf"}},
            {"type": "eval.finished", "step": 3, "data": {"loss": "nan", "perplexity": "inf"}},
        ],
    )
    def test_eval_and_unknown_columns_are_a_finding_only(
        self, trainer: Trainer, event: dict[str, Any]
    ) -> None:
        assert kind(trainer.events(event)) == "continue"
        findings = Finding.objects.filter(run=trainer.run)
        assert findings.exists()
        assert {finding.severity for finding in findings} == {"info"}
        assert not any(finding.needs_incident for finding in findings)
        assert not FirstBad.objects.filter(run=trainer.run).exists()

    def test_an_unknown_frame_column_and_act_norm_are_findings_only(self, trainer: Trainer) -> None:
        bad = np.full((1, 4), np.nan, dtype=np.float32)
        assert kind(trainer.frame(rank_frame(steps=range(3, 4), ranks=range(4), aux=bad))) == "continue"
        assert Finding.objects.get(run=trainer.run).severity == "info"

    def test_sentinels_are_not_measured(self, trainer: Trainer) -> None:
        assert kind(trainer.step(1, rank=0, loss=-1, grad_norm=-1.0)) == "continue"
        frame = rank_frame(
            steps=range(1, 2), ranks=range(4), loss=np.full((1, 4), -1.0), grad_norm=np.full((1, 4), -1.0)
        )
        assert kind(trainer.frame(frame)) == "continue"
        assert not FirstBad.objects.filter(run=trainer.run).exists()

    def test_an_hour_old_nan_from_a_spool_is_backfill(self, trainer: Trainer) -> None:
        trainer.step(900, loss=2.0)
        late = {"type": "step", "step": 500, "rank": 1, "time": time.time() - 3600, "data": {"loss": "nan"}}
        assert kind(trainer.events(late)) == "continue"
        event = Event.objects.get(run_id=trainer.run.pk, step=500)
        assert event.backfill
        finding = Finding.objects.get(run=trainer.run)
        assert (finding.backfill, finding.needs_incident) == (True, False)

    def test_a_nan_of_an_earlier_attempt_is_backfill(self, trainer: Trainer) -> None:
        trainer.step(900, attempt=1, loss=2.0)
        trainer.events({"type": "attempt.launched", "attempt": 2, "data": {"world_size": 4}})
        assert kind(trainer.step(901, attempt=1, rank=1, loss=NAN)) == "continue"
        loss = np.full((1, 4), np.nan, dtype=np.float32)
        frame = rank_frame(steps=range(902, 903), ranks=range(4), attempt=1, loss=loss)
        assert kind(trainer.frame(frame)) == "continue"
        assert {f.backfill for f in Finding.objects.filter(run=trainer.run)} == {True}
        assert FirstBad.objects.filter(run=trainer.run, attempt=1).exists()

    def test_the_offset_header_makes_a_slow_clock_current(self, trainer: Trainer) -> None:
        old = {"type": "step", "step": 5, "rank": 1, "time": time.time() - 3600, "data": {"loss": "nan"}}
        import json

        body = json.dumps(old).encode()
        assert kind(trainer.post(body, andon_clock_offset_ms="3600000")) == "hold"

    def test_a_constant_lag_after_a_gap_is_clock_skew_and_not_backfill(self, trainer: Trainer) -> None:
        then = time.time() - 7200
        events = [
            {"type": "step", "step": step, "rank": 0, "time": then, "data": {"loss": value}}
            for step, value in ((1, 2.0), (2, "nan"))
        ]
        assert kind(trainer.events(*events)) == "hold"
        skew = Finding.objects.get(run=trainer.run, kind="clock_skew")
        assert abs(skew.numbers["lag_s"] - 7200) < 5
        assert not Event.objects.filter(run_id=trainer.run.pk, backfill=True).exists()

    def test_in_observe_mode_a_nan_is_a_finding_and_holds_nothing(self, trainer: Trainer) -> None:
        from runs.identity import forget
        from runs.policies import set_policy

        set_policy(run=trainer.run, document={"modes": {"nonfinite": "observe"}}, person=None, why="test")
        forget()
        assert kind(trainer.step(3, rank=1, loss=NAN)) == "continue"
        finding = Finding.objects.get(run=trainer.run)
        assert (finding.mode, finding.needs_incident, finding.severity) == ("observe", False, "halt")


class TestDeadRun:
    def test_it_speaks_once_per_lane_and_moves_no_row(self, trainer: Trainer) -> None:
        loss = np.full((4, 256), np.nan, dtype=np.float32)
        for first in range(10, 50, 4):
            answer = trainer.frame(rank_frame(steps=range(first, first + 4), ranks=range(256), loss=loss))
            assert kind(answer) == "hold"
        assert FirstBad.objects.filter(run=trainer.run).count() == 256
        assert set(FirstBad.objects.filter(run=trainer.run).values_list("step", flat=True)) == {10}
        assert Finding.objects.filter(run=trainer.run).count() <= 2
        assert Directive.objects.filter(run=trainer.run).count() == 2

    def test_first_bad_moves_only_to_an_earlier_cell_whatever_the_order_of_arrival(
        self, trainer: Trainer
    ) -> None:
        for step in (20, 12, 30, 15):
            trainer.step(step, rank=7, loss=NAN)
        assert FirstBad.objects.get(run=trainer.run, lane="7").step == 12

    def test_an_applied_value_counts_before_an_earlier_skipped_one(self, trainer: Trainer) -> None:
        trainer.step(3, rank=7, loss=NAN, skipped=True)
        trainer.step(18, rank=7, loss=NAN)
        row = FirstBad.objects.get(run=trainer.run, lane="7")
        assert (row.step, row.skipped) == (18, False)

    def test_a_joined_finding_reaches_the_incident_by_the_worker(self, trainer: Trainer) -> None:
        from incidents.models import Incident

        trainer.step(20, rank=5, loss=NAN)
        trainer.step(18, rank=9, loss=NAN)
        incident = Incident.objects.get(run=trainer.run)
        assert Finding.objects.filter(run=trainer.run, incident=str(incident.pk)).count() == 2
        watching.look(trainer.run.pk)
        incident.refresh_from_db()
        assert (incident.first_bad["step"], incident.first_bad["ranks"]) == (18, [9])
