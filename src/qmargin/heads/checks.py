"""Checks of a head: settings, memory, batches, prototypes, and its place in a wrapped model."""

from __future__ import annotations

import os
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qmargin.errors import ConfigError, DataError, ShapeError
from qmargin.heads.paths import Chunked, Sparse, TopK
from qmargin.kernels.head_reference import inverse_lengths
from qmargin.losses.checks import check_floating
from qmargin.losses.margin_loss import MarginLoss
from qmargin.losses.margins import ElasticMargin

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


def check_arguments(embedding_dim: object, num_classes: object, loss: object) -> None:
    """Refuse arguments of the wrong type."""
    for name, value in (("embedding_dim", embedding_dim), ("num_classes", num_classes)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")
    if not isinstance(loss, MarginLoss):
        raise ConfigError(
            f"loss is {loss!r}; pass a MarginLoss, such as qmargin.q_margin() or qmargin.cosface()"
        )


def check_settings(head: MarginClassifier, dtype: torch.dtype) -> None:
    """Refuse settings with which no step is possible."""
    if head.gradient not in ("dense", "sparse", "fused"):
        raise ConfigError(f"gradient is {head.gradient!r}; known ones are dense, sparse, fused")
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"prototypes are {dtype}; keep them in torch.float32 (or float64) and choose the "
            "precision of the screen with path=Sparse(screen_dtype=...)"
        )
    if head.loss.reduction == "none" and head.ranks.world > 1:
        raise ConfigError(
            "the loss has reduction='none' and classes are split over ranks, which exchange only "
            "means and sums; use reduction='mean' or 'sum'"
        )
    margin = head.loss.margin
    parts = margin.modules() if head.ranks.world > 1 and isinstance(margin, nn.Module) else ()
    if any(isinstance(part, ElasticMargin) and part.seed is None for part in parts):
        raise ConfigError(
            "the margin is drawn from each rank's own generator and the ranks must draw the same; "
            "give ElasticMargin a seed"
        )
    path = head.path
    if isinstance(path, Chunked | TopK) or path.name == "sparse":
        alpha = 1.0 + head.alpha_minus_one
        if alpha <= 1.0 and not isinstance(path, Chunked):
            raise ConfigError(
                f"path is {path.name!r}, for posteriors that are zero for most classes, and alpha "
                f"is {alpha:g}; use path='chunked', or an alpha above 1"
            )


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device, None if that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    if device.type != "cpu":
        return None
    facts = Path("/proc/meminfo")  # includes memory that caches can release; sysconf does not
    for line in facts.read_text(encoding="ascii").splitlines() if facts.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def gib(size: float) -> str:
    """Format a number of bytes."""
    power = next((power for power in (30, 20) if size >= 1 << power), 10)
    return f"{size / (1 << power):,.1f} {' KMG'[power // 10]}iB"


def check_head_memory(head: MarginClassifier, like: Tensor) -> None:
    """Refuse a head that the device cannot hold; ``like`` has its dtype and device."""
    native, numbers = like.element_size(), len(head.shard) * head.embedding_dim
    parts = {"prototypes": numbers * native}
    if isinstance(head.path, Sparse | Chunked) or head.gradient == "fused":
        parts["screened copy"] = numbers * head.screen_dtype_for(like).itemsize
    if head.gradient == "dense":
        parts["gradient"] = numbers * native
    available, needed = available_memory(like.device), sum(parts.values())
    if available is not None and needed > available:
        listed = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
        raise ConfigError(
            f"a head of {len(head.shard):,} classes x {head.embedding_dim:,} needs {gib(needed)} "
            f"on {like.device} ({listed}) and {gib(available)} are free; use fewer classes, a "
            "smaller embedding_dim, gradient='fused', or a larger device"
        )


def check_embeddings(head: MarginClassifier, embeddings: Tensor) -> Tensor:
    """Refuse embeddings of the wrong shape, dtype or device; return them in float32 or float64."""
    embeddings = check_floating(embeddings, "embeddings")
    shape, device = tuple(embeddings.shape), head.prototypes.device
    if len(shape) != 2 or shape[1] != head.embedding_dim:
        raise ShapeError(
            f"embeddings have shape {shape}; this head takes [B, {head.embedding_dim}]"
        )
    if embeddings.device != device:
        raise ShapeError(
            f"embeddings are on {embeddings.device} and prototypes on {device}; move one of them"
        )
    return embeddings


def check_norms(norms: Tensor, *, debug: bool) -> None:
    """Refuse rows without a direction; a GPU would have to wait, so there their loss is NaN."""
    if norms.is_cuda and not debug:
        return
    norms = norms.detach()
    is_bad = ~((norms > 0) & norms.isfinite())
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise DataError(
            f"the embedding of row {row} has length {float(norms[row]):g}, so it has no "
            "direction; look for NaN, inf or a dead layer, or mark the row with ignore_index"
        )


def check_prototypes(head: MarginClassifier) -> None:
    """Name the first prototype without a direction, on every rank; waits for the device."""
    inverse = inverse_lengths(head.prototypes.detach())
    bad = inverse.isnan().nonzero()
    mine = head.shard.start + int(bad[0]) if len(bad) else -1
    numbers = (number for (number,) in head.ranks.integers(mine, device=inverse.device))
    found = [number for number in numbers if number >= 0]
    if found:
        raise DataError(
            f"the prototype of class {min(found)} is zero or not finite, so every loss is NaN; "
            "look for a diverged step, or draw a new prototype"
        )


def check_layout(head: MarginClassifier) -> None:
    """Refuse prototypes whose numbers kernels would look for elsewhere."""
    prototypes = head.prototypes
    if not prototypes.is_contiguous() and "triton" in head.kernels.__name__:
        raise ShapeError(
            f"the prototypes have strides {prototypes.stride()}, and kernels read whole rows of "
            "them; assign a contiguous tensor: head.prototypes.data = weights.contiguous()"
        )


def check_data_parallel(head: MarginClassifier) -> None:
    """Refuse a shard, or a fused gradient, that ``DistributedDataParallel`` would average."""
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or id(wrapper) == head.checked_wrapper:
        return
    if head.ranks.world == 1 and head.gradient != "fused":
        return
    names = (name for name, value in wrapper.module.named_parameters() if value is head.prototypes)
    name, world = next(names, None), dist.get_world_size(wrapper.process_group)
    if name is None or name in wrapper.parameters_to_ignore or world == 1:
        head.checked_wrapper = id(wrapper)
        return
    if head.ranks.world == 1:
        raise ConfigError(
            f"{name} is replicated by DistributedDataParallel and gradient='fused' leaves it no "
            "gradient to average; pass group=torch.distributed.group.WORLD to the head, or use "
            "gradient='dense'"
        )
    raise ConfigError(
        f"{name} differs from rank to rank (group=...) and DistributedDataParallel has overwritten "
        "it with that of rank 0 and averages its gradients; wrap the backbone alone, or call "
        "qmargin.exclude_from_ddp(model) before wrapping"
    )


def exclude_from_ddp(model: nn.Module) -> nn.Module:
    """Exclude sharded prototypes of a model from ``DistributedDataParallel``.

    Call it before wrapping a model that contains a ``MarginClassifier(group=...)``. Each rank has
    its own prototypes there, which must be neither overwritten by those of rank 0 nor averaged.
    Returns the same model.

    Examples:
        >>> from qmargin import MarginClassifier, q_margin
        >>> model = nn.ModuleDict({"head": MarginClassifier(8, 100, q_margin())})
        >>> exclude_from_ddp(model)._ddp_params_and_buffers_to_ignore
        ['head.prototypes']
    """
    from qmargin.heads.classifier import MarginClassifier

    heads = [name for name, part in model.named_modules() if isinstance(part, MarginClassifier)]
    names = (f"{name}.prototypes" if name else "prototypes" for name in heads)
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    ignored = list(dict.fromkeys([*known, *names]))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return model
