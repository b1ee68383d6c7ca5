"""`python -m demo.train`: the demo's training run, 4 ranks on this machine's CPU (gloo, DDP).

    python -m demo.train --dir DIR                                    train, post nothing
    python -m demo.train --live --url U --run R --secret S --dir DIR  train and obey the server
    … --permit permit.json --key FINGERPRINT                          relaunch a held run by its permit

Exit code 93: held. Starting again in a held directory needs a permit that verifies offline.
"""

import argparse
import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from urllib.parse import unquote, urlsplit

from msgspec.structs import replace

from andon import checkpoints, hold
from andon.loader import Window
from andon.permit import Permit, read_permit_file
from demo.job import Job, prepare

PLAN_STEPS = 80  # steps a relaunch trains past its checkpoint


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    one = argparse.ArgumentParser(prog="python -m demo.train", description="Train the demo's small GPT.")
    one.add_argument("--dir", required=True, type=Path, help="run directory; checkpoints and logs lie in it")
    one.add_argument("--run", default="demo-live", help="the run's name on the server")
    one.add_argument("--live", action="store_true", help="post to a server and obey it")
    one.add_argument("--url", help="the server")
    one.add_argument("--secret", default=os.environ.get("ANDON_RUN_SECRET"), help="the run's whsec_…")
    one.add_argument("--attempt", type=int, default=1)
    one.add_argument(
        "--steps", type=int, default=None, help="last step (default 140, or 80 past the checkpoint)"
    )
    one.add_argument("--fault", choices=["none", "hole", "binary"], default="hole")
    one.add_argument("--fault-step", type=int, default=120)
    one.add_argument("--fault-rank", type=int, default=3)
    one.add_argument("--fault-steps", type=int, default=1)
    one.add_argument("--lr", type=float, default=3e-3)
    one.add_argument("--checkpoint-every", type=int, default=30)
    one.add_argument("--guard", choices=["off", "skip"], default="off", help="skip drops nonfinite updates")
    one.add_argument("--hold-deadline", type=float, default=600.0, metavar="SECONDS")
    one.add_argument("--permit", type=Path, help="permit document to go on by")
    one.add_argument(
        "--key", action="append", default=[], metavar="FINGERPRINT", help="the server's pinned key"
    )
    return one


def from_permit(job: Job, permit: Permit) -> Job:
    """Return the launch a permit allows: its attempt, its checkpoint, its skip window, nothing else.

    Raises:
        hold.Held: the checkpoint on disk is not the one approved.
    """
    if permit.checkpoint is None:
        raise hold.Held("the permit names no checkpoint: it resumes ranks that still wait, and none do")
    directory = directory_of_uri(permit.checkpoint.uri)
    manifest = checkpoints.verify(directory)
    if permit.checkpoint.digest not in (None, manifest.digest):
        raise hold.Held(
            f"{directory}: its digest is {manifest.digest}, the permit is for {permit.checkpoint.digest}"
        )
    approved = permit.positions.loader_position
    if approved is not None and approved != manifest.positions.loader_position:
        raise hold.Held(
            f"{directory}: at sample {manifest.positions.loader_position}, the permit says {approved}"
        )
    skips = (Window(permit.skip.from_, permit.skip.to),) if permit.skip else ()
    return replace(
        job,
        attempt=permit.attempt,
        restore=str(directory),
        skips=skips,
        permit=permit.permit,
        last_step=max(job.last_step, manifest.step + PLAN_STEPS),
    )


def directory_of_uri(uri: str) -> Path:
    """Return the local path of a file:// URI."""
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise hold.Held(f"{uri}: not a directory of this machine")
    return Path(unquote(parts.path))


def launch(job: Job) -> int:
    """Run all ranks of one attempt as child processes; return the attempt's exit code.

    93 if any rank left held, else the first code that is not 0. The first failing rank ends the
    others: what is left of a broken collective only waits.
    """
    if not job.began_ns:
        job = replace(job, began_ns=time.time_ns())
    prepare(job).close()
    store = job.root / f".store-{job.attempt}-{secrets.token_hex(4)}"
    context = multiprocessing.get_context("spawn")
    ranks: list[BaseProcess] = [
        context.Process(target=_rank_main, args=(job, rank, store, os.getpid()), name=f"rank-{rank}")
        for rank in range(job.world_size)
    ]

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for rank in ranks:
            rank.start()
        return _wait(ranks)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.terminate()
        for rank in ranks:
            if rank.pid is not None:
                rank.join(5)
                if rank.is_alive():
                    rank.kill()
                    rank.join()
        for number, handler in previous.items():
            signal.signal(number, handler)
        store.unlink(missing_ok=True)


def _wait(ranks: list[BaseProcess]) -> int:
    while any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode not in (None, 0, hold.EXIT_HELD) for rank in ranks):
            break
        time.sleep(0.1)
    codes = [rank.exitcode for rank in ranks if rank.exitcode is not None]
    if hold.EXIT_HELD in codes:
        return hold.EXIT_HELD
    return next((code for code in codes if code), 0)


def _rank_main(job: Job, rank: int, store: Path, launcher: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the launcher decides
    if sys.platform == "linux":
        # A launcher killed with -9 must not leave ranks behind (prctl PR_SET_PDEATHSIG = 1).
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != launcher:
            raise SystemExit(1)
    # Read when torch is imported: DDP warns on every launch that no parameter was unused (demo/rank.py
    # says why it is asked to look).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from demo.rank import run_rank

    code = 1
    try:
        run_rank(job, rank, store)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # Not through the interpreter's shutdown: gloo's threads outlive their group there and abort
        # the process ("terminate called without an active exception"), which would hide the code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = parser().parse_args(arguments)
    if args.live and not (args.url and args.secret):
        parser().error("--live needs --url and --secret (or ANDON_RUN_SECRET)")
    job = Job(
        directory=str(args.dir.resolve()),
        run=args.run,
        attempt=args.attempt,
        last_step=args.steps or 140,
        learning_rate=args.lr,
        fault=args.fault,
        fault_step=args.fault_step,
        fault_rank=args.fault_rank,
        fault_steps=args.fault_steps,
        checkpoint_every=args.checkpoint_every,
        guard=args.guard,
        hold_deadline_s=args.hold_deadline,
        url=args.url if args.live else None,
        secret=args.secret if args.live else None,
        trusted=tuple(args.key),
    )
    (job.root / "checkpoints").mkdir(parents=True, exist_ok=True)
    try:
        if args.permit is not None:
            document = read_permit_file(str(args.permit))
            permit = hold.release(
                job.root / "checkpoints", document, trusted=args.key, at=time.time(), run=job.run
            )
            job = from_permit(job, permit)
            if args.steps:
                job = replace(job, last_step=args.steps)
        else:
            hold.check(job.root / "checkpoints")
    except (hold.Held, checkpoints.CheckpointError, OSError, ValueError) as error:
        print(f"not started: {error}", file=sys.stderr)
        return hold.EXIT_HELD
    return launch(job)


if __name__ == "__main__":
    sys.exit(main())
