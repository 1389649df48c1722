"""Validation during a run: plain callables, so that training need not know how it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qmargin.heads.classifier import MarginClassifier
from qmargin.training.process import Process
from qmargin.training.recipe import Recipe
from qmargin.training.session import Session
from qmargin.training.together import together


@dataclass(frozen=True)
class HookState:
    """What a hook may look at; it is the run's own, so look and do not touch.

    Attributes:
        step: Steps that have been taken.
        epoch: Epoch of the next step.
        recipe: Of the run.
        process: This rank: hooks run on every rank, and may use ``process.rank`` to share work.
        backbone: In evaluation mode, the same on every rank.
        head: This rank's classes.
        average: Moving average of the backbone's weights, if the recipe keeps one.
    """

    step: int
    epoch: int
    recipe: Recipe
    process: Process
    backbone: nn.Module
    head: MarginClassifier
    average: dict[str, Tensor] | None


Hook: TypeAlias = Callable[[HookState], dict[str, float]]


@torch.no_grad()
def run_hooks(hooks: Sequence[Hook], session: Session) -> dict[str, float]:
    """Results of all hooks; the backbone is in training mode again afterwards."""
    session.share_buffers_()
    average = session.average
    state = HookState(
        step=session.progress.step,
        epoch=session.epoch,
        recipe=session.recipe,
        process=session.process,
        backbone=session.backbone.eval(),
        head=session.head,
        average=None if average is None else dict(average.tensors),
    )
    results: dict[str, float] = {}
    try:
        for hook in hooks:
            found = together(session.process, lambda hook=hook: hook(state))  # type: ignore[misc]
            results |= {name: float(value) for name, value in found.items()}
    finally:
        session.backbone.train()
    return results
