"""A ledger as a file: CSV, JSON and Parquet of the same rows, written as they come and read back exactly.

What is nested (ranks, positions, the detector's numbers) stands as JSON text in a cell, so that every
format gives the row back whole and its digest can be recomputed.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from andon.canonical import exact
from andon.ledger import FIELDS, NESTED, SCHEMA, WHOLE

Row = Mapping[str, Any]
FORMATS = ("csv", "json", "parquet")
ROWS_AT_ONCE = 500
_BLANK_IS_TEXT = frozenset({"previous", "why"})  # everywhere else an empty cell is "none"
# A spreadsheet runs what begins like this; and what begins with our own mark must be told from it.
_RISKY = ("=", "+", "-", "@", "\t", "\r", "'")


class Unreadable(ValueError):
    """The file is no ledger; the text says where and why."""


def write(rows: Iterable[Row], form: str) -> Iterator[bytes]:
    """Return the bytes of a file of `form`, piece by piece.

    Raises:
        ValueError: `form` is none of `FORMATS`.
    """
    writers = {"csv": _csv, "json": _json, "parquet": _parquet}
    if form not in writers:
        raise ValueError(f"format {form!r}: one of {', '.join(FORMATS)}")
    return writers[form](rows)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a file, whose format is told by its ending.

    Raises:
        Unreadable: it is no ledger.
        OSError: it cannot be opened.
    """
    readers = {".csv": _read_csv, ".json": _read_json, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise Unreadable(f"{path}: a ledger ends in {', '.join(readers)}")
    return reader(path)


def _text(value: object) -> str:
    return json.dumps(exact(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


# CSV (RFC 4180)


def _csv(rows: Iterable[Row]) -> Iterator[bytes]:
    yield (",".join(FIELDS) + "\r\n").encode()
    for batch in _batches(rows):
        out = io.StringIO(newline="")
        lines = csv.writer(out)
        lines.writerows([_cell(name, row[name]) for name in FIELDS] for row in batch)
        yield out.getvalue().encode()


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in NESTED or isinstance(value, int | float):
        return _text(value)
    text = str(value)
    return f"'{text}" if text.startswith(_RISKY) else text


def _value(name: str, cell: str) -> Any:
    if not cell and name not in _BLANK_IS_TEXT:
        return None
    if name in NESTED or name in WHOLE or name == "gpu_hours_lost":
        return _whole(name, json.loads(cell))
    return cell[1:] if cell.startswith("'") else cell


def _whole(name: str, value: Any) -> Any:
    """Return a whole number that stood as text, because it is beyond what JSON's numbers hold."""
    return int(value) if name in WHOLE and isinstance(value, str) else value


def _read_csv(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file, strict=True)
        try:
            head = next(lines, [])
            if head != list(FIELDS):
                raise Unreadable(f"{path}: the first line names other columns than a ledger's")
            for cells in lines:
                if len(cells) != len(FIELDS):
                    raise Unreadable(f"{path}, line {lines.line_num}: {len(cells)} cells, not {len(FIELDS)}")
                yield {name: _value(name, cell) for name, cell in zip(FIELDS, cells, strict=True)}
        except Unreadable:
            raise
        except (csv.Error, ValueError, RecursionError) as error:
            raise Unreadable(f"{path}, line {lines.line_num}: {error}") from error


# JSON


def _json(rows: Iterable[Row]) -> Iterator[bytes]:
    yield f'{{"schema":"{SCHEMA}","rows":['.encode()
    before = "\n"
    for batch in _batches(rows):
        yield (before + ",\n".join(_text({name: row[name] for name in FIELDS}) for row in batch)).encode()
        before = ",\n"
    yield b"\n]}\n"


def _read_json(path: Path) -> Iterator[dict[str, Any]]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path}: not JSON: {error}") from error
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Unreadable(f"{path}: an object with `rows`, a list of objects, is a ledger")
    for row in rows:
        yield {name: _whole(name, value) for name, value in row.items()}


# Parquet


def _arrow_schema() -> Any:
    import pyarrow as pa

    kinds = {"at": pa.timestamp("us", tz="UTC"), "gpu_hours_lost": pa.float64()}
    kinds |= {name: pa.int64() for name in WHOLE}
    return pa.schema(
        [pa.field(name, kinds.get(name, pa.string())) for name in FIELDS], metadata={"schema": SCHEMA}
    )


class _Pieces(io.RawIOBase):
    """A file that only grows; what was written since is taken out by `take`."""

    def __init__(self) -> None:
        self._new, self._at = bytearray(), 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._new += piece
        self._at += len(piece)
        return len(piece)

    def take(self) -> bytes:
        piece, self._new = bytes(self._new), bytearray()
        return piece


def _parquet(rows: Iterable[Row]) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, file = _arrow_schema(), _Pieces()
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in _batches(rows):
            columns = {name: [_column(name, row[name]) for row in batch] for name in FIELDS}
            writer.write_table(pa.table(columns, schema=schema))
            yield file.take()
    yield file.take()


def _column(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in NESTED:
        return _text(value)
    return datetime.fromisoformat(value) if name == "at" else value


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(_arrow_schema()):
                raise Unreadable(f"{path}: its columns are not a ledger's")
            for batch in file.iter_batches(ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield {name: _from_column(name, value) for name, value in row.items()}
    except pa.ArrowException as error:
        raise Unreadable(f"{path}: not Parquet: {error}") from error
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable(f"{path}: {error}") from error


def _from_column(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in NESTED:
        return json.loads(value)
    return rfc3339(value) if name == "at" else value


def rfc3339(moment: datetime) -> str:
    """Return a time as a row spells it: RFC 3339 in UTC, with what fraction of a second it has."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
