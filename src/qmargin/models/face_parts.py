"""What face networks share: their input, layers in full precision, and activations made again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qmargin.errors import ConfigError, ShapeError

IMAGE_SIZE = 112


def check_faces(images: Tensor) -> None:
    """Refuse anything but images ``[B, 3, 112, 112]``."""
    if images.dim() != 4 or images.shape[1:] != (3, IMAGE_SIZE, IMAGE_SIZE):
        raise ShapeError(
            f"images have shape {tuple(images.shape)}; this network takes "
            f"[B, 3, {IMAGE_SIZE}, {IMAGE_SIZE}]"
        )


def check_embedding_dim(embedding_dim: int) -> int:
    """The dimension, if it is one."""
    if embedding_dim < 1:
        raise ConfigError(f"embedding_dim is {embedding_dim}; it must be at least 1")
    return embedding_dim


def check_rate(rate: float, name: str) -> float:
    """The rate, if it is in [0, 1)."""
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"{name} is {rate:g}; it must be in [0, 1)")
    return rate


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast switched off; some devices, such as meta, have none to switch off."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def recomputed(blocks: Iterable[nn.Module], inputs: Tensor) -> Tensor:
    """Outputs of blocks in a row, whose activations are made again in the backward pass.

    Only what enters a block is kept. Gradients and running statistics are those of plain calls:
    draws are repeated, and the second pass leaves the statistics of batch norms alone, which would
    otherwise move twice per step.

    Examples:
        >>> blocks = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> inputs = torch.ones(1, 2, requires_grad=True)
        >>> bool((recomputed(blocks, inputs) == blocks(inputs)).all())
        True
    """
    for block in blocks:
        if torch.compiler.is_compiling():  # a compiled second pass has no side effects
            inputs = checkpoint(block, inputs, use_reentrant=False)
        else:
            contexts = partial(_contexts, block)
            inputs = checkpoint(block, inputs, use_reentrant=False, context_fn=contexts)
    return inputs


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first pass of a block, and around the second."""
    return nullcontext(), _untracked(block)


@contextmanager
def _untracked(block: nn.Module) -> Iterator[None]:
    """Buffers of a block, such as running statistics, are copies inside, and lost afterwards."""
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
