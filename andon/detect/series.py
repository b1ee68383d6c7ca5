"""Judge a table of a training's curve: step, loss, and the gradient norm where there is one."""

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from andon.detect.finding import Finding
from andon.detect.grad_norm import GradNorm
from andon.detect.spike import RobustSpike
from andon.policy import Policy

DETECTOR = "series"
VERSION = 1
MAX_STEP = 2**63 - 1

_NAMES = {
    "step": {"step", "steps", "iteration", "iter", "global_step", "optimizer_step"},
    "loss": {"loss", "train_loss", "lm_loss", "training_loss"},
    "grad_norm": {"grad_norm", "gradient_norm", "gradnorm", "global_grad_norm"},
}
_BLANK = {"", "null", "none", "n/a", "na", "-"}
_NONFINITE = {"nan", "inf", "infinity"}


class SeriesError(ValueError):
    """The table can't be read; the message names the line and the column."""


class Row(msgspec.Struct, frozen=True):
    """One record. A value is None where it was not recorded; it may be nonfinite.

    `line` is the 1-based line of the file.
    """

    line: int
    step: int
    loss: float | None
    grad_norm: float | None


class Series(msgspec.Struct, frozen=True):
    """A table as read.

    Attributes:
        rows: in the order of the file, which is taken as the order of training.
        has_grad_norm: the table has such a column.
        loss_places: decimals that the losses are printed with; None: not printed.
        notes: what a reader should know: steps counted for want of a column, steps that went back.
    """

    rows: list[Row]
    has_grad_norm: bool
    notes: list[str]
    loss_places: int | None = None


def parse(text: str) -> Series:
    """Read a table.

    With a header (any order, extra columns are left out): step or iteration, loss, grad_norm; without a
    step column the records are counted from 1, which is said. Without a header: two columns, step and
    loss. Separated by comma, tab, semicolon or blanks; blank lines and lines that begin with # are left
    out. A blank cell is not recorded; nan, inf and numbers beyond a double are nonfinite.

    Raises:
        SeriesError: no record, no loss column, a cell that is no number, a step that is no integer from
            0 to 2^63 − 1.
    """
    lines = _split(text.removeprefix("\ufeff"))
    if not lines:
        raise SeriesError("line 1: the file has no record; expected columns step and loss")
    number, first = lines[0]
    notes: list[str] = []
    if all(_is_value(cell) for cell in first):
        if len(first) != 2:
            raise SeriesError(
                f"line {number}: {len(first)} columns and no header; expected step and loss, or a header"
            )
        columns = {"step": 0, "loss": 1}
    else:
        columns = _columns(number, first)
        lines = lines[1:]
        if not lines:
            raise SeriesError(f"line {number}: a header and no record")
    width = len(first)
    if "step" not in columns:
        notes.append("no step column: records counted from 1")
    rows: list[Row] = []
    backwards = places = 0
    for count, (line, cells) in enumerate(lines, start=1):
        if len(cells) != width:
            raise SeriesError(f"line {line}: {len(cells)} columns, expected {width}")
        step = _step(line, cells[columns["step"]]) if "step" in columns else count
        loss = _value(line, "loss", cells[columns["loss"]])
        places = max(places, _places(cells[columns["loss"]]))
        at = columns.get("grad_norm")
        grad_norm = None if at is None else _value(line, "grad_norm", cells[at])
        backwards += bool(rows) and step <= rows[-1].step
        rows.append(Row(line, step, loss, grad_norm))
    if backwards:
        notes.append(f"the step did not grow {backwards} times: read in the order of the file")
    return Series(rows, "grad_norm" in columns, notes, places)


def is_table(text: str) -> bool:
    """Return whether the first record is a header of which a loss and a step are known, or two numbers."""
    lines = _split("\n".join(text.removeprefix("\ufeff").splitlines()[:50]))
    if not lines:
        return True
    try:
        return all(map(_is_value, lines[0][1])) or {"step", "loss"} <= _columns(*lines[0]).keys()
    except SeriesError:
        return False


def _split(text: str) -> list[tuple[int, list[str]]]:
    """Return (line number, cells) of every line that is neither blank nor a comment."""
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        return []
    delimiter = next((d for d in (",", ";", "\t") if d in lines[0][1]), None)
    if delimiter is None:
        return [(number, line.split()) for number, line in lines]
    split: list[tuple[int, list[str]]] = []
    for number, line in lines:
        try:
            cells = next(csv.reader(io.StringIO(line), delimiter=delimiter, strict=True))
        except (csv.Error, StopIteration) as error:
            raise SeriesError(f"line {number}: {error}") from error
        split.append((number, [cell.strip() for cell in cells]))
    return split


def _columns(line: int, header: Sequence[str]) -> dict[str, int]:
    columns: dict[str, int] = {}
    for at, cell in enumerate(header):
        name = re.sub(r"[^a-z0-9]+", "_", cell.lower().removeprefix("train/")).strip("_")
        for column, names in _NAMES.items():
            if name in names:
                if column in columns:
                    raise SeriesError(f"line {line}: two columns are called {column}")
                columns[column] = at
    if "loss" not in columns:
        shown = ", ".join(repr(cell[:40]) for cell in header[:12])
        raise SeriesError(f"line {line}: no column named loss among {shown}")
    return columns


def _is_value(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _number(cell: str) -> float | None:
    """Return the value of a cell, None when blank.

    Raises:
        ValueError: it is no number. Underscores, which Python reads, are refused.
    """
    lowered = cell.strip().lower()
    if lowered in _BLANK:
        return None
    if lowered.lstrip("+-") in _NONFINITE:
        return float(lowered)
    if "_" in lowered or not lowered.isascii():
        raise ValueError(cell)
    return float(lowered)


def _places(cell: str) -> int:
    """Return the decimals of a number as printed: 2 for "2.30", 4 for "1.23e-2"."""
    digits, _, exponent = cell.strip().lower().partition("e")
    decimals = len(digits.partition(".")[2])
    return decimals - int(exponent) if re.fullmatch(r"[+-]?\d{1,3}", exponent) else decimals


def _value(line: int, column: str, cell: str) -> float | None:
    try:
        return _number(cell)
    except ValueError as error:
        raise SeriesError(f"line {line}, column {column}: {cell[:40]!r} is no number") from error


def _step(line: int, cell: str) -> int:
    text = cell.strip()
    try:
        if re.fullmatch(r"[+-]?\d{1,19}", text):
            step = int(text)
        else:
            number = _number(cell)
            if number is None or not math.isfinite(number) or not number.is_integer():
                raise ValueError(cell)
            step = int(number)
    except ValueError as error:
        raise SeriesError(f"line {line}, column step: {cell[:40]!r} is no integer") from error
    if not 0 <= step <= MAX_STEP:
        raise SeriesError(f"line {line}, column step: {cell[:40]} must be 0 to 2^63-1")
    return step


def watch(series: Series, policy: Policy) -> Iterator[Finding]:
    """Judge a table in its order; yield findings as they come, last what was not judged.

    A nonfinite loss or gradient norm is a halt of rule "nonfinite": a table does not say that an update
    was skipped. The loss is judged by `RobustSpike`, the gradient norm by `GradNorm`. A curve with too
    few values gives one finding of kind "not_judged" and severity "info".
    """
    loss = RobustSpike(policy.spike, places=series.loss_places)
    grad_norm = GradNorm(policy.grad_norm)
    measured = {"loss": 0, "grad_norm": 0}
    for row in series.rows:
        for name, value in (("loss", row.loss), ("grad_norm", row.grad_norm)):
            if value is not None and not math.isfinite(value):
                yield _nonfinite(row, name, value)
        if row.loss is not None and math.isfinite(row.loss) and row.loss != -1:
            measured["loss"] += 1
        finding = loss.update(row.step, row.loss)
        if finding is not None:
            yield finding
        if row.grad_norm is not None and math.isfinite(row.grad_norm) and row.grad_norm > 0:
            measured["grad_norm"] += 1
        yield from grad_norm.update(row.step, row.grad_norm)
    last = series.rows[-1].step if series.rows else None
    if not loss.judged:
        yield _not_judged(last, "loss", measured["loss"], policy.spike.warm_up)
    if series.has_grad_norm and not grad_norm.judged:
        yield _not_judged(last, "grad_norm", measured["grad_norm"], policy.grad_norm.warm_up)


def _nonfinite(row: Row, name: str, value: float) -> Finding:
    text = "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    return Finding(
        kind="nonfinite",
        severity="halt",
        rule="nonfinite",
        step=row.step,
        detector=DETECTOR,
        detector_version=VERSION,
        series=name,
        numbers={"value": text.lower(), "line": row.line},
        phase="forward" if name == "loss" else "reduce",
        detail=f"{name} is {text}",
    )


def _not_judged(step: int | None, name: str, measured: int, needed: int) -> Finding:
    return Finding(
        kind="not_judged",
        severity="info",
        rule="spike" if name == "loss" else name,
        step=step,
        detector=DETECTOR,
        detector_version=VERSION,
        series=name,
        numbers={"values": measured, "needed": needed},
        detail=f"not judged: {measured} of {needed} values",
    )
