"""Megatron: what a permit means on its command line, and whether it resumed with the right learning rate.

    andon megatron args permit.json --global-batch-size 1024
    andon megatron lr permit.json before.log after.log --global-batch-size 1024

`--iterations-to-skip` counts iterations from 0 (megatron/training/training.py): iteration i is the step that
turns W(i) into W(i+1), Andon's step i + 1. A skipped iteration reads its batch, counts its samples, and
does not step the learning-rate schedule: after the window the rate is that of as many steps earlier.
"""

import argparse
import bisect
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import msgspec

from andon.permit import Permit, PermitError, read_permit_file, verify
from andon.readers.training_log import read_lines
from andon.wire_times import parse_time

EXIT_EQUAL, EXIT_DIFFERS, EXIT_USAGE = 0, 1, 2
MAX_ITERATIONS = 100_000  # a command line holds no more, and no window is as wide
_MAX_LOG_BYTES = 1 << 30
# Megatron prints seven digits (3.000000E-04).
_TOLERANCE = 1e-6
_ITERATION_DIRECTORY = re.compile(r"iter_\d{7}")

Verdict = Literal["equal", "differs", "not comparable"]


class LrCheck(msgspec.Struct, frozen=True):
    """The first step after the window whose rate can be compared, and what was expected there."""

    verdict: Verdict
    step: int | None = None
    expected: tuple[float, float] | None = None  # least and most, where the old log has neighbours only
    got: float | None = None
    detail: str = ""


def iterations_to_skip(permit: Permit, global_batch_size: int) -> list[int]:
    """Return the iterations whose batches lie in the permit's skip window, wholly or in part.

    Args:
        global_batch_size: samples per iteration after the checkpoint; a ramp must be over by then.

    Raises:
        ValueError: no checkpoint or no loader position to count from, a window before it, or one too wide.
    """
    if permit.skip is None:
        return []
    if permit.checkpoint is None:
        raise ValueError("the permit names no checkpoint: there is no iteration to count from")
    if global_batch_size < 1:
        raise ValueError("the global batch size must be 1 or more")
    position = permit.positions.loader_position
    if position is None:
        position = permit.positions.consumed_samples  # one number in Megatron
    if position is None:
        raise ValueError("the permit has no loader position: there is no sample to count from")
    if permit.skip.from_ < position:
        raise ValueError(
            f"the window begins at sample {permit.skip.from_}, before the checkpoint's {position}"
        )
    first = permit.checkpoint.step + (permit.skip.from_ - position) // global_batch_size
    end = permit.checkpoint.step - (-(permit.skip.to - position) // global_batch_size)
    if end - first > MAX_ITERATIONS:
        raise ValueError(f"{end - first} iterations: more than {MAX_ITERATIONS}; is the batch size right?")
    return list(range(first, end))


def arguments(permit: Permit, global_batch_size: int) -> list[str]:
    """Return what the next launch adds to its command line. Raises ValueError, as `iterations_to_skip`."""
    words: list[str] = []
    if permit.checkpoint is not None:
        parts = urlsplit(permit.checkpoint.uri)
        path = Path(unquote(parts.path) if parts.scheme == "file" else permit.checkpoint.uri)
        # Megatron's own layout: the directory above is what it loads from.
        words = ["--load", str(path.parent if _ITERATION_DIRECTORY.fullmatch(path.name) else path)]
        words += ["--ckpt-step", str(permit.checkpoint.step)]
    skipped = iterations_to_skip(permit, global_batch_size)
    if skipped:
        words += ["--iterations-to-skip", *map(str, skipped)]
    return words


def check_lr(
    before: Sequence[tuple[int, float]],
    after: Sequence[tuple[int, float]],
    permit: Permit,
    global_batch_size: int,
) -> LrCheck:
    """Compare the resumed learning rate with the schedule as the log before shows it.

    Args:
        before, after: (step, rate) as printed, of the attempt that was held and of the one that resumed.

    Raises:
        ValueError: as `iterations_to_skip`.
    """
    skipped = iterations_to_skip(permit, global_batch_size)
    start = permit.checkpoint.step if permit.checkpoint is not None else 0
    end = skipped[-1] + 1 if skipped else start  # the last step that is not trained
    factor, words = _declared(permit)
    old = dict(before)
    steps = sorted(old)
    for step, got in sorted(after):
        if step <= end:
            continue
        was = step - len(skipped)
        least, most = _between(old, steps, was)
        if least is None or most is None:
            continue
        low, high = sorted((least * factor, most * factor))
        right = low * (1 - _TOLERANCE) - 1e-12 <= got <= high * (1 + _TOLERANCE) + 1e-12
        detail = f"step {step}: {got:.6E}, expected {low:.6E}"
        detail += f" to {high:.6E}" if high != low else ""
        detail += f" (the schedule's step {was}, {len(skipped)} iterations skipped{words})"
        return LrCheck("equal" if right else "differs", step, (low, high), got, detail)
    return LrCheck("not comparable", detail="the logs have no step after the window in common")


def _between(old: dict[int, float], steps: list[int], step: int) -> tuple[float, float] | tuple[None, None]:
    """Return the least and the most that a schedule without turns has at a step between two printed ones."""
    if step in old:
        return old[step], old[step]
    at = bisect.bisect(steps, step)
    if not 0 < at < len(steps):
        return None, None
    pair = sorted((old[steps[at - 1]], old[steps[at]]))
    return pair[0], pair[1]


def _declared(permit: Permit) -> tuple[float, str]:
    """Return the factor on the learning rate that the plan declares."""
    for change in permit.changes:
        if not re.search(r"\b(?:lr|learning[ _-]rate)\b", change.what, re.I):
            continue
        times = re.search(r"[×x*]\s*([0-9.]+(?:e-?\d+)?)\s*$", f"{change.what} {change.to or ''}".strip())
        if times is not None:
            return float(times[1]), f", declared × {times[1]}"
        if _is_rate(change.to) and _is_rate(change.was):
            factor = float(change.to) / float(change.was)
            return factor, f", declared × {factor:g}"
    return 1.0, ""


def _is_rate(value: object) -> bool:
    try:
        return not isinstance(value, bool) and float(value) > 0  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


# --- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    words = commands.add_parser("args", help="print what the next launch adds to its command line")
    rate = commands.add_parser("lr", help="check the learning rate it resumed with; exit 1 where it differs")
    for one in (words, rate):
        one.add_argument(
            "permit", metavar="PERMIT", help="the permit's file; `andon permit verify` checks it"
        )
    rate.add_argument("before", metavar="BEFORE", type=Path, help="the log of the attempt that was held")
    rate.add_argument("after", metavar="AFTER", type=Path, help="the log of the attempt that resumed")
    for one in (words, rate):
        one.add_argument("--global-batch-size", type=int, required=True, help="samples per iteration")
        one.add_argument("--key", action="append", metavar="FINGERPRINT", help="a pinned key (SHA-256, hex)")


def run(args: argparse.Namespace) -> int:
    """Print the arguments, or judge the rate. Returns the exit code."""
    try:
        document = read_permit_file(args.permit)
        # A rate is looked at after the launch, when a permit may have run out.
        at = time.time() if args.what == "args" else parse_time(document.get("issued_at"))[0] / 1e9
        permit = verify(document, trusted=args.key, at=at)
        if args.what == "args":
            sys.stdout.write(shlex.join(arguments(permit, args.global_batch_size)) + "\n")
            return EXIT_EQUAL
        checked = check_lr(_rates(args.before), _rates(args.after), permit, args.global_batch_size)
    except (OSError, ValueError, PermitError) as error:
        sys.stderr.write(f"andon megatron: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(f"{checked.verdict}: {checked.detail}\n")
    return {"equal": EXIT_EQUAL, "differs": EXIT_DIFFERS}.get(checked.verdict, EXIT_USAGE)


def _rates(path: Path) -> list[tuple[int, float]]:
    """Return (step, learning rate) of the newest launch in a log."""
    with path.open("rb") as file:
        text = file.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
    found: dict[int, float] = {}
    for event in read_lines(re.split(r"[\r\n]+", text), format="megatron"):
        if event["type"] == "attempt.launched":
            found.clear()
        rate = event["data"].get("lr")
        if event["type"] == "step" and rate is not None:
            found[event["step"]] = rate
    return sorted(found.items())
