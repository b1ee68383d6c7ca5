"""`andon read FILE…`: what a file of another tool says, as Andon's events; printed, or posted."""

import argparse
import hashlib
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from andon.agent.watch_files import id_of
from andon.client import Client
from andon.command_line import add_secret, secret_of, show_events
from andon.masking import mask_value
from andon.readers import foreign
from andon.spool_records import must_arrive
from andon.wire import encode_events

EXIT_OK, EXIT_NOT_SENT, EXIT_UNREADABLE = 0, 1, 2
_FLUSH_S = 60.0
_PER_POST = 2_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Read files of other tools: dcgmi (diag, nvlink, health), nccl-tests, W&B runs and exports, "
        "TensorBoard, flight recorder, torchelastic, nvidia-smi and dcgm-exporter, kernel and training logs, "
        "reports of GCM, SuperBench, NVRx, DLRover, FlagScale, lm-resiliency. Prints their events as JSON "
        "lines, or posts them with --url. Exit 0; 1: not all could be sent; 2: a file could not be read."
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--url", help="the server to post to; without it the events are printed")
    parser.add_argument("--run", default=os.environ.get("ANDON_RUN"), help="the run's name (ANDON_RUN)")
    add_secret(parser)
    parser.add_argument("--node", default=socket.gethostname(), help="whose files they are (%(default)s)")
    parser.add_argument("--attempt", type=int, help="which attempt they are of; default: the newest")
    parser.add_argument(
        "--baseline-gbs", type=float, metavar="X", help="bus bandwidth of known-good nodes, for nccl-tests"
    )


def run(args: argparse.Namespace) -> int:
    """Read, print or post. Returns the exit code."""
    try:
        client = _client(args) if args.url else None
    except (OSError, ValueError) as error:
        sys.stderr.write(f"andon read: {error}\n")
        return EXIT_UNREADABLE
    code = EXIT_OK
    for path in args.files:
        try:
            with path.open("rb") as file:
                body = file.read(foreign.MAX_BYTES + 1)
            if len(body) > foreign.MAX_BYTES:
                raise ValueError(f"larger than {foreign.MAX_BYTES} bytes")
            reading = foreign.read(path.name, body, baseline_gbs=args.baseline_gbs)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"andon read: {path}: {getattr(error, 'strerror', None) or error}\n")
            code = EXIT_UNREADABLE
            continue
        sys.stderr.write(f"andon read: {path}: {reading.format}, {len(reading.events)} events\n")
        events = [_ready(event, args) for event in reading.events]
        if client is None:
            show_events(events)
        else:
            _post(client, events, f"{args.run} {args.node} {hashlib.sha256(body).hexdigest()}")
    if client is not None:
        if not client.flush(_FLUSH_S):
            sys.stderr.write(f"andon read: not sent: {client.status()['last_error']}\n")
            code = max(code, EXIT_NOT_SENT)
        client.close()
    return code


def _ready(event: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    more = {} if args.attempt is None else {"attempt": args.attempt}
    event.pop("zoned", None)
    return {"node": args.node, **more, **event, "data": mask_value(event.get("data") or {})}


def _post(client: Client, events: list[dict[str, Any]], name: str) -> None:
    """Post under ids made of the file's content: reading it twice is posting it once."""
    for start in range(0, len(events), _PER_POST):
        part = events[start : start + _PER_POST]
        client.enqueue(
            "/events",
            encode_events(part),
            "application/json",
            events=len(part),
            kept=must_arrive(part),
            id_=id_of(f"{name} {start}"),
        )


def _client(args: argparse.Namespace) -> Client:
    secret = secret_of(args)
    if not args.run or not secret:
        raise ValueError("--run and --secret-file (or ANDON_RUN_SECRET): needed to post")
    # Ids come from the content, so nothing needs to outlive this command.
    return Client(
        args.url, args.run, secret, node=args.node, spool_dir=tempfile.mkdtemp(prefix="andon-read-")
    )
