"""Loops as people write them, with one fault in each: run by torchrun, every rank writes what it saw.

A kind is played in three acts in its own directory: two nonfinite steps in a row end it (93), a second
start without a permit is refused (93), a third with one goes on. The trainers that save by themselves go back
to the checkpoint of step 2 and skip the samples of the bad steps, which stay as bad as they were.
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
from tests.andon.integrations.shape import BAD_RANK, BAD_STEPS, LAST, PER_STEP, WIDTH


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
        last = {"bad": False, "steps": 3} if run is plain else {"steps": LAST}
        third = run(kind, here, options, rank=rank, permit=server["permit"], **last)
        dist.barrier()
        seen[kind] = {"first": first[:3], "refused": refused[:2], "third": third[:2], "read": third[3:]}
    return seen


# --- trainers that own their loop


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples, four a step in their order. Those of the bad steps are spoilt where the bad rank reads
    them."""

    def __init__(self, bad, micro_batch):
        self.bad, self.micro_batch = bad, micro_batch
        self.read = []

    def __len__(self):
        return 8 * PER_STEP

    def __getitem__(self, index):
        self.read.append(index)
        ids = torch.randint(0, 50, (WIDTH,), generator=torch.Generator().manual_seed(index))
        spoilt = (
            self.bad
            and index // PER_STEP + 1 in BAD_STEPS
            and index // self.micro_batch % dist.get_world_size() == BAD_RANK
        )
        return {"input_ids": ids, "x": ids.float() * (torch.nan if spoilt else 0.02)}


def huggingface(kind, folder, server, *, rank, bad=True, steps=8, permit=None):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from andon.integrations.huggingface import AndonCallback

    class Loss(nn.Module):  # type: ignore[misc]
        """What a Trainer trains: a module that returns its own loss."""

        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x, input_ids):
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
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    rows = Rows(bad, 1)
    trainer = Trainer(Loss(), arguments, train_dataset=rows, callbacks=[keep])
    andon = AndonCallback(trainer, directory=folder, permit=permit, interval_steps=2, **server)
    trainer.add_callback(andon)
    code = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train(resume_from_checkpoint=andon.checkpoint() if permit else None)
    except SystemExit as left:
        code = left.code
    untouched = keep.good is not None and same(
        keep.good, snapshot(trainer.model, trainer.optimizer.optimizer)
    )
    return code, keep.last, untouched, rows.read


def lightning(kind, folder, server, *, rank, bad=True, steps=8, permit=None):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from andon.integrations.lightning import AndonCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        good, last = None, 0

        def __init__(self):
            super().__init__()
            self.body = network()

        def training_step(self, batch, batch_idx):
            self.last = self.trainer.global_step + 1
            if self.last == BAD_STEPS[0]:
                self.good = snapshot(self.body, self.optimizer)
            return self.body(batch["x"]).square().mean()

        def configure_optimizers(self):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return self.optimizer

    model = Module()
    andon = AndonCallback(directory=folder, permit=permit, interval_steps=2, vocabulary=50, **server)
    kept = ModelCheckpoint(dirpath=folder / "saved", filename="{step}", every_n_train_steps=2, save_top_k=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_steps=steps,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[andon, kept],
    )
    rows = Rows(bad, 2)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    code = None
    try:
        trainer.fit(model, loader, ckpt_path=andon.checkpoint() if permit else None)
    except SystemExit as left:
        code = left.code
    return (
        code,
        model.last,
        model.good is not None and same(model.good, snapshot(model.body, model.optimizer)),
        rows.read,
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
