"""A small GPT: byte-level, pre-norm without norm weights, rotary positions, local and global attention.

The sizes suit two CPU cores; the shape is a usual one. Most layers look back over a short window,
one layer sees the whole sample (as models with interleaved local and global attention do). The
window layers need no padding mask: samples are padded on the right, and causal order keeps the
padding out of reach. The global layer masks padded keys. Attention is written out, so a row
that may attend to nothing is a softmax over nothing but −inf: 0/0.

Layer names sort in forward order (embed, layers.0.attn.qkv, layers.0.attn.wo, layers.0.mlp.fc1, …,
lm_head), so "lowest in the forward direction" can be read from the name.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults give 65,536 parameters."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    width: int = 32
    heads: int = 4
    window: int = 32  # keys a local layer looks back over, itself included
    global_layers: tuple[int, ...] = (2,)
    dropout: float = 0.05

    def document(self) -> dict[str, object]:
        """Return the shape as JSON-ready data."""
        return asdict(self)


def normalise(x: Tensor) -> Tensor:
    """RMS norm without weights (Zhang and Sennrich 2019; weightless as in OLMo)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5)


def rotate(x: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021) to (batch, heads, tokens, head width)."""
    tokens, width = x.shape[-2:]
    half = width // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class Attention(nn.Module):  # type: ignore[misc]
    """Causal self-attention, over a window or over all real tokens of the sample."""

    def __init__(self, shape: Shape, *, is_global: bool) -> None:
        super().__init__()
        self.heads = shape.heads
        self.is_global = is_global
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)
        position = torch.arange(shape.context)
        distance = position[:, None] - position[None, :]
        reach = shape.context if is_global else shape.window
        self.register_buffer("allowed", (distance >= 0) & (distance < reach), persistent=False)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """Attend. `x` is (batch, tokens, width), `valid` is bool (batch, tokens): real tokens."""
        batch, tokens, width = x.shape
        split = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = rotate(query) @ rotate(key).transpose(-1, -2) * (width // self.heads) ** -0.5
        allowed = self.allowed[:tokens, :tokens]
        if self.is_global:
            allowed = allowed & valid[:, None, None, :]
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        weights = functional.dropout(weights, self.dropout, self.training)
        mixed = (weights @ value).transpose(1, 2).reshape(batch, tokens, width)
        return self.wo(mixed)


class Mlp(nn.Module):  # type: ignore[misc]
    """Two linear layers with a GELU between."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.fc2 = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same."""
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):  # type: ignore[misc]
    """Attention and MLP, each on the normalised residual."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.attn = Attention(shape, is_global=index in shape.global_layers)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same."""
        x = x + self.attn(normalise(x), valid)
        return x + self.mlp(normalise(x))


class Gpt(nn.Module):  # type: ignore[misc]
    """The whole model: token ids to logits."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape, index) for index in range(shape.layers))
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            # GPT-2's rule: writes into the residual are scaled by the number of such writes.
            residual = name.endswith(("wo.weight", "fc2.weight"))
            deviation = 0.06 / (2 * shape.layers) ** 0.5 if residual else 0.06
            with torch.no_grad():
                parameter.normal_(0.0, deviation, generator=generator)

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        """Return logits (batch, tokens, vocabulary) for ids (batch, tokens) and the mask of real tokens."""
        x = normalise(self.embed(tokens))
        for block in self.layers:
            x = block(x, valid)
        return self.lm_head(normalise(x))


def loss_of(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    """Return the summed token loss (nats) over the labels that count, and how many count."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum(), int(mask.sum())
