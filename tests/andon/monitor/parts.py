"""A small model that can be made to fail in a chosen place, and a sender that keeps what is posted."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from andon.local_norms import LocalNorms
from andon.monitor import Monitor
from andon.monitor_posts import BatchFacts, Place, StepFacts
from andon.restore_check import Parts
from andon.watch import Watch
from andon.wire import decode_events, decode_frame, encode_events, encode_frame

WIDTH = 8


class _Spoil(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        spoilt = gradient.clone()
        spoilt[..., 0] = ctx.value
        return spoilt, None


class Spoil(nn.Module):  # type: ignore[misc]
    """Passes values on; while `backward` is set, column 0 of the gradient becomes that value."""

    def __init__(self):
        super().__init__()
        self.forward_value = self.backward_value = None

    def forward(self, x):
        if self.forward_value is not None:
            x = x + self.forward_value
        return x if self.backward_value is None else _Spoil.apply(x, self.backward_value)


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, width=WIDTH, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(width, width, dtype=dtype)
        self.spoil = Spoil()
        self.second = nn.Linear(width, width, dtype=dtype)

    def forward(self, x):
        return self.second(torch.tanh(self.spoil(self.first(x))))


def net(dtype=torch.float32):
    """Return the model with the same weights on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Net(dtype=dtype)


def ddp(model, **options):
    return DistributedDataParallel(model, **options)


def fsdp2(model, mesh=None):
    for part in (model.first, model.second):
        fully_shard(part, **({"mesh": mesh} if mesh else {}))
    return fully_shard(model, **({"mesh": mesh} if mesh else {}))


def hsdp_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def loss_of(model, x):
    """Return the mean over the samples, and how many there are."""
    return model(x).float().square().mean(), x.shape[0]


def batch(rank, step, rows=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return torch.randn(rows, WIDTH, generator=generator).to(dtype)


def place(rank, world_size=4):
    return Place("r", 1, rank, world_size, "node", tuple(range(world_size)), dist.group.WORLD)


class Kept:
    """Takes posts as the server would: through the wire's own reading. Nothing is sent."""

    def __init__(self):
        self.directive = None
        self.events = []
        self.frames = []

    def send_events(self, events):
        decoded = decode_events(encode_events(events), "application/json")
        assert not decoded.refused, decoded.refused
        self.events += [event for _, event in decoded.events]

    def send_frame(self, frame):
        self.frames.append(decode_frame(*encode_frame(frame)))

    def of(self, kind):
        return [event for event in self.events if event.type == kind]

    def cells(self, stream, metric, bits=None):
        """Return {(step, lane[, rank]): value} of a metric, only where `bits` are set when given."""
        found = {}
        for frame in self.frames:
            if frame.stream != stream or metric not in frame.metrics:
                continue
            measured = frame.measured(metric)
            for row in range(frame.rows):
                value = frame.metrics[metric][row].item()
                if measured[row] and (bits is None or value & bits):
                    key = f"{int(frame.step[row])}/{frame.lane[row]}"
                    found[key if frame.rank is None else f"{key}/{int(frame.rank[row])}"] = value
        return found

    def views(self, stream):
        return sorted(
            {json.dumps(frame.views, sort_keys=True) for frame in self.frames if frame.stream == stream}
        )


def monitor(rank, model, optimizer, *, forward=False, replicas=1, then=None, place_=None, **options):
    """Return a monitor and its sender (None on ranks that do not lead)."""
    where = place_ or place(rank)
    sender = Kept() if where.leads else None
    options.setdefault("guard", "skip")
    options.setdefault("interval_steps", 2)
    norms = LocalNorms(model, forward=forward, replicas=replicas, then=then)
    return Monitor(where, norms, optimizer=optimizer, sender=sender, background=False, **options), sender


def facts(step, rank=0):
    return StepFacts(
        step=step,
        grad_norm=None,
        lr=1e-2,
        step_time_s=0.1,
        loader_position=16 * step,
        consumed_samples=16 * step,
        optimizer_step=step,
        schedule_position=step,
        batch=BatchFacts(positions=(16 * step + rank,), names=(f"s{step}-{rank}",), lengths=(8,)),
    )


def snapshot(model, optimizer):
    """Return every bit of weights, moments and step counts."""
    from andon.local_gradients import local_of

    weights = [local_of(p.detach()).clone() for p in model.parameters()]
    state = [
        local_of(value).clone()
        for p in model.parameters()
        for _, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    return [*weights, *state]


def same(before, after):
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def one_step(watched, step, rank, model, optimizer, x):
    """Train one step through a monitor; return (agreement, whether nothing changed)."""
    loss, tokens = loss_of(model, x)
    loss.backward()
    before = snapshot(model, optimizer)
    agreed = watched.agree(step, loss.detach() * tokens, tokens)
    if watched.deferred or not agreed.skip:
        optimizer.step()
    untouched = same(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    watched.finish(agreed, facts(step, rank))
    return agreed, untouched


def plain(agreed):
    """Return an agreement as what must be equal on every rank."""
    return [
        agreed.step,
        agreed.skip,
        agreed.halt,
        agreed.hold,
        agreed.nonfinite_ranks,
        agreed.nonfinite_losses,
        repr(agreed.loss),
        agreed.decision.reason,
    ]


def watched_by(rank, model, optimizer, folder, **parts):
    """Return a Watch that keeps its posts, and the sender."""
    where = place(rank)
    sender = Kept() if where.leads else None
    options = {"policy": None, "guard": "skip", "interval_steps": 50, "deferred": False, "first_step": 1}
    options |= {"checksum_steps": 1000, "twin_steps": 1000}
    given = {name: parts.pop(name) for name in list(parts) if name in options}
    made = Watch(
        where,
        LocalNorms(model, forward=False),
        Parts(model, optimizer, **parts),
        directory=folder,
        server=None,
        trusted=(),
        sender=sender,
        background=False,
        **(options | given),
    )
    return made, sender
