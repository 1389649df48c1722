"""Optimizers of a recipe: one for the backbone, one for the prototypes, and their clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.updates import ExactSGD, SparseSGD, scale_all_
from qmargin.training.recipe import OptimizerPart, Recipe


@dataclass(frozen=True)
class Optimizers:
    """The two optimizers of a run; iterate over them to step, zero or save both.

    Attributes:
        backbone: Of the network.
        head: Of the prototypes.
        lr_ratio: Of the head's learning rate to that of the backbone.
    """

    backbone: torch.optim.Optimizer
    head: torch.optim.Optimizer
    lr_ratio: float = 1.0

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter((self.backbone, self.head))

    def set_learning_rate(self, lr: float) -> None:
        """Give every group the learning rate of the step about to be taken.

        Args:
            lr: Of the backbone.
        """
        for optimizer, ratio in ((self.backbone, 1.0), (self.head, self.lr_ratio)):
            for group in optimizer.param_groups:
                group["lr"] = ratio * lr

    def zero_grad(self) -> None:
        """Drop all gradients, a pending one of the head included."""
        for optimizer in self:
            optimizer.zero_grad(set_to_none=True)


def build_optimizers(recipe: Recipe, backbone: nn.Module, head: MarginClassifier) -> Optimizers:
    """The optimizers of a recipe, at the learning rate of its peak.

    Args:
        recipe: Kind, rates, decay and the head's update.
        backbone: On its device already, wrapped or not.
        head: Built with the gradient that ``recipe.head.left_gradient`` names.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> from qmargin.training.build import build_backbone, build_head
        >>> recipe = debug()
        >>> pair = build_optimizers(recipe, build_backbone(recipe), build_head(recipe))
        >>> type(pair.backbone).__name__, type(pair.head).__name__
        ('SGD', 'ExactSGD')
    """
    part, lr = recipe.optimizer, recipe.optimizer.lr * recipe.lr_factor
    groups, ratio = parameter_groups(backbone, part), recipe.head.lr_ratio
    return Optimizers(_make(part, groups, lr), _make_head(recipe, head, ratio * lr), ratio)


def parameter_groups(backbone: nn.Module, part: OptimizerPart) -> list[dict[str, Any]]:
    """Trained parameters in one group, or in two if vectors do not decay.

    Biases, the weights of norms and the slopes of PReLU are vectors; matrices and filters are not.
    """
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


@torch.no_grad()
def clip_gradients_(
    optimizers: Optimizers,
    max_norm: float,
    *,
    with_head: bool = True,
    sum_over_shards: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``.

    With one rank it is ``torch.nn.utils.clip_grad_norm_`` over backbone and prototypes, fused
    gradients included. Where the norm is not finite nothing is scaled: look at what is returned
    before stepping. Under a ``GradScaler``, unscale both optimizers first.

    Args:
        optimizers: Whose parameters have gradients.
        max_norm: Largest norm that is left alone.
        with_head: Whether the prototypes count, and are scaled.
        sum_over_shards: Sum of a scalar over the ranks that share the prototypes; the backbone's
            gradient is the same on all of them and counts once.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank.
    """
    backbone, head = optimizers.backbone, optimizers.head
    squared = _norm(backbone).square()
    if with_head:
        head_squared = _norm(head).square()
        if sum_over_shards is not None:
            head_squared = sum_over_shards(head_squared)
        squared = squared + head_squared.to(squared.device)
    total = squared.sqrt()
    factor = (max_norm / (total + 1e-6)).clamp_max(1.0)
    factor = torch.where(total.isfinite(), factor, 1.0)
    for optimizer in (backbone, head) if with_head else (backbone,):
        _scale_(optimizer, factor)
    return total


def _make(
    part: OptimizerPart, groups: list[dict[str, Any]], lr: float, *, is_sparse: bool = False
) -> torch.optim.Optimizer:
    # On a GPU one kernel for many weights: a host that launches hundreds makes it wait.
    is_fused = not is_sparse and all(one.is_cuda for group in groups for one in group["params"])
    if part.kind == "adamw":
        betas = (part.beta1, part.beta2)
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=part.epsilon, fused=is_fused)
    return torch.optim.SGD(
        groups, lr=lr, momentum=part.momentum, nesterov=part.nesterov, fused=is_fused
    )


def _make_head(recipe: Recipe, head: MarginClassifier, lr: float) -> torch.optim.Optimizer:
    part = recipe.optimizer
    if head.gradient != recipe.head.left_gradient:
        raise ConfigError(
            f"the head leaves a {head.gradient!r} gradient and the recipe's update "
            f"{recipe.head.update!r} takes {recipe.head.left_gradient!r}; build the head with "
            "build_head(recipe)"
        )
    if recipe.head.update == "torch":
        group = {"params": list(head.parameters()), "weight_decay": part.weight_decay}
        return _make(part, [group], lr, is_sparse=head.gradient == "sparse")
    kind = ExactSGD if recipe.head.update == "exact" else SparseSGD
    return kind(head, lr, part.momentum, part.weight_decay, part.nesterov)


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
    """Norm of the gradients that exist, float64; a fused one does not, and is not made for this."""
    gradients = _gradients(optimizer)
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # One kernel for many tensors: hundreds of small ones would take longer than the head.
    norms = torch.stack(torch._foreach_norm(gradients))
    total: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return total


def _scale_(optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
    if isinstance(optimizer, ExactSGD | SparseSGD):
        optimizer.scale_gradient_(factor.to(optimizer.head.prototypes.device))
        return
    scale_all_(_gradients(optimizer), factor)
