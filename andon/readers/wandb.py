"""Histories of Weights & Biases: the run file of an offline run (`run-….wandb`), and exports.

A run file is a LevelDB log (blocks of 32 KiB; records of checksum, length, type, data) of protobuf records,
of which the history's are read (wandb/proto/wandb_internal.proto). It may be read while the run writes it: a
torn end is cut off. Exports: one JSON object per line or a list of them (`scan_history`), or CSV, from
`history()` or from a chart.

`_step` counts calls of `log`, not optimizer steps: where a row names a global step, that is the step. A
chart's export and `history()` hold samples of at most 500 points unless told otherwise, so a spike may be
missing.
"""

import csv
import io
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from andon.detect.series import SeriesError
from andon.readers.protobuf import BYTES, FIXED64, VARINT, fields, varint
from andon.readers.scalars import Scalar, is_step, plain

_IDENT = b":W&B"
_HEADER = struct.Struct("<4sHB")
_RECORD = struct.Struct("<IHB")
_BLOCK = 32_768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY = 2  # Record.history
_MAX_RECORD_BYTES = 64 << 20
_MAX_SCALARS = 20_000_000
_STEPS = ("global_step", "trainer_global_step", "train_global_step", "iteration", "optimizer_step")
_NONFINITE = {
    "nan": math.nan,
    "infinity": math.inf,
    "-infinity": -math.inf,
    "inf": math.inf,
    "-inf": -math.inf,
}

Row = dict[str, Any]


def is_run_file(body: bytes) -> bool:
    """Return whether bytes begin as a run file does."""
    return body.startswith(_IDENT)


def is_export(text: str) -> bool:
    """Return whether a text begins as an export does: a `_step` in its first object, or in its header."""
    start = text.lstrip("\ufeff \r\n\t[")[:20_000]
    if start.startswith("{"):
        return '"_step"' in start
    return bool(re.match(r'(?:[^,\n]*,)*\s*"?(?:_step|Step)"?\s*(?:,|$)', start.split("\n", 1)[0]))


def read(body: bytes) -> list[Scalar]:
    """Return the scalars of a run file or an export, in their order.

    Raises:
        SeriesError: it is neither, or holds no row; the message says where.
    """
    rows = _rows(body)
    steps = [_step(row, _STEPS) for row in rows]
    told = next((step for step in steps if step is not None), None)  # the last one named, from here on
    found: list[Scalar] = []
    for number, row in enumerate(rows):
        named = steps[number]
        if told is None:
            called = _step(row, ("step",))
            step = number if called is None else called
        else:  # a row without one, as of an evaluation, was logged at the step before
            step = told = told if named is None else named
        time = _number(row.get("_timestamp"))
        for key, said in row.items():
            if key.startswith("_") or key in ("Step", "", "Unnamed: 0"):
                continue
            value = _number(said)
            if value is not None and len(found) < _MAX_SCALARS:
                found.append(Scalar(time if time is not None and time > 0 else 0.0, step, key, value))
    return found


def _rows(body: bytes) -> list[Row]:
    if is_run_file(body):
        return list(_history(body))
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SeriesError(f"byte {error.start}: neither a run file nor text") from error
    if text.lstrip("\ufeff \r\n\t").startswith(("{", "[")):
        return _json(text)
    return _table(text)


def _step(row: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    named = {plain(key): value for key, value in row.items()}
    for name in names:
        value = _number(named.get(name))
        if value is not None and is_step(value):
            return int(value)
    return None


# --- the run file


def _history(body: bytes) -> Iterator[Row]:
    for record in _records(body):
        try:
            for number, kind, data in fields(record):
                if (number, kind) == (_HISTORY, BYTES) and (row := _row(data)):
                    yield row
        except (ValueError, struct.error):  # one record that is damaged does not cost the others
            continue


def _records(body: bytes) -> Iterator[bytes]:
    """Yield the payloads of a LevelDB log; a zero-filled rest of a block is padding, a torn end is cut
    off."""
    at, parts = _HEADER.size, b""
    while at + _RECORD.size <= len(body):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD.size:
            at += left
            continue
        _, length, kind = _RECORD.unpack_from(body, at)
        if kind == 0:
            at, parts = at + left, b""
            continue
        start = at + _RECORD.size
        if length > left - _RECORD.size or kind > _LAST:
            at, parts = at + left, b""  # damaged: the next block begins anew
            continue
        if start + length > len(body):
            return
        data = body[start : start + length]
        at = start + length
        if kind == _FULL:
            yield data
            parts = b""
        elif kind == _FIRST:
            parts = data
        elif len(parts) + length <= _MAX_RECORD_BYTES:
            parts += data
            if kind == _LAST:
                yield parts
                parts = b""


def _row(history: bytes) -> Row:
    row: Row = {}
    step: int | None = None
    for number, kind, data in fields(history):
        if (number, kind) == (1, BYTES):
            key, value = _item(data)
            if key:
                row[key] = value
        elif (number, kind) == (2, BYTES):
            step = next((varint(n, 0)[0] for field, k, n in fields(data) if (field, k) == (1, VARINT)), step)
    if step is not None:
        row.setdefault("_step", step)
    return row


def _item(message: bytes) -> tuple[str, Any]:
    key, nested, value = "", [], None
    for number, kind, data in fields(message):
        if (number, kind) == (1, BYTES):
            key = data.decode("utf-8", "replace")[:400]
        elif (number, kind) == (2, BYTES):
            nested.append(data.decode("utf-8", "replace")[:400])
        elif (number, kind) == (5, VARINT):  # sint64: zigzag
            coded = varint(data, 0)[0]
            value = (coded >> 1) ^ -(coded & 1)
        elif (number, kind) == (6, FIXED64):
            value = struct.unpack("<d", data)[0]
        elif (number, kind) == (16, BYTES):
            try:
                value = json.loads(data)
            except (ValueError, RecursionError):
                value = None
    return key or ".".join(nested)[:400], value


# --- exports


def _json(text: str) -> list[Row]:
    body = text.lstrip("\ufeff \r\n\t")
    if body.startswith("["):
        try:
            listed = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SeriesError(f"line 1: no JSON list ({error})") from error
        return [one for one in listed if isinstance(one, dict)]
    rows: list[Row] = []
    lines = body.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break  # being written
            raise SeriesError(f"line {number}: no JSON object ({error})") from error
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _table(text: str) -> list[Row]:
    lines = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
    try:
        header = [cell.strip() for cell in next(lines, [])]
        if not {"_step", "Step"} & set(header):
            raise SeriesError(f"line 1: no column _step or Step among {', '.join(header[:8])}")
        # A chart names its columns "run - metric", and adds the spread of its own averaging.
        names = [
            None
            if name.endswith(("__MIN", "__MAX"))
            else name.rsplit(" - ", 1)[-1]
            if " - " in name
            else name
            for name in header
        ]
        runs = {name.rsplit(" - ", 1)[0] for name in header if " - " in name}
        if len(runs) > 1:
            raise SeriesError(
                f"line 1: a chart of {len(runs)} runs: {', '.join(sorted(runs)[:6])}; export one"
            )
        return [
            {name: cell for name, cell in zip(names, row, strict=False) if name is not None and cell.strip()}
            for row in lines
        ]
    except csv.Error as error:
        raise SeriesError(f"line {lines.line_num}: {error}") from error


def _number(value: Any) -> float | None:
    """Return a value as a number; words for nonfinite ones are, anything else is not measured."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if not isinstance(value, str) or len(value) > 60:
        return None
    word = value.strip().lower()
    if word in _NONFINITE:
        return _NONFINITE[word]
    try:
        return float(word) if re.fullmatch(r"[+-]?[\d.]+(?:e[+-]?\d{1,4})?", word, re.A) else None
    except ValueError:
        return None
