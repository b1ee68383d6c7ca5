"""Order of checks and bad input: the right status, a problem that names the field, never a 500."""

import gzip
import io
import json
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from andon import wire
from runs.models import Event, Receipt, RunProgress, RunSecret, UnreadBody
from tests.runs.conftest import Trainer, rank_frame

pytestmark = pytest.mark.django_db

STEP = {"type": "step", "step": 7, "data": {"loss": 2.5}}


def problem(answer: Any, status: int, kind: str, field: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.content[:300]
    assert answer["Content-Type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert document["type"].endswith(f"/{kind}"), document
    assert document["detail"]
    if field is not None:
        assert document["field"] == field
    return document


class TestSignature:
    def test_a_good_post_is_accepted_with_the_directive_in_force(self, trainer: Trainer) -> None:
        answer = trainer.events(STEP)
        assert answer.status_code == 202
        document = answer.json()
        assert (document["accepted"], document["refused"], document["duplicate"]) == (1, [], False)
        assert document["wanted"] == 0
        assert document["directive"]["kind"] == "continue"
        assert document["directive"]["seq"] == 1

    def test_it_refuses_a_wrong_signature_before_it_looks_at_the_body(self, trainer: Trainer) -> None:
        trainer.secret = "whsec_" + "A" * 43 + "="
        problem(trainer.post(b"["), 401, "bad-signature", "webhook-signature")
        assert not UnreadBody.objects.filter(run=trainer.run).exists()

    @pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
    @pytest.mark.parametrize("value", ["", "\x00", "é", "v1", "9" * 400, "-1", "1e9", "a b"])
    def test_a_malformed_header_is_401(self, trainer: Trainer, name: str, value: str) -> None:
        answer = trainer.post(b"{}", **{name: value})
        problem(answer, 401, "bad-signature")

    def test_a_stale_timestamp_is_told_the_servers_time(self, trainer: Trainer) -> None:
        document = problem(
            trainer.post(json.dumps(STEP).encode(), at_s=1_700_000_000),
            401,
            "timestamp-out-of-tolerance",
            "webhook-timestamp",
        )
        assert abs(document["server_time"] - __import__("time").time()) < 5

    def test_an_unknown_run_is_404(self, trainer: Trainer) -> None:
        trainer.run.slug = "nobody-made-this"
        problem(trainer.events(STEP), 404, "unknown-run", "run")

    def test_a_new_secret_counts_at_once_and_the_old_one_still_does(self, trainer: Trainer) -> None:
        from runs.actions import create_run

        assert trainer.events(STEP).status_code == 202
        old = trainer.secret
        trainer.secret = create_run(name=trainer.run.slug, rotate=True).secret
        assert trainer.secret != old
        import runs.identity

        runs.identity._known[trainer.run.slug].loaded_at -= 2  # longer ago than a reload may be
        assert trainer.events(STEP).status_code == 202
        trainer.secret = old
        assert trainer.events(STEP).status_code == 202

    def test_the_last_use_of_a_secret_is_noted_once_a_minute(self, trainer: Trainer) -> None:
        trainer.events(STEP)
        first = RunSecret.objects.get(run=trainer.run).last_used_at
        trainer.events(STEP)
        assert first is not None
        assert RunSecret.objects.get(run=trainer.run).last_used_at == first


class TestBodies:
    def test_no_body_is_400(self, trainer: Trainer) -> None:
        problem(trainer.post(b""), 400, "undecodable", "body")

    def test_above_the_cap_is_413_without_reading_the_signature(self, trainer: Trainer) -> None:
        trainer.secret = "whsec_" + "A" * 43 + "="
        problem(trainer.post(b"x" * ((4 << 20) + 1)), 413, "too-large", "body")

    def test_a_truncated_gzip_is_400_and_kept_as_sent(self, trainer: Trainer) -> None:
        body = gzip.compress(json.dumps([STEP] * 100).encode())[:-9]
        problem(trainer.post(body, content_encoding="gzip"), 400, "undecodable", "body")
        kept = UnreadBody.objects.get(run=trainer.run)
        assert (bytes(kept.body), kept.status, kept.encoding) == (body, 400, "gzip")
        assert kept.problem["field"] == "body"
        progress = RunProgress.objects.get(run=trainer.run)
        assert (progress.unread_bodies, progress.unread_bytes) == (1, len(body))

    def test_a_gigabyte_of_zeros_is_413(self, trainer: Trainer) -> None:
        packed = io.BytesIO()
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        for _ in range(1024):
            packed.write(packer.compress(bytes(1 << 20)))
        packed.write(packer.flush())
        body = packed.getvalue()
        assert len(body) < 2 << 20
        problem(trainer.post(body, content_encoding="gzip"), 413, "too-large", "body")

    def test_zstd_and_gzip_are_read(self, trainer: Trainer) -> None:
        body = json.dumps(STEP).encode()
        assert trainer.post(gzip.compress(body), content_encoding="gzip").status_code == 202
        packed = zstandard.compress(body)
        assert trainer.post(packed, content_encoding="zstd").status_code == 202
        assert Event.objects.filter(run_id=trainer.run.pk, type="step").count() == 2

    def test_another_encoding_or_content_type_is_415(self, trainer: Trainer) -> None:
        problem(trainer.post(b"{}", content_encoding="br"), 415, "unsupported-encoding", "content-encoding")
        problem(trainer.post(b"{}", content_type="text/csv"), 415, "unsupported-media-type", "content-type")

    def test_a_hundred_thousand_brackets_are_422(self, trainer: Trainer) -> None:
        problem(trainer.post(b"[" * 100_000), 422, "nested-too-deep", "body")

    @pytest.mark.parametrize("step", [-1, 2**63, 1.5, "7"])
    def test_a_step_out_of_range_is_422_and_names_the_field(self, trainer: Trainer, step: object) -> None:
        document = problem(trainer.events({"type": "step", "step": step}), 422, "unprocessable", "step")
        assert document["refused"] == [
            {"index": 0, "field": "step", "detail": document["refused"][0]["detail"]}
        ]

    def test_nul_and_lone_surrogates_become_replacement_characters(self, trainer: Trainer) -> None:
        body = rb'{"type": "step", "step": 1, "node": "n\u0000", "data": {"note": "\ud800x", "loss": 2.0}}'
        assert trainer.post(body).status_code == 202
        event = Event.objects.get(run_id=trainer.run.pk)
        assert event.node == "n\ufffd"
        assert event.data["note"] == "\ufffdx"

    def test_a_batch_is_taken_event_by_event_and_what_was_refused_is_kept(self, trainer: Trainer) -> None:
        answer = trainer.events(
            STEP, {"type": "step", "step": -1}, {"type": "no.such.type", "data": {"a": 1}}
        )
        assert answer.status_code == 202
        assert answer.json()["accepted"] == 2
        assert [r["index"] for r in answer.json()["refused"]] == [1]
        assert UnreadBody.objects.get(run=trainer.run).status == 202
        assert Event.objects.filter(run_id=trainer.run.pk, type="no.such.type").exists()

    def test_an_offset_header_that_is_no_number_is_422(self, trainer: Trainer) -> None:
        answer = trainer.post(json.dumps(STEP).encode(), andon_clock_offset_ms="soon")
        problem(answer, 422, "unprocessable", "andon-clock-offset-ms")

    def test_unread_bodies_beyond_the_limit_are_counted_and_not_kept(
        self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("runs.unread.KEEP_BYTES", 1_000)
        for _ in range(3):
            trainer.post(b"[" + b" " * 600)
        assert UnreadBody.objects.filter(run=trainer.run).count() == 1
        assert RunProgress.objects.get(run=trainer.run).unread_bodies == 3

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        body=st.binary(max_size=400)
        | st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
        content_type=st.sampled_from(
            ["application/json", "application/x-ndjson", "application/cloudevents+json", "x/y", ""]
        ),
        path=st.sampled_from(["events", "frames"]),
    )
    def test_no_body_ends_in_a_server_error(
        self, trainer: Trainer, body: bytes, content_type: str, path: str
    ) -> None:
        answer = trainer.post(body, path=path, content_type=content_type)
        assert answer.status_code in {202, 400, 413, 415, 422}
        if answer.status_code != 202:
            assert answer.json()["field"]

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        data=st.dictionaries(
            st.sampled_from(
                [
                    "seq",
                    "state",
                    "step",
                    "ranks",
                    "uri",
                    "files",
                    "digest",
                    "world_size",
                    "nodes",
                    "groups",
                    "permit",
                    "loss",
                    "nonfinite",
                    "action",
                    "began_from",
                    "bytes_total",
                ]
            ),
            st.none()
            | st.integers(-(2**70), 2**70)
            | st.floats()
            | st.text(max_size=8)
            | st.lists(st.integers(-3, 9) | st.text(max_size=3), max_size=3)
            | st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
            max_size=6,
        ),
        kind=st.sampled_from(sorted(wire.EVENT_TYPES)),
    )
    def test_no_report_ends_in_a_server_error(
        self, trainer: Trainer, data: dict[str, Any], kind: str
    ) -> None:
        answer = trainer.events({"type": kind, "step": 3, "data": data})
        assert answer.status_code in {202, 422}, (kind, data, answer.content)


class TestFrames:
    def test_an_arrow_frame_is_stored_as_posted(self, trainer: Trainer) -> None:
        from runs.models import Frame

        frame = rank_frame(steps=range(3, 5), ranks=range(8), node="node-1")
        body, _ = wire.encode_frame(frame)
        assert trainer.frame(frame).json()["accepted"] == 1
        row = Frame.objects.get(run_id=trainer.run.pk)
        assert bytes(row.body) == body
        assert (row.step_first, row.step_last, row.lane_first, row.lane_last, row.rows) == (3, 4, 0, 7, 16)
        assert (row.bad_cells, row.backfill, row.node) == (0, False, "node-1")

    def test_json_columns_are_read_too(self, trainer: Trainer) -> None:
        body = {
            "stream": "rank",
            "attempt": 1,
            "columns": {"step": [1, 1], "lane": [0, 1], "loss": [2.0, 2.1]},
        }
        answer = trainer.post(json.dumps(body).encode(), path="frames")
        assert answer.status_code == 202

    def test_a_cut_stream_is_400(self, trainer: Trainer) -> None:
        body, content_type = wire.encode_frame(rank_frame(steps=range(2), ranks=range(64)))
        for length in (10, len(body) // 2, len(body) - 40):
            answer = trainer.post(body[:length], path="frames", content_type=content_type)
            assert answer.status_code in {400, 422}
            assert answer.json()["field"]

    def test_every_altered_byte_is_answered(self, trainer: Trainer) -> None:
        body, content_type = wire.encode_frame(rank_frame(steps=range(1), ranks=range(4)))
        random = np.random.default_rng(3)
        for at in random.choice(len(body), size=60, replace=False):
            altered = bytearray(body)
            altered[at] ^= 0xFF
            answer = trainer.post(bytes(altered), path="frames", content_type=content_type)
            assert answer.status_code in {202, 400, 413, 415, 422}, at

    def test_compressed_buffers_are_refused(self, trainer: Trainer) -> None:
        table = pa.table({"step": pa.array([1, 2], pa.int64()), "lane": pa.array([0, 1], pa.int32())})
        table = table.replace_schema_metadata({"andon.stream": "rank", "andon.attempt": "1"})
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        answer = trainer.post(sink.getvalue(), path="frames", content_type=wire.ARROW_TYPE)
        assert answer.status_code in {400, 415, 422}
        assert answer.json()["field"]


class TestTheRest:
    def test_a_refused_post_does_not_use_up_its_id(self, trainer: Trainer) -> None:
        assert trainer.post(b"{", webhook_id="msg_again").status_code == 400
        assert trainer.events(STEP, webhook_id="msg_again").status_code == 202
        assert Receipt.objects.filter(run=trainer.run, webhook_id="msg_again").count() == 1

    def test_too_many_posts_are_429_with_retry_after(self, trainer: Trainer) -> None:
        from runs.models import PolicyVersion
        from runs.policies import set_policy

        assert not PolicyVersion.objects.filter(run=trainer.run).exists()
        set_policy(
            run=trainer.run,
            document={"rate": {"small_per_s": 0.5, "small_burst": 2}},
            person=None,
            why="test",
        )
        import runs.identity

        runs.identity.forget()
        answers = [trainer.events(STEP) for _ in range(4)]
        assert [answer.status_code for answer in answers[:2]] == [202, 202]
        problem(answers[3], 429, "too-many-posts")
        assert int(answers[3]["Retry-After"]) >= 1
        # Frames and other large bodies have a bucket of their own.
        assert trainer.frame(rank_frame(steps=range(1), ranks=range(8000))).status_code == 202
