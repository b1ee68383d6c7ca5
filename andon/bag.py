"""Evidence bags: `andon verify BAG [--key FINGERPRINT]`.

Writing is in `andon.bag_writing`, checking in `andon.bag_verify`; this is the command.
"""

import argparse
import re
from pathlib import Path

from andon.bag_trees import Unreadable, open_tree
from andon.bag_verify import Report, verify

EXIT_VERIFIED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_PINNED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `andon verify`."""
    parser.add_argument("bag", type=Path, help="a bag: a directory or a .zip")
    parser.add_argument(
        "--key",
        metavar="FINGERPRINT",
        help="lower-case hex SHA-256 of the raw public key that must have signed it, or handed over to the "
        "one that did; told apart from the bag",
    )


def run(args: argparse.Namespace) -> int:
    """Check one bag and print what was found.

    Returns 0 verified and signed by the pinned key, 1 failed, 2 unreadable or wrong use, 3 consistent
    but not pinned.
    """
    if args.key is not None and not re.fullmatch(r"[0-9a-f]{64}", args.key):
        print("--key: a fingerprint is 64 lower-case hex digits")  # noqa: T201
        return EXIT_USAGE
    report = check(args.bag, args.key)
    if report is None:
        return EXIT_USAGE
    for line in describe(report):
        print(line)  # noqa: T201
    if not report.is_good:
        return EXIT_FAILED
    return EXIT_VERIFIED if report.pinned else EXIT_NOT_PINNED


def check(path: Path, key: str | None) -> Report | None:
    """Return the report of a bag on disk; None (and a line printed) when there is no bag to check."""
    try:
        return verify(open_tree(path), key)
    except Unreadable as error:
        print(error)  # noqa: T201
        return None
    except ValueError as error:
        return Report(problems=[f"{path}: {error}"])


def describe(report: Report) -> list[str]:
    """Return a report as lines for people."""
    lines = [f"FAILED  {problem}" for problem in report.problems]
    lines += [f"not checked  {one}" for one in report.not_checked]
    lines += [f"deleted by two people, see andon/custody.ndjson  {one}" for one in report.deleted]
    counted = f"{report.files} files, {report.seals} seals, {report.custody_rows} custody rows"
    if report.problems:
        return [*lines, f"This bag is NOT what was exported: {len(report.problems)} problems in {counted}."]
    if report.pinned and report.pinned_by != report.key_id:
        return [*lines, f"verified, signed by {report.key_id}, successor of {report.pinned_by}: {counted}"]
    if report.pinned:
        return [*lines, f"verified, signed by {report.key_id} as asked: {counted}"]
    return [*lines, f"consistent, signed by {report.key_id}, not pinned: {counted}"]
