"""An fp16 GradScaler that skips on all ranks together.

A scaler looks for overflows in the gradients it holds. Under DDP these are the same everywhere; under
FSDP2 each rank holds a slice, so one would skip and halve its scale while the others step on. The fused
sum already knows better: what all ranks agreed on is written into the scaler before it decides.
(https://docs.pytorch.org/docs/stable/amp.html)
"""

from typing import Any

import torch


def unscale(scaler: Any, optimizer: torch.optim.Optimizer, *, skip: bool) -> None:
    """Unscale the gradients and make the scaler skip exactly when all ranks agreed to.

    `scaler.step` and `scaler.update` follow; the scaler then backs off or grows on all ranks alike.
    """
    scaler.unscale_(optimizer)
    for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        found.fill_(1.0 if skip else 0.0)


def document(scaler: Any) -> dict[str, Any] | None:
    """Return the scaler's state for a snapshot; None where there is none."""
    if scaler is None or not scaler.is_enabled():
        return None
    return dict(scaler.state_dict())
