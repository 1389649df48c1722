"""The parts of a recipe: frozen records that refuse impossible values when they are built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qmargin.errors import ConfigError
from qmargin.training.fields import (
    Option,
    check_at_least,
    check_at_most,
    check_below,
    check_fields,
    check_positive,
)

HalfOrSingle = Literal["float16", "bfloat16", "float32"]
MOST_WORKERS = 1024  # per rank; each is a process
LONGEST_TIMEOUT_S = 1e7  # 115 days
MADE = ("synthetic", "strokes")  # data that is computed, and has no path


@dataclass(frozen=True)
class DataPart:
    """Samples, and how many of them make a step.

    Args:
        kind: ``"synthetic"`` identities, ``"strokes"``, ``"images"`` or ``"audio"``.
        batch_size: Samples of a step over **all** ranks and accumulated parts.
        path: Where the samples are; synthetic ones have none.
        num_classes: Identities; None to count them in the data.
        options: Of the dataset, such as ``samples_per_class`` and ``noise`` of synthetic ones, or
            ``flip``, ``photometric`` and ``low_resolution`` of images.
        num_workers: Loading processes per rank, at most 1024; it changes nothing but speed.
        max_corrupt: Unreadable samples that are replaced before the run stops.
        drop_last: Leave out the samples at the end of an epoch that do not fill a batch.
        index_dir: Folder for the index of the samples; None for a place beside them.
    """

    kind: Literal["synthetic", "strokes", "images", "audio"]
    batch_size: int
    path: str | None = None
    num_classes: int | None = None
    options: dict[str, Option] = field(default_factory=dict, hash=False)
    num_workers: int = 0
    max_corrupt: int = 100
    drop_last: bool = True
    index_dir: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 1, "batch_size", "num_classes")
        check_at_least(self, 0, "num_workers", "max_corrupt")
        check_at_most(self, MOST_WORKERS, "num_workers")
        if self.kind in MADE and self.path is not None:
            raise ConfigError(f"path is {self.path!r} and {self.kind} data has none; leave it out")
        if self.kind in MADE and self.num_classes is None:
            raise ConfigError(
                f"num_classes is missing and {self.kind} data cannot be counted; set it"
            )
        if self.kind not in MADE and self.path is None:
            raise ConfigError(f"path is missing; say where the {self.kind} are with data.path")


@dataclass(frozen=True)
class ModelPart:
    """The backbone, by its name in ``qmargin.models.registry``, with its options.

    Args:
        backbone: Its name.
        embedding_dim: Length of an embedding.
        options: Of this backbone.
        weights: What it starts with: a model directory, a safetensors file or a PyTorch
            checkpoint. None for fresh weights.
    """

    backbone: str
    embedding_dim: int = 512
    options: dict[str, Option] = field(default_factory=dict, hash=False)
    weights: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 1, "embedding_dim")


@dataclass(frozen=True)
class HeadPart:
    """How the classifier takes a step; see ``MarginClassifier``.

    Args:
        path: ``"auto"`` or one of the head's paths.
        update: ``"exact"`` (``ExactSGD``), ``"sparse"`` (``SparseSGD``: another optimizer, which
            touches active classes only) or ``"torch"`` (the optimizer of the backbone).
        lr_ratio: Learning rate of the prototypes over that of the backbone; above 1 where classes
            are visited a few times only.
        gradient: ``"auto"`` takes what the update needs: ``"fused"``, or ``"dense"`` for torch.
        screen_dtype: Precision of the screened copy; None for the head's own choice.
        chunk_dtype: Precision of the products of chunked steps; None for the head's own choice.
        sample_rate: Share of the classes that ``path="sampled"`` takes.
        top_percent: Percentage of the classes that ``path="paper"`` takes.
    """

    path: Literal["auto", "sparse", "chunked", "dense", "sampled", "paper"] = "auto"
    update: Literal["exact", "sparse", "torch"] = "exact"
    lr_ratio: float = 1.0
    gradient: Literal["auto", "dense", "sparse", "fused"] = "auto"
    screen_dtype: HalfOrSingle | None = None
    chunk_dtype: HalfOrSingle | None = None
    sample_rate: float = 0.1
    top_percent: float = 5.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, "lr_ratio")
        for name, high in (("sample_rate", 1.0), ("top_percent", 100.0)):
            if not 0.0 < getattr(self, name) <= high:
                value = getattr(self, name)
                raise ConfigError(f"{name} is {value:g}; it must be above 0 and at most {high:g}")
        is_fused = self.gradient == "fused"
        if self.gradient != "auto" and is_fused != (self.update != "torch"):
            needed = "dense" if self.update == "torch" else "fused"
            raise ConfigError(
                f"gradient is {self.gradient!r} and update {self.update!r} needs {needed!r}; "
                "leave the gradient at 'auto'"
            )

    @property
    def left_gradient(self) -> str:
        """What backward leaves, with ``"auto"`` decided."""
        if self.gradient != "auto":
            return self.gradient
        return "dense" if self.update == "torch" else "fused"


@dataclass(frozen=True)
class OptimizerPart:
    """The optimizer of the backbone and, unless the head has one of its own, of the prototypes.

    Args:
        kind: ``"sgd"`` or ``"adamw"``.
        lr: Learning rate at the peak of the schedule.
        momentum: Of SGD.
        weight_decay: Times the weight.
        nesterov: Of SGD.
        beta1: Of AdamW.
        beta2: Of AdamW.
        epsilon: Of AdamW.
        decay_norms: Whether biases, norms and other vectors of the backbone decay as well.
        clip_norm: Largest norm of a step's gradient; None not to clip.
        clip_head: Whether the prototypes' gradient counts in that norm and is clipped with it.
        accumulation: Parts into which each rank cuts its share of a batch.
        base_batch: If given, every learning rate is multiplied by ``batch_size / base_batch``.
    """

    lr: float
    kind: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decay_norms: bool = True
    clip_norm: float | None = None
    clip_head: bool = True
    accumulation: int = 1
    base_batch: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, "lr", "epsilon", "clip_norm")
        check_below(self, 1.0, "momentum", "beta1", "beta2")
        check_at_least(self, 0.0, "weight_decay")
        check_at_least(self, 1, "accumulation", "base_batch")
        if self.nesterov and (self.kind != "sgd" or self.momentum == 0.0):
            raise ConfigError(
                f"nesterov is on for {self.kind} with momentum {self.momentum:g}; it needs sgd "
                "with momentum, switch it off"
            )


@dataclass(frozen=True)
class SchedulePart:
    """The learning rate over a run; formulas in ``qmargin.training.schedules``.

    Args:
        kind: ``"step"``, ``"polynomial"``, ``"cosine"``, ``"exponential"`` or ``"constant"``.
        epochs: Length of the schedule; None for that of the run.
        warmup_epochs: A line up from ``warmup_start`` at the beginning; parts of epochs may be
            given.
        warmup_start: Share of the learning rate at step 0.
        decay_in_warmup: Whether decay starts at step 0, under the warm-up, as in WeSpeaker, or
            when the warm-up ends.
        milestones: Epochs after which ``"step"`` multiplies by ``gamma``.
        gamma: Factor of ``"step"``.
        power: Of ``"polynomial"``; 1 is a line.
        final_lr: At the end of ``"polynomial"``, ``"cosine"`` and ``"exponential"``.
    """

    kind: Literal["step", "polynomial", "cosine", "exponential", "constant"] = "constant"
    epochs: int | None = None
    warmup_epochs: float = 0.0
    warmup_start: float = 0.0
    decay_in_warmup: bool = False
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    power: float = 1.0
    final_lr: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 1, "epochs")
        check_at_least(self, 0.0, "warmup_epochs", "final_lr")
        check_below(self, 1.0, "warmup_start")
        check_positive(self, "gamma", "power")
        if self.kind == "step" and not self.milestones:
            raise ConfigError("milestones is empty; a step schedule needs the epochs of its steps")
        if any(mark <= 0.0 for mark in self.milestones) or (
            sorted(set(self.milestones)) != list(self.milestones)
        ):
            raise ConfigError(
                f"milestones is {list(self.milestones)}; give growing numbers of epochs above 0"
            )
        if self.kind == "exponential" and self.final_lr == 0.0:
            raise ConfigError("final_lr is 0, which no exponential reaches; give a positive one")


@dataclass(frozen=True)
class ValueSchedule:
    """A number that moves from ``initial`` to ``final`` between two epochs.

    Epochs are counted from 0: with ``start_epoch=19`` the move begins after 19 full epochs, which
    is "epoch 20" for those who count from 1.

    Args:
        kind: ``"linear"``, ``"exponential"`` (fast first, as the margin rises in WeSpeaker and in
            the paper's speaker runs) or ``"constant"`` (a jump at ``start_epoch``).
        initial: Until ``start_epoch``.
        final: From ``end_epoch`` on; None for the number in the loss part.
        start_epoch: Parts of epochs may be given.
        end_epoch: Not before ``start_epoch``; a jump has none.
    """

    kind: Literal["constant", "exponential", "linear"] = "exponential"
    initial: float = 0.0
    final: float | None = None
    start_epoch: float = 0.0
    end_epoch: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 0.0, "start_epoch")
        if self.kind == "constant":
            if self.end_epoch is not None:
                raise ConfigError(f"end_epoch is {self.end_epoch:g} and a jump has none; remove it")
        elif self.end_epoch is None:
            raise ConfigError(f"end_epoch is missing; a schedule that is {self.kind} needs one")
        elif self.end_epoch <= self.start_epoch:
            raise ConfigError(
                f"end_epoch is {self.end_epoch:g} and start_epoch {self.start_epoch:g}; "
                "the end must be later"
            )


@dataclass(frozen=True)
class PrecisionPart:
    """Precision of the backbone (``"fp32"``, ``"bf16"``, ``"fp16"``), its layout, its compiler."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RunPart:
    """Length of a run, what it writes and what it survives; intervals are in steps.

    Args:
        epochs: Over the data.
        max_steps: Stop earlier; the schedule stays as it is.
        start_from: Output folder of another run, or one of its checkpoints: this one starts with
            the weights of its backbone, averaged where that run wrote an average, and with its
            prototypes. None for fresh weights.
        save_every_steps: Between checkpoints.
        keep: Newest checkpoints that are kept.
        validate_every: Between calls of the validation hooks; None for none.
        log_every: Between lines of the journal.
        ema_decay: Of a moving average of the backbone's weights; None for none.
        average_last: Checkpoints averaged at the end; 0 for none.
        nan_budget: Steps that may be skipped because something was not finite.
        timeout_s: Seconds after which a rank that says nothing counts as lost.
        spike_factor: Roll back when the loss exceeds its recent level by this factor; None never.
        spike_window: Steps that make the recent level, and that are skipped after a roll-back.
    """

    epochs: int
    max_steps: int | None = None
    start_from: str | None = None
    save_every_steps: int = 1000
    keep: int = 3
    validate_every: int | None = None
    log_every: int = 50
    ema_decay: float | None = None
    average_last: int = 0
    nan_budget: int = 10
    timeout_s: float = 600.0
    spike_factor: float | None = None
    spike_window: int = 100

    def __post_init__(self) -> None:
        check_fields(self)
        counts = ("epochs", "max_steps", "save_every_steps", "keep", "validate_every", "log_every")
        check_at_least(self, 1, *counts, "spike_window")
        check_at_least(self, 0, "average_last", "nan_budget")
        check_positive(self, "timeout_s")
        check_at_most(self, LONGEST_TIMEOUT_S, "timeout_s")
        check_below(self, 1.0, "ema_decay")
        if self.average_last > self.keep:
            raise ConfigError(
                f"average_last is {self.average_last} and only {self.keep} checkpoints are kept; "
                "raise run.keep"
            )
        if self.spike_factor is not None and self.spike_factor <= 1.0:
            raise ConfigError(f"spike_factor is {self.spike_factor:g}; it must be above 1")
