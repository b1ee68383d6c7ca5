"""Scenarios: accumulation, scaler, running a step again, and corruption."""

import torch
import torch.distributed as dist

from andon.local_gradients import local_of
from andon.local_norms import LocalNorms
from andon.monitor_rerun import RandomState, first_nonfinite
from andon.policy import DEFAULT_MODES, Policy
from andon.replicas import compare, groups_of
from tests.andon.monitor.parts import (
    adamw,
    batch,
    ddp,
    facts,
    fsdp2,
    hsdp_mesh,
    loss_of,
    monitor,
    net,
    one_step,
    plain,
    same,
    snapshot,
    watched_by,
)

INF, NAN = float("inf"), float("nan")


def accumulation(rank, folder):
    """Three micro-batches a step; in step 2 rank 1's second one has a NaN in its batch."""
    results = {}
    for kind, wrap in (("ddp", ddp), ("fsdp2", fsdp2)):
        inner = net()
        model = wrap(inner)
        optimizer = adamw(model)
        made, sender = watched_by(rank, model, optimizer, folder / kind)
        rows = []
        for step in range(1, 4):
            micro = [batch(rank, 10 * step + k) for k in range(3)]
            if (step, rank) == (2, 1):
                micro[1][0, 0] = NAN

            def run(k, model=model, micro=micro):
                return loss_of(model, micro[k])[0] / 3

            for k in range(3):
                last = k == 2
                if kind == "fsdp2":
                    model.set_requires_gradient_sync(last)
                    run(k).backward()
                elif last:
                    run(k).backward()
                else:
                    with model.no_sync():
                        run(k).backward()
                with torch.no_grad():
                    made.micro_batch(loss_of(inner if kind == "ddp" else model, micro[k])[0], 4)
            if kind == "ddp":
                # The sum of the micro-batches is what was seen before the reduce.
                alone = net()
                alone.load_state_dict(inner.state_dict())
                for k in range(3):
                    (loss_of(alone, micro[k])[0] / 3).backward()
                expected = torch.stack([p.grad.double().norm() for p in alone.parameters()]).norm().item()
            else:
                expected = None
            agreed = made.step(rerun=run)
            rows.append(
                [plain(agreed), agreed.micro_batch, agreed.reading.bits, agreed.reading.grad_norm, expected]
            )
        made.close()
        results[kind] = {"rows": rows}
        if sender is not None:
            firsts = [e for e in sender.of("verdict") if e.data["kind"] == "first_nonfinite"]
            results[kind]["first"] = [
                [e.step, e.rank, {k: e.data[k] for k in ("module", "what", "micro_batch")}] for e in firsts
            ]
            results[kind]["cells"] = [
                [
                    int(f.step[0]),
                    f.lane[0],
                    int(f.rank[0]),
                    int(f.micro_batch[0]),
                    int(f.metrics["nonfinite"][0]),
                ]
                for f in sender.frames
                if f.stream == "layer" and f.micro_batch is not None
            ]
            results[kind]["rank_cells"] = [
                [int(f.step[0]), int(f.lane[0]), int(f.micro_batch[0])]
                for f in sender.frames
                if f.stream == "rank" and f.micro_batch is not None
            ]
    return results


def run_again(rank, _folder):
    """The first nonfinite tensor, for faults in forward, between modules, in backward, and transient."""
    results = {}
    for kind, wrap in (("ddp", ddp), ("fsdp2", fsdp2)):
        for name in ("forward", "between", "backward", "random", "transient", "none"):
            inner = net()
            model = wrap(inner)
            norms = LocalNorms(model, forward=False)
            calls = [0]
            x = batch(rank, 1)
            if name == "forward":
                inner.second.register_forward_hook(lambda m, i, out: out + NAN if rank == 2 else out)
            elif name == "between":
                inner.spoil.forward_value = INF if rank == 2 else None
            elif name == "backward":
                inner.spoil.backward_value = INF if rank == 2 else None

            drawn_first = [torch.zeros(())]

            def run(_k, model=model, x=x, name=name, calls=calls, drawn_first=drawn_first):
                calls[0] += 1
                drawn = torch.rand(())
                loss = loss_of(model, x)[0]
                if name == "random" and rank == 2 and calls[0] > 0:
                    # Nonfinite only for the number drawn the first time.
                    loss = loss + torch.where(
                        drawn == drawn_first[0], drawn.new_tensor(NAN), drawn.new_zeros(())
                    )
                if name == "transient" and rank == 2 and calls[0] == 1:
                    loss = loss + NAN
                return loss

            state = RandomState.take()
            drawn_first[0] = torch.rand(())
            state.put()
            run(0).backward()
            before = [local_of(p.grad).clone() for p in model.parameters()]
            torch.rand(5)
            now = torch.get_rng_state()
            first = first_nonfinite(norms, run, random_state=state)
            after = [local_of(p.grad) for p in model.parameters()]
            unchanged = all(
                torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, after, strict=True)
            )
            results[f"{kind} {name}"] = [
                None if first is None else first.document(),
                unchanged and torch.equal(now, torch.get_rng_state()),
            ]
    return results


def scaler(rank, folder):
    """Loss scaling: one overflow on rank 1 halves the scale everywhere, also where ranks hold shards."""
    results = {}
    for kind, wrap in (("ddp", ddp), ("fsdp2", fsdp2)):
        inner = net()
        model = wrap(inner)
        optimizer = adamw(model)
        scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        made, sender = watched_by(rank, model, optimizer, folder / kind, scaler=scale)
        rows = []
        for step in range(1, 5):
            inner.spoil.backward_value = INF if (step, rank) == (3, 1) else None
            loss, tokens = loss_of(model, batch(rank, step))
            scale.scale(loss).backward()
            before = snapshot(model, optimizer)
            agreed = made.step(loss, tokens, clip=0.1)
            rows.append(
                [
                    plain(agreed),
                    scale.get_scale(),
                    agreed.loss_scale,
                    agreed.reading.grad_norm,
                    agreed.grad_norm,
                    same(before, snapshot(model, optimizer)),
                ]
            )
        results[kind] = {"rows": rows}
        if sender is not None:
            results[kind]["scales"] = [e.data["loss_scale"] for e in sender.of("step")]
            results[kind]["skips"] = [e.step for e in sender.of("step") if e.data["skipped"]]
            results[kind]["verdicts"] = [e.data["kind"] for e in sender.of("verdict")]
    return results


def scaler_collapse(rank, _folder):
    """An overflow in every step after the search: halted when too many came in a row, with the scale gone."""
    model = net()
    optimizer = adamw(model)
    scale = torch.amp.GradScaler("cpu", init_scale=8.0)
    watched, sender = monitor(
        rank,
        model,
        optimizer,
        replicas=4,
        scaler=scale,
        first_step=500,
        previous_scale=2.0,
        interval_steps=1000,
    )
    steps = []
    for step in range(500, 540):
        scale.scale(loss_of(model, batch(rank, step))[0])  # makes the scale
        for p in model.parameters():
            p.grad = torch.full_like(p, INF)
        watched.before_reduce()
        agreed = watched.agree(step, torch.tensor(1.0), 1)
        watched.finish(agreed, facts(step, rank))
        scale.update(max(1.0, scale.get_scale() / 2))
        steps.append(plain(agreed)[:3])
        if agreed.halt:
            break
    found = {"last": steps[-1], "count": len(steps)}
    if sender is not None:
        found["verdicts"] = sorted({e.data["kind"] for e in sender.of("verdict")})
    return found


def state_is_bad(rank, _folder):
    """A moment that became nonfinite in the update of step 2, on rank 1: known to all ranks in step 3."""
    inner = net()
    model = ddp(inner)
    optimizer = adamw(model)
    watched, _ = monitor(rank, model, optimizer)

    def spoil(_optimizer, _args, _kwargs):
        if rank == 1 and int(optimizer.state[inner.second.weight]["step"]) == 2:
            optimizer.state[inner.second.weight]["exp_avg"][1, 1] = INF

    optimizer.register_step_post_hook(spoil)
    rows = []
    for step in range(1, 4):
        agreed, untouched = one_step(watched, step, rank, model, optimizer, batch(rank, step))
        rows.append([plain(agreed), untouched])
    return rows


def replicas(rank, _folder):
    """A flipped bit in rank 2's weight, and in its moment; shards have no replica; HSDP has two."""
    results = {}
    inner = net()
    model = ddp(inner)
    optimizer = adamw(model)
    policy = Policy(modes=DEFAULT_MODES | {"corruption": "act"})
    watched, sender = monitor(rank, model, optimizer, policy=policy)
    one_step(watched, 1, rank, model, optimizer, batch(rank, 1))
    results["clean"] = watched.check_replicas(1)[0].event(1)["data"]
    moment = optimizer.state[inner.second.weight]["exp_avg"]
    if rank == 2:
        moment.view(torch.int32)[3, 3] ^= 1
    results["moment"] = watched.check_replicas(1)[0].event(1)["data"]
    if rank == 2:
        moment.view(torch.int32)[3, 3] ^= 1
        inner.first.weight.data.view(torch.int32)[0, 1] ^= 1 << 20
    results["weight"] = watched.check_replicas(1)[0].event(1)["data"]
    agreed, untouched = one_step(watched, 2, rank, model, optimizer, batch(rank, 2))
    results["next step"] = [plain(agreed), untouched]
    if sender is not None:
        results["reports"] = [e.data["status"] for e in sender.of("checksum.report")]

    # A plain loop says who replicates what: here pairs hold one layer, and nobody shares the other.
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plainly = net()
    if rank == 3:
        plainly.first.weight.data.view(torch.int32)[0, 0] ^= 1
        plainly.second.weight.data.view(torch.int32)[0, 0] ^= 1
    said = compare(groups_of(plainly, None, {"first": pairs[rank // 2], "second": None}))
    results["named"] = [report.event(1)["data"] for report in said]

    sharded = fsdp2(net())
    results["fsdp2"] = compare(groups_of(sharded, None))[0].event(1)["data"]
    mesh = hsdp_mesh()
    hybrid = fsdp2(net(), mesh)
    optimizer = adamw(hybrid)
    loss_of(hybrid, batch(rank, 1))[0].backward()
    optimizer.step()
    results["hsdp"] = compare(groups_of(hybrid, optimizer))[0].event(1)["data"]
    if rank == 3:
        with torch.no_grad():
            local_of(hybrid.second.bias).view(torch.int32)[0] ^= 1
    results["hsdp flipped"] = compare(groups_of(hybrid, optimizer))[0].event(1)["data"]
    return results


def twins(rank, _folder):
    """Rank 1 multiplies wrongly: its replicas stay equal, its twin step does not."""
    results = {}
    for kind, wrap in (("ddp", ddp), ("fsdp2", fsdp2)):
        inner = net()
        model = wrap(inner)
        optimizer = adamw(model)
        watched, sender = monitor(rank, model, optimizer)
        wrong = {"left": 0}

        def spoil(_module, _inputs, out, wrong=wrong):
            if rank != 1 or not wrong["left"]:
                return out
            wrong["left"] -= 1
            return out + 1e-3

        inner.second.register_forward_hook(spoil)

        def run(x, model=model):
            return loss_of(model, x)[0]

        one_step(watched, 1, rank, model, optimizer, batch(rank, 1))
        results[f"{kind} clean"] = watched.twin(1, run, batch(rank, 1)).event(1)["data"]
        wrong["left"] = 1
        results[f"{kind} transient"] = watched.twin(2, run, batch(rank, 1)).event(1)["data"]
        wrong["left"] = 1000
        one_step(watched, 2, rank, model, optimizer, batch(rank, 2))
        results[f"{kind} checksum"] = [r.status for r in compare(groups_of(model, optimizer))]
        results[f"{kind} persistent"] = watched.twin(3, run, batch(rank, 1)).event(1)["data"]
        results[f"{kind} grads left"] = sum(p.grad is not None for p in model.parameters())
        if sender is not None:
            results[f"{kind} posted"] = [e.data["status"] for e in sender.of("twin.report")]
    return results


def suspicion(rank, folder):
    """A watched loop: the checksum of step 2 differs, so step 3 runs a twin step, and observe goes on."""
    inner = net()
    model = ddp(inner)
    optimizer = adamw(model)
    made, sender = watched_by(rank, model, optimizer, folder, checksum_steps=2, twin_steps=100)
    for step in range(1, 5):
        if step == 2:
            made.boundary("context 8k", tokens=8192)
        if (step, rank) == (2, 2):
            inner.first.weight.data.view(torch.int32)[0, 1] ^= 1 << 20
        loss, tokens = loss_of(model, batch(rank, step))
        loss.backward()
        made.step(loss, tokens, twin=(lambda x: loss_of(model, x)[0], batch(rank, step)))
    if sender is None:
        return {}
    return {
        "checksums": [[e.step, e.data["status"]] for e in sender.of("checksum.report")],
        "twins": [
            [e.step, e.data["status"], [one["rank"] for one in e.data["differing"]]]
            for e in sender.of("twin.report")
        ],
        "verdicts": [[e.step, e.data["kind"], e.data["would"]] for e in sender.of("verdict")],
        "boundaries": [[e.step, e.data] for e in sender.of("schedule.boundary")],
    }


ALL = {
    "accumulation": accumulation,
    "run again": run_again,
    "scaler": scaler,
    "scaler collapse": scaler_collapse,
    "state is bad": state_is_bad,
    "replicas": replicas,
    "twins": twins,
    "suspicion": suspicion,
}
