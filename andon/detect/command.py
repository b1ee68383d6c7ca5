"""`andon detect FILE`: findings of a table as JSON lines."""

import argparse
import json
import sys
from pathlib import Path

from andon.detect.series import Series, SeriesError, is_table, parse, watch
from andon.policy import Policy, decode
from andon.readers import scalars, tensorboard, wandb

EXIT_CALM, EXIT_HALT, EXIT_UNREADABLE = 0, 1, 2
MAX_BYTES = 512 * 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Judge a table with columns step, loss and, where there is one, grad_norm (CSV or blanks; without "
        "a header: step and loss), a TensorBoard event file, or a W&B history (the .wandb file of an offline "
        "run, or an export). Prints one JSON object per finding: kind, severity (warn or halt; info for "
        "'not_judged'), step, score, and the numbers used. Exit 0: no halt, 1: a halt, 2: unreadable."
    )
    parser.add_argument("file", metavar="FILE", help="the table, or - for standard input")
    parser.add_argument("--policy", metavar="JSON", help="a policy document whose thresholds to use")


def run(args: argparse.Namespace) -> int:
    """Judge the file and return the exit code."""
    try:
        policy = _policy(args.policy)
        body = _read(args.file)
        series = _series(body)
    except (OSError, ValueError) as error:
        where = args.file if isinstance(error, SeriesError | UnicodeDecodeError) else ""
        sys.stderr.write(f"andon detect: {where + ': ' if where else ''}{_message(error)}\n")
        return EXIT_UNREADABLE
    for note in series.notes:
        sys.stderr.write(f"andon detect: {note}\n")
    halted = False
    for finding in watch(series, policy):
        halted |= finding.severity == "halt"
        if finding.kind == "not_judged":
            sys.stderr.write(f"andon detect: {finding.series}: {finding.detail}\n")
        sys.stdout.write(json.dumps(finding.to_document(), allow_nan=False) + "\n")
    sys.stdout.flush()
    return EXIT_HALT if halted else EXIT_CALM


def _series(body: bytes) -> Series:
    if tensorboard.is_events(body):
        return scalars.series(tensorboard.read(body), "TensorBoard")
    if wandb.is_run_file(body):
        return scalars.series(wandb.read(body), "W&B")
    text = body.decode("utf-8")
    # An export of few columns is an ordinary table too, and then judged by its printed digits.
    if wandb.is_export(text) and not is_table(text):
        return scalars.series(wandb.read(body), "W&B")
    return parse(text)


def _policy(path: str | None) -> Policy:
    if path is None:
        return Policy()
    try:
        document = json.loads(Path(path).read_text("utf-8"))
        if not isinstance(document, dict):
            raise ValueError("expected an object")
        return decode(document)
    except ValueError as error:
        raise ValueError(f"{path}: not a policy: {error}") from error


def _read(name: str) -> bytes:
    if name == "-":
        body = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        with Path(name).open("rb") as file:
            body = file.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise SeriesError(f"larger than {MAX_BYTES} bytes")
    return body


def _message(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        line = error.object[: error.start].count(b"\n") + 1
        return f"line {line}: not UTF-8 text"
    return str(error)
