"""An exact checksum of a tensor that does not depend on the order of summation or on the layout.

    Σ bits(x_i) · w(i)  mod 2^64,   w(i) = i · 0x9E3779B97F4A7C15 | 1

over the elements' bit patterns, i the place in the whole tensor. Integers wrap and are associative, so a
device may sum in any order, and the shards of a tensor add up to the checksum of the whole: a replica, a
restore, and a restore on another number of ranks can all be compared. Every weight is odd, so a change
of a single element always shows.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed 64-bit integer
_CHUNK = 1 << 22  # elements at a time: the integers of a large tensor must not fill the memory
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()  # type: ignore[untyped-decorator]
def checksum(tensor: Tensor, start: int = 0) -> Tensor:
    """Return int64, a scalar on the device. `start` is the place of the first element in the whole."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(_VIEWS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, bits.numel(), _CHUNK):
        part = bits[first : first + _CHUNK].to(torch.int64)
        place = torch.arange(start + first, start + first + part.numel(), device=flat.device)
        total += (part * ((place * _GOLDEN) | 1)).sum()
    return total


def place_of(tensor: Tensor) -> tuple[Tensor, int, bool]:
    """Return this rank's part of a tensor, the place of its first element, and whether that is the whole.

    Raises:
        ValueError: the part is not one contiguous run of the whole (split along another dimension than the
            first), so its places are not known.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0, True
    local, start, whole = tensor.to_local(), 0, True
    rows, first = tensor.shape[0] if tensor.dim() else 1, 0
    for dimension, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard):
            continue
        if placement.dim != 0:
            raise ValueError(f"split along dimension {placement.dim}: no checksum over shards")
        # torch.chunk's rule: all ranks hold ceil(rows / ranks) but the last ones.
        ranks = tensor.device_mesh.size(dimension)
        each = -(-rows // ranks)
        mine = tensor.device_mesh.get_local_rank(dimension)
        first += min(each * mine, rows)
        rows = max(0, min(each, rows - each * mine))
        whole = False
    if not whole:
        start = first * (tensor.numel() // max(1, tensor.shape[0]))
    return local, start, whole
