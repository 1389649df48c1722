"""The state of a run in memory: built from its recipe, saved to and restored from checkpoints."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qmargin.data.loader import BatchStream, build_loader
from qmargin.data.order import GlobalOrder
from qmargin.data.samples import CorruptBudget, Dataset, check_labels
from qmargin.errors import CheckpointError, ConfigError, DataError
from qmargin.heads.classifier import MarginClassifier
from qmargin.training import build
from qmargin.training.checkpoint import (
    PROTOTYPES,
    Checkpoint,
    CheckpointState,
    HeadRows,
    join_rows,
    load_checkpoint,
    split_rows,
)
from qmargin.training.distributed import Process, run_on_all
from qmargin.training.loss_part import ScheduledLoss
from qmargin.training.optim import MovingAverage, Optimizers, build_optimizers
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import to_yaml
from qmargin.training.schedules import unreached

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILED_GRAPHS = 64  # of one backbone's code: sizes, modes, batches that differ
LOADER_PATIENCE = 0.8  # of the ranks' timeout, so that a slow loader is named first


class SpikeDetector:
    """A loss above ``factor`` times the median of the last ``window`` losses is a spike."""

    def __init__(self, factor: float | None, window: int, losses: Iterable[float] = ()) -> None:
        self.factor = factor
        self.losses = deque(losses, maxlen=window)

    def is_spike(self, loss: float) -> bool:
        """Whether the loss of a step is a spike; if not, add it to the recent losses."""
        if self.factor is None:
            return False
        is_full = len(self.losses) == self.losses.maxlen
        if is_full and loss > self.factor * median(self.losses):
            return True
        self.losses.append(loss)
        return False


@dataclass
class Progress:
    """Progress of a run; equal on every rank."""

    step: int = 0
    num_skipped: int = 0
    rollbacks: list[int] = field(default_factory=list)  # steps of the checkpoints restored


@dataclass
class Session:
    """The objects of a run on one rank."""

    recipe: Recipe
    process: Process
    dataset: Dataset
    order: GlobalOrder
    backbone: nn.Module
    model: nn.Module  # the backbone, wrapped for several ranks
    head: MarginClassifier
    loss: ScheduledLoss
    optimizers: Optimizers
    scaler: torch.amp.GradScaler
    average: MovingAverage | None
    budget: CorruptBudget
    spikes: SpikeDetector
    progress: Progress = field(default_factory=Progress)
    weights_sha256: str | None = None  # of the file that the backbone started with
    journal_bytes: int = 0  # of the journal at the checkpoint that the run resumes from

    def __post_init__(self) -> None:
        buffers = [*self.backbone.buffers(), *self.head.buffers()]
        dtypes = sorted({buffer.dtype for buffer in buffers}, key=str)
        # By dtype: only then are many copies one kernel.
        self._buffers = [[one for one in buffers if one.dtype == dtype] for dtype in dtypes]
        self._kept = [[one.detach().clone() for one in group] for group in self._buffers]

    @property
    def runs_ahead(self) -> bool:
        """Whether the host may launch a whole step before it reads any result."""
        is_one_gpu = self.process.device.type == "cuda" and self.process.world == 1
        # a sample of classes cannot be drawn again
        return is_one_gpu and self.head.gradient == "fused" and self.head.path.name != "sampled"

    @property
    def total_steps(self) -> int:
        """Total number of steps of the run."""
        run = self.recipe.run
        steps = run.epochs * self.order.steps_per_epoch
        return steps if run.max_steps is None else min(steps, run.max_steps)

    def is_recorded(self, step: int) -> bool:
        """Whether the journal gets a record once this many steps have been taken."""
        return step % self.recipe.run.log_every == 0 or step >= self.total_steps

    @property
    def unreached(self) -> list[str]:
        """Scheduled changes that this run never reaches, see ``schedules.unreached``."""
        return unreached(self.recipe, self.total_steps / self.order.steps_per_epoch)

    @property
    def epoch(self) -> int:
        """Epoch of the next step."""
        return self.order.epoch_of(self.progress.step)

    def stream(self) -> BatchStream:
        """Batches of this rank from the next step on."""
        return build_loader(
            self.dataset,
            self.order,
            start_step=self.progress.step,
            stop_step=self.total_steps,
            rank=self.process.rank,
            world=self.process.world,
            num_workers=self.recipe.data.num_workers,
            pin_memory=self.process.device.type == "cuda",
            timeout_s=LOADER_PATIENCE * self.recipe.run.timeout_s,
        )

    def autocast(self) -> torch.autocast:
        """Autocast context of the backbone."""
        dtype = DTYPES[self.recipe.precision.dtype]
        is_enabled = dtype != torch.float32
        return torch.autocast(self.process.device.type, dtype=dtype, enabled=is_enabled)

    def without_sync(self, is_apart: bool) -> AbstractContextManager[Any]:
        """Context without gradient exchange, for all but the last part of a batch."""
        if is_apart and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    @torch.no_grad()
    def broadcast_buffers_(self) -> None:
        """Give every rank the running statistics of rank 0, which are those that are saved."""
        if self.process.world > 1:
            with self.process.name_lost_ranks():
                for buffer in self.backbone.buffers():
                    dist.broadcast(buffer, src=0)

    @torch.no_grad()
    def keep_buffers_(self, *, restore: bool = False) -> None:
        """Copy running statistics before a step, or restore them after a skipped step."""
        for kept, buffers in zip(self._kept, self._buffers, strict=True):
            torch._foreach_copy_(*((buffers, kept) if restore else (kept, buffers)))


def build_session(
    recipe: Recipe,
    process: Process,
    dataset: Dataset | None = None,
    *,
    checkpoint: Checkpoint | None = None,
) -> Session:
    """Check labels, then build everything, at step 0 or at the step of a checkpoint."""

    def read() -> tuple[Dataset, GlobalOrder]:
        found = build.build_dataset(recipe) if dataset is None else dataset
        try:
            check_labels(found)
        except MemoryError as error:
            raise ConfigError(
                f"the labels of {len(found):,} samples do not fit into memory ({error}); use fewer "
                "samples, of computed data lower data.options.samples_per_class"
            ) from error
        batch, is_short = recipe.data.batch_size, recipe.data.drop_last
        return found, GlobalOrder(len(found), recipe.seed, batch, drop_last=is_short)

    def make() -> tuple[nn.Module, MarginClassifier, ScheduledLoss, str | None]:
        device, classes = process.device, samples.num_classes
        options: dict[str, Any] = {} if process.world == 1 else {"group": dist.group.WORLD}
        loss = build.build_loss(recipe, num_classes=classes, device=device, dataset=samples)
        options["loss"] = loss.loss
        head = build.build_head(recipe, num_classes=classes, device=device, **options).to(device)
        backbone = build.build_backbone(recipe, device=device)
        found = None
        if recipe.model.weights is not None and checkpoint is None:
            found = build.load_pretrained_(backbone, recipe.model.weights)
        if recipe.run.start_from is not None and checkpoint is None:
            build.load_start_weights_(backbone, head, recipe.run.start_from)
        return backbone, head, loss, found

    samples, order = run_on_all(process, read)
    backbone, head, loss, weights_sha256 = run_on_all(process, make)
    run = recipe.run
    session = Session(
        recipe=recipe,
        process=process,
        dataset=samples,
        order=order,
        backbone=backbone,
        model=_wrapped(recipe, process, backbone),
        head=head,
        loss=loss,
        optimizers=build_optimizers(recipe, backbone, head),
        scaler=torch.amp.GradScaler(process.device.type, enabled=recipe.precision.dtype == "fp16"),
        average=None if run.ema_decay is None else MovingAverage(run.ema_decay),
        budget=CorruptBudget(recipe.data.max_corrupt),
        spikes=SpikeDetector(run.spike_factor, run.spike_window),
        weights_sha256=weights_sha256,
    )
    if checkpoint is None:
        return session
    loop = restore_(session, checkpoint)
    if loop["num_samples"] != order.n:
        raise DataError(
            f"the run was saved with {loop['num_samples']:,} samples and the data has "
            f"{order.n:,}; restore the data"
        )
    if loop.get("class_values", loss.sha256s) != loss.sha256s:
        raise DataError("the file of loss.options.per_class has changed on disk; restore it")
    session.progress = Progress(checkpoint.step, loop["num_skipped"], list(loop["rollbacks"]))
    session.budget = CorruptBudget(session.budget.limit, **loop["corrupt"])
    session.spikes = SpikeDetector(run.spike_factor, run.spike_window, loop["losses"])
    session.journal_bytes = loop["journal_bytes"]
    return session


def snapshot(session: Session, *, journal_bytes: int = 0) -> CheckpointState:
    """This rank's part of a checkpoint; its tensors are those of the run, not copies."""
    head, optimizers, progress = session.head, session.optimizers, session.progress
    rest, rows = split_rows(optimizers.head.state_dict(), head.prototypes.shape)
    others = {name: value for name, value in head.state_dict().items() if name != PROTOTYPES}
    parts: dict[str, Any] = {
        "optimizer": optimizers.backbone.state_dict(),
        "head_optimizer": rest,
        "head_state": others,
        "scaler": session.scaler.state_dict(),
    }
    if session.average is not None:
        parts["ema"] = session.average.state_dict()
    tensors = {PROTOTYPES: head.prototypes.detach(), **rows}
    return CheckpointState(
        step=progress.step,
        backbone=session.backbone.state_dict(),
        head=HeadRows(head.shard.start, head.num_classes, tensors),
        parts=parts,
        loop={
            "epoch": session.epoch,
            "position": progress.step % session.order.steps_per_epoch,
            "num_samples": session.order.n,
            "num_skipped": progress.num_skipped,
            "rollbacks": list(progress.rollbacks),
            "corrupt": {"epoch": session.budget.epoch, "count": session.budget.count},
            "losses": list(session.spikes.losses),
            "class_values": dict(session.loss.sha256s),
            "journal_bytes": journal_bytes,
        },
        recipe_yaml=to_yaml(session.recipe),
        recipe_sha256=session.recipe.sha256,
    )


def restore_(session: Session, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Load weights and optimizers of a checkpoint into a session; return the loop's state."""

    def load() -> Mapping[str, Any]:
        shard = session.head.shard
        state = load_checkpoint(checkpoint, start=shard.start, stop=shard.stop)
        try:
            _load_(session, state)
        except CheckpointError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{checkpoint.path} does not fit this recipe ({error}); use the one stored there"
            ) from error
        return state.loop

    return run_on_all(session.process, load)


def _load_(session: Session, state: CheckpointState) -> None:
    session.backbone.load_state_dict(dict(state.backbone))
    assert state.head is not None
    rows = dict(state.head.tensors)
    with torch.no_grad():
        session.head.prototypes.copy_(rows.pop(PROTOTYPES))
    session.head.load_state_dict(state.parts["head_state"], strict=False)
    _load_optimizer_(session.optimizers.backbone, state.parts["optimizer"])
    _load_optimizer_(session.optimizers.head, join_rows(state.parts["head_optimizer"], rows))
    if session.scaler.is_enabled() and state.parts["scaler"]:
        session.scaler.load_state_dict(state.parts["scaler"])
    if session.average is not None and "ema" in state.parts:
        session.average.load_state_dict(state.parts["ema"], device=session.process.device)


def _load_optimizer_(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load optimizer state such as momentum; learning rates and decays stay those of the recipe."""
    saved = [
        {**own, "params": group["params"]}  # where a state goes depends on how steps are taken
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": saved})
    for weight, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                # a file has rows one after the other; kernels for many weights need one layout
                values[name] = torch.empty_like(weight.detach(), dtype=value.dtype).copy_(value)


def _raise_compile_limit() -> None:
    """Allow a process to compile a backbone in many sizes, as a search does; torch limits it."""
    import torch._dynamo.config as settings  # slow to import, and only needed here

    name = "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit"
    setattr(settings, name, max(COMPILED_GRAPHS, getattr(settings, name)))  # renamed in torch 2.7


def _wrapped(recipe: Recipe, process: Process, backbone: nn.Module) -> nn.Module:
    if recipe.precision.compile:
        _raise_compile_limit()
        backbone.compile(fullgraph=True)  # inside the wrapper, in place: names of weights stay
    if process.world == 1:
        return backbone
    place = None if process.device.type == "cpu" else [process.device.index]
    # Running statistics are those of rank 0, see broadcast_buffers_; a broadcast in every forward
    # pass would cost time, and would hang when a rank has no batch to pass forward.
    known = inspect.signature(DistributedDataParallel).parameters
    renamed = "forward_sync_buffers"  # since torch 2.13
    options: dict[str, Any] = {renamed if renamed in known else "broadcast_buffers": False}
    return DistributedDataParallel(
        backbone, device_ids=place, gradient_as_bucket_view=True, **options
    )
