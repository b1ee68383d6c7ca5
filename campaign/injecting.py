"""How each fault is put in: into the batch, the model, the gradients, the state, or the clock."""

import os
import signal
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from andon.local_gradients import local_of
from campaign.cases import EPOCH, Case
from campaign.model import OVERLONG, TOKENS

if TYPE_CHECKING:
    from campaign.trainer import Trainer

SLOW_S = 0.06
SPIKE_STEPS = 6


def flip(tensor: Tensor, index: int, bit: int) -> None:
    """Flip one bit of one element of a float32 tensor, in place."""
    with torch.no_grad():
        bits = tensor.view(-1).view(torch.int32)
        at = index % bits.numel()
        bits[at] ^= -(2**31) if bit == 31 else 1 << bit


class Injector:
    """Does what a case says, on the rank and in the steps it says."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.mine = case.rank is None or case.rank == rank
        self.reader = rank % (2 if case.topology == "pipeline" else 4)  # both stages know the batch
        self.value = float(case.value)
        self._calls = 0

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step = step
        self._calls = 0

    @property
    def _now(self) -> bool:
        return self.mine and self.step == self.case.step

    # --- the batch

    def positions(self, own: list[int], before: list[list[int]]) -> list[int]:
        """Return what the loader gives: its own, or by mistake an earlier batch again."""
        if self.case.place == "duplicate" and self._now:
            return before[-2]
        return own

    def overlong(self, micro: int) -> bool:
        """Whether this micro-batch is the one overlong sample."""
        turn, rest = divmod(self.step - self.case.step, EPOCH)
        here = self.case.place == "overlong" and micro == self.case.micro and rest == 0 and 0 <= turn < 3
        return here and self.reader == overlong_rank(self.case, turn)

    def tokens(self, micro: int) -> int:
        """Return the length of this micro-batch's samples."""
        if self.overlong(micro):
            return OVERLONG
        if self.case.place == "ragged":
            return TOKENS + (self.step + 3 * self.reader) % 4
        return TOKENS

    def batch(self, micro: int, x: Tensor) -> Tensor:
        """Return the micro-batch as it is read."""
        if self.case.place == "data" and self._now and micro == self.case.micro:
            x[0, 0, 0] = self.value
        return x

    def shift(self) -> float:
        """Return by how much the targets are wrong."""
        case, since = self.case, self.step - self.case.step
        if not self.mine or since < 0:
            return 0.0
        if case.place == "spike":
            return case.amount if since < SPIKE_STEPS else 0.0
        if case.place == "one spike":
            return case.amount if since == 0 else 0.0
        if case.place == "creep":
            return case.amount * (since + 1)
        if case.place == "boundary":
            return case.amount
        return 0.0

    # --- forward and backward

    def share(self, trainer: "Trainer", micro: int) -> None:
        """A micro-batch's forward begins; also when the step is run again."""
        self._calls += 1
        case, spoil = self.case, trainer.net.spoil
        spoil.clear()
        again = self._calls > case.micro_batches
        now = self._now and micro == case.micro and (case.lasting or not again)
        if case.place in ("killed", "stuck") and now:
            end(case.place)
        if case.place == "forward" and now:
            spoil.forward_with = lambda x: x + self.value
        elif case.place == "backward" and now:
            spoil.backward_value = self.value
        elif case.place == "overflow" and self.mine and self.step >= case.step:
            spoil.backward_value = float("inf")
        elif case.place == "activation" and now:
            spoil.forward_with = self._flipped
        elif case.place == "slow" and self.mine and self.step >= case.step:
            spoil.forward_with = self._slow
        elif case.place == "matmul" and self.mine and self.step >= case.step:
            spoil.forward_with = lambda x: x + case.amount

    def _flipped(self, x: Tensor) -> Tensor:
        changed = x.detach().float().clone()
        # One below 1.5: the highest bit of its exponent is 0, and becomes 1.
        small = torch.nonzero(changed.view(-1).abs() < 1.5).view(-1)
        flip(changed, int(small[self.case.step % len(small)]), self.case.bit)
        return x + (changed - x.detach()).to(x.dtype)

    def _slow(self, x: Tensor) -> Tensor:
        time.sleep(SLOW_S)
        return x

    def loss(self, micro: int, loss: Tensor) -> Tensor:
        """Return the loss as it is computed."""
        again = self._calls > self.case.micro_batches
        if self.case.place == "dead" and self.mine and self.step - self.case.step in (0, 2, 3):
            return loss + self.value
        if self.case.place == "loss" and self._now and micro == self.case.micro:
            return loss if again and not self.case.lasting else loss + self.value
        return loss

    # --- after backward, after the update

    def gradients(self, trainer: "Trainer") -> None:
        """Gradients are reduced and not yet looked at."""
        if self.case.place == "reduced" and self._now:
            gradient = next(p.grad for p in trainer.net.parameters() if p.grad is not None)
            local_of(gradient).view(-1)[0] = self.value

    def updated(self, trainer: "Trainer") -> None:
        """The step is over."""
        case = self.case
        if not self._now:
            return
        parameters = list(trainer.net.parameters())
        parameter = parameters[case.bit % len(parameters)]
        with torch.no_grad():
            if case.place == "weight":
                local_of(parameter.detach()).view(-1)[0] = self.value
            elif case.place == "moment":
                local_of(trainer.optimizer.state[parameter]["exp_avg"]).view(-1)[0] = self.value
            elif case.place == "weight flip":
                flip(local_of(parameter.detach()), case.step, case.bit)
            elif case.place == "moment flip":
                flip(local_of(trainer.optimizer.state[parameter]["exp_avg_sq"]), case.step, case.bit)


def end(how: str) -> None:
    """End this rank's part in the run: gone at once, or there and never going on."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.1)


def overlong_rank(case: Case, turn: int) -> int:
    """Return who reads the overlong sample the `turn`-th time: each epoch is shuffled anew."""
    ranks = 2 if case.topology == "pipeline" else 4  # data enters at the first stage
    return ((case.rank or 0) + turn) % ranks
