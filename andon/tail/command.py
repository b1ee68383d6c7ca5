"""`andon tail LOGFILE`: the command."""

import argparse
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from andon.client import Client
from andon.command_line import add_secret, secret_of, show_events
from andon.readers.training_log import FORMATS, TrainingLog
from andon.tail.posting import LogTail, Notes

EXIT_OK, EXIT_NOTHING, EXIT_USAGE = 0, 1, 2
EVERY_S = 0.5
_FLUSH_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Read a training log and post its steps and errors; the trainer is not touched. Reads Megatron, "
        "DeepSpeed, torchtitan, NeMo, OLMo and Hugging Face logs, follows rotation, and goes on where it "
        "stood. Exit 0; 1: --once found no record, or could not send all; 2: wrong use."
    )
    parser.add_argument("file", metavar="LOGFILE", type=Path, help="the log; it need not be there yet")
    parser.add_argument("--url", default=os.environ.get("ANDON_URL"), help="the server (ANDON_URL)")
    parser.add_argument("--run", default=os.environ.get("ANDON_RUN"), help="the run's name (ANDON_RUN)")
    add_secret(parser)
    parser.add_argument("--node", default=socket.gethostname(), help="whose log it is (%(default)s)")
    parser.add_argument("--rank", type=int, help="whose log it is, for errors that name no rank")
    parser.add_argument(
        "--attempt", type=_attempt, default=os.environ.get("ANDON_ATTEMPT"), help="default: the newest"
    )
    parser.add_argument("--format", choices=FORMATS, default="auto", help="default: ask every reader")
    parser.add_argument(
        "--logging-steps", type=int, default=1, help="steps between two records of a log that prints none"
    )
    parser.add_argument("--state", type=Path, default=_state(), help="its own directory (%(default)s)")
    parser.add_argument("--from-end", action="store_true", help="leave out what is there at the first start")
    parser.add_argument("--once", action="store_true", help="read what is there, then end")
    parser.add_argument("--print", action="store_true", help="print the events; send and keep nothing")


def _attempt(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("attempts count from 1")
    return number


def _state() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "andon" / "tail"


def run(args: argparse.Namespace) -> int:
    """Tail until SIGTERM, or once. Returns the exit code."""
    client, notes = None, None
    try:
        if not args.print:
            client = _client(args)
            notes = Notes(args.state, args.file, f"{args.url} {args.run}")
        elif args.once and not args.file.exists():
            raise ValueError(f"{args.file}: is not there")
        tail = LogTail(
            args.file,
            TrainingLog(
                format=args.format,
                logging_steps=max(1, args.logging_steps),
                attempt=args.attempt,
                rank=args.rank,
            ),
            client=client,
            notes=notes,
            hand_over=show_events if args.print else None,
            node=args.node,
            from_end=args.from_end,
        )
    except BlockingIOError:
        return _wrong(f"{args.file}: is read by another andon tail")
    except (OSError, ValueError) as error:
        return _wrong(str(error))
    stopped = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopped.set())
    with tail:
        _loop(tail, stopped, once=args.once, client=client)
    code = EXIT_OK
    if args.once and tail.events == 0:
        sys.stderr.write(f"andon tail: {args.file}: no record of a known format in {tail.lines} lines\n")
        code = EXIT_NOTHING
    if client is not None:
        if args.once and not client.flush(_FLUSH_S):
            status = client.status()
            sys.stderr.write(f"andon tail: {status['pending']} posts wait: {status['last_error']}\n")
            code = EXIT_NOTHING
        client.close()
    return code


def _loop(tail: LogTail, stopped: threading.Event, *, once: bool, client: Client | None) -> None:
    told: int | None = None
    truncations = 0
    while not stopped.is_set():
        try:
            read = tail.turn()
        except BrokenPipeError:  # of what is printed, not of the log
            raise
        except OSError as error:
            sys.stderr.write(f"andon tail: {tail.path}: {error}\n")
            read = False
            if once:
                return
        if tail.follower.truncations > truncations:
            truncations = tail.follower.truncations
            sys.stderr.write(f"andon tail: {tail.path}: was truncated; reading from its start\n")
        directive = client.directive if client is not None else None
        if directive is not None and directive.get("kind") == "hold" and directive.get("seq") != told:
            told = directive.get("seq")
            # It cannot stop a trainer that it does not run in; whoever reads this can.
            sys.stderr.write(
                f"andon tail: the run is held (incident {directive.get('incident') or 'not known'}): "
                "stop the job, or let its supervisor do it\n"
            )
        if not read:
            if once:
                tail.turn(at_end=True)
                return
            stopped.wait(EVERY_S)


def _client(args: argparse.Namespace) -> Client:
    secret = secret_of(args)
    missing = [name for name, value in (("--url", args.url), ("--run", args.run)) if not value]
    if missing or not secret:
        missing += [] if secret else ["--secret-file"]
        raise ValueError(f"{', '.join(missing)}: needed, or --print for a dry run")
    return Client(args.url, args.run, secret, node=args.node, spool_dir=args.state / "spool")


def _wrong(what: str) -> int:
    sys.stderr.write(f"andon tail: {what}\n")
    return EXIT_USAGE
