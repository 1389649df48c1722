"""What a recipe will take of a device's memory, before any of it is allocated."""

from __future__ import annotations

import torch
from torch import nn

from qmargin.errors import ConfigError
from qmargin.heads.memory import available_memory, gib
from qmargin.models.registry import create_backbone
from qmargin.training.build import build_backbone
from qmargin.training.process import Process
from qmargin.training.recipe import Recipe
from qmargin.training.session import DTYPES
from qmargin.training.step import part_sizes

_FLOAT = 4


def estimate_memory(
    recipe: Recipe, process: Process, *, num_classes: int, input_shape: tuple[int, ...]
) -> dict[str, int]:
    """Bytes on one rank's device, by purpose.

    Weights, gradients and states are counted; activations are those that the backbone keeps for its
    backward pass, found by a forward pass without memory. Workspaces of libraries and the blocks in
    which the head works are not in it: allow for another tenth.

    Args:
        recipe: What would be trained.
        process: One rank of how many, and its device.
        num_classes: Of the data.
        input_shape: Of one sample.
    """
    part = recipe.optimizer
    backbone = build_backbone(recipe, device="meta")
    weights = _FLOAT * sum(weight.numel() for weight in backbone.parameters())
    num_states = 2 if part.kind == "adamw" else int(part.momentum > 0)
    has_average = recipe.run.ema_decay is not None
    rows = -(-num_classes // process.world)
    matrix = _FLOAT * rows * recipe.model.embedding_dim
    is_cuda = process.device.type == "cuda"
    shares = part_sizes(recipe.data.batch_size, world=process.world, parts=part.accumulation)
    batch = (max(map(max, shares)), *input_shape)
    inputs = _FLOAT * torch.Size(batch).numel()
    return {
        "weights": weights * (1 + has_average),
        "gradients": weights * (2 if process.world > 1 else 1),  # and buckets to exchange them
        "optimizer": weights * num_states,
        "prototypes": matrix,
        "copy for the screen": matrix // 2 if is_cuda else matrix,
        "gradient of the prototypes": matrix if recipe.head.left_gradient == "dense" else 0,
        "optimizer of the head": matrix * num_states,
        "inputs": inputs,
        "activations": activation_bytes(recipe, batch),
    }


def activation_bytes(recipe: Recipe, batch_shape: tuple[int, ...]) -> int:
    """Bytes that the backbone keeps for its backward pass over a batch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    dtype = DTYPES[recipe.precision.dtype]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.graph.saved_tensors_hooks(pack, _unpacked),
    ):
        part = recipe.model
        options = {"embedding_dim": part.embedding_dim, **part.options}
        backbone: nn.Module = create_backbone(part.backbone, **options)  # type: ignore[arg-type]
        own = {weight.untyped_storage()._cdata for weight in backbone.parameters()}
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            output = backbone(torch.empty(batch_shape))  # kept alive: so are its storages
    assert output is not None
    return sum(size for storage, size in kept.items() if storage not in own)


def check_fits(parts: dict[str, int], process: Process) -> None:
    """Refuse a run that needs more memory than a device has left.

    Ranks on CPUs are taken to share one machine.
    """
    available = available_memory(process.device)
    num_here = process.world if process.device.type == "cpu" else 1
    needed = num_here * sum(parts.values())
    if available is None or needed <= available:
        return
    listed = ", ".join(f"{name} {gib(num_here * size)}" for name, size in parts.items() if size)
    raise ConfigError(
        f"this recipe needs about {gib(needed)} on {process.device} ({listed}) and "
        f"{gib(available)} are free; use a smaller data.batch_size, more optimizer.accumulation, "
        "more ranks or fewer classes"
    )


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
