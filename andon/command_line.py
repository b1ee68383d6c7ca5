"""What commands share that speak for a run: where its secret comes from, and events as lines to read."""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from andon.wire import encode_events


def add_secret(parser: argparse.ArgumentParser) -> None:
    """Declare `--secret-file`."""
    parser.add_argument("--secret-file", type=Path, help="holds the run's whsec_…; default: ANDON_RUN_SECRET")


def secret_of(args: argparse.Namespace) -> str:
    """Return the run's secret, "" where none was given.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    secret = args.secret_file.read_text("utf-8").strip() if args.secret_file else ""
    return secret or os.environ.get("ANDON_RUN_SECRET", "")


def show_events(events: Iterable[dict[str, Any]]) -> None:
    """Print events as JSON lines, as they would be sent: nonfinite values as words."""
    for event in events:
        sys.stdout.write(json.dumps(msgspec.json.decode(encode_events([event]))) + "\n")
    sys.stdout.flush()
