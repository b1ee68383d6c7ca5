"""Attempts, acknowledgements and checkpoints as posts make them known."""

from typing import Any

import pytest
from django.dispatch import receiver

from runs.directives import obedience
from runs.models import Attempt, Checkpoint, DirectiveAck, Event, Run
from runs.signals import action_reported, attempt_launched, checkpoint_changed
from tests.runs.conftest import Trainer, rank_frame

pytestmark = pytest.mark.django_db


class TestLaunch:
    def test_a_post_before_any_launch_opens_attempt_1_as_not_reported(self, trainer: Trainer) -> None:
        trainer.step(1, loss=2.0)
        attempt = Attempt.objects.get(run=trainer.run)
        assert (attempt.number, attempt.launch_reported) == (1, False)
        assert Event.objects.get(run_id=trainer.run.pk).attempt == 1

    def test_a_launch_reported_later_completes_the_implicit_attempt(self, trainer: Trainer) -> None:
        trainer.step(1, loss=2.0)
        trainer.events(
            {
                "type": "attempt.launched",
                "data": {
                    "world_size": 8,
                    "nodes": [{"node": "a", "ranks": "0-3"}, {"node": "b", "ranks": [4, 5, 6, 7]}],
                    "groups": {"tp": ["0-1", "2-3"]},
                    "precision": "bf16",
                    "kept": "yes",
                },
            }
        )
        attempt = Attempt.objects.get(run=trainer.run)
        assert (attempt.number, attempt.launch_reported, attempt.world_size) == (1, True, 8)
        assert attempt.nodes[0]["ranks"] == [0, 1, 2, 3]
        assert attempt.groups == {"tp": [[0, 1], [2, 3]]}
        assert (attempt.precision, attempt.data["kept"]) == ("bf16", "yes")

    def test_events_without_a_number_belong_to_the_newest_launched(self, trainer: Trainer) -> None:
        for number in (1, 2):
            trainer.events({"type": "attempt.launched", "attempt": number, "data": {}})
        trainer.step(1, loss=2.0)
        assert Event.objects.get(run_id=trainer.run.pk, type="step").attempt == 2

    def test_a_number_above_the_current_one_opens_it_implicitly(self, trainer: Trainer) -> None:
        trainer.step(1, attempt=1, loss=2.0)
        trainer.step(1, attempt=3, loss=2.0)
        assert list(Attempt.objects.filter(run=trainer.run).values_list("number", "launch_reported")) == [
            (1, False),
            (3, False),
        ]

    def test_a_frame_opens_its_attempt_too(self, trainer: Trainer) -> None:
        assert trainer.frame(rank_frame(steps=range(1), ranks=range(2), attempt=4)).status_code == 202
        assert Attempt.objects.get(run=trainer.run).number == 4

    def test_a_launch_within_one_post_counts_for_the_events_behind_it(self, trainer: Trainer) -> None:
        trainer.step(9, loss=2.0)
        trainer.events(
            {"type": "attempt.launched", "attempt": 2, "data": {}}, {"type": "step", "step": 9, "data": {}}
        )
        newest = Event.objects.filter(run_id=trainer.run.pk, type="step").order_by("-pk").first()
        assert newest is not None
        assert (newest.attempt, newest.backfill) == (2, False)

    def test_the_signal_tells_whether_a_permit_was_named(self, trainer: Trainer) -> None:
        heard: list[tuple[int, str]] = []

        @receiver(attempt_launched, weak=False, dispatch_uid="tests.launched")
        def hear(attempt: Attempt, permit_id: str, **_: Any) -> None:
            heard.append((attempt.number, permit_id))

        try:
            trainer.step(1, attempt=1, loss=2.0)
            trainer.events({"type": "attempt.launched", "attempt": 2, "data": {"permit": "p-1"}})
        finally:
            attempt_launched.disconnect(dispatch_uid="tests.launched")
        assert heard == [(1, ""), (2, "p-1")]

    def test_exit_and_finish_are_kept(self, trainer: Trainer) -> None:
        trainer.step(1, loss=2.0)
        trainer.events({"type": "attempt.exited", "data": {"code": 93}}, {"type": "run.finished"})
        attempt = Attempt.objects.get(run=trainer.run)
        assert attempt.exited_at is not None
        assert attempt.exit == {"code": 93}
        assert Run.objects.get(pk=trainer.run.pk).finished_at is not None


class TestObedience:
    def test_it_counts_ranks_that_acknowledged_the_hold(self, trainer: Trainer) -> None:
        trainer.events({"type": "attempt.launched", "attempt": 1, "data": {"world_size": 4}})
        seq = trainer.step(5, rank=1, loss="nan").json()["directive"]["seq"]
        for ranks, state in (("0-1", "held"), ([2], "received")):
            trainer.events(
                {"type": "directive.ack", "data": {"seq": seq, "state": state, "step": 6, "ranks": ranks}}
            )
        assert obedience(trainer.run.pk) == {"obeyed": 2, "of": 4, "silent": [2, 3], "step": 6}
        assert DirectiveAck.objects.filter(run=trainer.run).count() == 2

    def test_an_acknowledgement_without_a_state_is_kept_as_an_event_only(self, trainer: Trainer) -> None:
        answer = trainer.events({"type": "directive.ack", "data": {"seq": 1, "state": "perhaps"}})
        assert answer.status_code in {202, 422}
        assert not DirectiveAck.objects.filter(run=trainer.run).exists()


class TestCheckpoints:
    COMMITTED = {
        "type": "checkpoint.committed",
        "step": 900,
        "data": {
            "uri": "file:///ckpt/900",
            "digest": "ab" * 32,
            "files": [{"path": "model.pt", "bytes": 10, "sha256": "cd" * 32}],
            "loader_position": 7200,
            "consumed_samples": 7200,
            "optimizer_step": 900,
            "schedule_position": 900,
        },
    }

    def test_a_commit_becomes_a_row_with_all_four_positions(self, trainer: Trainer) -> None:
        heard: list[str] = []

        @receiver(checkpoint_changed, weak=False, dispatch_uid="tests.checkpoint")
        def hear(checkpoint: Checkpoint, **_: Any) -> None:
            heard.append(checkpoint.state)

        try:
            trainer.events(self.COMMITTED)
            trainer.events(self.COMMITTED)  # reported again: the same checkpoint
        finally:
            checkpoint_changed.disconnect(dispatch_uid="tests.checkpoint")
        row = Checkpoint.objects.get(run=trainer.run)
        assert row.positions() == {
            "loader_position": 7200,
            "consumed_samples": 7200,
            "optimizer_step": 900,
            "schedule_position": 900,
        }
        assert (row.step, row.bytes_total, row.state) == (900, 10, "committed")
        assert heard == ["committed"]

    def test_a_deletion_is_kept_as_a_state(self, trainer: Trainer) -> None:
        trainer.events(self.COMMITTED)
        trainer.events({"type": "checkpoint.deleted", "step": 900, "data": {"uri": "file:///ckpt/900"}})
        assert Checkpoint.objects.get(run=trainer.run).state == "deleted"


def test_an_action_is_told_upwards_and_one_without_reasons_is_refused(trainer: Trainer) -> None:
    heard: list[str] = []

    @receiver(action_reported, weak=False, dispatch_uid="tests.action")
    def hear(event: Any, **_: Any) -> None:
        heard.append(event.data["action"])

    try:
        refused = trainer.events({"type": "action", "data": {"action": "skip"}})
        trainer.events(
            {
                "type": "action",
                "step": 5,
                "ranks": "0-3",
                "data": {
                    "action": "skip",
                    "loader_before": 10,
                    "loader_after": 14,
                    "checkpoint": "step 0",
                    "reason": "nonfinite loss",
                },
            }
        )
    finally:
        action_reported.disconnect(dispatch_uid="tests.action")
    assert refused.status_code == 422
    assert heard == ["skip"]
