"""The recording format, and what the two recordings of the demo say."""

import json
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from andon import recording
from andon.recording import Recorder, Recording, RecordingError
from andon.wire import EVENT_TYPES, Frame, decode_events
from demo.answers import derive

RECORDINGS = Path(__file__).parents[2] / "demo" / "recordings"
REPOSITORY = RECORDINGS.parents[1]


def describe(**changes):
    document = {
        "schema": recording.SCHEMA,
        "name": "small",
        "title": "",
        "recorded_at": "2026-01-02T03:04:05+00:00",
        "script": {},
        "command": "",
        "versions": {},
        "world_size": 2,
        "nodes": [{"node": "node-00", "ranks": [0]}, {"node": "node-01", "ranks": [1]}],
        "note": "",
        "policy": {},
        "answer": {},
        "attempts": [],
    }
    return msgspec.convert(document | changes, recording.Description)


def make(tmp_path, *, line=None):
    """Record four posts of two nodes by a clock of our own, and pack them."""
    root = tmp_path / "run directory"
    (root / "logs").mkdir(parents=True)
    (root / "logs" / "rank-0.log").write_text("     0.100 begin\n     0.900 step 1\n  and more\n")
    now = [0]
    sources = []
    for node in ("node-00", "node-01"):
        path = root / f"{node}.jsonl"
        recorder = Recorder(path, node=node, attempt=1, clock=lambda: now[0], began_ns=0)
        now[0] = 10**9 if node == "node-01" else 2 * 10**9
        recorder.send_events(
            [{"type": "step", "step": 1, "data": {"loss": float("nan"), "uri": root.as_uri() + "/a"}}]
        )
        now[0] = 3 * 10**9
        recorder.send_frame(
            Frame(
                stream="rank",
                attempt=1,
                node=node,
                step=np.array([1]),
                lane=np.array([0], np.int32),
                metrics={"loss": np.array([np.inf], np.float32)},
            )
        )
        recorder.close()
        if line is not None:
            path.write_bytes(line)
        sources.append(path)
    target = tmp_path / "small.zip"
    if line is not None:
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr(recording.DESCRIPTION, msgspec.json.encode(describe()))
            archive.writestr(recording.POSTS, line)
        return target
    recording.pack(
        target, describe(), run_directory=root, posts={1: sources}, files=[root / "logs" / "rank-0.log"]
    )
    return target


class TestFormat:
    def test_posts_come_back_in_order_of_emission_over_all_nodes(self, tmp_path):
        with Recording(make(tmp_path)) as opened:
            posts = list(opened.posts())
        assert [(p.t_s, p.node, p.kind) for p in posts] == [
            (1.0, "node-01", "event"),
            (2.0, "node-00", "event"),
            (3.0, "node-00", "frame"),
            (3.0, "node-01", "frame"),
        ]

    def test_nonfinite_values_survive_and_every_line_is_plain_json(self, tmp_path):
        target = make(tmp_path)
        with zipfile.ZipFile(target) as archive:
            for line in archive.read(recording.POSTS).splitlines():
                json.loads(line, parse_constant=pytest.fail)
        with Recording(target) as opened:
            posts = list(opened.posts(1))
        assert posts[0].events[0]["data"]["loss"] == "nan"
        assert posts[2].frame().metrics["loss"].tolist() == [float("inf")]

    def test_file_uris_of_the_run_directory_become_relative(self, tmp_path):
        with Recording(make(tmp_path)) as opened:
            assert next(opened.posts()).events[0]["data"]["uri"] == "recording:///a"

    def test_a_log_line_without_a_time_belongs_to_the_line_before(self, tmp_path):
        with Recording(make(tmp_path)) as opened:
            assert [at_s for at_s, _ in opened.log_lines("logs/rank-0.log")] == [0.1, 0.9, 0.9]

    def test_another_attempt_has_no_posts(self, tmp_path):
        with Recording(make(tmp_path)) as opened:
            assert list(opened.posts(2)) == []

    def test_a_file_is_never_written_outside_the_directory(self, tmp_path):
        with Recording(make(tmp_path)) as opened, pytest.raises(RecordingError, match="outside"):
            opened.extract("../../elsewhere", tmp_path / "out")

    @pytest.mark.parametrize("line", [b"{}\n", b"not json\n", b'{"t_s": "a"}\n'])
    def test_a_broken_line_is_named(self, tmp_path, line):
        with Recording(make(tmp_path, line=line)) as opened, pytest.raises(RecordingError, match="line 1"):
            list(opened.posts())

    def test_what_is_no_recording_is_refused(self, tmp_path):
        (tmp_path / "x.zip").write_bytes(b"PK")
        for path in (tmp_path / "x.zip", tmp_path / "absent.zip"):
            with pytest.raises(RecordingError, match=path.name):
                Recording(path)

    def test_a_later_schema_is_refused_by_name(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr(recording.DESCRIPTION, msgspec.json.encode(describe(schema="andon.recording/9")))
        with pytest.raises(RecordingError, match=r"andon\.recording/9"):
            Recording(tmp_path / "x.zip")

    def test_a_recording_too_large_for_the_repository_is_not_written(self, tmp_path):
        big = tmp_path / "big"
        big.write_bytes(np.random.default_rng(0).bytes(recording.MAX_FILE_BYTES))
        with pytest.raises(RecordingError, match="may have"):
            recording.pack(tmp_path / "big.zip", describe(), run_directory=tmp_path, posts={}, files=[big])
        assert not (tmp_path / "big.zip").exists()


@pytest.fixture(params=["nan-one-rank", "quiet-spike"])
def opened(request):
    with Recording(RECORDINGS / f"{request.param}.zip") as opened:
        yield opened


class TestTheTwoRecordings:
    def test_they_are_small_enough_for_the_repository(self, opened):
        assert opened.path.stat().st_size <= recording.MAX_FILE_BYTES

    def test_they_were_made_by_the_scripts_of_this_checkout(self, opened):
        script = opened.description.script
        current = recording.script_digest(
            {name: (REPOSITORY / name).read_bytes() for name in script["files"]}
        )
        assert script["digest"] == current["digest"], "the scripts changed: run `python -m demo.record`"

    def test_the_detectors_find_the_answer_from_the_posts_alone(self, opened):
        answer, derived = opened.description.answer, derive(opened)
        assert len(derived) >= 2
        assert derived == {key: answer[key] for key in derived}

    def test_every_event_is_of_a_known_type_and_taken_whole(self, opened):
        for post in opened.posts():
            if post.kind == "event":
                decoded = decode_events(msgspec.json.encode(post.events), "application/json")
                assert decoded.refused == []
                assert {event.type for _, event in decoded.events} <= EVENT_TYPES

    def test_nodes_are_said_to_be_logical(self, opened):
        nodes = opened.description.nodes
        assert [(n.node, n.ranks, n.logical) for n in nodes] == [
            ("node-00", (0, 1), True),
            ("node-01", (2, 3), True),
        ]
        assert "not machines" in opened.description.note

    def test_nothing_of_the_machine_that_recorded_is_in_it(self, opened):
        with zipfile.ZipFile(opened.path) as archive:
            text = archive.read(recording.POSTS) + archive.read(recording.DESCRIPTION)
        assert b"file:///" not in text
        assert b"/tmp/" not in text

    def test_every_file_a_post_points_to_is_there(self, opened):
        files = opened.files()
        for post in opened.posts():
            for event in post.events if post.kind == "event" else []:
                uri = event.get("data", {}).get("uri", "")
                if uri.startswith(recording.URI_BASE):
                    path = uri.removeprefix(recording.URI_BASE)
                    assert path in files or f"{path}/commit.json" in files

    def test_the_next_attempt_began_where_the_default_plan_goes_back_to(self, opened):
        answer, goes_on = opened.description.answer, opened.description.continuation
        first = {event["step"]: event for event in steps(opened, 2)}
        start = min(first)
        assert start == goes_on.checkpoint_step + 1 == answer["last_good_step"] + 1
        assert goes_on.skip.start == goes_on.positions["loader_position"]
        assert goes_on.skip.start <= answer["positions"][0] < answer["positions"][1] <= goes_on.skip.stop
        batch = first[start]["data"]["loader_position"] - goes_on.skip.stop
        assert batch == 16
        assert all(isinstance(event["data"]["loss"], float) for event in first.values())


def steps(opened, attempt):
    for post in opened.posts(attempt):
        for event in post.events if post.kind == "event" else []:
            if event["type"] == "step":
                yield event


class TestNanOneRank:
    @pytest.fixture
    def nan(self):
        with Recording(RECORDINGS / "nan-one-rank.zip") as opened:
            yield opened

    def test_only_one_rank_is_nonfinite_before_the_reduce_and_all_are_after_it(self, nan):
        answer = nan.description.answer
        bits = {
            (int(step), int(rank)): (int(bit), bool(np.isfinite(loss)))
            for post in nan.posts(1)
            if post.kind == "frame" and post.body["stream"] == "rank"
            for frame in [post.frame()]
            for step, rank, bit, loss in zip(
                frame.step, frame.lane, frame.metrics["nonfinite"], frame.metrics["loss"], strict=True
            )
        }
        b = answer["step"]
        assert all(value == (0, True) for (step, _), value in bits.items() if step < b)
        assert bits[b, answer["ranks"][0]] == (2 | 4 | 8 | 16 | 32, False)
        others = {rank: bits[b, rank] for rank in range(4) if rank not in answer["ranks"]}
        assert set(others.values()) == {(8 | 16 | 32, True)}
        assert all(bits[b + 1, rank] == (2 | 4 | 8 | 16 | 32, False) for rank in range(4))

    def test_the_run_went_on_dead(self, nan):
        dead = [event for event in steps(nan, 1) if event["data"]["loss"] == "nan"]
        assert [event["step"] for event in dead] == list(range(nan.description.answer["step"], 141))
        assert not any(event["data"]["skipped"] for event in dead)

    def test_the_damaged_sample_has_no_token_and_the_loss_of_no_other_sample_is_masked_whole(self, nan):
        empty = [
            (event["step"], event["rank"], name)
            for post in nan.posts(1)
            for event in (post.events if post.kind == "event" else [])
            if event["type"] == "batch.seen"
            for name, density in zip(event["data"]["samples"], event["data"]["mask_density"], strict=True)
            if density == 0
        ]
        answer = nan.description.answer
        assert empty == [(answer["step"], answer["ranks"][0], answer["sample"])]

    def test_checkpoints_before_are_finite_and_the_one_of_the_bad_step_is_not(self, nan):
        finite = {
            event["step"]: event["data"]["finite"]
            for post in nan.posts(1)
            for event in (post.events if post.kind == "event" else [])
            if event["type"] == "checkpoint.committed"
        }
        assert finite == {30: True, 60: True, 90: True, 120: False}


class TestQuietSpike:
    def test_nothing_in_it_is_nonfinite(self):
        with Recording(RECORDINGS / "quiet-spike.zip") as opened:
            for post in opened.posts():
                if post.kind == "frame":
                    frame = post.frame()
                    assert not any(frame.nonfinite(name).any() for name in frame.metrics)
                else:
                    assert '"nan"' not in json.dumps(post.events)
