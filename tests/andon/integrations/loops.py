"""Loops as people write them, with one fault in each: run by torchrun, every rank writes what it saw.

A kind is played in three acts in its own directory: two nonfinite steps in a row end it (93), a second
start without a permit is refused (93), a third with one goes on.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from andon.batch_ring import BatchFacts
from andon.local_gradients import local_of
from andon.policy import HoldRules, Policy
from andon.watch import watch

BAD_STEPS, BAD_RANK = (4, 5), 1
WIDTH = 8


def snapshot(model, optimizer):
    """Return every bit of weights, moments and step counts."""
    state = [
        local_of(value).clone()
        for p in model.parameters()
        for _, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    return [local_of(p.detach()).clone() for p in model.parameters()] + state


def same(before, after):
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def wrapped(kind, model):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def plain(kind, folder, server, *, rank, bad=True, steps=8, permit=None):
    """A loop of one's own. Returns (what it left with, last step, whether nothing was applied after 3)."""
    model = wrapped(kind, network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    code, last, good = None, 0, None
    try:
        monitor = watch(model, optimizer, directory=folder, permit=permit, interval_steps=2, **server)
        for step in range(1, steps + 1):
            torch.manual_seed(100 * step + rank)
            x = torch.randn(4, WIDTH)
            if bad and rank == BAD_RANK and step in BAD_STEPS:
                x = x * torch.nan
            loss = model(x).square().mean()
            loss.backward()
            last = step
            if step == BAD_STEPS[0]:
                good = snapshot(model, optimizer)
            monitor.step(loss, tokens=len(x), batch=BatchFacts(lengths=(WIDTH,) * 4))
        monitor.close()
    except SystemExit as left:
        code = left.code
    return code, last, good is not None and same(good, snapshot(model, optimizer))


def play(kinds, servers, folder, rank):
    """Play every kind; returns what this rank saw of each."""
    seen = {}
    for kind in kinds:
        server = servers[kind]
        options = {"url": server["url"], "run": server["run"], "secret": server["secret"]}
        options |= {"trusted": server["trusted"], "policy": Policy(hold=HoldRules(deadline_s=30.0))}
        options["spool_dir"] = str(folder / f"spool-{kind}-{rank}")
        here = folder / kind
        run = {"hf": huggingface, "lightning": lightning}.get(kind) or plain
        first = run(kind, here, options, rank=rank)
        refused = run(kind, here, options, rank=rank, bad=False)
        dist.barrier()
        third = run(kind, here, options, rank=rank, bad=False, steps=3, permit=server["permit"])
        dist.barrier()
        seen[kind] = {"first": first, "refused": refused[:2], "third": third[:2]}
    return seen


# --- trainers that own their loop


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples, dealt to the ranks in turn, two a step and rank; those of the bad steps are spoilt on one."""

    def __init__(self, bad, world_size):
        self.bad, self.world_size = bad, world_size

    def __len__(self):
        return 2 * 8 * self.world_size

    def __getitem__(self, index):
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        step = index // (2 * self.world_size) + 1
        spoilt = self.bad and step in BAD_STEPS and index % self.world_size == BAD_RANK
        return {"x": x * torch.nan if spoilt else x}


def huggingface(kind, folder, server, *, rank, bad=True, steps=8, permit=None):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from andon.integrations.huggingface import AndonCallback

    class Loss(nn.Module):  # type: ignore[misc]
        """What a Trainer trains: a module that returns its own loss."""

        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            return {"loss": self.body(x).square().mean()}

    class Keep(TrainerCallback):  # type: ignore[misc]
        """Remembers weights before the first bad update, and the last step begun."""

        good, last = None, 0

        def on_step_begin(self, args, state, control, **_):
            self.last = state.global_step + 1
            if self.last == BAD_STEPS[0]:
                self.good = snapshot(trainer.model, trainer.optimizer.optimizer)

    keep = Keep()
    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    trainer = Trainer(Loss(), arguments, train_dataset=Rows(bad, dist.get_world_size()), callbacks=[keep])
    trainer.add_callback(AndonCallback(trainer, directory=folder, permit=permit, interval_steps=2, **server))
    code = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()
    except SystemExit as left:
        code = left.code
    untouched = keep.good is not None and same(
        keep.good, snapshot(trainer.model, trainer.optimizer.optimizer)
    )
    return code, keep.last, untouched


def lightning(kind, folder, server, *, rank, bad=True, steps=8, permit=None):
    import lightning.pytorch as pl

    from andon.integrations.lightning import AndonCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        good, last = None, 0

        def __init__(self):
            super().__init__()
            self.body = network()

        def training_step(self, batch, batch_idx):
            self.last = batch_idx + 1
            if self.last == BAD_STEPS[0]:
                self.good = snapshot(self.body, self.optimizer)
            return self.body(batch["x"]).square().mean()

        def configure_optimizers(self):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return self.optimizer

    model = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_steps=steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[AndonCallback(directory=folder, permit=permit, interval_steps=2, **server)],
    )
    rows = Rows(bad, dist.get_world_size())
    loader = torch.utils.data.DataLoader(
        rows, batch_size=2, sampler=torch.utils.data.DistributedSampler(rows, shuffle=False)
    )
    code = None
    try:
        trainer.fit(model, loader)
    except SystemExit as left:
        code = left.code
    return (
        code,
        model.last,
        model.good is not None and same(model.good, snapshot(model.body, model.optimizer)),
    )


def main():
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plan = json.loads(Path(os.environ["LOOPS_PLAN"]).read_text())
    folder = Path(plan["folder"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen = play(plan["kinds"], plan["servers"], folder, rank)
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(93 if plan.get("leave") else 0)


if __name__ == "__main__":
    main()
