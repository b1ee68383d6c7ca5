"""Frames: columns of numbers for many ranks, layers or nodes over some steps. JSON form and checks.

A frame has one row per (step, lane[, micro_batch, rank]) and one column per metric. The Arrow form
is in andon/wire_arrow.py; both end in the same `Frame`.
"""

import math
import re
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from andon.wire_event_data import SENTINELS
from andon.wire_values import (
    MAX_RANK,
    WireError,
    load_json,
    media_type,
    spelled_nonfinite,
    unprocessable,
)

ARROW_TYPE = "application/vnd.apache.arrow.stream"
JSON_TYPE = "application/json"

Stream = Literal["rank", "layer", "node"]
STREAMS = ("rank", "layer", "node")
VIEWS = ("local", "shard", "reduced")

MAX_CELLS = 4_000_000
MAX_FRAME_BYTES = 32 * 1024 * 1024
MAX_COLUMNS = 512
MAX_NAME = 200
MAX_LANE_NAME = 512

# Known metrics per stream; others are kept and plottable.
RANK_METRICS = (
    "loss",
    "grad_norm",
    "nonfinite",
    "compute_s",
    "wait_s",
    "step_time_s",
    "mem_bytes",
    "seq_len_max",
    "tokens",
)
LAYER_METRICS = ("grad_norm", "weight_norm", "update_ratio", "nonfinite", "act_norm")
NODE_METRICS = (
    "gpu_temp_c",
    "mem_temp_c",
    "power_w",
    "power_limit_w",
    "sm_clock_mhz",
    "mem_clock_mhz",
    "throttle_reasons",
    "ecc_sbe",
    "ecc_dbe",
    "row_remap_pending",
    "xid_count",
    "pcie_replays",
    "nvlink_errors",
    "rx_pause",
    "tx_pause",
    "rx_drops",
    "ib_symbol_errors",
    "retransmits",
    "clock_offset_ms",
)

AXES = ("step", "lane", "time_ns", "micro_batch", "rank")
_DEFAULT_VIEWS = {"loss": "local", "nonfinite": "local", "grad_norm": "reduced"}
_REPLACED = re.compile("[\x00\ud800-\udfff]")


class Frame(msgspec.Struct, kw_only=True):
    """One frame of n rows.

    Shapes: `step` int64[n] ≥ 0; `lane` int32[n] (rank or layer number) or n names; `time_ns`
    int64[n]; `micro_batch` int16[n]; `rank` int32[n]; each of `metrics` is a float32, float64,
    int8 to int64 or bool array[n].

    A float that was measured and is nonfinite stays NaN or ±Inf in its array. What was *not
    measured* (null, a logger's sentinel) is marked true in `missing[name]` (a bool array, only
    there when the column has any) and holds NaN, or 0 in an integer column. Use `measured` and
    `nonfinite` instead of `isnan`.

    `views` has an entry ("local", "shard", "reduced") for every metric that said its view or has a
    default, `groups` for every one that named a group.
    """

    stream: Stream
    attempt: int
    step: NDArray[np.int64]
    lane: NDArray[np.int32] | list[str]
    metrics: dict[str, NDArray[Any]]
    node: str | None = None
    time_ns: NDArray[np.int64] | None = None
    micro_batch: NDArray[np.int16] | None = None
    rank: NDArray[np.int32] | None = None
    views: dict[str, str] = {}
    groups: dict[str, str] = {}
    missing: dict[str, NDArray[np.bool_]] = {}
    schema: str | None = None
    replaced: int = 0

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.step)

    def view_of(self, metric: str) -> str | None:
        """Return local, shard or reduced; None when nobody said and there is no default."""
        return self.views.get(metric) or _DEFAULT_VIEWS.get(metric)

    def measured(self, metric: str) -> NDArray[np.bool_]:
        """Return, per row, whether the metric has a value (a NaN that was measured is one)."""
        missing = self.missing.get(metric)
        if missing is None:
            return np.ones(self.rows, np.bool_)
        present: NDArray[np.bool_] = ~missing
        return present

    def nonfinite(self, metric: str) -> NDArray[np.bool_]:
        """Return, per row, whether a measured value is NaN or ±Inf; all false for integer columns."""
        values = self.metrics[metric]
        if values.dtype.kind != "f":
            return np.zeros(self.rows, np.bool_)
        bad: NDArray[np.bool_] = ~np.isfinite(values)
        missing = self.missing.get(metric)
        if missing is not None:
            bad &= ~missing
        return bad


def decode_frame(body: bytes, content_type: str) -> Frame:
    """Read one frame, Arrow or JSON. `body` is already decompressed.

    Raises:
        WireError: 400 unreadable, 413 too many bytes or cells, 415 another content type (or Arrow
            where pyarrow is not installed), 422 a rule is broken; `field` names the column.
    """
    kind = media_type(content_type)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(413, "too-large", f"a frame may have {MAX_FRAME_BYTES} bytes", "body")
    if kind == ARROW_TYPE:
        from andon.wire_arrow import decode_arrow  # pyarrow is an optional part

        return decode_arrow(body)
    if kind == JSON_TYPE:
        return _decode_json(body)
    raise WireError(415, "unsupported-media-type", f"frames are {ARROW_TYPE} or {JSON_TYPE}", "content-type")


# --- checks both forms share ------------------------------------------------------------------------


def check_size(rows: int, columns: int) -> None:
    """Refuse an empty frame and one of more than MAX_CELLS cells."""
    if columns > MAX_COLUMNS:
        raise unprocessable(f"a frame may have {MAX_COLUMNS} columns, this has {columns}", "columns")
    if rows == 0:
        raise unprocessable("the frame has no rows", "columns")
    if rows * columns > MAX_CELLS:
        raise WireError(
            413, "too-large", f"a frame may have {MAX_CELLS} cells, this has {rows * columns}", "columns"
        )


def check_name(name: object, field: str) -> str:
    """Return a column name, node or group that may be stored."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or _REPLACED.search(name):
        raise unprocessable(f"must be a string of 1 to {MAX_NAME} characters without NUL", field)
    return name


def check_stream(stream: object) -> Stream:
    """Return the stream's name."""
    if stream not in STREAMS:
        raise unprocessable("must be rank, layer or node", "stream")
    return stream  # type: ignore[return-value]


def check_attempt(value: object) -> int:
    """Return the attempt, from JSON's number or Arrow metadata's digits."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if type(value) is not int or not 1 <= value < 2**31:
        raise unprocessable("is required and must be a whole number from 1 to 2^31−1", "attempt")
    return value


def build(
    *,
    stream: object,
    attempt: object,
    columns: dict[str, "Column"],
    node: object = None,
    views: dict[str, str] | None = None,
    groups: dict[str, str] | None = None,
    schema: str | None = None,
) -> Frame:
    """Put checked columns together.

    Raises:
        WireError: 422 an axis is missing, has nulls, or is out of its range.
    """
    name_of_stream = check_stream(stream)
    for name in ("step", "lane"):
        if name not in columns:
            raise unprocessable("is required", f"columns.{name}")
    step = _axis(columns, "step", np.int64, 0, 2**63 - 1)
    assert step is not None
    lane_column = columns["lane"]
    lane: NDArray[np.int32] | list[str]
    replaced = 0
    if lane_column.text is not None:
        lane, replaced = _lane_names(lane_column.text)
    else:
        numbers = _axis(columns, "lane", np.int32, 0, MAX_RANK)
        assert numbers is not None
        lane = numbers
    frame = Frame(
        stream=name_of_stream,
        attempt=check_attempt(attempt),
        node=None if node is None else check_name(node, "node"),
        step=step,
        lane=lane,
        time_ns=_axis(columns, "time_ns", np.int64, 0, 2**63 - 1),
        micro_batch=_axis(columns, "micro_batch", np.int16, 0, 2**15 - 1),
        # On a layer frame `rank` says who measured; on the others it would only repeat the lane.
        rank=_axis(columns, "rank", np.int32, 0, MAX_RANK),
        metrics={},
        missing={},
        views=dict(views or {}),
        groups=dict(groups or {}),
        schema=schema,
        replaced=replaced,
    )
    for name, column in columns.items():
        if name not in AXES:
            _add_metric(frame, name, column)
    for name, view in _DEFAULT_VIEWS.items():
        if name in frame.metrics:
            frame.views.setdefault(name, view)
    return frame


class Column(msgspec.Struct):
    """One column before it is placed: an array (with a mask of nulls) or, for `lane`, names."""

    values: NDArray[Any] | None = None
    null: NDArray[np.bool_] | None = None
    text: list[str | None] | None = None


def _axis(columns: dict[str, Column], name: str, dtype: Any, least: int, most: int) -> NDArray[Any] | None:
    column = columns.get(name)
    if column is None:
        return None
    field = f"columns.{name}"
    values = column.values
    if values is None or values.dtype.kind not in "iu":
        raise unprocessable("must hold whole numbers", field)
    if column.null is not None and column.null.any():
        raise unprocessable(f"must not be null (row {int(column.null.argmax())})", field)
    wrong = (values < least) | (values > most)
    if wrong.any():
        row = int(wrong.argmax())
        raise unprocessable(f"row {row}: {int(values[row])} is not in {least} to {most}", field)
    return values.astype(dtype, copy=False)


def _lane_names(names: list[str | None]) -> tuple[list[str], int]:
    fixed: dict[str, str] = {}
    replaced = 0
    for row, name in enumerate(names):
        if name in fixed:
            continue
        if name is None or not 1 <= len(name) <= MAX_LANE_NAME:
            raise unprocessable(f"row {row}: must be 1 to {MAX_LANE_NAME} characters", "columns.lane")
        fixed[name], count = _REPLACED.subn("\ufffd", name)
        replaced += count
    if replaced:
        return [fixed[name] for name in names if name is not None], replaced
    return names, 0  # type: ignore[return-value]


def _add_metric(frame: Frame, name: str, column: Column) -> None:
    values, null = column.values, column.null
    if values is None:
        raise unprocessable("must hold numbers; text is only for lane", f"columns.{name}")
    if null is not None and not null.any():
        null = None
    if name == "nonfinite":
        if values.dtype.kind == "f":
            whole = np.where(null, 0, values) if null is not None else values
            with np.errstate(invalid="ignore"):
                bits = whole.astype(np.int16)
            if not np.array_equal(bits, whole):
                raise unprocessable("must be bit sets from 0 to 127", "columns.nonfinite")
            values = bits
        if values.dtype.kind == "b" or ((values < 0) | (values > 127)).any():
            raise unprocessable("must be bit sets from 0 to 127", "columns.nonfinite")
    elif values.dtype.kind in "if":
        # A layer's gradient norm may truly be zero (a frozen or dead layer); only the global one may not.
        sentinels = (-1.0,) if frame.stream != "rank" and name == "grad_norm" else SENTINELS.get(name, ())
        for sentinel in sentinels:
            found = values == sentinel
            if found.any():
                null = found if null is None else null | found
    if null is not None:
        values = values.copy()
        values[null] = np.nan if values.dtype.kind == "f" else 0
        frame.missing[name] = null
    frame.metrics[name] = values


# --- JSON form --------------------------------------------------------------------------------------


def _decode_json(body: bytes) -> Frame:
    value = load_json(body)
    if not isinstance(value, dict):
        raise unprocessable('a frame must be {"stream", "attempt", "columns"}', "body")
    raw = value.get("columns")
    if not isinstance(raw, dict) or not raw:
        raise unprocessable("must be an object from names to lists of equal length", "columns")
    rows = None
    for name, items in raw.items():
        check_name(name, "columns")
        if not isinstance(items, list):
            raise unprocessable("must be a list", f"columns.{name}")
        if rows is None:
            rows = len(items)
            check_size(rows, len(raw))
        elif len(items) != rows:
            raise unprocessable(f"has {len(items)} rows, the first column has {rows}", f"columns.{name}")
    columns = {name: _json_column(name, items) for name, items in raw.items()}
    names = _names(value, "views", raw), _names(value, "groups", raw)
    for name, view in names[0].items():
        if view not in VIEWS:
            raise unprocessable("must be local, shard or reduced", f"views.{name}")
    schema = value.get("schema")
    return build(
        stream=value.get("stream"),
        attempt=value.get("attempt"),
        node=value.get("node"),
        columns=columns,
        views=names[0],
        groups=names[1],
        schema=None if schema is None else check_name(schema, "schema"),
    )


def _names(value: dict[str, Any], key: str, columns: dict[str, Any]) -> dict[str, str]:
    given = value.get(key)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise unprocessable("must be an object from column names to strings", key)
    for name, text in given.items():
        if name not in columns:
            raise unprocessable("names a column that the frame does not have", f"{key}.{name}"[:300])
        check_name(text, f"{key}.{name}")
    return given


def _json_column(name: str, items: list[Any]) -> Column:
    kinds = set(map(type, items))
    if name == "lane" and kinds <= {str, type(None)} and str in kinds:
        return Column(text=items)
    field = f"columns.{name}"
    if kinds & {list, dict}:
        raise unprocessable("must hold numbers, not lists or objects", field)
    if name in AXES:
        # Ints may come as 12.0 from loggers that keep every number as a float.
        if float in kinds:
            items = [int(i) if type(i) is float and math.isfinite(i) and i.is_integer() else i for i in items]
        for row, item in enumerate(items):
            if type(item) is not int or not -(2**63) <= item < 2**63:
                raise unprocessable(f"row {row}: must be a whole number of 64 bits", field)
        return Column(values=np.array(items, np.int64))
    if kinds == {bool}:
        return Column(values=np.array(items, np.bool_))
    if kinds == {int} and all(-(2**63) <= item < 2**63 for item in (min(items), max(items))):
        return Column(values=np.array(items, np.int64))
    if kinds <= {float, int}:
        try:
            return Column(values=np.array(items, np.float64))
        except OverflowError:
            pass  # an integer beyond a double, which is ±inf below
    null = np.array([item is None for item in items], np.bool_)
    rest = kinds - {type(None)}
    if rest == {bool}:
        return Column(values=np.array([bool(item) for item in items], np.bool_), null=null)
    if name == "nonfinite" and rest == {int}:
        return Column(values=np.array([item or 0 for item in items], np.float64), null=null)
    return Column(values=np.array([_real(item, field) for item in items], np.float64), null=null)


def _real(item: Any, field: str) -> float:
    if item is None:
        return math.nan
    if isinstance(item, str):
        flag = spelled_nonfinite(item)
        if flag is None:
            raise unprocessable(f"{item[:40]!r} is not a number".encode("ascii", "replace").decode(), field)
        return float(flag)
    try:
        return float(item)
    except OverflowError:
        return math.inf if item > 0 else -math.inf
