"""Checkpoints that a trainer wrote in its own format: committed, read back, told, and rotated by permission.

What needs all ranks (digests of every part, whether weights and moments are finite, each rank's loader and
random numbers) happens in the call. Hashing and reading back is rank 0's, in a thread of its own: a
checkpoint of hundreds of gigabytes must not stop training for minutes. A process that is killed meanwhile
leaves a checkpoint without a manifest, which is one that was never committed.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from andon import checkpoints, halt_snapshot, restore_check
from andon.checkpoint_states import promote
from andon.checkpoints import CheckpointError, DeletionGate, Positions
from andon.loader import LoaderState
from andon.monitor_reduce import reduce
from andon.monitor_rows import StateAfter

if TYPE_CHECKING:
    from andon.watch import Watch

PartsOf = Callable[[Path], Mapping[str, Sequence[str]]]
Remove = Callable[[], Iterable[Path]]

OURS = {"digests": "andon-parts-", "loader": "loader-", "rng": "rng-"}  # what is written beside the trainer's
_DRAIN_S = 600.0


@dataclass(frozen=True)
class _Saved:
    """What rank 0 knows of a checkpoint when all ranks have written it."""

    directory: Path
    parts_of: PartsOf
    attempt: int
    step: int
    positions: Positions
    nonfinite: tuple[str, ...]
    forced: bool  # the run was held when it was written; it may be by the time of hashing


class Saver:
    """Commits one checkpoint after the other. One per rank; only rank 0's has a thread.

    Arguments:
        gate: the deletion gate, on rank 0; None: no server, so nobody can hold anything.
    """

    def __init__(self, watch: "Watch", gate: DeletionGate | None) -> None:
        self._watch = watch
        self.gate = gate
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def save(self, directory: Path, parts_of: PartsOf, *, rng: bool = False) -> None:
        """Commit what lies in `directory`. Call on every rank, once all its files are written.

        Args:
            parts_of: names the files of each part by paths relative to the directory; called on rank 0.
            rng: also keep each rank's random numbers, where the trainer does not.
        """
        watch = self._watch
        watch.saved(directory)
        rank = watch.place.rank
        loader = watch.parts.loader
        if loader is not None and (rank == 0 or not restore_check.is_shared(loader)):
            checkpoints.write_document(
                directory, f"loader-{rank:05d}.json", restore_check.loader_state(loader)
            )
        if rng:
            halt_snapshot.write_rng(directory, rank)
        bad = reduce(StateAfter.measure(watch.norms, watch.optimizer, watch.number, None).bad.double())
        nonfinite = ("weights or moments",) if bad.item() else ()
        if watch.place.world_size > 1:
            dist.barrier()
        if rank == 0:
            place = watch.place
            saved = _Saved(
                directory,
                parts_of,
                attempt=place.attempt,
                step=watch.number,
                positions=watch.positions(),
                nonfinite=nonfinite,
                forced=checkpoints.is_held(directory),
            )
            self._later(lambda: self._commit(saved))

    def remove(self, directories: Remove, *, then: Callable[[Path], None] = lambda _: None) -> None:
        """Delete checkpoints, each only if the deletion gate allows it, after the saves before this call.

        Args:
            directories: says which, when it is their turn.
            then: called for each that was deleted.
        """

        def work() -> None:
            for directory in directories():
                deleted, why = checkpoints.delete(directory, self.gate)
                if deleted:
                    then(directory)
                    self._watch.post(
                        [
                            {
                                "type": "checkpoint.deleted",
                                "step": self._watch.number,
                                "data": {"uri": directory.resolve().as_uri(), "reason": why},
                            }
                        ]
                    )
                else:
                    self._watch.say(f"{directory}: {why}")

        if self._watch.place.rank == 0:
            self._later(work)

    def drain(self, timeout_s: float = _DRAIN_S) -> bool:
        """Wait until everything is done; False when time ran out."""
        end_s = time.monotonic() + timeout_s
        while self._work.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.02)
        return not self._work.unfinished_tasks

    def _later(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="andon-saver", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception as error:  # a save that goes wrong must not end those after it, nor the training
                self._watch.say(f"checkpoint: {error}")
            finally:
                self._work.task_done()

    def _commit(self, saved: _Saved) -> None:
        watch, directory = self._watch, saved.directory
        parts = {part: list(paths) for part, paths in saved.parts_of(directory).items() if paths}
        for part, start in OURS.items():
            mine = [file.name for file in sorted(directory.glob(f"{start}[0-9]*"))]
            if mine:
                parts[part] = sorted({*parts.get(part, ()), *mine})
        manifest = checkpoints.commit(
            directory,
            run=watch.place.run,
            attempt=saved.attempt,
            step=saved.step,
            positions=saved.positions,
            parts=parts,
            nonfinite=saved.nonfinite,
            forced=saved.forced,
        )
        event = manifest.event(directory)
        if not manifest.quarantined:
            try:
                promote(directory)
                event["data"]["verified"] = True
            except CheckpointError as error:
                watch.say(str(error))
                event["data"] |= {"verified": False, "reason": str(error)[:500]}
        watch.post([event])


def files_of(directory: Path, kinds: Sequence[tuple[str, str]], *, rest: str) -> dict[str, list[str]]:
    """Return the files under a checkpoint by part.

    Args:
        kinds: (pattern of the relative path, part), the first that matches counts.
        rest: the part of what matches none.
    """
    found: dict[str, list[str]] = {}
    own = {checkpoints.MANIFEST, "verified.json", "bad.json"}
    for path in sorted(one for one in directory.rglob("*") if one.is_file()):
        if path.name in own or (path.name.startswith((".", *OURS.values())) and path.parent == directory):
            continue
        relative = path.relative_to(directory)
        part = next((part for pattern, part in kinds if relative.match(pattern)), rest)
        found.setdefault(part, []).append(relative.as_posix())
    return found


def loader_state(directory: Path) -> LoaderState | None:
    """Return the state of the data's order in a checkpoint, None where it has none.

    Raises:
        andon.checkpoints.CheckpointError: it cannot be read.
    """
    path = directory / "loader-00000.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=LoaderState)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: no state of a data order ({error})") from error
