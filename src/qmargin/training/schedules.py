r"""Schedules: values as functions of the step alone, in float64.

``step`` counts optimizer steps from 0 and is the step about to be taken; an epoch has ``E`` of
them. Nothing here has state, so a resumed run has nothing to restore.

With :math:`W` the steps of the warm-up, :math:`T` those of the schedule, and progress
:math:`p = (t - W) / (T - W)` (or :math:`t / T` with ``decay_in_warmup``), kept in [0, 1]:

.. math::

    \text{lr}(t) = f \cdot \text{warm}(t) \cdot \text{curve}(p), \qquad
    \text{warm}(t) = w_0 + (1 - w_0)\, t / W \;\text{ for } t < W

where :math:`f` is 1 or ``batch_size / base_batch`` and :math:`w_0` is ``warmup_start``.
"""

from __future__ import annotations

import math

from qmargin.errors import ConfigError
from qmargin.training.loss_part import LossSettings
from qmargin.training.recipe import SCHEDULED, Recipe, SchedulePart, ValueSchedule

RISE_LEFT = 1e-3 / (1.0 + 1e-6)  # share of an exponential move that is left at its end
_RISE_RATE = math.log(RISE_LEFT)


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Learning rate of a step.

    Examples:
        >>> from dataclasses import replace
        >>> from qmargin.recipes.debug import debug
        >>> part = SchedulePart("step", epochs=20, milestones=(7, 13))
        >>> recipe = replace(debug(), schedule=part)
        >>> [round(learning_rate(recipe, 10 * epoch, 10), 6) for epoch in (0, 6, 7, 13, 19)]
        [0.1, 0.1, 0.01, 0.001, 0.001]
    """
    _check_step(step, steps_per_epoch)
    schedule = recipe.schedule
    warmup = schedule.warmup_epochs * steps_per_epoch
    total = recipe.schedule_epochs * steps_per_epoch
    start = 0.0 if schedule.decay_in_warmup else warmup
    progress = min(max((step - start) / (total - start), 0.0), 1.0)
    epoch = step / steps_per_epoch
    curve = decayed(schedule, recipe.optimizer.lr, progress=progress, epoch=epoch)
    return recipe.lr_factor * warmup_share(step, warmup, start=schedule.warmup_start) * curve


def warmup_share(step: int, warmup_steps: float, *, start: float = 0.0) -> float:
    """Share of the learning rate that a line from ``start`` to 1 allows at a step.

    Examples:
        >>> [warmup_share(step, 4) for step in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """
    if step >= warmup_steps:
        return 1.0
    return start + (1.0 - start) * step / warmup_steps


def decayed(schedule: SchedulePart, lr: float, *, progress: float, epoch: float) -> float:
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


def scheduled_value(
    schedule: ValueSchedule, step: int, steps_per_epoch: int, *, final: float
) -> float:
    r"""Value of a schedule at a step.

    With :math:`p` the part of the way between the two epochs, a linear move is at
    :math:`v_0 + (v_1 - v_0) p`, and an exponential one, as in WeSpeaker, at

    .. math:: v_0 + (v_1 - v_0) \left(1 - r^p\right), \qquad r = 10^{-3} / (1 + 10^{-6})

    Args:
        schedule: Kind, epochs and values.
        step: The step about to be taken.
        steps_per_epoch: ``E``.
        final: ``v_1`` where the schedule leaves it to the loss.

    Examples:
        >>> rise = ValueSchedule("exponential", start_epoch=19, end_epoch=39)
        >>> [round(scheduled_value(rise, epoch, 1, final=0.2), 3) for epoch in (19, 20, 22, 29, 39)]
        [0.0, 0.058, 0.129, 0.194, 0.2]
    """
    _check_step(step, steps_per_epoch)
    return _value_at(schedule, step / steps_per_epoch, final)


def _value_at(schedule: ValueSchedule, epoch: float, final: float) -> float:
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
    """Alpha, margin and scale of a step.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> loss_settings(debug(), 0, 10)
        LossSettings(alpha=1.25, margin=0.2, scale=32.0)
    """
    settings = recipe.loss.settings
    for name, target in SCHEDULED.items():
        part: ValueSchedule | None = getattr(recipe, name)
        if part is not None:
            final = getattr(settings, target)
            value = scheduled_value(part, step, steps_per_epoch, final=final)
            settings = settings._replace(**{target: value})
    return settings


def unreached(recipe: Recipe, epochs: float) -> list[str]:
    """What a recipe schedules and a run of this many epochs never does, one sentence each.

    A run that is cut short keeps the schedules of its recipe. A margin that would begin to rise
    after the last step stays at zero for the whole run; every run says so before it starts.

    Args:
        recipe: Of the run.
        epochs: Length of the run; with ``run.max_steps`` it may be less than ``run.epochs``.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> unreached(debug(), 6)
        []
    """
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
    """The same for one schedule of the loss; proposes a move within the first quarter of a run.

    Args:
        name: Of the schedule.
        part: The schedule.
        constant: Of the loss, where there is no schedule.
        epochs: Length of the run.
    """
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
        happens, mark = f"ends at {_value_at(part, epochs, final):.3g}", f"end_epoch is {last:g}"
    else:
        happens, mark = f"stays at {part.initial:g}", f"start_epoch is {start:g}"
    return [
        f"the {SCHEDULED[name]} {happens} and never reaches {final:g}: {name}.{mark} and the run "
        f"ends after {epochs:.4g} epochs; set {remedy}, or {name}=null for {constant:g} throughout"
    ]


def _check_step(step: int, steps_per_epoch: int) -> None:
    if step < 0 or steps_per_epoch < 1:
        raise ConfigError(
            f"step is {step} and steps_per_epoch {steps_per_epoch}; the first must be at least 0, "
            "the second at least 1"
        )
