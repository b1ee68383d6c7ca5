"""The command line of `andon probe`: a frozen step again, with one condition changed.

    andon probe incident-7 --step train:frozen_step --rank 61 --change precision=fp32

Exit 0: the changed step is clean (or two devices agree); 1: it breaks as before (or they differ); 3: it did
not break unchanged, so the change tells nothing; 2: nothing could be run.
"""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon.frozen_step import FrozenStep, NoFrozenStep, find

if TYPE_CHECKING:
    from andon.probe import Build, Change, Outcome, Result

SCHEMA = "andon.probe/1"
EXIT = {"clean": 0, "same": 0, "breaks": 1, "differ": 1, "not reproduced": 3}
UNUSABLE = 2
WORDS = {
    "clean": "it is clean",
    "breaks": "it breaks as before",
    "same": "the same result on both",
    "differ": "digests differ",
    "not reproduced": "it did not break as it was, so the change tells nothing",
}
CHANGES = {
    "precision": "precision=fp32: nothing computed below fp32",
    "kernels": "kernels=unfused: plain attention, nothing compiled",
    "batch": "batch=STEP: the batch of another step",
    "device": "device=cuda:1: the same step on a second device, digests compared",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `PATH --step MODULE:FUNCTION [--change …]`."""
    parser.add_argument("path", type=Path, help="a halt snapshot, or an exported bag that holds one")
    parser.add_argument(
        "--step",
        required=True,
        metavar="MODULE:FUNCTION",
        help="builds the trainer's step: takes an andon.probe.Frozen, returns an andon.probe.Step",
    )
    parser.add_argument("--rank", type=int, help="whose batch and random numbers (the only one kept, or 0)")
    parser.add_argument("--device", default="", help="where it runs unchanged (first GPU, else CPU)")
    parser.add_argument("--change", default="", metavar="WHAT=TO", help="; ".join(CHANGES.values()))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")


def run(args: argparse.Namespace) -> int:
    """Run the probe and say how it came out."""
    try:
        frozen = find(args.path)
        from andon import probe

        result = probe.probe(
            _builder(args.step),
            frozen,
            rank=_rank(args.rank, frozen),
            change=_change(args.change),
            device=args.device,
        )
    except (NoFrozenStep, ValueError) as error:
        return _refuse(str(error))
    except ImportError as error:
        return _refuse(f"needs {error.name or error}, which cannot be imported here")
    rank = _rank(args.rank, frozen)
    if args.json:
        print(json.dumps(document(result, frozen, rank), sort_keys=True))  # noqa: T201
    else:
        print("\n".join(lines(result, frozen, rank)))  # noqa: T201
    return EXIT[result.verdict]


def _refuse(text: str) -> int:
    print(f"andon probe: {text}", file=sys.stderr)  # noqa: T201
    return UNUSABLE


def _rank(asked: int | None, frozen: FrozenStep) -> int:
    if asked is not None:
        return asked
    return frozen.ranks[0] if len(frozen.ranks) == 1 else 0


def _change(text: str) -> "Change":
    from andon.probe import Change

    if not text:
        return Change()
    what, equals, value = text.partition("=")
    fixed = {"precision": "fp32", "kernels": "unfused"}
    known = what in CHANGES and equals and (value == fixed[what] if what in fixed else bool(value))
    if not known or (what == "batch" and not value.isdecimal()):
        raise ValueError(f"--change {text!r}: one of {'; '.join(CHANGES.values())}")
    return Change(what, value)  # type: ignore[arg-type]


def _builder(text: str) -> "Build":
    """Return the function that `module:function` names; modules are looked for beside the caller, too."""
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"--step {text!r}: expected module:function, as in train:frozen_step")
    if "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"--step {text!r}: {module} has no function {name}")
    build: Build = found
    return build


def lines(result: "Result", frozen: FrozenStep, rank: int) -> list[str]:
    """Return what a person reads."""
    of = frozen.manifest
    said = [f"step {frozen.step:,} of {of.run}, rank {rank}, from W({of.step:,}) of attempt {of.attempt}"]
    said += [
        f"  restored {line.part}: {line.verdict}{f', {line.detail}' if line.detail else ''}"
        for line in result.unchanged.restored
    ]
    said.append(f"  as it was: {_outcome(result.unchanged)}")
    if result.changed is not None:
        said.append(f"  {result.change}: {_outcome(result.changed)}")
    return [*said, WORDS[result.verdict]]


def _outcome(one: "Outcome") -> str:
    where = ""
    if one.first is not None:
        name = f" {one.first.name}" if one.first.name else ""
        where = f"; first nonfinite: {one.first.what} of {one.first.module}{name}"
    return f"loss {one.loss:.6g}, gradient norm {one.grad_norm:.6g}{where}"


def document(result: "Result", frozen: FrozenStep, rank: int) -> dict[str, Any]:
    """Return what a program reads."""
    return {
        "schema": SCHEMA,
        "run": frozen.manifest.run,
        "attempt": frozen.manifest.attempt,
        "step": frozen.step,
        "rank": rank,
        "change": str(result.change),
        "verdict": result.verdict,
        "unchanged": _told(result.unchanged),
        "changed": None if result.changed is None else _told(result.changed),
    }


def _told(one: "Outcome") -> dict[str, Any]:
    return {
        "loss": one.loss if math.isfinite(one.loss) else str(one.loss),
        "grad_norm": one.grad_norm if math.isfinite(one.grad_norm) else str(one.grad_norm),
        "first": None if one.first is None else one.first.document(),
        "digest": f"{one.digest:016x}",
        "restored": [line.document() for line in one.restored],
    }
