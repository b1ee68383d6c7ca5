"""The permit: signed permission for one resume, checked without asking anybody.

`andon permit verify FILE` exits 0 when the permit holds and its key was pinned, 1 when it fails,
2 when the file cannot be read, 3 when it is consistent but no key was pinned.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from andon import keys
from andon.signing import SignatureError, SigningKey, sign_document, verify_document
from andon.wire_times import parse_time

SCHEMA = "andon.permit/1"
MAX_FILE_BYTES = 4 * 1024 * 1024

PlanKind = Literal[
    "resume_in_place",
    "skip_and_continue",
    "rollback_and_replay",
    "rollback_and_skip",
    "rollback_one_further",
]

EXIT_VERIFIED, EXIT_FAILED, EXIT_UNREADABLE, EXIT_NOT_PINNED = 0, 1, 2, 3


class PermitError(Exception):
    """The permit does not permit this. The message says why."""


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to start from: W(step), where its bytes are, and the digest they must have."""

    step: int
    uri: str
    digest: str | None = None


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The four different numbers that together say where a run is. None: the run has no such number."""

    loader_position: int | None = None
    consumed_samples: int | None = None
    optimizer_step: int | None = None
    schedule_position: int | None = None


class SkipWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"from_": "from"}):
    """Absolute samples not to train on, half open: from ≤ sample < to."""

    from_: int
    to: int


class Exclusions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the next attempt must at least leave out; leaving out more is allowed."""

    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One declared change, and whether it makes a new training regime."""

    what: str
    to: Any = None
    was: Any = None
    changes_regime: bool = False


class Permit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Permission for one resume of one run.

    `attempt` is the number of the *next* attempt. `approval_digest` is the SHA-256 the approver
    signed for. `checkpoint` is None only when ranks go on from memory. Times are RFC 3339 UTC.
    Unknown fields are refused: a condition this version cannot read must not be passed over.
    """

    permit: str
    run: str
    attempt: int
    incident: str
    approval: str
    approval_digest: str
    plan: PlanKind
    checkpoint: Checkpoint | None = None
    positions: Positions = Positions()
    skip: SkipWindow | None = None
    exclusions: Exclusions = Exclusions()
    changes: tuple[Change, ...] = ()
    regime: str | None = None
    issued_at: str
    expires_at: str
    schema: str = SCHEMA

    def to_document(self) -> dict[str, Any]:
        """Return the permit as JSON-ready data, unsigned."""
        return msgspec.json.decode(msgspec.json.encode(self))  # type: ignore[no-any-return]


def _check_content(permit: Permit) -> tuple[int, int]:
    """Return (issued, expires) in ns. Raises PermitError when the fields contradict each other."""
    if permit.schema != SCHEMA:
        raise PermitError(f"schema: expected {SCHEMA!r}, got {permit.schema!r}")
    if permit.attempt < 1:
        raise PermitError("attempt: must be 1 or more")
    if permit.skip is not None and not 0 <= permit.skip.from_ <= permit.skip.to:
        raise PermitError("skip: needs 0 ≤ from ≤ to")
    if permit.plan.startswith("rollback") and permit.checkpoint is None:
        raise PermitError(f"checkpoint: the plan {permit.plan} must name one")
    if permit.plan == "rollback_and_skip" and permit.skip is None:
        raise PermitError("skip: the plan rollback_and_skip must have a window")
    times = []
    for name in ("issued_at", "expires_at"):
        try:
            times.append(parse_time(getattr(permit, name))[0])
        except ValueError as error:
            raise PermitError(f"{name}: {error}") from error
    if times[1] <= times[0]:
        raise PermitError("expires_at: must be after issued_at")
    return times[0], times[1]


def issue(permit: Permit, key: SigningKey) -> dict[str, Any]:
    """Return the signed permit.

    Raises:
        PermitError: its fields contradict each other (it would never verify).
    """
    _check_content(permit)
    return sign_document(permit.to_document(), key)


def verify(
    document: object,
    *,
    trusted: Collection[str] | None,
    at: float,
    run: str | None = None,
    attempt: int | None = None,
) -> Permit:
    """Check a permit offline.

    Args:
        document: decoded JSON, from anybody.
        trusted: fingerprints of pinned keys, or a `keys.KeyRing`, by which a permit issued after its key
            was handed over fails. None: consistent with the key it carries, no more.
        at: the moment it is to be used, Unix seconds.
        run, attempt: what it must be for, when given.

    Raises:
        PermitError: the signature, the key, the time, the run or the attempt is not right.
    """
    try:
        content = verify_document(document, trusted)
    except SignatureError as error:
        raise PermitError(f"signature: {error}") from error
    try:
        permit = msgspec.convert(content, Permit)
    except msgspec.ValidationError as error:
        raise PermitError(f"permit: {error}") from error
    issued_ns, expires_ns = _check_content(permit)
    try:
        keys.check_time(trusted, document, permit.issued_at)
    except SignatureError as error:
        raise PermitError(f"signature: {error}") from error
    if run is not None and permit.run != run:
        raise PermitError(f"run: it is for {permit.run!r}, not for {run!r}")
    if attempt is not None and permit.attempt != attempt:
        raise PermitError(f"attempt: it is for attempt {permit.attempt}, not for {attempt}")
    if not math.isfinite(at):  # NaN is neither before nor after anything, so it would never expire
        raise PermitError("at: is not a moment")
    # Five minutes of grace on the early side only: a node's clock may lag the server that issued
    # it. Expiry is the limit the approver set, and has none.
    if at * 1e9 < issued_ns - 300e9:
        raise PermitError(f"issued_at: {permit.issued_at} lies in the future; check this machine's clock")
    if at * 1e9 >= expires_ns:
        raise PermitError(f"expires_at: it expired at {permit.expires_at}")
    return permit


# --- andon permit verify --------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `verify FILE [--at TIME] [--key FINGERPRINT]…`."""
    commands = parser.add_subparsers(dest="permit_command", required=True, metavar="COMMAND")
    one = commands.add_parser("verify", help="check a permit without asking the server")
    one.add_argument("file", help="the permit as JSON, or an answer that holds it under 'permit'; - reads it")
    one.add_argument("--at", metavar="TIME", help="RFC 3339 or Unix seconds; default: now")
    one.add_argument("--key", action="append", metavar="FINGERPRINT", help="a pinned key (SHA-256, hex)")
    one.add_argument(
        "--keys",
        metavar="FILE",
        help="a saved /.well-known/andon-keys.json: also trust keys by the handovers in it",
    )
    one.add_argument("--run", help="the run it must be for")
    one.add_argument("--attempt", type=int, help="the attempt it must be for")


def read_permit_file(path: str) -> dict[str, Any]:
    """Read a permit, or the answer `{"permit": {…}}` it came in. `-` is standard input.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON object.
    """
    if path == "-":
        raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    else:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError("is too large for a permit")
    try:
        document = json.loads(raw)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if isinstance(document, dict) and isinstance(document.get("permit"), Mapping):
        document = document["permit"]
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")
    return document


def _moment(text: str | None) -> float:
    if text is None:
        return time.time()
    try:
        seconds = float(text)
    except ValueError:
        return parse_time(text)[0] / 1e9
    return parse_time(seconds)[0] / 1e9  # refuses NaN and infinity


def run(args: argparse.Namespace) -> int:
    """Check the file and say in one line what was found. Returns the exit code."""
    say = sys.stderr.write
    trusted: Collection[str] | None = [key.strip().lower() for key in args.key] if args.key else None
    for key in trusted or ():
        if len(key) != 64 or set(key) - set("0123456789abcdef"):
            say(f"--key: {key!r} is not a fingerprint (64 hexadecimal digits)\n")
            return EXIT_UNREADABLE
    try:
        at = _moment(args.at)
    except ValueError as error:
        say(f"--at: {error}\n")
        return EXIT_UNREADABLE
    try:
        document = read_permit_file(args.file)
    except (OSError, ValueError) as error:
        say(f"{args.file}: cannot be read: {error}\n")
        return EXIT_UNREADABLE
    if args.keys is not None:
        if trusted is None:
            say("--keys: needs --key, a fingerprint that was told by another way\n")
            return EXIT_UNREADABLE
        try:
            trusted = keys.follow(read_permit_file(args.keys), trusted)
        except (OSError, ValueError) as error:
            say(f"{args.keys}: cannot be read: {error}\n")
            return EXIT_UNREADABLE
    try:
        permit = verify(document, trusted=trusted, at=at, run=args.run, attempt=args.attempt)
    except PermitError as error:
        say(f"{args.file}: failed: {error}\n")
        return EXIT_FAILED
    what = f"permit {permit.permit} for {permit.run} attempt {permit.attempt}, {permit.plan}"
    until = f"valid until {permit.expires_at}"
    if trusted is None:
        sys.stdout.write(f"consistent, signed by {document['key_id']}, not pinned: {what}, {until}\n")
        return EXIT_NOT_PINNED
    sys.stdout.write(f"verified, signed by {document['key_id']}: {what}, {until}\n")
    return EXIT_VERIFIED
