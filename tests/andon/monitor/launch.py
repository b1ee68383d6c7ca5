"""One of the four ranks: plays every scenario in turn and writes down what it saw."""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path


def rank_main(rank, world_size, folder):
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.pop("ANDON_MODE", None)
    import warnings

    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    from tests.andon.monitor import scenarios

    torch.set_num_threads(1)
    root = Path(folder)
    store = dist.FileStore(str(root / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    results, code = {}, 0
    only = [name for name in os.environ.get("SCENARIOS", "").split(";") if name]
    try:
        for name, play in scenarios.ALL.items():
            if only and name not in only:
                continue
            (root / f"at-{rank}.txt").write_text(f"rank {rank}: {name}")
            torch.manual_seed(1000 + rank)
            results[name] = play(rank, root / name)
            dist.barrier()
        (root / f"rank-{rank}.json").write_text(json.dumps(results))
    except BaseException:
        where = (root / f"at-{rank}.txt").read_text()
        (root / f"error-{rank}.txt").write_text(f"{where}\n{traceback.format_exc()}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads outlive their group in the interpreter's shutdown
