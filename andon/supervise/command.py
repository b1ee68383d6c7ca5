"""`andon supervise RUN.toml`: the command."""

import argparse
import signal
import sys
from pathlib import Path

from andon.client import Client
from andon.supervise import runfile
from andon.supervise.loop import Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", type=Path, metavar="RUN.toml", help="what is supervised")
    parser.add_argument("--check", action="store_true", help="only read the file")


def run(args: argparse.Namespace) -> int:
    """Supervise until the job ends. Returns the job's exit code, 93 held, 143 stopped, 2 for wrong use."""
    try:
        file = runfile.read(args.file)
        secret = file.secret
    except (OSError, ValueError) as error:
        sys.stderr.write(f"andon supervise: {error}\n")
        return 2
    if args.check:
        return 0
    client = Client(file.url, file.run, secret, node=file.node, trusted=file.keys)
    supervisor = Supervisor(file, client, say=_say)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    try:
        return supervisor.run()
    finally:
        client.flush(5.0)
        client.close()


def _say(text: str) -> None:
    sys.stdout.write(f"andon supervise: {text}\n")
    sys.stdout.flush()
