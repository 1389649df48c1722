r"""Schedules: values as functions of the step alone, in float64.

``step`` counts optimizer steps from 0 and is the next step; an epoch has ``E`` of them. Schedules
have no state, so a resumed run has nothing to restore.

With :math:`W` the steps of the warm-up, :math:`T` those of the schedule, and progress
:math:`p = (t - W) / (T - W)` (or :math:`t / T` with ``decay_in_warmup``), kept in [0, 1]:

.. math::

    \text{lr}(t) = f \cdot \text{warm}(t) \cdot \text{curve}(p), \qquad
    \text{warm}(t) = w_0 + (1 - w_0)\, t / W \;\text{ for } t < W

where :math:`f` is 1 or ``batch_size / base_batch`` and :math:`w_0` is ``warmup_start``.
"""

from __future__ import annotations

import math

from qmargin.training.loss_part import LossSettings
from qmargin.training.recipe import SCHEDULED, Recipe, SchedulePart, ValueSchedule

_RISE_RATE = math.log(1e-3 / (1.0 + 1e-6))  # of the share of an exponential move left at its end


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Learning rate of a step."""
    schedule = recipe.schedule
    warmup = schedule.warmup_epochs * steps_per_epoch
    total = recipe.schedule_epochs * steps_per_epoch
    start = 0.0 if schedule.decay_in_warmup else warmup
    progress = min(max((step - start) / (total - start), 0.0), 1.0)
    first = schedule.warmup_start
    share = 1.0 if step >= warmup else first + (1.0 - first) * step / warmup
    curve = _decayed(schedule, recipe.optimizer.lr, progress, epoch=step / steps_per_epoch)
    return recipe.lr_factor * share * curve


def _decayed(schedule: SchedulePart, lr: float, progress: float, *, epoch: float) -> float:
    """Learning rate without warm-up: at a progress in [0, 1], or for steps at an epoch."""
    if schedule.kind == "constant":
        return lr
    if schedule.kind == "step":
        num_passed = sum(epoch >= mark for mark in schedule.milestones)
        return float(lr * schedule.gamma**num_passed)
    final = schedule.final_lr
    if schedule.kind == "polynomial":
        return float(final + (lr - final) * (1.0 - progress) ** schedule.power)
    if schedule.kind == "cosine":
        return final + (lr - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return float(lr * (final / lr) ** progress)


def scheduled_value(schedule: ValueSchedule, epoch: float, *, final: float) -> float:
    r"""Value of a schedule at ``epoch``; ``final`` is :math:`v_1` where the schedule has none.

    With :math:`p` the part of the way between the two epochs, a linear move is at
    :math:`v_0 + (v_1 - v_0) p`, and an exponential one, as in WeSpeaker, at

    .. math:: v_0 + (v_1 - v_0) \left(1 - r^p\right), \qquad r = 10^{-3} / (1 + 10^{-6})
    """
    final = final if schedule.final is None else schedule.final
    if epoch < schedule.start_epoch:
        return schedule.initial
    if schedule.end_epoch is None or epoch >= schedule.end_epoch:
        return final
    part = (epoch - schedule.start_epoch) / (schedule.end_epoch - schedule.start_epoch)
    if schedule.kind == "exponential":
        part = -math.expm1(part * _RISE_RATE)
    return schedule.initial + (final - schedule.initial) * part


def loss_settings(recipe: Recipe, step: int, steps_per_epoch: int) -> LossSettings:
    """Alpha, margin, scale and strength of a step."""
    settings = recipe.loss.settings
    for name, target in SCHEDULED.items():
        part: ValueSchedule | None = getattr(recipe, name)
        if part is not None:
            final = getattr(settings, target)
            value = scheduled_value(part, step / steps_per_epoch, final=final)
            settings = settings._replace(**{target: value})
    return settings


def unreached(recipe: Recipe, epochs: float) -> list[str]:
    """Scheduled changes that a run of this many epochs never reaches, one sentence each."""
    schedule, length = recipe.schedule, f"the run ends after {epochs:.4g} epochs"
    found = []
    if schedule.warmup_epochs > epochs:
        found.append(
            f"the learning rate never reaches its peak: schedule.warmup_epochs is "
            f"{schedule.warmup_epochs:g} and {length}; warm up for fewer"
        )
    late = [f"{mark:g}" for mark in schedule.milestones if mark >= epochs]
    if schedule.kind == "step" and late:
        found.append(
            f"the learning rate does not fall at epoch{'s' * (len(late) > 1)} {', '.join(late)} of "
            f"schedule.milestones: {length}; set earlier milestones, or train for longer"
        )
    for name, target in SCHEDULED.items():
        part: ValueSchedule | None = getattr(recipe, name)
        if part is not None:
            constant = getattr(recipe.loss.settings, target)
            found += _unreached_value(name, part, constant, epochs)
    return found


def _unreached_value(name: str, part: ValueSchedule, constant: float, epochs: float) -> list[str]:
    """The same for one schedule of the loss; suggests a change in the first quarter of a run."""
    final = constant if part.final is None else part.final
    start, end = part.start_epoch, part.end_epoch
    last = start if end is None else end
    if part.initial == final or (start < epochs and last <= epochs):
        return []
    proposed = {"start_epoch": epochs / 4}
    if end is not None:
        proposed = {"start_epoch": epochs / 4 * start / end, "end_epoch": epochs / 4}
    remedy = " ".join(f"{name}.{key}={mark:.3g}" for key, mark in proposed.items())
    if start < epochs:
        value = scheduled_value(part, epochs, final=final)
        happens, mark = f"ends at {value:.3g}", f"end_epoch is {last:g}"
    else:
        happens, mark = f"stays at {part.initial:g}", f"start_epoch is {start:g}"
    return [
        f"the {SCHEDULED[name]} {happens} and never reaches {final:g}: {name}.{mark} and the run "
        f"ends after {epochs:.4g} epochs; set {remedy}, or {name}=null for {constant:g} throughout"
    ]
