"""Ranks that are killed or get stuck: a launch each, looked at from outside the trainer.

Who is gone is told by the node's watch over processes; who never came to the collective by the flight
recorder of the others. The step is the one after the last that was posted.
"""

import json
import time
from pathlib import Path
from typing import Any

from andon.agent.watch_ranks import Ranks
from andon.diagnose.gather import collectives
from andon.diagnose.record import Launch, Posted, Record
from andon.readers import flight_recorder
from campaign import launching
from campaign.cases import FIRST, RANKS, TOPOLOGIES, Case, Expect

START_S, STOP_S = 60.0, 40.0
LOOK_S = 0.05


def stopped() -> list[Case]:
    """Return the runs that end with a process."""
    found = []
    for number, topology in enumerate(TOPOLOGIES):
        for how in ("killed", "stuck"):
            rank, step = (number + (how == "stuck")) % RANKS, FIRST + 3 + number
            expect = Expect("outside", step, step, (rank,))
            name = f"{topology}: rank {rank} is {how}"
            found.append(Case(name, topology, f"{how} rank", how, rank, step, step + 3, expect=expect))
    return found


def play(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Launch four ranks that train until one ends, and return what was seen, in the form of the other cases.

    Raises:
        launching.LaunchError: the ranks never trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = f"campaign-{case.topology}-{case.place}"
    environment = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": str(RANKS), "ANDON_RUN": run}
    processes = launching.start("campaign.stopping", folder, case.name, environment=environment)
    watched, gone = Ranks(run), list[int]()
    try:
        until = time.monotonic() + START_S + STOP_S
        alive: set[int] = set()
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            for event in watched.look():
                alive |= set(event.get("ranks", ()))
                gone += [one["rank"] for one in event["data"].get("gone", ()) if not gone]
            waited = len(list(folder.glob("nccl_trace_rank_*"))) == RANKS
            if waited or sum(process.poll() is None for process in processes) <= 1:
                break  # the stuck one would stay for ever
            time.sleep(LOOK_S)
    finally:
        launching.end(processes)
    if alive != set(range(RANKS)):
        errors = "\n".join(path.read_text() for path in folder.glob("error-*.txt"))
        raise launching.LaunchError(f"{case.name}: only ranks {sorted(alive)} came up\n{errors}")
    facts = _facts(folder)
    absent = [rank for rank in range(RANKS) if f"rank {rank} never entered" in facts]
    named = gone if case.place == "killed" else absent
    said = {"step": _last_step(folder) + 1, "ranks": named, "gone": gone, "facts": facts}
    acted: dict[str, Any] = {"acts": [], "code": None, "changed": []}
    return [
        {"case": case.name, **acted, "said": said},
        *({"case": case.name, **acted} for _ in range(RANKS - 1)),
    ]


def _last_step(folder: Path) -> int:
    steps = (folder / "steps.txt").read_text().split()
    return int(steps[-1])


def _facts(folder: Path) -> str:
    """Return what the diagnosis says of the ranks' flight recorders."""
    events = []
    for path in sorted(folder.glob("nccl_trace_rank_*")):
        data = flight_recorder.read(path.read_bytes())
        rank = flight_recorder.rank_of(path)
        events.append(Posted(id=f"V-{rank}", type="flight_recorder.dump", rank=rank, data=data))
    launch = Launch(id="N-1", number=1, world_size=RANKS)
    facts = collectives.facts(Record(incident="I-1", launches=[launch], events=events))
    return "; ".join(fact.text for fact in facts)


def written(folder: Path, rank: int, dump: bytes | str) -> None:
    """Write a rank's dump under the name that NCCL's has."""
    body = dump.encode() if isinstance(dump, str) else dump
    json.loads(body)
    (folder / f".dump-{rank}").write_bytes(body)
    (folder / f".dump-{rank}").rename(folder / f"nccl_trace_rank_{rank}")
