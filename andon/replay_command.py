"""The command line of `andon replay`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from andon import hold
from andon import permit as permits
from andon.permit import read_permit_file
from andon.recording import Recording, RecordingError
from andon.replay import Replay, ReplayRefused
from andon.wire import parse_time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `FILE --url U --run R --secret S …`."""
    parser.add_argument("file", type=Path, help="a recording (.zip)")
    parser.add_argument("--url", required=True, help="the server, e.g. http://localhost:8000")
    parser.add_argument("--run", required=True, help="the run's name on the server")
    parser.add_argument("--secret", required=True, help="the run's whsec_…")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="times as fast as it happened")
    parser.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="run directory for checkpoints and logs"
    )
    parser.add_argument(
        "--attempt", type=int, default=1, metavar="N", help="which recorded attempt (default 1)"
    )
    parser.add_argument("--permit", type=Path, metavar="FILE", help="go on from a hold by this permit")
    parser.add_argument(
        "--key", action="append", default=[], metavar="FINGERPRINT", help="the server's pinned key"
    )


def run(args: argparse.Namespace) -> int:
    """Replay; exit 0 at the end of the attempt, 93 when held, 1 when refused, 2 when unreadable."""
    stderr = sys.stderr.write
    try:
        recording = Recording(args.file)
    except (RecordingError, OSError) as error:
        stderr(f"{error}\n")
        return 2
    directory = args.checkpoint_dir or Path(tempfile.mkdtemp(prefix="andon-replay-"))
    with recording:
        replay = Replay(
            recording,
            url=args.url,
            run=args.run,
            secret=args.secret,
            directory=directory,
            speed=args.speed,
            trusted=args.key or None,
            say=lambda text: print(text, flush=True),  # noqa: T201
        )
        try:
            return _run(replay, args)
        except hold.Held as error:
            stderr(f"not started: {error}\n")
            return hold.EXIT_HELD
        except (ReplayRefused, RecordingError, OSError, ValueError) as error:
            stderr(f"{error}\n")
            return 1
        finally:
            replay.close()


def _run(replay: Replay, args: argparse.Namespace) -> int:
    replay.say(f"{args.file.name}: attempt {args.attempt} to {args.run}, files under {replay.directory}")
    if args.permit is not None:
        document = read_permit_file(str(args.permit))
        replay.compare(permits.verify(document, trusted=args.key, at=time.time(), run=args.run))
        permit = hold.release(replay.checkpoint_dir, document, trusted=args.key, at=time.time(), run=args.run)
        directive = replay.continue_with(permit)
    else:
        directive = replay.play_until_held(args.attempt)
    if directive is None:
        replay.say(f"the recorded attempt ended at step {replay.step}")
        return 0
    deadline_s = hold_deadline_s(directive)
    replay.stop.wait(max(0.0, deadline_s - time.time()))
    return replay.leave(directive)


def hold_deadline_s(directive: dict[str, Any]) -> float:
    """Return when held ranks leave, Unix seconds; now where the directive says `exit` or names no time."""
    if directive.get("mode") == "exit" or not directive.get("deadline"):
        return time.time()
    return parse_time(directive["deadline"])[0] / 1e9
