"""What networks share: checks of sizes, layers in full precision, recomputed activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qmargin.errors import ConfigError


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be at least 1")


def check_rates(**rates: float) -> None:
    """Refuse rates outside [0, 1)."""
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"{name} is {rate:g}; it must be in [0, 1)")


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off; some devices, such as meta, have none to switch off."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def run_blocks(blocks: nn.Sequential, inputs: Tensor, *, recompute: bool) -> Tensor:
    """Outputs of blocks in a row; ``recompute`` keeps only what enters a block.

    Recomputed gradients and running statistics are those of plain calls: random draws are repeated,
    and the second pass leaves the statistics of batch norms alone.
    """
    if not (recompute and torch.is_grad_enabled()):
        outputs: Tensor = blocks(inputs)
        return outputs
    for block in blocks:
        options: dict[str, Any] = {}
        if not torch.compiler.is_compiling():  # a compiled second pass has no side effects
            options["context_fn"] = lambda block=block: (nullcontext(), _untracked(block))
        inputs = checkpoint(block, inputs, use_reentrant=False, **options)
    return inputs


@contextmanager
def _untracked(block: nn.Module) -> Iterator[None]:
    """Inside, the block's buffers, such as running statistics, are copies."""
    kept = [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)
