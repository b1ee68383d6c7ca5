"""`andon agent`: the command."""

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from andon.agent.loop import NodeAgent, Settings
from andon.agent.watch_files import default_dumps
from andon.agent.watching import Watched, Watcher
from andon.client import Client
from andon.command_line import add_secret, secret_of

KMSG = Path("/dev/kmsg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "andon" / "agent"
    parser.add_argument("--url", required=True, help="the server, e.g. https://andon.example.org")
    parser.add_argument("--run", required=True, help="the run's name")
    parser.add_argument("--node", default=socket.gethostname(), help="as the trainer names it (%(default)s)")
    parser.add_argument(
        "--root", action="append", required=True, type=Path, help="a directory it may serve; may be repeated"
    )
    parser.add_argument("--state", type=Path, default=state, help="its own directory (%(default)s)")
    add_secret(parser)
    parser.add_argument(
        "--max-mb-per-s", type=float, default=0.0, help="megabytes per second at most; 0 = no cap of its own"
    )
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two questions at most")
    parser.add_argument(
        "--uploads", type=int, default=4, help="files under way at the same time (%(default)s)"
    )
    watch = parser.add_argument_group(
        "watching", "what it looks at on the node and posts; patterns are quoted"
    )
    watch.add_argument("--watch", action="store_true", help="all of the below, where this node has it")
    watch.add_argument("--log", action="append", default=[], metavar="PATTERN", help="logs of ranks")
    watch.add_argument(
        "--dumps", action="append", default=[], metavar="PATTERN", help="flight-recorder dumps"
    )
    watch.add_argument(
        "--errors", action="append", default=[], metavar="PATTERN", help="torchelastic's error files"
    )
    watch.add_argument(
        "--reports",
        action="append",
        default=[],
        metavar="PATTERN",
        help="reports of checks (dcgmi, nccl-tests, …), see `andon read`",
    )
    watch.add_argument("--kernel-log", type=Path, metavar="FILE", help="e.g. /dev/kmsg, /var/log/kern.log")
    watch.add_argument("--gpus", metavar="SOURCE", help="auto, nvidia-smi, or an address of dcgm-exporter")
    watch.add_argument("--ranks", action="store_true", help="which ranks' processes are alive")
    parser.add_argument("--once", action="store_true", help="end when nothing is wanted any more")


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM. Returns 0, or 2 for wrong use."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        secret = secret_of(args)
        for root in args.root:
            if not root.is_absolute():
                raise ValueError(f"--root {root}: must be absolute")
        agent = NodeAgent(
            Settings(
                url=args.url,
                run=args.run,
                secret=secret,
                node=args.node,
                roots=tuple(args.root),
                state=args.state,
                max_mb_per_s=args.max_mb_per_s,
                every_s=args.every,
                uploads=max(1, args.uploads),
            )
        )
    except (OSError, ValueError) as error:
        sys.stderr.write(f"andon agent: {error}\n")
        return 2
    try:
        watcher = _watcher(args, secret)
    except OSError as error:
        sys.stderr.write(f"andon agent: {error}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    if watcher is not None:
        watcher.start()
    try:
        agent.run(once=args.once)
    finally:
        if watcher is not None:
            watcher.stop(at_end=args.once)
    return 0


def _watcher(args: argparse.Namespace, secret: str) -> Watcher | None:
    watched = Watched(
        logs=tuple(args.log),
        dumps=tuple(args.dumps or (default_dumps() if args.watch else ())),
        errors=tuple(args.errors),
        reports=tuple(args.reports),
        kernel_log=args.kernel_log or (KMSG if args.watch and os.access(KMSG, os.R_OK) else None),
        gpus=args.gpus or ("auto" if args.watch else None),
        ranks=args.ranks or args.watch,
    )
    if not watched:
        return None
    client = Client(args.url, args.run, secret, node=args.node, spool_dir=args.state / "spool")
    return Watcher(watched, client, state=args.state, server=f"{args.url} {args.run}", node=args.node)
