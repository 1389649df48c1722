"""Optimizers of backbone and prototypes, gradient clipping, and averages of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from qmargin.errors import CheckpointError, ConfigError, ShapeError
from qmargin.files import replacing
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.optimizers import ExactSGD, SparseSGD, scale_all_
from qmargin.training.checkpoint import Checkpoint, open_checkpoint, read_backbone, write_tensors
from qmargin.training.recipe import OptimizerPart, Recipe

AVERAGE = "average.safetensors"  # in the folder of a run, at its end
MOVING_AVERAGE = "ema.safetensors"


@dataclass(frozen=True)
class Optimizers:
    """The two optimizers of a run; iterate over them to step, zero or save both."""

    backbone: torch.optim.Optimizer
    head: torch.optim.Optimizer
    lr_ratio: float = 1.0  # ratio of the head's learning rate to that of the backbone

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter((self.backbone, self.head))

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the step about to be taken, given that of the backbone."""
        for optimizer, ratio in ((self.backbone, 1.0), (self.head, self.lr_ratio)):
            for group in optimizer.param_groups:
                group["lr"] = ratio * lr

    def zero_grad(self) -> None:
        """Drop all gradients, including a pending one of the head."""
        for optimizer in self:
            optimizer.zero_grad(set_to_none=True)


def build_optimizers(recipe: Recipe, backbone: nn.Module, head: MarginClassifier) -> Optimizers:
    """Build the optimizers of a recipe at its peak learning rate, for models on their device."""
    part, update, ratio = recipe.optimizer, recipe.head.update, recipe.head.lr_ratio
    lr = part.lr * recipe.lr_factor
    if head.gradient != recipe.head.gradient_form:
        needed = recipe.head.gradient_form
        raise ConfigError(
            f"the head leaves a {head.gradient!r} gradient, not {needed!r}; use build_head(recipe)"
        )
    if update == "torch":
        group = {"params": list(head.parameters()), "weight_decay": part.weight_decay}
        of_head = _make(part, [group], ratio * lr, is_sparse=head.gradient == "sparse")
    else:
        kind = ExactSGD if update == "exact" else SparseSGD
        of_head = kind(head, ratio * lr, part.momentum, part.weight_decay, part.nesterov)
    return Optimizers(_make(part, parameter_groups(backbone, part), lr), of_head, ratio)


def parameter_groups(backbone: nn.Module, part: OptimizerPart) -> list[dict[str, Any]]:
    """Trained parameters in one group, or in two if vectors (biases, norms) do not decay."""
    trained = [weight for weight in backbone.parameters() if weight.requires_grad]
    if not trained:
        raise ConfigError("the backbone has no parameter that requires a gradient; train something")
    if part.decay_norms:
        return [{"params": trained, "weight_decay": part.weight_decay}]
    groups = (
        ([weight for weight in trained if weight.ndim > 1], part.weight_decay),
        ([weight for weight in trained if weight.ndim <= 1], 0.0),
    )
    return [{"params": weights, "weight_decay": decay} for weights, decay in groups if weights]


def _make(
    part: OptimizerPart, groups: list[dict[str, Any]], lr: float, *, is_sparse: bool = False
) -> torch.optim.Optimizer:
    # On a GPU, one kernel for many weights: hundreds of launches would make it wait.
    is_fused = not is_sparse and all(one.is_cuda for group in groups for one in group["params"])
    if part.kind == "adamw":
        betas = (part.beta1, part.beta2)
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=part.epsilon, fused=is_fused)
    return torch.optim.SGD(
        groups, lr=lr, momentum=part.momentum, nesterov=part.nesterov, fused=is_fused
    )


@torch.no_grad()
def clip_gradients_(
    optimizers: Optimizers,
    max_norm: float,
    *,
    with_head: bool = True,
    sum_over_shards: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``.

    This works like ``torch.nn.utils.clip_grad_norm_``, but includes fused gradients.
    ``sum_over_shards`` adds over the ranks that share the prototypes; the backbone's gradient is
    the same on all and counts once. Returns the norm before clipping, in float64. Where it is not
    finite nothing is scaled.
    """
    squared = _norm(optimizers.backbone).square()
    if with_head:
        head_squared = _norm(optimizers.head).square()
        if sum_over_shards is not None:
            head_squared = sum_over_shards(head_squared)
        squared = squared + head_squared.to(squared.device)
    total = squared.sqrt()
    factor = (max_norm / (total + 1e-6)).clamp_max(1.0)
    factor = torch.where(total.isfinite(), factor, 1.0)
    for optimizer in optimizers if with_head else (optimizers.backbone,):
        if isinstance(optimizer, ExactSGD | SparseSGD):
            optimizer.scale_gradient_(factor.to(optimizer.head.prototypes.device))
        else:
            scale_all_(_gradients(optimizer), factor)
    return total


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Stored numbers of all gradients; those of a sparse one with each element once."""
    found = []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None and weight.grad.is_sparse:
                weight.grad = weight.grad.coalesce()
                found.append(weight.grad._values())
            elif weight.grad is not None:
                found.append(weight.grad)
    return found


def _norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Euclidean norm of all gradients; in float64, because it is squared and summed over ranks."""
    if isinstance(optimizer, ExactSGD | SparseSGD):
        return optimizer.grad_norm().double()
    return stored_norm(optimizer)


@torch.no_grad()
def stored_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Norm of the stored gradients, float64, without fused ones."""
    gradients = _gradients(optimizer)
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # One kernel for many tensors: hundreds of small ones would take longer than the head.
    norms = torch.stack(torch._foreach_norm(gradients))
    total: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return total


class MovingAverage:
    """Exponential moving average of a state dict.

    The first update copies; after it ``average = decay * average + (1 - decay) * value``. Tensors
    of floats are averaged, running statistics included, in float32 or better; counters are copied.
    """

    def __init__(self, decay: float) -> None:
        self.decay = float(decay)
        self.num_updates = 0
        self.tensors: dict[str, Tensor] = {}
        self._blend = get_ema_multi_avg_fn(self.decay)

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Update with the next values, ``model.state_dict()``."""
        self.num_updates += 1
        if not self.tensors:
            # at least float32, where a decay of 0.9999 still moves the average
            half = (torch.float16, torch.bfloat16)
            self.tensors = {
                name: value.detach().to(
                    dtype=torch.float32 if value.dtype in half else None, copy=True
                )
                for name, value in values.items()
            }
            return
        _check_alike(self.tensors, values)
        averages, floats = [], []
        for name, value in values.items():
            average = self.tensors[name]
            if average.is_floating_point():
                averages.append(average)
                floats.append(value.detach().to(average.dtype))
            else:
                average.copy_(value)
        if averages:
            self._blend(averages, floats, self.num_updates)

    def state_dict(self) -> dict[str, Any]:
        """A tree for ``CheckpointState.parts``."""
        tensors = dict(self.tensors)
        return {"decay": self.decay, "num_updates": self.num_updates, "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any], *, device: Any = None) -> None:
        """Restore the state of ``state_dict``; the decay stays that of this object."""
        self.num_updates = int(state["num_updates"])
        saved = state["tensors"].items()
        self.tensors = {name: tensor.to(device, copy=True) for name, tensor in saved}


def _check_alike(expected: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    shapes = [{name: one.shape for name, one in state.items()} for state in (expected, values)]
    changed = {name for name, _ in shapes[0].items() ^ shapes[1].items()}
    if changed:
        names = ", ".join(sorted(changed)[:3])
        raise ShapeError(
            f"{names} differs between the states to average in name or shape; use one model"
        )


def average_checkpoints(checkpoints: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """Mean of the backbones of some checkpoints in float64; counters are those of the last."""
    sums: dict[str, Tensor] = {}
    latest: dict[str, Tensor] = {}
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.step):
        latest = read_backbone(checkpoint)
        if not sums:
            sums = {name: torch.zeros_like(value).double() for name, value in latest.items()}
        _check_alike(sums, latest)
        for name, value in latest.items():
            sums[name] += value
    count = len(checkpoints)
    return {
        name: (sums[name] / count).to(value.dtype) if value.is_floating_point() else value
        for name, value in latest.items()
    }


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write or replace a safetensors file atomically."""
    try:
        with replacing(path) as temporary:
            write_tensors(temporary, tensors)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); free some space, or choose "
            "another folder"
        ) from error


def write_averages(folder: Path, checkpoints: Sequence[Path], moving: MovingAverage | None) -> None:
    """Write averaged weights of a run: mean of checkpoints, moving average."""
    if checkpoints:
        average = average_checkpoints([open_checkpoint(path) for path in checkpoints])
        write_weights(folder / AVERAGE, average)
    if moving is not None and moving.tensors:
        write_weights(folder / MOVING_AVERAGE, moving.tensors)
