"""Flight-recorder dumps and torchelastic's error files: forged ones run nothing, torn ones crash nothing."""

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.readers import flight_recorder, torchelastic
from andon.readers.flight_recorder import DumpError
from andon.wire import encode_events
from tests.andon.readers.test_training_log import on_the_wire


def entry(number, *, name="nccl:all_reduce", state="started", **more):
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": name,
        "state": state,
        "retired": False,
        "input_sizes": ((3, 4),),
        "input_dtypes": ["Float"],
        "output_sizes": ((3, 4),),
        "output_dtypes": ["Float"],
        "time_created_ns": 1796003425957124318,
        "time_discovered_started_ns": None,
        "is_p2p": False,
        "frames": [{"name": "step", "filename": "train.py", "line": 88}],
        **more,
    }


def dump(*entries, **more):
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_enqueued_collective": 2, "last_completed_collective": "1"}},
        "entries": list(entries),
        **more,
    }


class TestFlightRecorder:
    def test_pickle_and_json_of_one_dump_are_the_same(self):
        whole = dump(entry(1, state="completed"), entry(2))
        told = json.loads(json.dumps(whole))
        for one in told["entries"]:
            one.pop("frames")
            one["time_discovered_started_ns"] = 0
            one["collective_seq_id"] = str(one["collective_seq_id"])
        of_pickle = flight_recorder.read(pickle.dumps(whole))
        of_json = flight_recorder.read(json.dumps(told).encode())
        assert of_pickle["entries"][1].pop("frames") == [{"name": "step", "filename": "train.py", "line": 88}]
        of_pickle["entries"][0].pop("frames")
        assert of_json == of_pickle
        assert of_json["entries"][1]["collective_seq_id"] == 2
        assert of_json["pg_config"]["0"]["ranks"] == [0, 1]
        assert of_json["pg_status"]["0"]["last_completed_collective"] == 1

    def test_a_retired_gloo_collective_is_over(self):
        data = flight_recorder.read(
            pickle.dumps(dump(entry(1, name="gloo:all_reduce", state="scheduled", retired=True)))
        )
        assert data["entries"][0]["state"] == "completed"

    @pytest.mark.parametrize("protocol", [0, 2, 5])
    def test_a_forged_dump_runs_nothing(self, protocol, tmp_path):
        class Forged:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path / 'ran'}",)

        body = pickle.dumps(dump(entry(1), extra=Forged()), protocol=protocol)
        with pytest.raises(DumpError, match="which no dump does: refused"):
            flight_recorder.read(body)
        assert list(tmp_path.iterdir()) == []

    def test_one_list_held_a_billion_times_stays_small(self):
        sizes: list = [1]
        for _ in range(40):
            sizes = [sizes, sizes]
        data = flight_recorder.read(pickle.dumps(dump(entry(1, input_sizes=sizes))))
        assert len(encode_events([{"type": "flight_recorder.dump", "data": data}])) < 10_000

    def test_the_newest_entries_are_kept_and_all_are_counted(self):
        data = flight_recorder.read(pickle.dumps(dump(*(entry(number) for number in range(2_000)))))
        assert data["entries_total"] == 2_000
        assert [data["entries"][0]["record_id"], data["entries"][-1]["record_id"]] == [1_600, 1_999]

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b"{}",
            b'{"entries": 3}',
            pickle.dumps([1]),
            pickle.dumps(dump())[:-9],
            b"\x80\x05.",
        ],
    )
    def test_what_is_no_dump_is_said_to_be_none(self, body):
        with pytest.raises(DumpError):
            flight_recorder.read(body)

    @given(st.binary(max_size=300), st.integers(0, 400))
    def test_no_bytes_crash_it(self, noise, at):
        whole = pickle.dumps(dump(entry(1), entry(2)))
        for body in (noise, whole[:at] + noise + whole[at:], whole[:at]):
            try:
                data = flight_recorder.read(body)
            except DumpError:
                continue
            on_the_wire([{"type": "flight_recorder.dump", "rank": 1, "data": data}])

    @pytest.mark.parametrize(
        ("name", "rank"),
        [
            ("nccl_trace_rank_container-node02_5", 5),
            ("nccl_trace_rank_container-node07_40", 40),
            ("nccl_trace_rank_6", 6),
            ("/tmp/fr0", 0),
            ("/tmp/comm_lib_trace_rank_12.json", 12),
            ("nccl_trace_rank_container-node07", None),
            ("node02", None),
        ],
    )
    def test_the_rank_stands_last_in_the_name_and_a_hosts_number_is_none(self, name, rank):
        assert flight_recorder.rank_of(Path(name)) == rank

    @pytest.mark.torch
    def test_a_dump_that_torch_makes_is_read(self, tmp_path):
        import torch
        import torch.distributed as dist

        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(3, 4))
            recorder = torch._C._distributed_c10d
            for body in (recorder._dump_fr_trace(), recorder._dump_fr_trace_json()):
                data = flight_recorder.read(body if isinstance(body, bytes) else body.encode())
                one = data["entries"][-1]
                assert one["profiling_name"] == "gloo:all_reduce"
                assert one["input_sizes"] == [[3, 4]]
        finally:
            dist.destroy_process_group()


class TestErrorFile:
    def test_the_nested_form(self):
        inner = {"message": "RuntimeError: boom", "errorCode": 1}
        inner["extraInfo"] = {"py_callstack": "Traceback …", "timestamp": "1724779239"}
        event = torchelastic.read(json.dumps({"message": inner}).encode())
        assert event == {
            "type": "process.error",
            "time": 1724779239 * 10**9,
            "data": {
                "class": "exception",
                "message": "RuntimeError: boom",
                "traceback": "Traceback …",
                "exitcode": 1,
            },
        }

    def test_the_plain_form(self):
        event = torchelastic.read(b'{"message": "SignalException", "timestamp": 1724779240}')
        assert (event["data"]["message"], event["time"]) == ("SignalException", 1724779240 * 10**9)

    def test_the_local_rank_is_the_directorys(self):
        assert torchelastic.local_rank_of(Path("/l/none_x1/attempt_0/3/error.json")) == 3
        assert torchelastic.local_rank_of(Path("/l/3/error.json")) is None

    @pytest.mark.parametrize(
        "body", [b"", b"[]", b"{}", b'{"message": ""}', b'{"message": 3}', b"[" * 100_000]
    )
    def test_what_is_none_is_said_to_be_none(self, body):
        with pytest.raises(torchelastic.ErrorFileError):
            torchelastic.read(body)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=20),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["message", "extraInfo", "timestamp", "errorCode", "py_callstack"]),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_whatever_is_read_is_taken_by_the_server(self, document):
        try:
            event = torchelastic.read(json.dumps(document).encode())
        except torchelastic.ErrorFileError:
            return
        assert len(on_the_wire([event])) == 1
