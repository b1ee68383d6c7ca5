"""One rank's training loop under each topology, watched as a user would watch it."""

import hashlib
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from andon.batch_ring import BatchFacts
from andon.client import Client
from andon.loader import Loader, LoaderState
from andon.local_gradients import local_of
from andon.local_norms import LocalNorms
from andon.monitor_agreement import Agreement
from andon.monitor_posts import Place
from andon.policy import DEFAULT_MODES, Policy
from andon.restore_check import Parts
from andon.watch import Watch
from campaign.cases import INTERVAL, MICRO_BATCHES, RANKS, Case
from campaign.injecting import Injector
from campaign.model import OVERLONG_POSITION, batch, loss_of, net
from campaign.posts import Posts

SAMPLES = 4  # of one micro-batch
LR = 3e-4
SCALE = 1024.0
STAGES = (("first", "mix"), ("second",))
GROUPS: dict[str, Any] = {"pipeline": {"pp": [[0, 2], [1, 3]], "dp": [[0, 1], [2, 3]]}}


class Recorded(Watch):
    """A watch that also keeps what this rank did in each step, for the judge."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.acts: list[list[Any]] = []

    def agree(self, *arguments: Any, **options: Any) -> Agreement:
        """Join the ranks' verdicts, and keep them."""
        agreed = super().agree(*arguments, **options)
        told = [agreed.step, agreed.skip, agreed.halt, agreed.hold, repr(agreed.loss)]
        self.acts.append([*told, agreed.nonfinite_ranks, agreed.decision.reason])
        return agreed


class _Handed(torch.autograd.Function):  # type: ignore[misc]
    """The end of a stage that has no loss: its backward begins with what the next stage sent."""

    @staticmethod
    def forward(context: "_Handed", out: Tensor, gradient: Tensor) -> Tensor:
        context.gradient = gradient
        return out.new_zeros(())

    @staticmethod
    def backward(context: "_Handed", _gradient: Tensor) -> tuple[Tensor, None]:
        return context.gradient, None


@dataclass(frozen=True)
class Start:
    """What every case of a topology begins from: copies of this rank's part."""

    weights: list[Tensor]
    moments: list[dict[str, Tensor]]
    loader: LoaderState
    decider: dict[str, Any]


@dataclass(frozen=True)
class Surroundings:
    """What one launch has once: where this rank stands, and its groups."""

    rank: int
    place: Place
    stages: tuple[Any, Any]  # the process group of each pipeline stage


class Trainer:
    """A model and all that belongs to it, made anew for a case."""

    def __init__(
        self,
        topology: str,
        around: Surroundings,
        *,
        start: Start | None = None,
        injector: Injector | None = None,
        lr: float = LR,
    ) -> None:
        self.topology, self.around, self.rank = topology, around, around.rank
        self.micro_batches = MICRO_BATCHES.get(topology, 1)
        self.injector = injector or Injector(Case("none", topology, "clean", "none"), around.rank)
        self.stage = around.rank // 2 if topology == "pipeline" else None
        self.net = net(STAGES[self.stage]) if self.stage is not None else net()
        self.model: Any = self._wrapped()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self.scaler: Any = None
        if topology == "scaler":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
        readers = 2 if self.stage is not None else RANKS  # both stages of a pipeline know the batch
        self.loader = Loader(
            size=20_000,
            seed=3,
            global_batch=readers * SAMPLES * self.micro_batches,
            rank=around.rank % readers,
            world_size=readers,
        )
        self.read: list[list[int]] = []
        self.watch: Recorded
        if start is not None:
            self.put(start)
        if self.injector.case.place in ("weight", "moment", "weight flip", "moment flip"):
            self.optimizer.register_step_post_hook(lambda *_: self.injector.updated(self))

    def _wrapped(self) -> Any:
        if self.topology == "pipeline":
            return self.net
        if self.topology == "fsdp2":
            for name in self.net.parts:
                fully_shard(getattr(self.net, name))
            return fully_shard(self.net)
        return DistributedDataParallel(self.net)

    # --- state

    def _moments(self) -> list[dict[str, Tensor]]:
        return [
            {key: local_of(value) for key, value in self.optimizer.state.get(p, {}).items()}
            for p in self.model.parameters()
        ]

    def _weights(self) -> list[Tensor]:
        return [local_of(p.detach()) for p in self.model.parameters()]

    def state(self) -> list[Tensor]:
        """Return a copy of every bit of weights, moments and step counts of this rank."""
        moments = [state[key] for state in self._moments() for key in sorted(state)]
        return [one.clone() for one in (*self._weights(), *moments)]

    def take(self, decider: dict[str, Any]) -> Start:
        """Return where this trainer stands."""
        moments = [{key: value.clone() for key, value in one.items()} for one in self._moments()]
        return Start([one.clone() for one in self._weights()], moments, self.loader.state(), decider)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def put(self, start: Start) -> None:
        """Go to a state; the optimizer makes its own tensors first, as they are laid out here."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for own, kept in zip(self._weights(), start.weights, strict=True):
            own.copy_(kept)
        for moments, kept_moments in zip(self._moments(), start.moments, strict=True):
            for key, value in kept_moments.items():
                moments[key].copy_(value)
        self.loader.restore(start.loader)

    def read_on(self, name: str) -> None:
        """Move the loader: every case has data of its own."""
        for _ in range(zlib.crc32(name.encode()) % 50):
            self.loader.next_batch()

    # --- watching

    def observe(
        self,
        folder: Path,
        posts: Posts | Client | None,
        *,
        case: Case,
        attempt: int,
        first_step: int,
        **options: Any,
    ) -> None:
        """Begin to watch: what `andon.watch.watch` does, with a sender that keeps what it is given."""
        place = self.around.place
        place = type(place)(
            "campaign", attempt, place.rank, place.world_size, place.node, place.node_ranks, place.node_group
        )
        folder.mkdir(parents=True, exist_ok=True)
        piped = self.stage is not None
        group = self.around.stages[self.rank // 2] if piped else None
        replicas = dict.fromkeys(self.net.parts, group) if piped else None
        self.watch = Recorded(
            place,
            LocalNorms(self.model, forward=piped, replicas=2 if piped else None),
            Parts(self.model, self.optimizer, self.schedule, self.scaler, self.loader),
            directory=folder,
            server=None,
            trusted=(),
            first_step=first_step,
            sender=posts,
            background=case.kind == "server dead",
            policy=Policy(modes=DEFAULT_MODES | dict.fromkeys(case.acts, "act")),
            guard="skip",
            interval_steps=INTERVAL,
            checksum_steps=case.checksum_steps,
            twin_steps=case.twin_steps,
            twin_group=group,
            replica_groups=replicas,
            **options,
        )

    # --- a step

    def run(self, micro: int) -> Tensor:
        """Return what `backward` of a micro-batch begins with; also for a step that is run again."""
        self.injector.share(self, micro)
        x = self.batches[micro]
        if self.stage is not None:
            return self._piped(micro, x)
        half = torch.autocast("cpu", torch.float16) if self.scaler is not None else nullcontext()
        with half:
            out = self.model(x)
        return self._told(micro, self.injector.loss(micro, loss_of(out, x, self.injector.shift())))

    def _told(self, micro: int, loss: Tensor) -> Tensor:
        self.losses[micro] = loss.detach()
        share = loss / self.micro_batches
        return self.scaler.scale(share) if self.scaler is not None else share

    def _piped(self, micro: int, x: Tensor) -> Tensor:
        peer = (self.rank + 2) % RANKS
        if self.stage == 0:
            out = self.model(x)
            dist.send(out.detach().contiguous(), peer)
            gradient = torch.empty_like(out)
            with self.watch.waiting():
                dist.recv(gradient, peer)
            return _Handed.apply(out, gradient)
        received = torch.empty_like(x)
        with self.watch.waiting():
            dist.recv(received, peer)
        received.requires_grad_()
        received.register_hook(lambda gradient: dist.send(gradient.contiguous(), peer))
        out = self.model(received)
        return self._told(micro, self.injector.loss(micro, loss_of(out, x, self.injector.shift())))

    def twin(self, x: Tensor) -> Tensor:
        """Return the loss of one micro-batch for a twin step; a stage is its own twin."""
        self.injector.share(self, self.injector.case.micro)
        half = torch.autocast("cpu", torch.float16) if self.scaler is not None else nullcontext()
        with half:
            out = self.model(x)
        return loss_of(out, x)

    def _sync(self, *, last: bool) -> AbstractContextManager[Any]:
        if last or self.topology not in ("accumulation",):
            return nullcontext()
        quiet: AbstractContextManager[Any] = self.model.no_sync()
        return quiet

    def train(self, step: int) -> Agreement:
        """Train one step.

        Raises:
            SystemExit: 93, the run is held.
        """
        injector = self.injector
        injector.begin(step)
        positions = injector.positions(self.loader.next_batch(), self.read)
        self.read.append(positions)
        self.batches: list[Tensor] = []
        self.losses: dict[int, Tensor] = {}
        used: list[int] = []
        for micro in range(self.micro_batches):
            part, tokens = positions[micro * SAMPLES : (micro + 1) * SAMPLES], injector.tokens(micro)
            part = [OVERLONG_POSITION] if injector.overlong(micro) else part  # batches are made by length
            used += part
            self.batches.append(injector.batch(micro, batch(part, tokens)))
        self.watch.begin()
        for micro in range(self.micro_batches):
            with self._sync(last=micro == self.micro_batches - 1):
                self.run(micro).backward()
            self.watch.micro_batch(self.losses.get(micro), self.batches[micro][..., 0].numel())
        if self.stage is not None:
            self.watch.before_reduce()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, group=self.around.stages[self.stage])
                parameter.grad /= 2
        injector.gradients(self)
        twin = None
        if self.injector.case.twin_steps:
            twin = (self.twin, self.batches[0])
        facts = self._facts(used)
        extra: dict[str, Any] = {"eval_loss": float("nan")} if injector.case.place == "eval" else {}
        return self.watch.step(batch=facts, rerun=self.run, twin=twin, **extra)

    def _facts(self, positions: list[int]) -> BatchFacts:
        samples = [(one, x) for x in self.batches for one in x]
        marks = (hashlib.sha256(one.numpy().tobytes()).hexdigest()[:16] for one, _ in samples)
        return BatchFacts(
            positions=tuple(positions),
            names=tuple(f"sample-{self.loader.sample(position)}" for position in positions),
            lengths=tuple(x.shape[1] for _, x in samples),
            fingerprints=tuple(marks),
        )
