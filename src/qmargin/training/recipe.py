"""``Recipe``: everything that decides the outcome of a run, checked when built, and hashed."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from qmargin.errors import ConfigError, MarginWarning
from qmargin.training.fields import check_at_least, check_fields
from qmargin.training.loss_part import LossPart
from qmargin.training.parts import (
    DataPart,
    HeadPart,
    ModelPart,
    OptimizerPart,
    PrecisionPart,
    RunPart,
    SchedulePart,
    ValueSchedule,
)

__all__ = [
    "DataPart",
    "HeadPart",
    "LossPart",
    "ModelPart",
    "OptimizerPart",
    "PrecisionPart",
    "Recipe",
    "RunPart",
    "SchedulePart",
    "ValueSchedule",
    "flatten",
]

SCHEDULED = {"margin_schedule": "margin", "scale_schedule": "scale", "alpha_schedule": "alpha"}
FREE = (  # keys, or the sections above them, that do not decide what a run computes
    "name",
    "data.num_workers",
    "data.max_corrupt",
    "data.index_dir",
    "run.save_every_steps",
    "run.keep",
    "run.validate_every",
    "run.log_every",
    "run.nan_budget",
    "run.timeout_s",
)


@dataclass(frozen=True)
class Recipe:
    """A run: what it reads, what it trains, by which rule and for how long.

    Parts are frozen; a variant is made with ``dataclasses.replace``, a file with
    ``qmargin.training.recipe_files``.

    Args:
        name: For people; it decides nothing.
        data: Samples and batch size.
        model: Backbone.
        loss: Divergence, margin and scale.
        optimizer: Rule and learning rate.
        run: Length, checkpoints and patience.
        head: How the classifier takes a step.
        schedule: Of the learning rate.
        precision: Of the backbone.
        seed: Of weights, order, augmentation and draws.
        margin_schedule: Of the margin; None for a constant.
        scale_schedule: Of the scale.
        alpha_schedule: Of the order of the divergence.

    Examples:
        >>> recipe = Recipe(
        ...     name="small",
        ...     data=DataPart("synthetic", batch_size=32, num_classes=10),
        ...     model=ModelPart("small_mlp", embedding_dim=16),
        ...     loss=LossPart.from_preset("q_margin"),
        ...     optimizer=OptimizerPart(lr=0.1),
        ...     run=RunPart(epochs=2),
        ... )
        >>> recipe.sha256 == replace(recipe, name="other").sha256
        True
        >>> recipe.sha256 == replace(recipe, seed=1).sha256
        False
    """

    name: str
    data: DataPart
    model: ModelPart
    loss: LossPart
    optimizer: OptimizerPart
    run: RunPart
    head: HeadPart = field(default_factory=HeadPart)
    schedule: SchedulePart = field(default_factory=SchedulePart)
    precision: PrecisionPart = field(default_factory=PrecisionPart)
    seed: int = 0
    margin_schedule: ValueSchedule | None = None
    scale_schedule: ValueSchedule | None = None
    alpha_schedule: ValueSchedule | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 0, "seed")
        if not self.name.strip():
            raise ConfigError("name is empty; give the recipe one")
        self._check_schedule()
        self._check_update()
        self._check_loss()

    @property
    def schedule_epochs(self) -> int:
        """Length of the learning rate's schedule: its own, or that of the run."""
        return self.run.epochs if self.schedule.epochs is None else self.schedule.epochs

    @property
    def lr_factor(self) -> float:
        """What every learning rate is multiplied by: 1, or ``batch_size / base_batch``."""
        base = self.optimizer.base_batch
        return 1.0 if base is None else self.data.batch_size / base

    @property
    def sha256(self) -> str:
        """Hash of everything that decides the outcome: of the resolved recipe without ``FREE``."""
        values = flatten(self.resolved())
        deciding = {key: value for key, value in values.items() if not is_under(key, FREE)}
        text = json.dumps(deciding, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def resolved(self) -> Recipe:
        """The same run with the values written out that follow from others."""
        changes: dict[str, Any] = {"schedule": replace(self.schedule, epochs=self.schedule_epochs)}
        for name, target in SCHEDULED.items():
            part = getattr(self, name)
            if part is not None and part.final is None:
                changes[name] = replace(part, final=getattr(self.loss, target))
        return replace(self, **changes)

    def _check_schedule(self) -> None:
        schedule, epochs = self.schedule, self.schedule_epochs
        if schedule.warmup_epochs >= epochs:
            raise ConfigError(
                f"schedule.warmup_epochs is {schedule.warmup_epochs:g} and the schedule has "
                f"{epochs} epochs; warm up for fewer"
            )
        if schedule.final_lr > self.optimizer.lr:
            raise ConfigError(
                f"schedule.final_lr is {schedule.final_lr:g} and optimizer.lr only "
                f"{self.optimizer.lr:g}; the learning rate decays, lower the final one"
            )

    def _check_update(self) -> None:
        head, optimizer, parts = self.head, self.optimizer, self.optimizer.accumulation
        if head.update != "torch" and optimizer.kind != "sgd":
            raise ConfigError(
                f"optimizer.kind is {optimizer.kind!r} and head.update {head.update!r} is a form "
                "of sgd; set head.update to 'torch'"
            )
        if parts > 1 and head.left_gradient == "fused":
            raise ConfigError(
                f"optimizer.accumulation is {parts} and head.update {head.update!r} holds the "
                "gradient of one part only; set head.update to 'torch'"
            )
        if self.data.batch_size % parts:
            raise ConfigError(
                f"optimizer.accumulation is {parts}, which does not divide data.batch_size "
                f"{self.data.batch_size}; choose a divisor"
            )
        if head.left_gradient == "sparse" and (
            optimizer.kind != "sgd" or optimizer.weight_decay > 0.0
        ):
            raise ConfigError(
                f"head.gradient is 'sparse' with {optimizer.kind} and weight_decay "
                f"{optimizer.weight_decay:g}; torch takes sparse gradients in sgd without decay "
                "only, set head.update to 'sparse' or 'exact'"
            )

    def _check_loss(self) -> None:
        if self.margin_schedule is not None and self.loss.margin_kind in (
            "adaface",
            "magface",
            "elastic",
        ):
            raise ConfigError(
                f"margin_schedule is given and the {self.loss.margin_kind} margin sets its own "
                "margins; remove the schedule"
            )
        for name, target in SCHEDULED.items():
            part: ValueSchedule | None = getattr(self, name)
            for value in (part.initial, part.final) if part is not None else ():
                if value is not None:
                    _check_value(self.loss, target, value, name)
        alphas = [self.loss.alpha] if self.alpha_schedule is None else _ends(self)
        if self.head.path in ("sparse", "paper") and min(alphas) <= 1.0:
            raise ConfigError(
                f"head.path is {self.head.path!r} and alpha is {min(alphas):g}; that path needs an "
                "alpha above 1, set head.path to 'auto'"
            )


def _ends(recipe: Recipe) -> list[float]:
    """The smallest and largest alpha of a schedule, in some order."""
    part = recipe.alpha_schedule
    assert part is not None
    return [part.initial, recipe.loss.alpha if part.final is None else part.final]


def _check_value(loss: LossPart, target: str, value: float, name: str) -> None:
    """Refuse a scheduled value that the loss would refuse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarginWarning)
        try:
            loss.build(loss.settings._replace(**{target: value}))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


def flatten(part: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a recipe by its dotted key; a section that is absent is None.

    Examples:
        >>> flatten(PrecisionPart(), "precision")
        {'precision.dtype': 'fp32', 'precision.channels_last': False, 'precision.compile': False}
    """
    return dict(_walk(part, prefix))


def _walk(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    start = f"{prefix}." if prefix else ""
    if is_dataclass(value):
        for entry in fields(value):
            yield from _walk(getattr(value, entry.name), start + entry.name)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(inner, start + name)
    else:
        yield prefix, value


def is_under(key: str, sections: tuple[str, ...]) -> bool:
    """Whether a dotted key is one of these, or inside one of these sections."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)
