"""One of the four ranks of a run that ends with a process: trains until a collective fails.

python -m campaign.stopping RANK FOLDER CASE
"""

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from campaign.broken import stopped, written
from campaign.cases import FIRST
from campaign.injecting import Injector
from campaign.playing import seed
from campaign.posts import Posts
from campaign.rank import join
from campaign.trainer import Trainer

COLLECTIVE_S = 8.0
STALLED_S = 3.0
LINGER_S = 1.0  # a job is torn down by its launcher, not by the first rank that fails


class Steps(Posts):
    """Keeps on disk which steps were posted, as the server would have them."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def send_events(self, events: list[dict[str, Any]]) -> None:
        """Note the steps."""
        with self._file.open("a") as file:
            file.writelines(f"{event['step']}\n" for event in events if event["type"] == "step")


class Recorder:
    """Writes the flight recorder's dump from a thread of its own while a step makes no progress.

    NCCL's monitor does the same. Once a collective of gloo has timed out, its dump calls it retired.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._at: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def progressed(self) -> None:
        """A step begins."""
        self._at = time.monotonic()

    def _watch(self) -> None:
        written_at: float | None = None
        while True:
            time.sleep(0.2)
            began = self._at
            if began is not None and began != written_at and time.monotonic() - began > STALLED_S:
                written(self._folder, self._rank, torch._C._distributed_c10d._dump_fr_trace_json())
                written_at = began


def main() -> int:
    """Train; return the exit code."""
    rank, folder, name = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    case = next(one for one in stopped() if one.name == name)

    try:
        around = join(rank, folder, COLLECTIVE_S if case.place == "stuck" else 60.0)
        seed(name, rank)
        trainer = Trainer(case.topology, around, injector=Injector(case, rank))
        posts = Steps(folder / "steps.txt") if rank == 0 else None
        trainer.observe(folder / "run", posts, case=case, attempt=1, first_step=FIRST + 1)
        recorder = Recorder(folder, rank)
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        return 2
    try:
        for step in range(FIRST + 1, case.until + 1):
            recorder.progressed()
            trainer.train(step)
    except RuntimeError as error:
        (folder / f"log-{rank}.txt").write_text(str(error))
        time.sleep(LINGER_S)
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
