"""One of the four ranks: plays every case it is given, one after another, and writes down what it saw.

python -m campaign.rank RANK FOLDER     # FOLDER/cases.json: the names
"""

import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from andon.watch_launch import place_here
from campaign.cases import RANKS
from campaign.playing import play, prepare
from campaign.table import all_cases
from campaign.trainer import Surroundings

TIMEOUT_S = 60.0


def join(rank: int, folder: Path, timeout_s: float = TIMEOUT_S) -> Surroundings:
    """Meet the other ranks."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.pop("ANDON_MODE", None)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=timeout_s)
    )
    place, _ = place_here("campaign", 1)
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    return Surroundings(rank, place, (first, second))


def main() -> int:
    """Play the cases; return the exit code."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    known = {case.name: case for case in all_cases()}
    cases = [known[name] for name in json.loads((folder / "cases.json").read_text())]
    at = folder / f"at-{rank}.txt"
    try:
        around = join(rank, folder)
        with (folder / f"rank-{rank}.jsonl").open("w") as lines:
            for topology in dict.fromkeys(case.topology for case in cases):
                at.write_text(f"rank {rank}: before {topology}")
                start, history = prepare(topology, around, folder / topology)
                for number, case in enumerate(cases):
                    if case.topology != topology:
                        continue
                    at.write_text(f"rank {rank}: {case.name}")
                    # An attempt of its own: the keys of its hold are no other case's.
                    result = play(case, number + 2, around, start, history, folder / f"case-{number}")
                    lines.write(json.dumps({"case": case.name, **result}) + "\n")
                    lines.flush()
                    dist.barrier()
        return 0
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(f"{at.read_text()}\n{traceback.format_exc()}")
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads outlive their group in the interpreter's shutdown
