"""What the journal says about a run and its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import qmargin
from qmargin.training.schedules import loss_settings
from qmargin.training.session import Session
from qmargin.training.starting import Start
from qmargin.training.step import StepResult


def start_record(session: Session, start: Start) -> dict[str, Any]:
    """The first event of a process: what runs, where, and from which step on."""
    return {
        "step": session.progress.step,
        "recipe": session.recipe.name,
        "recipe_sha256": session.recipe.sha256,
        "weights_sha256": session.weights_sha256,
        "checkpoint": None if start.checkpoint is None else start.checkpoint.path.name,
        "changes": start.changes,
        "unreached": session.unreached,
        "total_steps": session.total_steps,
        "steps_per_epoch": session.order.steps_per_epoch,
        "num_samples": session.order.n,
        "num_classes": session.head.num_classes,
        "world": session.process.world,
        "device": str(session.process.device),
        "version": qmargin.__version__,
        "torch": torch.__version__,
    }


def describe_run(session: Session) -> str:
    """The run in one line, for people."""
    process, recipe = session.process, session.recipe
    ranks = f"on {process.device}" if process.world == 1 else f"on {process.world} ranks"
    where = f", from step {session.progress.step}" if session.progress.step else ""
    return (
        f"training {recipe.name} {ranks}: {session.order.n:,} samples of "
        f"{session.head.num_classes:,} classes, {session.total_steps:,} steps of "
        f"{recipe.data.batch_size:,}{where}"
    )


def step_record(
    session: Session, result: StepResult, rates: Mapping[str, float | None]
) -> dict[str, Any]:
    """A record of the step that was just taken; every rank must ask, and reading it waits.

    ``step`` counts steps that have been taken. Support, path and mass error are those of the last
    part of the batch.
    """
    head, step = session.head, session.progress.step
    stats, per_epoch = head.last_step, session.order.steps_per_epoch
    settings = loss_settings(session.recipe, step - 1, per_epoch)
    record: dict[str, Any] = {
        "step": step,
        "total_steps": session.total_steps,
        "epoch": session.order.epoch_of(step - 1),
        "loss": result.loss,
        "lr": session.optimizers.backbone.param_groups[0]["lr"],
        "effective_margin": head.loss.effective_margin,
        **settings._asdict(),
        "grad_norm": result.grad_norm,
        "num_skipped": session.progress.num_skipped,
        "num_corrupt": session.budget.count,
        "num_redone": head.num_redone,
        "num_classes": head.num_classes,
        **rates,
    }
    if session.scaler.is_enabled():
        record["loss_scale"] = session.scaler.get_scale()
    device = session.process.device
    if device.type == "cuda":
        record["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30  # of this rank
    names = ("support_mean", "support_max", "path", "mass_error", "num_overflowed")
    return record | {name: None if stats is None else getattr(stats, name) for name in names}
