"""Replay: posts as the training did, obeys as a trainer does, goes on only as it was recorded."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from andon import checkpoints, hold
from andon import permit as permits
from andon.cli import main
from andon.recording import Recording
from andon.replay import Replay, ReplayRefused
from andon.wire import parse_time
from tests.andon.listener import Listener

RECORDINGS = Path(__file__).parents[2] / "demo" / "recordings"
SPEED = 200.0


def is_nonfinite_step(event):
    return event.type == "step" and bool(event.flags)


@pytest.fixture
def nan():
    with Recording(RECORDINGS / "nan-one-rank.zip") as opened:
        yield opened


@pytest.fixture
def listener(tmp_path):
    listener = Listener(tmp_path, hold_when=is_nonfinite_step)
    yield listener
    listener.close()


@pytest.fixture
def replay(nan, listener, tmp_path):
    replay = Replay(
        nan,
        url=listener.url,
        run=listener.run,
        secret=listener.secret,
        directory=tmp_path / "run",
        speed=SPEED,
        trusted=listener.trusted,
        say=lambda text: None,
    )
    yield replay
    replay.close()


def permit_for(listener, replay, **changes):
    goes_on = replay.recording.description.continuation
    directory = checkpoints.directory_of(replay.checkpoint_dir / "attempt-1", goes_on.checkpoint_step)
    fields = {
        "checkpoint": (goes_on.checkpoint_step, directory.as_uri(), goes_on.digest),
        "positions": goes_on.positions,
        "skip": (goes_on.skip.start, goes_on.skip.stop),
    }
    return listener.permit(**(fields | changes))


def release(listener, replay, document):
    return hold.release(replay.checkpoint_dir, document, trusted=listener.trusted, at=time.time())


class TestHeld:
    def test_it_stops_at_the_end_of_the_bad_step_and_says_so_for_every_rank(self, replay, listener):
        directive = replay.play_until_held()
        assert directive["kind"] == "hold"
        step = replay.recording.description.answer["step"]
        assert max(event.step for event in listener.of("step")) == step
        assert max(int(frame.step.max()) for frame in listener.frames) == step
        acks = [(event.data["state"], event.step, event.ranks) for event in listener.of("directive.ack")]
        assert sorted(acks) == [("held", step, (0, 1)), ("held", step, (2, 3)), ("received", step, (0,))]
        assert {event.data["state"] for event in listener.of("heartbeat")[-2:]} == {"held"}

    def test_the_step_is_finished_with_the_rank_that_broke_and_the_checkpoint_in_flight(
        self, replay, listener
    ):
        replay.play_until_held()
        answer = replay.recording.description.answer
        local = {
            (int(frame.step[row]), int(frame.lane[row]))
            for frame in listener.frames
            if frame.stream == "rank"
            for row in range(frame.rows)
            if frame.nonfinite("loss")[row]
        }
        assert local == {(answer["step"], answer["ranks"][0])}
        last = listener.of("checkpoint.committed")[-1]
        assert (last.step, last.data["finite"]) == (answer["first_bad_checkpoint_step"], False)

    def test_checkpoints_and_logs_lie_where_the_events_say(self, replay, listener):
        replay.play_until_held()
        for event in listener.of("checkpoint.committed"):
            directory = Path(event.data["uri"].removeprefix("file://"))
            assert directory.is_relative_to(replay.directory)
            manifest = checkpoints.read_manifest(directory)
            assert manifest.digest == event.data["digest"]
            if event.data["finite"]:
                checkpoints.verify(directory)
        logs = [event for event in listener.of("artifact.available") if event.data["kind"] == "rank_logs"]
        assert {event.data["rank"] for event in logs} == {0, 1, 2, 3}
        text = Path(
            next(e for e in logs if e.data["rank"] == 3).data["uri"].removeprefix("file://")
        ).read_text()
        assert "step 120 loss nan" in text
        assert "step 121" not in text

    def test_times_are_now_and_the_originals_are_kept(self, replay, listener):
        before_ns = time.time_ns()
        replay.play_until_held()
        for event in listener.of("step"):
            assert before_ns - 10**9 <= event.occurred_ns <= time.time_ns()
            assert parse_time(event.data["original_time"])[0] < before_ns
        for frame in listener.frames:
            assert (frame.time_ns >= before_ns - 10**9).all()
            assert (frame.metrics["original_time_ns"] < before_ns).all()
        occurred = [event.occurred_ns for event in listener.of("step")]
        assert occurred == sorted(occurred)

    def test_the_hold_file_keeps_another_replay_out(self, replay):
        replay.play_until_held()
        held = hold.read(replay.checkpoint_dir)
        assert held is not None
        assert held["incident"] == "2041"
        with pytest.raises(hold.Held):
            replay.play_until_held()

    def test_without_an_order_it_plays_to_the_end(self, replay, listener):
        listener.hold_when = lambda event: False
        assert replay.play_until_held() is None
        assert max(event.step for event in listener.of("step")) == 140
        assert hold.read(replay.checkpoint_dir) is None

    def test_an_order_of_another_key_is_no_order(self, nan, listener, tmp_path):
        replay = Replay(
            nan,
            url=listener.url,
            run=listener.run,
            secret=listener.secret,
            directory=tmp_path / "other",
            speed=SPEED,
            trusted=["0" * 64],
            say=lambda text: None,
        )
        try:
            assert replay.play_until_held() is None
        finally:
            replay.close()


class TestGoingOn:
    def test_the_permit_of_the_recorded_plan_plays_the_next_attempt(self, replay, listener):
        replay.play_until_held()
        permit = release(listener, replay, permit_for(listener, replay))
        listener.go_on()
        assert replay.continue_with(permit) is None
        launched = listener.of("attempt.launched")[-1]
        assert (launched.attempt, launched.data["permit"]) == (2, "P-1")
        assert Path(launched.data["began_from"]["uri"].removeprefix("file://")).is_dir()
        steps = [event for event in listener.of("step") if event.attempt == 2]
        assert [event.step for event in steps] == list(range(91, 181))
        assert steps[0].data["loader_position"] == 1920 + 16
        assert not any(event.flags for event in steps)

    def test_a_permit_for_something_else_is_refused_by_name_and_the_hold_stays(self, replay, listener):
        replay.play_until_held()
        at = time.time()
        cases: list[tuple[dict[str, Any], str]] = [
            ({"skip": (1440, 1936)}, "skip window"),
            ({"skip": None, "kind": "rollback_and_replay"}, "skip window"),
            ({"checkpoint": (60, "file:///elsewhere", None)}, "checkpoint step"),
            ({"checkpoint": (90, "file:///elsewhere", "0" * 64)}, "checkpoint digest"),
            ({"positions": {"loader_position": 1}}, "loader_position"),
            ({"run": "another"}, "run"),
            ({"attempt": 1}, "attempt"),
        ]
        for changes, what in cases:
            document = permit_for(listener, replay, **changes)
            with pytest.raises(ReplayRefused, match=what):
                replay.compare(permits.verify(document, trusted=listener.trusted, at=at))
        permit = release(listener, replay, permit_for(listener, replay, skip=(1440, 1936)))
        assert hold.read(replay.checkpoint_dir) is None
        with pytest.raises(ReplayRefused, match="skip window"):
            replay.continue_with(permit)
        assert hold.read(replay.checkpoint_dir) is not None
        assert [event.attempt for event in listener.of("attempt.launched")] == [1]

    def test_a_damaged_checkpoint_is_refused(self, replay, listener):
        replay.play_until_held()
        directory = checkpoints.directory_of(replay.checkpoint_dir / "attempt-1", 90)
        (directory / "weights.npz").write_bytes(b"damaged")
        permit = release(listener, replay, permit_for(listener, replay))
        with pytest.raises(ReplayRefused, match=r"weights\.npz"):
            replay.continue_with(permit)

    def test_a_hold_that_nobody_released_stays(self, replay, listener):
        replay.play_until_held()
        document = permit_for(listener, replay)
        permit = permits.verify(document, trusted=listener.trusted, at=time.time())
        with pytest.raises(hold.Held):
            replay.continue_with(permit)


class TestCommand:
    def arguments(self, listener, directory):
        return [
            "replay",
            str(RECORDINGS / "nan-one-rank.zip"),
            *("--url", listener.url, "--run", listener.run, "--secret", listener.secret),
            *("--speed", str(SPEED), "--checkpoint-dir", str(directory), "--key", listener.trusted[0]),
        ]

    def test_it_leaves_with_93_at_the_deadline_and_goes_on_by_a_permit(self, listener, tmp_path, capsys):
        listener.hold_s = 1.0
        arguments = self.arguments(listener, tmp_path / "run")
        assert main(arguments) == 93
        assert "held at the end of step 120" in capsys.readouterr().out
        assert {e.data["state"] for e in listener.of("directive.ack")} == {"received", "held", "exited"}
        assert main(arguments) == 93, "a held directory must not be replayed into"
        with Recording(RECORDINGS / "nan-one-rank.zip") as opened:
            goes_on = opened.description.continuation
        assert goes_on is not None
        directory = checkpoints.directory_of(tmp_path / "run" / "checkpoints" / "attempt-1", 90)
        wrong, right = tmp_path / "wrong.json", tmp_path / "right.json"
        fields = {
            "checkpoint": (90, directory.as_uri(), goes_on.digest),
            "positions": goes_on.positions,
        }
        wrong.write_text(json.dumps(listener.permit(**fields, skip=(1440, 1930))))
        right.write_text(json.dumps(listener.permit(**fields, skip=(1440, 1920))))
        listener.go_on()
        assert main([*arguments, "--permit", str(wrong)]) == 1
        assert "skip window" in capsys.readouterr().err
        assert hold.read(tmp_path / "run" / "checkpoints") is not None
        assert main([*arguments, "--permit", str(right)]) == 0

    def test_a_file_that_is_no_recording_exits_2(self, listener, tmp_path, capsys):
        (tmp_path / "x.zip").write_bytes(b"no")
        arguments = self.arguments(listener, tmp_path / "run")
        assert main([arguments[0], str(tmp_path / "x.zip"), *arguments[2:]]) == 2
        assert "not a recording" in capsys.readouterr().err
