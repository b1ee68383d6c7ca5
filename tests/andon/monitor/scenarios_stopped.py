"""Scenarios: stopping, waiting, and restoring."""

import json
import os
import shutil
import socket
import textwrap
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from andon import halt_snapshot, hold, restore_check
from andon.batch_ring import BatchFacts
from andon.client import Client
from andon.loader import Loader
from andon.restore_check import Parts
from andon.signing import new_secret
from andon.spool_slots import open_slot
from andon.watch import watch
from andon.wire import decode_events
from tests.andon.listener import Listener
from tests.andon.monitor.parts import (
    adamw,
    batch,
    ddp,
    fsdp2,
    hsdp_mesh,
    loss_of,
    net,
    same,
    snapshot,
    watched_by,
)

INF, NAN = float("inf"), float("nan")
SECRET = new_secret()


def halted(rank, folder):
    """Two nonfinite steps in a row: all ranks stop before that update; the snapshot is the state before."""
    results = {}
    for kind, wrap in (("ddp", ddp), ("fsdp2", fsdp2)):
        inner = net()
        model = wrap(inner)
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done)
        loader = Loader(size=1000, seed=3, global_batch=16, rank=rank, world_size=4)
        root = folder / kind
        root.mkdir(parents=True, exist_ok=True)
        made, sender = watched_by(rank, model, optimizer, root, schedule=schedule, loader=loader)
        code, before, last = None, None, 0
        try:
            for step in range(1, 9):
                positions = loader.next_batch()
                inner.spoil.backward_value = INF if step >= 5 and rank == 3 else None
                loss, tokens = loss_of(model, batch(rank, step))
                loss.backward()
                before = snapshot(model, optimizer)
                last = step
                names = tuple(f"sample-{p}" for p in positions)
                made.step(
                    loss, tokens, batch=BatchFacts(positions=tuple(positions), names=names, lengths=(8,) * 4)
                )
        except SystemExit as left:
            code = left.code
        untouched = same(before, snapshot(model, optimizer))
        dist.barrier()
        where = root / "attempt-1" / "quarantine" / "step-00000005"
        ring = json.loads((where / f"batches-{rank:05d}.json").read_text())
        directory_held = hold.read(root)
        refused = None
        try:
            watch(model, optimizer, directory=root)
        except SystemExit as left:
            refused = left.code
        # Into fresh objects: everything must come back as it was.
        fresh_model = wrap(net())
        fresh = adamw(fresh_model)
        fresh_schedule = torch.optim.lr_scheduler.LambdaLR(fresh, lambda done: 0.9**done)
        fresh_loader = Loader(size=1000, seed=3, global_batch=16, rank=rank, world_size=4)
        lines = halt_snapshot.read(where, Parts(fresh_model, fresh, fresh_schedule, None, fresh_loader))
        results[kind] = {
            "code": code,
            "stopped_at": last,
            "untouched": untouched,
            "ring": [[one["step"], one["samples"][0]] for one in ring["steps"]],
            "held": directory_held,
            "refused": refused,
            "lines": [[line.part, line.verdict] for line in lines],
            "same_state": same(before, snapshot(fresh_model, fresh)),
            "loader": fresh_loader.position,
        }
        if sender is not None:
            committed = sender.of("checkpoint.committed")[-1]
            results[kind]["snapshot"] = {
                key: committed.data[key] for key in ("step", "quarantined", "finite", "parts", "positions")
            }
            results[kind]["acks"] = sorted(
                [e.data["state"], r] for e in sender.of("directive.ack") for r in e.data["ranks"]
            )
            results[kind]["actions"] = [[e.step, e.data["action"]] for e in sender.of("action")]
    return results


def server_dead(rank, folder):
    """Bad steps with nobody to ask: 3 alone, then 5 and 6. What they would have done is never applied."""
    results = {}
    kinds: dict[str, tuple[Any, str, dict[str, bool]]] = {
        "ddp, loss": (ddp, "forward_value", {}),
        "ddp, gradient": (ddp, "backward_value", {}),
        "fsdp2, gradient": (fsdp2, "backward_value", {}),
        "ddp, gradient, on the device": (ddp, "backward_value", {"fused": True}),
    }
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for kind, (wrap, place, options) in kinds.items():
        inner = net()
        model = wrap(inner)
        optimizer = adamw(model, **options)
        root = folder / kind
        made = watch(
            model,
            optimizer,
            directory=root,
            run="dead",
            url=url,
            secret=SECRET,
            spool_dir=root / "spool",
            deferred=bool(options),
        )
        code, step, touched, idle = None, 0, [], []
        try:
            for step in range(1, 12):
                is_bad = step == 3 or step >= 5
                setattr(inner.spoil, place, NAN if is_bad and rank == 3 else None)
                loss, tokens = loss_of(model, batch(rank, step))
                loss.backward()
                before = snapshot(model, optimizer)
                try:
                    made.step(loss, tokens)
                finally:
                    (touched if is_bad else idle).append(same(before, snapshot(model, optimizer)))
        except SystemExit as left:
            code = left.code
        finite = all(bool(torch.isfinite(one).all()) for one in snapshot(model, optimizer))
        spooled = []
        if isinstance(made.sender, Client):
            made.sender.close(timeout_s=1.0)
            spool = open_slot(next((root / "spool").iterdir()))
            while (found := spool.peek()) is not None:
                post = found[0]
                if post.content_type == "application/json" and post.path.endswith("/events"):
                    body = zlib.decompress(post.body, 31) if post.encoding else post.body
                    for _, event in decode_events(body, "application/json").events:
                        spooled.append([event.type, event.step, event.data.get("action", "")])
                spool.done(found[1])
            spool.close()
        results[kind] = {
            "code": code,
            "stopped_at": step,
            "bad_left_all_untouched": all(touched),
            "bad": len(touched),
            "good_trained": not any(idle[1:]),
            "finite": finite,
            "actions": [one[1:] for one in spooled if one[0] == "action"],
            "exited": sum(one[0] == "directive.ack" for one in spooled),
        }
        dist.barrier()
    return results


def restores(rank, folder):
    """Digests at the save, compared after the load: equal, then with one part wrong at a time."""
    root = Path(folder)
    inner = net()
    model = ddp(inner)
    optimizer = adamw(model)
    loader = Loader(size=1000, seed=3, global_batch=16, rank=rank, world_size=4)
    made, sender = watched_by(rank, model, optimizer, root, loader=loader, guard="off")
    for step in range(1, 3):
        loader.next_batch()
        loss, tokens = loss_of(model, batch(rank, step))
        loss.backward()
        made.step(loss, tokens)
    made.saved(root / "save")
    dist.barrier()
    results: dict[str, Any] = {"equal": [[line.part, line.verdict] for line in made.restored(root / "save")]}
    kept = torch.get_rng_state()
    if rank == 2:
        torch.rand(1)
    results["rng"] = [[line.part, line.verdict] for line in made.restored(root / "save")]
    torch.set_rng_state(kept)
    moment = optimizer.state[inner.first.weight]["exp_avg_sq"]
    kept_moment = moment.clone()
    with torch.no_grad():
        moment[0, 0] += 1
    results["moments"] = [
        [line.part, line.verdict, line.detail]
        for line in made.restored(root / "save")
        if line.verdict != "equal"
    ]
    with torch.no_grad():
        moment.copy_(kept_moment)
    # As if eight ranks had saved: what belongs to a rank cannot be compared, everything else can.
    shutil.copytree(root / "save", root / f"eight-{rank}")
    for path in (root / f"eight-{rank}").glob("andon-parts-*.json"):
        path.write_text(path.read_text().replace('"world_size": 4', '"world_size": 8'))
    eight = restore_check.check(root / f"eight-{rank}", made.parts)
    results["eight"] = [[line.part, line.verdict, line.document()["equal"]] for line in eight]
    results["absent"] = [line.verdict for line in restore_check.check(root / "nowhere", made.parts)]
    made.guard = "skip"
    loader.next_batch()
    code = None
    try:
        made.restored(root / "save")
    except SystemExit as left:
        code = left.code
    results["held"] = code
    if sender is not None:
        results["reports"] = [
            [[p["part"], p["rank"]] for p in e.data["parts"] if p["equal"] is False]
            for e in sender.of("restore.report")
        ]
        results["reason"] = hold.read(root)["reason"]
    # What FSDP2 splits over four ranks has the checksums that DDP has whole.
    whole = restore_check.digests(Parts(ddp(net())))["weights"]
    split = restore_check.digests(Parts(fsdp2(net())))["weights"]
    hybrid = restore_check.digests(Parts(fsdp2(net(), hsdp_mesh())))["weights"]
    results["layout"] = whole == split == hybrid and len(whole) == 4
    return results


def waits_in_place(rank, folder):
    """The server holds the run; all ranks wait, and go on from memory by permit as if nothing had been."""
    folder.mkdir(exist_ok=True)
    listener = told = None
    if rank == 0:
        listener = Listener(folder, hold_when=lambda e: e.type == "step" and e.step == 2, hold_s=60.0)
        told = [listener.url, listener.run, listener.secret, listener.trusted]
    shared = [told]
    dist.broadcast_object_list(shared, src=0)
    url, run, secret, trusted = shared[0]
    inner, alone = net(), net()
    model, other = ddp(inner), ddp(alone)
    optimizer, plainly = adamw(model), adamw(other)
    made = watch(
        model,
        optimizer,
        directory=folder / "checkpoints",
        run=run,
        url=url,
        secret=secret,
        trusted=trusted,
        spool_dir=str(folder / "spool"),
        interval_steps=1000,
        launch={"git": {"revision": "abc"}},
    )

    def permit():
        while [e.data["state"] for e in listener.of("directive.ack")].count("held") == 0:
            time.sleep(0.05)
        listener.resume_in_place()

    if listener is not None:
        threading.Thread(target=permit, daemon=True).start()
    held_at, after = None, 0
    for step in range(1, 400):
        loss, tokens = loss_of(model, batch(rank, step))
        loss.backward()
        made.step(loss, tokens)
        loss_of(other, batch(rank, step))[0].backward()
        plainly.step()
        plainly.zero_grad()
        time.sleep(0.02)
        if made.place.attempt == 2:
            held_at = held_at or step
            after += 1
        if after == 3:
            break
    made.close()
    result = {
        "held_at": held_at,
        "attempt": made.place.attempt,
        "as_if_never_held": same(snapshot(model, optimizer), snapshot(other, plainly)),
        "file": hold.read(folder / "checkpoints"),
    }
    dist.barrier()
    if listener is not None:
        result["acks"] = sorted(
            {(e.data["state"], r) for e in listener.of("directive.ack") for r in e.data["ranks"]}
        )
        result["launched"] = [[e.attempt, e.data.get("permit")] for e in listener.of("attempt.launched")]
        first = listener.of("attempt.launched")[0].data
        result["said"] = [
            first[key] for key in ("world_size", "groups", "precision", "parallelism", "layers", "git")
        ]
        result["ranks"] = [node["ranks"] for node in first["nodes"]]
        result["exited"] = [[e.attempt, e.data["exit_code"]] for e in listener.of("attempt.exited")]
        result["second"] = sorted(e.step for e in listener.of("step") if e.attempt == 2)
        listener.close()
    return result


def documented(rank, folder):
    """The lines of docs/trainer.md, as they stand there; one rank meets a NaN in step 3."""
    page = (Path(__file__).parents[3] / "docs" / "trainer.md").read_text()
    block = page[page.index("    from andon.watch import watch") :]
    block = textwrap.dedent(block[: block.index("\nServer, run and secret")])
    model = ddp(net())
    batches = [batch(rank, step) for step in range(1, 6)]
    if rank == 3:
        batches[2][0, 0] = NAN
    names = {"model": model, "optimizer": adamw(model), "loader": batches}
    before = Path.cwd()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        exec(block, names)
    finally:
        os.chdir(before)
    finite = all(torch.isfinite(p).all().item() for p in model.parameters())
    return [names["monitor"].number, names["monitor"].optimizer_step, finite]


ALL = {
    "halted": halted,
    "server dead": server_dead,
    "restores": restores,
    "waits in place": waits_in_place,
    "documented": documented,
}
