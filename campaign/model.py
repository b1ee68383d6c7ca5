"""A model of a few hundred parameters that can be made to fail in a chosen place, and its data.

Attention is as naive as the one in the playbook's case: scores in half precision, grown with the square of
the position, so that one overlong sample overflows them and no other does.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

WIDTH = 16
TOKENS = 8
OVERLONG, OVERLONG_POSITION = 2048, 41  # the one overlong sample: its length, and which it is
PARTS = ("first", "mix", "second")


class _Backward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: "_Backward", x: Tensor, value: float) -> Tensor:
        context.value = value
        return x.view_as(x)

    @staticmethod
    def backward(context: "_Backward", gradient: Tensor) -> tuple[Tensor, None]:
        spoilt = gradient.clone()
        spoilt[..., 0] = context.value
        return spoilt, None


class Spoil(nn.Module):  # type: ignore[misc]
    """Passes values on; what is set changes them on their way, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_with: Callable[[Tensor], Tensor] | None = None
        self.backward_value: float | None = None

    def clear(self) -> None:
        """Change nothing any more."""
        self.forward_with = self.backward_value = None

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, changed where asked for."""
        if self.forward_with is not None:
            x = self.forward_with(x)
        return x if self.backward_value is None else _Backward.apply(x, self.backward_value)


class Mix(nn.Module):  # type: ignore[misc]
    """Every token takes from those that look like it."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, tokens, width) to the same."""
        look = self.look(x)
        place = torch.arange(x.shape[1]) / 6.0
        scores = look @ look.transpose(-1, -2) / WIDTH**0.5 + place[:, None] * place
        scores = scores.half()  # Inf beyond 65,504: at places 7 it is 1.4, at 2,047 it is 116,000
        return x + scores.float().softmax(dim=-1).to(x.dtype) @ x


class Net(nn.Module):  # type: ignore[misc]
    """The whole model, or one pipeline stage of it."""

    def __init__(self, parts: Sequence[str] = PARTS) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.spoil = Spoil()
        for name in self.parts:
            setattr(self, name, Mix() if name == "mix" else nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, tokens, width) to the same."""
        for index, name in enumerate(self.parts):
            x = getattr(self, name)(x)
            if index == 0:
                x = self.spoil(x)
        return x


def net(parts: Sequence[str] = PARTS) -> Net:
    """Return the model with the same weights on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Net(parts)


def sample(position: int, tokens: int = TOKENS) -> Tensor:
    """Return the sample at an absolute position, (tokens, width): noise, and where each token stands."""
    generator = torch.Generator().manual_seed(position)
    x = torch.randn(tokens, WIDTH, generator=generator)
    x[:, -1] = torch.arange(tokens) % TOKENS
    return x


def batch(positions: Sequence[int], tokens: int = TOKENS) -> Tensor:
    """Return (samples, tokens, width)."""
    return torch.stack([sample(position, tokens) for position in positions])


def loss_of(out: Tensor, x: Tensor, shift: float = 0.0) -> Tensor:
    """Return the mean over the tokens: the next column's value is to be told. `shift` moves the targets."""
    target = x.roll(1, dims=-1).clamp(-3.0, 3.0) + shift
    return (out.float() - target.float()).square().mean()
