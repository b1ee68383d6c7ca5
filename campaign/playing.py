"""One case on one rank: train from the same start, put the fault in, and note what was done."""

import socket
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from andon import hold
from andon.client import Client
from andon.signing import new_secret
from campaign import restoring
from campaign.cases import FIRST, HISTORY, Case
from campaign.injecting import Injector
from campaign.posts import Posts
from campaign.reading import History, read
from campaign.trainer import Start, Surroundings, Trainer

LEARNING_STEPS = 30
LEARNING_LR = 1e-2


def prepare(topology: str, around: Surroundings, folder: Path) -> tuple[Start, History | None]:
    """Train until the loss is level, then record the healthy steps that every case's detectors know.

    Returns:
        The start, and on rank 0 what was posted.
    """
    seed(topology, around.rank)
    clean = Case("history", topology, "clean", "none")
    learner = Trainer(topology, around, lr=LEARNING_LR)
    learner.observe(folder / "learning", None, case=clean, attempt=1, first_step=1)
    for step in range(1, LEARNING_STEPS + 1):
        learner.train(step)
    learnt = learner.take({})
    trainer = Trainer(topology, around, start=learnt)
    posts = Posts() if around.rank == 0 else None
    trainer.observe(folder / "history", posts, case=clean, attempt=1, first_step=FIRST - HISTORY + 1)
    for step in range(FIRST - HISTORY + 1, FIRST + 1):
        trainer.train(step)
    trainer.watch.flush()
    start = trainer.take(trainer.watch.decider.state())
    return start, History(topology, posts) if posts is not None else None


def play(
    case: Case, attempt: int, around: Surroundings, start: Start, history: History | None, folder: Path
) -> dict[str, Any]:
    """Play a case and return, ready for JSON, what this rank did and what the product says of it."""
    seed(case.name, around.rank)
    began = time.perf_counter()
    if case.place in restoring.PLACES:
        return restoring.play(case, attempt, around, start, folder)
    trainer = Trainer(case.topology, around, start=start, injector=Injector(case, around.rank))
    trainer.read_on(case.name)
    posts = Posts() if around.rank == 0 else None
    options: dict[str, Any] = {}
    if case.place == "scale not restored":
        options["previous_scale"] = trainer.scaler.get_scale() / 16
    sender: Any = posts
    if case.kind == "server dead" and posts is not None:
        sender = Client(unheard(), "campaign", new_secret(), spool_dir=folder / "spool")
    trainer.observe(folder, sender, case=case, attempt=attempt, first_step=FIRST + 1, **options)
    decider = trainer.watch.decider
    decider.load({"skips": decider.skips.state(), "spike": start.decider["spike"]})
    code, changed = None, []
    try:
        for step in range(FIRST + 1, case.until + 1):
            if case.place == "boundary" and step == case.step:
                trainer.watch.boundary("mixture change")
            before = trainer.state()
            try:
                trainer.train(step)
            finally:
                if not same(before, trainer.state()):
                    changed.append(step)
        trainer.watch.flush()
    except SystemExit as left:
        code = left.code
    result: dict[str, Any] = {
        "acts": trainer.watch.acts,
        "code": code,
        "changed": changed,
        "finite": all(bool(torch.isfinite(one).all()) for one in trainer.state()),
        "repeats": [steps for _, steps in trainer.watch.ring.duplicates()],
    }
    if around.rank == 0:
        result["held"] = hold.read(folder) is not None
    if sender is not posts:
        sender.close(timeout_s=0.5)
    elif posts is not None and history is not None:
        result["said"] = read(posts, history)
    result["seconds"] = round(time.perf_counter() - began, 3)
    return result


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Whether not one bit changed, NaN included."""
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(before, after, strict=True)
    )


def unheard() -> str:
    """Return the address of a port that nobody listens on."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def seed(name: str, rank: int) -> None:
    """Set the random numbers of a case: the same in every run of the campaign."""
    torch.manual_seed(zlib.crc32(name.encode()) + rank)
