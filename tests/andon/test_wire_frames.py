"""Frames on the wire, Arrow and JSON: the same checks, the same result."""

import io
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.wire import (
    ARROW_TYPE,
    Frame,
    WireError,
    decode_frame,
    encode_frame,
    encode_frame_json,
)

JSON = "application/json"
META = {"andon.stream": "rank", "andon.attempt": "1"}


def stream(
    columns: dict, metadata: dict | None = None, *, options=None, batches: int = 1, fields=None
) -> bytes:
    arrays = [value if isinstance(value, pa.Array) else pa.array(value) for value in columns.values()]
    schema = pa.schema(
        [pa.field(n, a.type, metadata=(fields or {}).get(n)) for n, a in zip(columns, arrays, strict=True)],
        metadata=META if metadata is None else metadata,
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for _ in range(batches):
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    return sink.getvalue()


def axes(n: int = 3) -> dict:
    return {"step": pa.array(range(n), pa.int64()), "lane": pa.array(range(n), pa.int32())}


def json_frame(**changes) -> bytes:
    body = {"stream": "rank", "attempt": 1, "columns": {"step": [1, 2], "lane": [0, 1], "loss": [2.5, 3]}}
    return json.dumps({**body, **changes}).encode()


def json_columns(**columns) -> bytes:
    return json_frame(columns={"step": [1, 2], "lane": [0, 1], **columns})


def refused(body: bytes, kind: str = ARROW_TYPE) -> WireError:
    with pytest.raises(WireError) as raised:
        decode_frame(body, kind)
    return raised.value


class TestArrow:
    def test_a_frame_with_everything(self):
        body = stream(
            {
                **axes(),
                "time_ns": pa.array([10**18] * 3, pa.int64()),
                "micro_batch": pa.array([0, 1, 2], pa.int16()),
                "rank": pa.array([5, 6, 7], pa.int32()),
                "loss": pa.array([1.0, float("nan"), None], pa.float32()),
                "nonfinite": pa.array([0, 2, 64], pa.int8()),
                "tokens": pa.array([1, None, 3], pa.int64()),
                "ok": pa.array([True, None, False]),
            },
            {**META, "andon.node": "n1", "andon.schema": "s/1"},
            fields={"loss": {"andon.view": "shard", "andon.group": "dp"}},
        )
        frame = decode_frame(body, ARROW_TYPE)
        assert (frame.stream, frame.attempt, frame.node, frame.schema, frame.rows) == (
            "rank",
            1,
            "n1",
            "s/1",
            3,
        )
        assert frame.step.tolist() == [0, 1, 2]
        assert list(frame.lane) == [0, 1, 2]
        assert frame.time_ns.tolist() == [10**18] * 3
        assert frame.micro_batch.tolist() == [0, 1, 2]
        assert frame.rank.tolist() == [5, 6, 7]
        assert frame.metrics["loss"].dtype == np.float32
        assert frame.measured("loss").tolist() == [True, True, False]
        assert frame.nonfinite("loss").tolist() == [False, True, False]
        assert frame.measured("tokens").tolist() == [True, False, True]
        assert frame.metrics["tokens"].tolist() == [1, 0, 3]
        assert frame.metrics["ok"].tolist() == [True, False, False]
        assert frame.views == {"loss": "shard", "nonfinite": "local"}
        assert frame.groups == {"loss": "dp"}

    def test_lanes_may_be_names(self):
        body = stream(
            {"step": [1, 1], "lane": ["blocks.0", "blöcke.1"], "grad_norm": [1.0, 2.0]},
            {**META, "andon.stream": "layer"},
        )
        frame = decode_frame(body, ARROW_TYPE)
        assert frame.lane == ["blocks.0", "blöcke.1"]
        assert frame.view_of("grad_norm") == "reduced"

    def test_nul_in_a_lane_name_is_replaced_and_counted(self):
        frame = decode_frame(stream({"step": [1, 2, 3], "lane": ["a\0b", "c", "a\0b"]}), ARROW_TYPE)
        assert frame.lane == ["a\ufffdb", "c", "a\ufffdb"]
        assert frame.replaced == 1

    @pytest.mark.parametrize(
        "array",
        [
            pa.array([1, 2, 3], pa.uint8()),
            pa.array([1, 2, 3], pa.float16()),
            pa.array(["a", "b", "c"]),
            pa.array(["a", "b", "c"], pa.large_utf8()),
            pa.array([b"a", b"b", b"c"]),
            pa.array([None, None, None]),
            pa.array([[1], [2], [3]]),
            pa.array([{"a": 1}] * 3),
            pa.array(["a", "b", "a"]).dictionary_encode(),
            pa.array([1, 2, 3], pa.timestamp("ns")),
            pa.array([1, 2, 3], pa.decimal128(5)),
        ],
    )
    def test_another_type_is_422_and_names_the_column(self, array):
        error = refused(stream({**axes(), "x": array}))
        assert (error.status, error.field) == (422, "columns.x")

    def test_an_extension_type_is_422(self):
        body = stream({**axes(), "x": [1, 2, 3]}, fields={"x": {"ARROW:extension:name": "my.own"}})
        assert (refused(body).status, refused(body).field) == (422, "columns.x")

    @pytest.mark.parametrize("codec", ["lz4", "zstd"])
    def test_compressed_buffers_are_422(self, codec):
        body = stream({**axes(1000), "x": [0.0] * 1000}, options=pa.ipc.IpcWriteOptions(compression=codec))
        error = refused(body)
        assert error.status == 422
        assert "Content-Encoding" in error.detail

    def test_a_second_batch_is_422(self):
        assert refused(stream(axes(), batches=2)).status == 422

    def test_no_batch_is_400(self):
        assert refused(stream(axes(), batches=0)).status == 400

    def test_a_column_that_appears_twice_is_422(self):
        schema = pa.schema(
            [("step", pa.int64()), ("lane", pa.int32()), ("x", pa.int8()), ("x", pa.int8())], metadata=META
        )
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.record_batch([pa.array([1], t) for t in schema.types], schema=schema))
        assert refused(sink.getvalue()).field == "columns.x"

    @pytest.mark.parametrize("missing", ["step", "lane"])
    def test_a_missing_axis_is_named(self, missing):
        columns = axes()
        del columns[missing]
        assert refused(stream({**columns, "x": [1, 2, 3]})).field == f"columns.{missing}"

    @pytest.mark.parametrize(
        ("metadata", "field"),
        [
            ({}, "stream"),
            ({"andon.stream": "rank"}, "attempt"),
            ({"andon.stream": "gpu", "andon.attempt": "1"}, "stream"),
            ({"andon.stream": "rank", "andon.attempt": "0"}, "attempt"),
            ({"andon.stream": "rank", "andon.attempt": "1.5"}, "attempt"),
            ({"andon.stream": "rank", "andon.attempt": "9" * 300}, "attempt"),
            ({b"andon.stream": b"\xff", b"andon.attempt": b"1"}, "schema metadata"),
        ],
    )
    def test_wrong_metadata_is_named(self, metadata, field):
        error = refused(stream(axes(), metadata))
        assert (error.status, error.field) == (422, field)

    def test_a_wrong_view_is_named(self):
        body = stream({**axes(), "x": [1, 2, 3]}, fields={"x": {"andon.view": "global"}})
        assert (refused(body).status, refused(body).field) == (422, "columns.x")

    @pytest.mark.parametrize(
        ("name", "array"),
        [
            ("step", pa.array([0, -1, 2], pa.int64())),
            ("step", pa.array([0, None, 2], pa.int64())),
            ("step", pa.array([0.0, 1.0, 2.0])),
            ("lane", pa.array([0, 2**31, 2], pa.int64())),
            ("lane", pa.array([0, -5, 2], pa.int32())),
            ("lane", pa.array(["a", "", "b"])),
            ("lane", pa.array(["a", None, "b"])),
            ("micro_batch", pa.array([0, 40_000, 1], pa.int32())),
            ("rank", pa.array([True, False, True])),
            ("time_ns", pa.array([-1, 0, 1], pa.int64())),
            ("nonfinite", pa.array([0, 128, 1], pa.int16())),
            ("nonfinite", pa.array([0.5, 1, 2])),
            ("nonfinite", pa.array([float("nan"), 1, 2])),
            ("nonfinite", pa.array([True, False, True])),
        ],
    )
    def test_a_wrong_value_names_its_column(self, name, array):
        error = refused(stream({**axes(), name: array}))
        assert (error.status, error.field) == (422, f"columns.{name}")

    def test_too_many_cells_are_413_before_they_are_read(self):
        n = 1_400_000
        assert refused(stream({**axes(n), "x": pa.array(np.zeros(n, np.int8))})).status == 413

    def test_too_many_bytes_are_413(self):
        assert refused(bytes(32 * 2**20 + 1)).status == 413

    def test_no_rows_are_422(self):
        assert refused(stream(axes(0))).status == 422

    def test_too_many_columns_are_422(self):
        assert refused(stream({**axes(1), **{f"m{i}": [1.0] for i in range(600)}})).status == 422


class TestJson:
    def test_it_is_read(self):
        frame = decode_frame(json_frame(node="n", views={"loss": "reduced"}, groups={"loss": "dp"}), JSON)
        assert frame.step.tolist() == [1, 2]
        assert frame.metrics["loss"].tolist() == [2.5, 3.0]
        assert (frame.node, frame.views, frame.groups) == ("n", {"loss": "reduced"}, {"loss": "dp"})

    def test_nonfinite_values_in_every_spelling(self):
        body = b"""{"stream":"rank","attempt":1,"columns":{"step":[1,1,1,1,1,1],"lane":[0,1,2,3,4,5],
            "loss":[NaN,"nan",1e999,"-Infinity",null,2]}}"""
        frame = decode_frame(body, JSON)
        assert frame.nonfinite("loss").tolist() == [True, True, True, True, False, False]
        assert frame.measured("loss").tolist() == [True, True, True, True, False, True]
        assert frame.metrics["loss"][2:4].tolist() == [np.inf, -np.inf]

    def test_an_integer_beyond_a_double_is_infinite(self):
        body = json_columns(x=[10**400, 1])
        assert decode_frame(body, JSON).metrics["x"].tolist() == [np.inf, 1.0]

    def test_kinds_of_columns_are_kept(self):
        frame = decode_frame(
            json_columns(
                a=[1, 2], b=[True, False], c=[1.5, 2], d=[1, None], e=[None, True], nonfinite=[2, None]
            ),
            JSON,
        )
        kinds = {name: values.dtype.kind for name, values in frame.metrics.items()}
        assert kinds == {"a": "i", "b": "b", "c": "f", "d": "f", "e": "b", "nonfinite": "i"}
        assert frame.measured("nonfinite").tolist() == [True, False]

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            (b"[]", "body"),
            (json_frame(columns={}), "columns"),
            (json_frame(columns=[]), "columns"),
            (json_frame(columns=None), "columns"),
            (json_frame(attempt=None), "attempt"),
            (json_frame(attempt=True), "attempt"),
            (json_frame(stream=["rank"]), "stream"),
            (json_frame(node=""), "node"),
            (json_frame(views={"loss": "global"}), "views.loss"),
            (json_frame(views={"other": "local"}), "views.other"),
            (json_frame(views=[]), "views"),
            (json_frame(groups={"loss": 5}), "groups.loss"),
            (json_frame(schema=7), "schema"),
            (json_columns(x=[1]), "columns.x"),
            (json_columns(x=7), "columns.x"),
            (json_columns(x=["a", 1]), "columns.x"),
            (json_columns(x=[[1], 2]), "columns.x"),
            (json_columns(x=[{}, None]), "columns.x"),
            (json_columns(step=[1, None]), "columns.step"),
            (json_columns(step=[1, -1]), "columns.step"),
            (json_columns(step=[1, 2**63]), "columns.step"),
            (json_columns(step=[1, 10**500]), "columns.step"),
            (json_columns(step=[True, 2]), "columns.step"),
            (json_columns(step=[1.5, 2]), "columns.step"),
            (json_columns(lane=["a", 1]), "columns.lane"),
            (json_columns(lane=["a", None]), "columns.lane"),
            (json_columns(nonfinite=[1, 500]), "columns.nonfinite"),
            (json_columns(nonfinite=[1, float("nan")]), "columns.nonfinite"),
            (json_frame(columns={"step": [], "lane": []}), "columns"),
            (json_frame(columns={"step": [1], "lane": [0], "a\0": [1]}), "columns"),
            (json_frame(columns={"step": [1], "lane": [0], "": [1]}), "columns"),
        ],
    )
    def test_what_is_wrong_is_named(self, body, field):
        error = refused(body, JSON)
        assert (error.status, error.field) == (422, field)

    def test_what_is_not_json_is_400_and_another_type_415(self):
        assert refused(b"{", JSON).status == 400
        assert refused(b"{}", "text/csv").status == 415
        assert refused(b"[" * 100_000, JSON).status == 422


class TestSentinels:
    def test_of_rank_frames(self):
        frame = decode_frame(json_columns(loss=[-1, 2.5], grad_norm=[0.0, -1.0]), JSON)
        assert frame.measured("loss").tolist() == [False, True]
        assert frame.measured("grad_norm").tolist() == [False, False]
        assert not frame.nonfinite("loss").any()

    def test_a_layer_may_truly_have_no_gradient(self):
        body = json_frame(
            stream="layer", columns={"step": [1, 1], "lane": ["a", "b"], "grad_norm": [0.0, -1.0]}
        )
        assert decode_frame(body, JSON).measured("grad_norm").tolist() == [True, False]


FLOATS = st.floats(width=64) | st.floats(width=32)


@st.composite
def frames(draw) -> Frame:
    n = draw(st.integers(1, 6))
    ints = st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)
    names = st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=9),
        min_size=n,
        max_size=n,
    )
    metrics = {
        name: np.array(draw(st.lists(FLOATS, min_size=n, max_size=n)), np.float64)
        for name in draw(st.sets(st.sampled_from(["loss", "mem_bytes", "ü"])))
    }
    missing = {}
    for name, values in metrics.items():
        mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
        mask |= values == (-1 if name == "loss" else np.inf)
        if mask.any():
            missing[name] = mask
            values[mask] = np.nan
    lane: object = draw(names) if draw(st.booleans()) else np.array(draw(ints), np.int32)
    return Frame(
        stream=draw(st.sampled_from(["rank", "layer", "node"])),
        attempt=draw(st.integers(1, 9)),
        node=draw(st.none() | st.just("n1")),
        step=np.array(draw(ints), np.int64),
        lane=lane,
        time_ns=draw(st.none() | ints.map(lambda v: np.array(v, np.int64))),
        metrics=metrics,
        missing=missing,
        views={name: "shard" for name in metrics if name == "ü"},
    )


def same(a: Frame, b: Frame) -> None:
    assert (a.stream, a.attempt, a.node, a.rows) == (b.stream, b.attempt, b.node, b.rows)
    for name in ("step", "time_ns"):
        assert (
            np.array_equal(getattr(a, name), getattr(b, name)) or getattr(a, name) is getattr(b, name) is None
        )
    assert list(a.lane) == list(b.lane)
    assert a.metrics.keys() == b.metrics.keys()
    for name in a.metrics:
        assert a.measured(name).tolist() == b.measured(name).tolist()
        assert a.nonfinite(name).tolist() == b.nonfinite(name).tolist()
        assert np.array_equal(a.metrics[name], b.metrics[name], equal_nan=True)
        assert a.view_of(name) == b.view_of(name)


@given(frames())
def test_both_forms_read_back_as_they_were_written(frame):
    body, kind = encode_frame(frame)
    assert kind == ARROW_TYPE
    same(frame, decode_frame(body, kind))
    text = encode_frame_json(frame)
    json.loads(text, parse_constant=pytest.fail)
    same(frame, decode_frame(text, JSON))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["nan", "rank", "local"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["step", "lane", "loss", "x", "nonfinite"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(
        st.sampled_from(["stream", "attempt", "columns", "node", "views", "groups", "schema"]), VALUES
    )
    | VALUES
)
def test_no_json_makes_anything_but_a_wire_error(value):
    try:
        frame = decode_frame(json.dumps(value).encode("utf-8", "surrogatepass"), JSON)
    except WireError as error:
        problem: WireError | None = error
    else:
        problem = None
        assert frame.rows > 0
    assert problem is None or (problem.status in (400, 413, 422) and problem.field)


@given(st.binary(max_size=300))
def test_no_bytes_make_anything_but_a_wire_error(body):
    for kind in (ARROW_TYPE, JSON):
        error = refused(body, kind)
        assert error.status in (400, 422)
