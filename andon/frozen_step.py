"""Where a frozen step lies: a halt snapshot, by itself or inside an exported bag. No torch here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.checkpoints import MANIFEST, CheckpointError, Manifest, read_manifest

STATE = "state"  # the folder of weights and moments; andon.halt_snapshot writes it


class NoFrozenStep(Exception):
    """A path holds no step that could be run again; the text says why."""


@dataclass(frozen=True)
class FrozenStep:
    """W(b−1) of the failing step b, as it was frozen.

    Attributes:
        directory: of the snapshot, its manifest in it.
        manifest: what it says of itself.
    """

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step that failed: the one after the last whose update was applied."""
        return self.manifest.step + 1

    @property
    def ranks(self) -> list[int]:
        """The ranks whose batches are kept, ascending."""
        return sorted(int(path.stem.partition("-")[2]) for path in self.directory.glob("batches-*.json"))

    def batch(self, rank: int, step: int) -> dict[str, Any] | None:
        """Return what a rank read in a step (positions, samples, lengths, …), None where it is not kept."""
        path = self.directory / f"batches-{rank:05d}.json"
        if not path.exists():
            return None
        kept = json.loads(path.read_bytes())["steps"]
        return next((one for one in reversed(kept) if one["step"] == step), None)

    def other_steps(self, rank: int) -> list[int]:
        """Return the steps whose batches a rank kept, but the failing one; the newest last."""
        path = self.directory / f"batches-{rank:05d}.json"
        kept = json.loads(path.read_bytes())["steps"] if path.exists() else []
        return sorted({one["step"] for one in kept} - {self.step})


def find(path: Path) -> FrozenStep:
    """Return the frozen step at a path: a snapshot's directory, or the only one below it (a bag).

    Raises:
        NoFrozenStep: there is none, more than one, or its manifest cannot be read.
    """
    if not path.is_dir():
        raise NoFrozenStep(f"{path}: no such directory; unpack a .zip bag first")
    found = sorted(one.parent for one in path.rglob(MANIFEST) if (one.parent / STATE).is_dir())
    if not found:
        raise NoFrozenStep(
            f"{path}: holds no halt snapshot ({MANIFEST} beside {STATE}/); "
            "without one, run the launch's own command from the last good checkpoint"
        )
    if len(found) > 1:
        names = ", ".join(str(one.relative_to(path)) for one in found[:4])
        raise NoFrozenStep(f"{path}: holds {len(found)} halt snapshots, name one: {names}")
    try:
        return FrozenStep(found[0], read_manifest(found[0]))
    except (CheckpointError, ValueError) as error:
        raise NoFrozenStep(str(error)) from error
