"""Wrong restores: everything is put back as it was saved but one part, and the check must name it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from andon.local_gradients import local_of
from andon.monitor_rerun import RandomState
from campaign.cases import FIRST, Case
from campaign.posts import Posts
from campaign.trainer import Start, Surroundings, Trainer

TRAINED = 2
PLACES = frozenset({"weights", "moments", "schedule", "loader", "rng", "scale", "nothing"})


def play(case: Case, attempt: int, around: Surroundings, start: Start, folder: Path) -> dict[str, Any]:
    """Save after two steps, restore into new objects with one part wrong, and let the monitor check it."""
    saved = Trainer(case.topology, around, start=start)
    saved.read_on(case.name)
    saved.observe(folder, None, case=case, attempt=attempt, first_step=FIRST + 1)
    for step in range(FIRST + 1, FIRST + TRAINED + 1):
        saved.train(step)
    directory = folder / "save"
    saved.watch.saved(directory)
    random, kept = RandomState.take(), saved.take({})
    schedule = saved.schedule.state_dict()
    scaler = saved.scaler.state_dict() if saved.scaler is not None else None
    dist.barrier()

    restored = Trainer(case.topology, around, start=kept)
    restored.schedule.load_state_dict(schedule)
    if restored.scaler is not None:
        restored.scaler.load_state_dict(scaler)
    random.put()
    if case.rank is None or case.rank == around.rank:
        _spoil(case, restored)
    posts = Posts() if around.rank == 0 else None
    restored.observe(folder, posts, case=case, attempt=attempt, first_step=FIRST + TRAINED + 1)
    code = None
    before = restored.state()
    try:
        restored.watch.restored(directory)
    except SystemExit as left:
        code = left.code
    untouched = all(torch.equal(a, b) for a, b in zip(before, restored.state(), strict=True))
    result: dict[str, Any] = {"acts": restored.watch.acts, "code": code, "changed": [], "finite": untouched}
    if posts is not None:
        parts = [part for event in posts.of("restore.report") for part in event.data["parts"]]
        wrong = [[part["part"], part["rank"], part["detail"]] for part in parts if part["equal"] is False]
        result["said"] = {"restore": wrong, "compared": sorted({part["part"] for part in parts})}
    return result


@torch.no_grad()  # type: ignore[untyped-decorator]
def _spoil(case: Case, trainer: Trainer) -> None:
    """Do what a restore that went wrong leaves behind."""
    parameters = list(trainer.net.parameters())
    parameter = parameters[case.bit % len(parameters)]
    if case.place == "weights":  # one tensor is an older one
        local_of(parameter.detach()).view(-1)[0] += 1e-3
    elif case.place == "moments":  # the optimizer began anew
        for key in ("exp_avg", "exp_avg_sq"):
            local_of(trainer.optimizer.state[parameter][key]).zero_()
    elif case.place == "schedule":
        trainer.schedule.last_epoch += 7
    elif case.place == "loader":
        trainer.loader.next_batch()
    elif case.place == "rng":
        torch.rand(1)
    elif case.place == "scale":
        state = trainer.scaler.state_dict()
        trainer.scaler.load_state_dict(state | {"scale": state["scale"] * 64})
