"""Shared parts of networks: checks, layers in full precision, recomputed activations.

All of it can be traced: ``torch.compile(backbone, fullgraph=True)`` makes one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qmargin.errors import ConfigError, ShapeError


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


SHAPE = "{shape}"  # in a message of ``refuse``: the shape of the inputs
_ERRORS: dict[str, type[ShapeError | ConfigError]] = {"shape": ShapeError, "config": ConfigError}


def refuse(inputs: Tensor, message: str, kind: Literal["shape", "config"] = "shape") -> Tensor:
    """Raise a ``ShapeError`` or a ``ConfigError``; a compiled graph raises it when it runs.

    The compiler would replace an error that is raised while it traces by one of its own. So the
    caller returns the tensor that comes back, which makes a graph that does nothing but raise.
    """
    if not torch.compiler.is_dynamo_compiling() or is_exporting():
        raise _error(inputs, message, kind)
    refused: Tensor = _refused(inputs, message, kind)
    return refused


def _error(inputs: Tensor, message: str, kind: str) -> ShapeError | ConfigError:
    return _ERRORS[kind](message.replace(SHAPE, str(tuple(inputs.shape))))


@torch.library.custom_op("qmargin::refused", mutates_args=())
def _refused(inputs: Tensor, message: str, kind: str) -> Tensor:
    raise _error(inputs, message, kind)


@_refused.register_fake
def _(inputs: Tensor, message: str, kind: str) -> Tensor:
    return torch.empty(0, device=inputs.device)


def is_exporting() -> bool:
    """Whether a graph is made for another runtime, not by ``torch.compile`` for this process."""
    if torch.compiler.is_dynamo_compiling():
        # until torch 2.11, the function torch.compiler.is_exporting says yes in every such graph
        return bool(getattr(torch.compiler, "_is_exporting_flag", False))
    return torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off; some devices, such as meta, have none to switch off."""
    # Compiled code has autocast, and the check itself breaks the graph before torch 2.12.
    is_known = device_type != "meta" and torch.compiler.is_compiling()
    if is_known or torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


_MOVES_STATISTICS_TWICE = torch.__version__ < "2.9"  # compared as a version


def run_blocks(blocks: nn.Sequential, inputs: Tensor, *, recompute: bool) -> Tensor:
    """Outputs of blocks in a row; ``recompute`` keeps only what enters a block.

    Recomputed gradients and running statistics are those of plain calls: random draws are repeated,
    and the second pass leaves the statistics of batch norms alone.
    """
    if not (recompute and torch.is_grad_enabled()):
        outputs: Tensor = blocks(inputs)
        return outputs
    has_statistics = blocks.training and any(True for _ in blocks.buffers())
    if torch.compiler.is_compiling() and has_statistics and _MOVES_STATISTICS_TWICE:
        raise ConfigError(
            "gradient_checkpointing moves the statistics of compiled batch norms twice before "
            "torch 2.9; switch it or the compiler off, or update torch"
        )
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
