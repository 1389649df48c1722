"""``Recipe``: everything that decides the outcome of a run, checked when built, and hashed."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from qmargin.errors import ConfigError
from qmargin.registry import datasets
from qmargin.schema import NEW, Options, check_fields, check_range
from qmargin.schema import flatten as flatten
from qmargin.training.loss_part import LossPart as LossPart
from qmargin.training.loss_part import check_registered, is_stateful

HalfOrSingle = Literal["float16", "bfloat16", "float32"]
MOST_WORKERS = 1024  # per rank; each is a process
LONGEST_TIMEOUT_S = 1e7  # 115 days


@dataclass(frozen=True)
class DataPart:
    """Samples and batch size."""

    kind: str  # a registered name, such as "synthetic", "strokes", "images" or "audio"
    batch_size: int  # of a step over all ranks and accumulated parts
    path: str | None = None  # where the samples are; computed ones have none
    num_classes: int | None = None  # None to count them in the data
    options: Options = field(default_factory=dict, hash=False)  # of the dataset
    num_workers: int = 0  # loading processes per rank; it only changes the speed
    max_corrupt: int = 100  # unreadable samples that are replaced before the run stops
    drop_last: bool = True  # the samples at the end of an epoch that do not fill a batch
    index_dir: str | None = None  # folder for the index of the samples; None: beside them

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "batch_size", "num_classes", at_least=1)
        check_range(self, "max_corrupt", at_least=0)
        check_range(self, "num_workers", at_least=0, at_most=MOST_WORKERS)
        check_registered(self.kind, datasets, "kind")
        if self.path is not None and not self.is_stored:
            raise ConfigError(f"path is {self.path!r} and {self.kind} data has none; leave it out")
        taken = inspect.signature(datasets.get(self.kind)).parameters
        for name in ("path", "num_classes"):
            is_needed = name in taken and taken[name].default is inspect.Parameter.empty
            if is_needed and getattr(self, name) is None:
                raise ConfigError(f"{name} is missing; {self.kind} data needs it, set data.{name}")

    @property
    def is_stored(self) -> bool:
        """Whether the samples are read from a path instead of computed."""
        return "path" in inspect.signature(datasets.get(self.kind)).parameters


@dataclass(frozen=True)
class ModelPart:
    """The backbone, by its name in ``qmargin.models``, with its options."""

    backbone: str
    embedding_dim: int = 512
    options: Options = field(default_factory=dict, hash=False)
    weights: str | None = None  # to start with: model directory, safetensors or PyTorch checkpoint

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "embedding_dim", at_least=1)


@dataclass(frozen=True)
class HeadPart:
    """Settings of the classifier; see ``MarginClassifier``."""

    path: Literal["auto", "sparse", "chunked", "dense", "sampled", "paper"] = "auto"
    # ExactSGD, SparseSGD (active classes only) or the optimizer of the backbone
    update: Literal["exact", "sparse", "torch"] = "exact"
    lr_ratio: float = 1.0  # learning rate of the prototypes over that of the backbone
    gradient: Literal["auto", "dense", "sparse", "fused"] = "auto"  # auto: what the update needs
    screen_dtype: HalfOrSingle | None = None  # of the screened copy; None: the head's own choice
    chunk_dtype: HalfOrSingle | None = None  # of the products of chunked steps; None: likewise
    sample_rate: float = 0.1  # share of the classes that path "sampled" takes
    top_percent: float = 5.0  # percentage of the classes that path "paper" takes

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "lr_ratio", above=0)
        check_range(self, "sample_rate", above=0, at_most=1)
        check_range(self, "top_percent", above=0, at_most=100)
        needed = "dense" if self.update == "torch" else "fused"
        if self.gradient != "auto" and (self.gradient == "fused") != (needed == "fused"):
            raise ConfigError(
                f"gradient is {self.gradient!r}; {self.update!r} needs {needed!r}, use 'auto'"
            )

    @property
    def gradient_form(self) -> str:
        """Form of the prototype gradient, with ``"auto"`` decided."""
        if self.gradient != "auto":
            return self.gradient
        return "dense" if self.update == "torch" else "fused"


@dataclass(frozen=True)
class OptimizerPart:
    """The optimizer of the backbone and, unless the head has one of its own, of the prototypes."""

    lr: float  # at the peak of the schedule
    kind: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.9  # of SGD
    weight_decay: float = 5e-4
    nesterov: bool = False  # of SGD
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.999  # of AdamW
    epsilon: float = 1e-8  # of AdamW
    decay_norms: bool = True  # whether biases, norms and other vectors of the backbone decay
    clip_norm: float | None = None  # largest norm of a step's gradient; None not to clip
    clip_head: bool = True  # whether the prototypes' gradient counts and is clipped
    accumulation: int = 1  # parts into which each rank splits its share of a batch
    base_batch: int | None = None  # every learning rate is multiplied by batch_size / base_batch

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "lr", "epsilon", "clip_norm", above=0)
        check_range(self, "momentum", "beta1", "beta2", at_least=0, below=1)
        check_range(self, "weight_decay", at_least=0)
        check_range(self, "accumulation", "base_batch", at_least=1)
        if self.nesterov and (self.kind != "sgd" or self.momentum == 0.0):
            raise ConfigError("nesterov is true; it needs sgd with momentum, switch it off")


@dataclass(frozen=True)
class SchedulePart:
    """The learning rate over a run; formulas in ``qmargin.training.schedules``."""

    kind: Literal["step", "polynomial", "cosine", "exponential", "constant"] = "constant"
    epochs: int | None = None  # length of the schedule; None for that of the run
    warmup_epochs: float = 0.0  # parts of epochs may be given
    warmup_start: float = 0.0  # share of the learning rate at step 0
    decay_in_warmup: bool = False  # whether decay starts at step 0, as in WeSpeaker
    milestones: tuple[float, ...] = ()  # epochs after which "step" multiplies by gamma
    gamma: float = 0.1
    power: float = 1.0  # of "polynomial"; 1 is a line
    final_lr: float = 0.0  # of "polynomial", "cosine" and "exponential"

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "epochs", at_least=1)
        check_range(self, "warmup_epochs", "final_lr", at_least=0)
        check_range(self, "warmup_start", at_least=0, below=1)
        check_range(self, "gamma", "power", above=0)
        marks = list(self.milestones)
        if self.kind == "step" and not marks:
            raise ConfigError("milestones is empty; a step schedule needs the epochs of its steps")
        if sorted({mark for mark in marks if mark > 0.0}) != marks:
            raise ConfigError(f"milestones is {marks}; give growing numbers of epochs above 0")
        if self.kind == "exponential" and self.final_lr == 0.0:
            raise ConfigError("final_lr is 0, which no exponential reaches; give a positive one")


@dataclass(frozen=True)
class ValueSchedule:
    """A number that changes from ``initial`` to ``final`` between two epochs, counted from 0."""

    # "exponential" is fast first, as the margin rises in WeSpeaker; "constant" jumps at start_epoch
    kind: Literal["constant", "exponential", "linear"] = "exponential"
    initial: float = 0.0  # until start_epoch
    final: float | None = None  # from end_epoch on; None for the number in the loss part
    start_epoch: float = 0.0  # epochs before the change starts; may be fractional
    end_epoch: float | None = None  # a jump has none

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "start_epoch", at_least=0)
        if self.kind == "constant":
            if self.end_epoch is not None:
                raise ConfigError(f"end_epoch is {self.end_epoch:g} and a jump has none; remove it")
        elif self.end_epoch is None:
            raise ConfigError(f"end_epoch is missing; a schedule that is {self.kind} needs one")
        elif self.end_epoch <= self.start_epoch:
            raise ConfigError(
                f"end_epoch is {self.end_epoch:g}; set it above start_epoch {self.start_epoch:g}"
            )


@dataclass(frozen=True)
class PrecisionPart:
    """Precision, memory layout and compilation of the backbone."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RunPart:
    """Length of a run, its outputs and its tolerance of failures; intervals are in steps."""

    epochs: int
    max_steps: int | None = None  # stop earlier; the schedule does not change
    start_from: str | None = None  # folder of another run, or a checkpoint: weights to start with
    save_every_steps: int = 1000
    keep: int = 3  # newest checkpoints that are kept
    validate_every: int | None = None  # between calls of the validation hooks
    log_every: int = 50  # between lines of the journal
    ema_decay: float | None = None  # of a moving average of the backbone's weights; None for none
    average_last: int = 0  # checkpoints averaged at the end
    nan_budget: int = 10  # steps that may be skipped because something was not finite
    timeout_s: float = 600.0  # after which a silent rank counts as lost
    spike_factor: float | None = None  # roll back above this multiple of the recent loss
    spike_window: int = 100  # steps of the recent level, and steps skipped after a roll-back

    def __post_init__(self) -> None:
        check_fields(self)
        counts = ("epochs", "max_steps", "save_every_steps", "keep", "validate_every", "log_every")
        check_range(self, *counts, "spike_window", at_least=1)
        check_range(self, "average_last", "nan_budget", at_least=0)
        check_range(self, "timeout_s", above=0, at_most=LONGEST_TIMEOUT_S)
        check_range(self, "ema_decay", at_least=0, below=1)
        check_range(self, "spike_factor", above=1)
        if self.average_last > self.keep:
            raise ConfigError(
                f"average_last is {self.average_last} and run.keep {self.keep}; raise run.keep"
            )


SCHEDULED = {
    "margin_schedule": "margin",
    "scale_schedule": "scale",
    "alpha_schedule": "alpha",
    "reference_schedule": "strength",
}
FREE = (  # keys, or sections of keys, that do not change the result of a run
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
FIXED = (  # keys that cannot change, because saved weights and positions depend on them
    "seed",
    "data.kind",
    "data.num_classes",
    "data.options",
    "data.batch_size",
    "data.drop_last",
    "model",
    "loss.divergence",
    "loss.divergence_options",
    "loss.margin_kind",
    "loss.options",
    "loss.plus",
    "loss.reference",
    "optimizer.kind",
)


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run: data, model, loss, optimizer, schedule.

    Parts are frozen; a variant is made with ``dataclasses.replace``, a file with
    ``qmargin.training.recipe_files``.

    Args:
        name: Name to display, without effect on the run.
        data: Samples and batch size.
        model: Backbone.
        loss: Divergence, margin, scale and references.
        optimizer: Rule and learning rate.
        run: Length, checkpoints and tolerance of failures.
        head: Path and update of the classifier.
        schedule: Schedule of the learning rate.
        precision: Precision of the backbone.
        seed: Seed of weights, order, augmentation and random draws.
        margin_schedule: Schedule of the margin; None for a constant.
        scale_schedule: Schedule of the scale.
        alpha_schedule: Schedule of the order of the divergence.
        reference_schedule: Schedule of the strength of the first reference.

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
    reference_schedule: ValueSchedule | None = field(default=None, metadata=NEW)

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "seed", at_least=0)
        if not self.name.strip():
            raise ConfigError("name is empty; give the recipe one")
        schedule, epochs, lr = self.schedule, self.schedule_epochs, self.optimizer.lr
        if schedule.warmup_epochs >= epochs:
            warmup = schedule.warmup_epochs
            raise ConfigError(f"schedule.warmup_epochs is {warmup:g} of {epochs}; lower it")
        if schedule.final_lr > lr:
            raise ConfigError(
                f"schedule.final_lr is {schedule.final_lr:g}, above lr {lr:g}; lower it"
            )
        self._check_update()
        self._check_loss()

    @property
    def schedule_epochs(self) -> int:
        """Length of the learning rate's schedule: its own, or that of the run."""
        return self.run.epochs if self.schedule.epochs is None else self.schedule.epochs

    @property
    def lr_factor(self) -> float:
        """Factor of every learning rate: 1, or ``batch_size / base_batch``."""
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
        """Return the same recipe with derived values filled in."""
        changes: dict[str, Any] = {"schedule": replace(self.schedule, epochs=self.schedule_epochs)}
        for name, target in SCHEDULED.items():
            part = getattr(self, name)
            if part is not None and part.final is None:
                changes[name] = replace(part, final=getattr(self.loss, target))
        return replace(self, **changes)

    def _check_update(self) -> None:
        head, optimizer, parts = self.head, self.optimizer, self.optimizer.accumulation
        wanted = f"head.update is {head.update!r}; set it to 'torch' for optimizer."
        if head.update != "torch" and optimizer.kind != "sgd":
            raise ConfigError(f"{wanted}kind={optimizer.kind}")
        if parts > 1 and head.gradient_form == "fused":
            raise ConfigError(f"{wanted}accumulation={parts}")
        if self.data.batch_size % parts:
            raise ConfigError(
                f"optimizer.accumulation is {parts}; it must divide data.batch_size "
                f"{self.data.batch_size}"
            )
        is_plain = optimizer.kind == "sgd" and optimizer.weight_decay == 0.0
        if head.gradient_form == "sparse" and not is_plain:
            raise ConfigError(
                "head.gradient is 'sparse', which torch supports in sgd without weight_decay only; "
                "set head.update to 'sparse' or 'exact'"
            )

    def _check_loss(self) -> None:
        loss = self.loss
        if self.margin_schedule is not None and is_stateful(loss.margin_kind):
            raise ConfigError(
                f"margin_schedule is given and {loss.margin_kind} sets its own margin; remove it"
            )
        if self.alpha_schedule is not None and loss.alpha is None:
            raise ConfigError(
                f"alpha_schedule is given and {loss.divergence} has no number; remove it"
            )
        if self.reference_schedule is not None and loss.strength is None:
            raise ConfigError(
                "reference_schedule is given and loss.reference has no strength; remove it"
            )
        ends = [(name, end) for name in SCHEDULED for end in _ends(getattr(self, name))]
        for name, value in ends:
            try:
                if SCHEDULED[name] == "strength":
                    loss.with_strength(value)
                else:
                    replace(loss, **{SCHEDULED[name]: value})  # type: ignore[arg-type]
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        alphas = [loss.alpha, *_ends(self.alpha_schedule)] if loss.divergence == "alpha" else []
        lowest = min((alpha for alpha in alphas if alpha is not None), default=0.0)
        if self.head.path in ("sparse", "paper") and lowest <= 1.0:
            raise ConfigError(
                f"head.path is {self.head.path!r} and loss.alpha {lowest:g}; it needs an "
                "alpha-divergence above 1, set head.path to 'auto'"
            )


def _ends(schedule: ValueSchedule | None) -> list[float]:
    """First and last value of a schedule, where it has its own."""
    ends = () if schedule is None else (schedule.initial, schedule.final)
    return [value for value in ends if value is not None]


def is_under(key: str, sections: tuple[str, ...]) -> bool:
    """Whether a dotted key is one of these, or inside one of these sections."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def diff(old: Recipe, new: Recipe) -> list[str]:
    """Differences of two resolved recipes, one line per key, such as ``seed: 0 -> 7``."""
    return list(_changes(old, new).values())


def check_resume(saved: Recipe, asked: Recipe, *, allow_changes: bool = False) -> list[str]:
    """Lines of ``diff`` to show before a run is resumed; refuses those that are not allowed."""
    changes = _changes(saved, asked)
    refused = [line for key, line in changes.items() if is_under(key, FIXED)]
    if refused:
        raise ConfigError(
            f"this run cannot be resumed with {'; '.join(refused)}; undo this, or start a new run"
        )
    altering = [line for key, line in changes.items() if not is_under(key, FREE)]
    if altering and not allow_changes:
        raise ConfigError(
            f"this run was saved with a different recipe: {'; '.join(altering)}; resume without a "
            "recipe or these settings, or add --allow-changes (in Python allow_changes=True)"
        )
    lines = changes.values()
    return [f"{line} (changes the outcome)" if line in altering else line for line in lines]


def _changes(old: Recipe, new: Recipe) -> dict[str, str]:
    before, after = flatten(old.resolved()), flatten(new.resolved())
    found = {}
    for key in before | after:
        left, right = before.get(key), after.get(key)  # absent is None
        if left != right or type(left) is not type(right):
            found[key] = f"{key}: {_text(left)} -> {_text(right)}"
    return found


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
