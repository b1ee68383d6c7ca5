"""Scenarios: what one rank sees before the reduce, and what the ranks agree on."""

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from andon.local_gradients import local_of
from andon.policy import DEFAULT_MODES, NonfiniteRules, Policy
from tests.andon.monitor.parts import (
    Kept,
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
    place,
    plain,
)

INF, NAN = float("inf"), float("nan")


def inf_in_one_backward(wrap, **options):
    """Inf in rank 3's backward in step 3, its loss finite; only column 0 of the first layer's gradient."""

    def play(rank, _folder):
        inner = net()
        model = wrap(inner)
        optimizer = adamw(model)
        watched, sender = monitor(rank, model, optimizer, **options)
        steps = []
        for step in range(1, 5):
            inner.spoil.backward_value = INF if (step, rank) == (3, 3) else None
            x = batch(rank, step)
            loss, tokens = loss_of(model, x)
            loss.backward()
            owner = not torch.isfinite(local_of(inner.first.weight.grad)).all().item()
            agreed = watched.agree(step, loss.detach() * tokens, tokens)
            if not agreed.skip:
                optimizer.step()
            optimizer.zero_grad()
            watched.finish(agreed, facts(step, rank))
            steps.append(
                {
                    "agreed": plain(agreed),
                    "bits": agreed.reading.bits,
                    "view": agreed.reading.view,
                    "layer_bits": agreed.reading.layer_bits.tolist(),
                    "loss_finite": bool(torch.isfinite(loss).item()),
                    "reduced_is_bad_here": owner,
                    "norm": agreed.reading.grad_norm,
                    "global_norm": agreed.grad_norm,
                }
            )
        watched.flush()
        result = {"steps": steps, "layers": watched.norms.layers}
        if sender is not None:
            result["local"] = sender.cells("rank", "nonfinite", bits=4)
            result["weights"] = sender.cells("layer", "weight_norm")
            result["ratios"] = sender.cells("layer", "update_ratio")
            result["views"] = sender.views("layer")
            result["actions"] = [e.data for e in sender.of("action")]
        return result

    return play


def tied(model):
    """Let both layers share one weight, which counts once."""
    model.second.weight = model.first.weight
    return model


def norms_are_right(rank, _folder):
    """The numbers themselves, against a model computed on one rank without any wrapper."""
    found = {
        "expected": expected_norms(rank, net),
        "expected tied": expected_norms(rank, lambda: tied(net())),
    }
    wraps: dict[str, tuple[Any, dict[str, Any]]] = {
        "ddp": (ddp, {}),
        "ddp, tied": (lambda inner: ddp(tied(inner)), {}),
        "ddp, gradients in buckets": (lambda inner: ddp(inner, gradient_as_bucket_view=True), {}),
        "ddp, hook": (ddp, {"then": (None, allreduce_hook)}),
        "ddp, hook of its own": (compressing, {}),
        "fsdp2": (fsdp2, {}),
        "hsdp": (lambda inner: fsdp2(inner, hsdp_mesh()), {}),
    }
    for name, (wrap, options) in wraps.items():
        model = wrap(net())
        optimizer = adamw(model)
        watched, _ = monitor(rank, model, optimizer, interval_steps=1, **options)
        loss, tokens = loss_of(model, batch(rank, 1))
        loss.backward()
        agreed = watched.agree(1, loss.detach() * tokens, tokens)
        found[name] = [agreed.reading.grad_norm, agreed.grad_norm, agreed.loss]
    return found


def compressing(inner):
    """DDP with a communication hook that the loop registered."""
    model = ddp(inner)
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def expected_norms(rank, make):
    """Return this rank's own norm, that of the mean gradient, and the mean loss, without any wrapper."""
    alone, mean = make(), make()
    losses = []
    for other in range(4):
        loss, _ = loss_of(mean, batch(other, 1))
        (loss / 4).backward()
        losses.append(loss.item())
    loss_of(alone, batch(rank, 1))[0].backward()

    def norm(model):
        return torch.stack([p.grad.double().norm() for p in model.parameters()]).norm().item()

    return [norm(alone), norm(mean), sum(losses) / 4]


class _Collectives(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class _HostReads(TorchFunctionMode):  # type: ignore[misc]
    """Counts every way in which Python reads a tensor's values: each would wait for a device."""

    NAMES = frozenset(
        {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero"}
    )

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def counted(rank, _folder):
    """Collectives and host reads of the monitor alone in 6 healthy steps, 2 of which measure layers."""
    results = {}
    for name, options in (("read", {}), ("deferred", {"deferred": True})):
        for kind, wrap in (("ddp", ddp), ("fsdp2", fsdp2)):
            model = wrap(net())
            optimizer = adamw(model, fused=True)
            # Alone on its node: the rows of a node's ranks are handed over by gloo, off the device.
            alone = place(rank)
            own = type(alone)("r", 1, rank, 4, f"node-{rank}", (rank,))
            watched, sender = monitor(rank, model, optimizer, place_=own, interval_steps=3, **options)
            steps = []
            for step in range(1, 7):
                loss, tokens = loss_of(model, batch(rank, step))
                loss.backward()
                with _Collectives() as collectives, _HostReads() as reads:
                    agreed = watched.agree(step, loss.detach() * tokens, tokens)
                optimizer.step()
                with collectives, reads:
                    watched.finish(agreed, facts(step, rank))
                optimizer.zero_grad()
                steps.append([dict(collectives.seen), dict(reads.seen)])
            watched.settle()
            watched.flush()
            rows = sorted({key.split("/")[0] for key in sender.cells("layer", "weight_norm")})
            results[f"{name} {kind}"] = {"steps": steps, "layer_steps": rows}
    return results


def skipped(rank, _folder):
    """A NaN and an Inf gradient: does anything in weights, moments and step counts change?"""
    results = {}
    for name, options, extra in (
        ("foreach", {"foreach": True}, {}),
        ("fused", {"fused": True}, {}),
        ("deferred", {"fused": True}, {"deferred": True}),
    ):
        inner = net()
        model = ddp(inner)
        optimizer = adamw(model, **options)
        policy = Policy(nonfinite=NonfiniteRules(skipped_in_a_row=9, skipped_in_window=9))
        watched, _ = monitor(rank, model, optimizer, policy=policy, **extra)
        rows = []
        for step, value in enumerate((None, NAN, None, INF, None), start=1):
            inner.spoil.backward_value = value if rank == 1 else None
            agreed, untouched = one_step(watched, step, rank, model, optimizer, batch(rank, step))
            rows.append([plain(agreed), untouched, float(next(iter(optimizer.state.values()))["step"])])
        last = watched.settle()
        results[name] = {"rows": rows, "last": None if last is None else plain(last)}
    return results


def reduced_only(rank, _folder):
    """A plain data-parallel loop that does not say when its gradients are its own."""
    results = {}
    for name in ("silent", "told"):
        model = net()
        optimizer = adamw(model)
        watched, sender = monitor(rank, model, optimizer, replicas=4 if name == "told" else None)
        for step in range(1, 4):
            model.spoil.backward_value = INF if (step, rank) == (2, 3) else None
            loss, tokens = loss_of(model, batch(rank, step))
            loss.backward()
            if name == "told":
                watched.before_reduce()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 4
            agreed = watched.agree(step, loss.detach() * tokens, tokens)
            if not agreed.skip:
                optimizer.step()
            optimizer.zero_grad()
            watched.finish(agreed, facts(step, rank))
        watched.flush()
        if sender is not None:
            results[name] = {
                "views": sender.views("rank"),
                "local_bits": sender.cells("rank", "nonfinite", bits=7),
                "reduced_bits": sender.cells("rank", "nonfinite", bits=8),
                "said": [e.data.get("gradients") for e in sender.of("step")],
                "skips": [e.step for e in sender.of("step") if e.data["skipped"]],
            }
    return results


def spike(rank, _folder):
    """A loss that rises for good in steps 61 on: halted at the third strike, everywhere, not applied."""
    results = {}
    for name, mode in (("act", "act"), ("observe", "observe")):
        model = net()
        optimizer = adamw(model)
        policy = Policy(modes=DEFAULT_MODES | {"spike": mode})
        watched, sender = monitor(rank, model, optimizer, policy=policy, replicas=4, interval_steps=1000)
        rows = []
        noise = torch.Generator().manual_seed(rank)
        for step in range(1, 66):
            value = 2.0 + 0.02 * torch.randn((), generator=noise) + (3.0 if step > 60 else 0.0)
            agreed = watched.agree(step, value * 10, 10)
            watched.finish(agreed, facts(step, rank))
            rows.append(plain(agreed))
            if agreed.halt:
                break
        results[name] = {"rows": rows[-6:]}
        if sender is not None:
            results[name]["verdicts"] = [
                [e.step, e.data["kind"], e.data["mode"], e.data["would"]] for e in sender.of("verdict")
            ]
    return results


def boundary(rank, _folder):
    """The same rise, declared: no verdict."""
    model = net()
    watched, sender = monitor(rank, model, adamw(model), replicas=4, interval_steps=1000)
    for step in range(1, 80):
        if step == 61:
            watched.boundary("mixture change", step)
        value = torch.tensor(2.0 + 0.001 * (step % 7) + (3.0 if step > 60 else 0.0))
        watched.finish(watched.agree(step, value, 1), facts(step, rank))
    if sender is None:
        return {}
    return {
        "verdicts": len(sender.of("verdict")),
        "said": [e.data["name"] for e in sender.of("schedule.boundary")],
    }


def ordered(rank, _folder):
    """Rank 0 hears of a hold before step 3: all ranks know it in step 3."""
    model = net()
    watched, sender = monitor(rank, model, adamw(model), replicas=4)
    rows = []
    for step in range(1, 5):
        if step == 3 and sender is not None:
            sender.directive = {"kind": "hold", "seq": 2, "attempt": 1}
        agreed = watched.agree(step, torch.tensor(2.0), 1)
        watched.finish(agreed, facts(step, rank))
        rows.append(plain(agreed))
    return rows


def straggler(rank, _folder):
    """Rank 2 computes longer in its forward, between its first and its second layer."""
    results = {}
    for kind, wrap in (("ddp", ddp), ("fsdp2", fsdp2)):
        inner = net()
        model = wrap(inner)
        optimizer = adamw(model)
        watched, _ = monitor(rank, model, optimizer)
        if rank == 2:
            inner.first.register_forward_hook(lambda *_: time.sleep(0.3))
        rows = []
        for step in range(1, 4):
            dist.barrier()
            watched.begin()
            agreed, _ = one_step(watched, step, rank, model, optimizer, batch(rank, step))
            rows.append([agreed.compute_s, agreed.wait_s])
        results[kind] = rows
    return results


def activations(rank, _folder):
    """Output norms on request, for one step only."""
    inner = net()
    model = ddp(inner)
    optimizer = adamw(model)
    watched, sender = monitor(rank, model, optimizer, interval_steps=1000)
    expected = None
    for step in range(1, 4):
        x = batch(rank, step)
        if step == 2:
            watched.request_activations()
            expected = inner.first(x).square().mean().sqrt().item()
        one_step(watched, step, rank, model, optimizer, x)
    watched.flush()
    everyone = [None] * 4
    dist.all_gather_object(everyone, expected)
    return (
        {"act_norm": sender.cells("layer", "act_norm"), "first": everyone} if isinstance(sender, Kept) else {}
    )


def bf16(rank, _folder):
    """bf16 weights and gradients: large finite values are finite, NaN is not."""
    inner = net(torch.bfloat16)
    model = ddp(inner)
    optimizer = adamw(model)
    watched, _ = monitor(rank, model, optimizer)
    rows = []
    for step, value in enumerate((None, 1e15, NAN), start=1):
        inner.spoil.backward_value = value if rank == 1 else None
        agreed, untouched = one_step(
            watched, step, rank, model, optimizer, batch(rank, step, dtype=torch.bfloat16)
        )
        rows.append([plain(agreed), agreed.reading.bits, untouched, agreed.reading.grad_norm])
    return rows


def pipeline(rank, _folder):
    """Two stages of two replicas each: ranks 0 and 1 embed, ranks 2 and 3 have the loss."""
    stage, peer = rank // 2, (rank + 2) % 4
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(stage)
    model = nn.Linear(8, 8)
    optimizer = adamw(model)
    watched, sender = monitor(rank, model, optimizer, forward=True, replicas=2)
    rows = []
    for step in range(1, 4):
        loss = None
        if stage == 0:
            x = batch(rank, step)
            if (step, rank) == (2, 1):
                x[0, 0] = NAN
            out = model(x)
            dist.send(out.detach(), peer)
            gradient = torch.empty_like(out)
            dist.recv(gradient, peer)
            out.backward(gradient)
        else:
            received = torch.empty(4, 8)
            dist.recv(received, peer)
            received.requires_grad_()
            loss = model(received).square().mean()
            loss.backward()
            dist.send(received.grad, peer)
        watched.before_reduce()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=groups[stage])
            p.grad /= 2
        own = sum(p.grad.double().square().sum().item() for p in model.parameters())
        agreed = watched.agree(step, None if loss is None else loss.detach() * 4, 0 if loss is None else 4)
        if not agreed.skip:
            optimizer.step()
        optimizer.zero_grad()
        watched.finish(agreed, facts(step, rank))
        rows.append([plain(agreed), agreed.measured, agreed.reading.bits, agreed.grad_norm, own])
    watched.flush()
    return {"rows": rows, "losses": sender.cells("rank", "loss") if sender else None}


ALL = {
    "inf in one backward, ddp": inf_in_one_backward(ddp),
    "inf in one backward, ddp hook": inf_in_one_backward(ddp, then=(None, allreduce_hook)),
    "inf in one backward, fsdp2": inf_in_one_backward(fsdp2),
    "norms are right": norms_are_right,
    "counted": counted,
    "skipped": skipped,
    "reduced only": reduced_only,
    "spike": spike,
    "boundary": boundary,
    "ordered": ordered,
    "straggler": straggler,
    "activations": activations,
    "bf16": bf16,
    "pipeline": pipeline,
}
