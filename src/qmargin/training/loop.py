"""``train``: a recipe from its first step, or its newest checkpoint, to its last step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import qmargin
from qmargin.data.loader import Batch
from qmargin.data.samples import Dataset
from qmargin.errors import CheckpointError, DataError
from qmargin.heads.classifier import MarginClassifier
from qmargin.training.checkpoint import (
    CHECKPOINTS,
    AsyncSaver,
    agree_on_newest,
    check_writable,
    list_steps,
)
from qmargin.training.distributed import Process, gather, run_on_all, start_process_group
from qmargin.training.optim import write_averages
from qmargin.training.recipe import Recipe
from qmargin.training.reporting import Meter, Reporter, check_trackers
from qmargin.training.schedules import loss_settings
from qmargin.training.session import Session, build_session, restore_, snapshot
from qmargin.training.signals import Interrupted, StopRequest
from qmargin.training.start import Start, find_start, locked, recipe_to_train
from qmargin.training.step import OVERFLOW, StepResult, batch_rows, take_step

MOST_ROLLBACKS = 3  # to one checkpoint; more spikes have another cause than the data
NUM_SHOWN = 5  # samples that a message names; the journal has all of them


@dataclass(frozen=True)
class HookState:
    """State that a hook may read but not change.

    Attributes:
        step: Number of steps taken.
        epoch: Epoch of the next step.
        recipe: Recipe of the run.
        process: This rank: hooks run on every rank, and may use ``process.rank`` to share work.
        backbone: The backbone in evaluation mode, the same on every rank.
        head: The head with this rank's classes.
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


@dataclass(frozen=True)
class Outcome:
    """How a call of ``train`` ended.

    Attributes:
        step: Number of steps taken; 0 if a signal came while the run was built.
        total_steps: Steps of the whole run; 0 if a signal came while it was built.
        loss: Loss of the last step; NaN if there was none.
        checkpoint: The newest checkpoint.
        num_skipped: Steps of the run that were skipped because something was not finite.
        signal: Number of the signal that stopped the run before its end, or 0.
    """

    step: int
    total_steps: int
    loss: float
    checkpoint: Path | None
    num_skipped: int
    signal: int = 0


def train(
    recipe: Recipe | None,
    out: str | Path,
    *,
    resume: bool | str | Path = False,
    allow_changes: bool = False,
    hooks: Sequence[Hook] = (),
    dataset: Dataset | None = None,
    device: str = "auto",
    trackers: Sequence[str] = (),
) -> Outcome:
    """Train by a recipe; with ``torchrun``, call it in every process.

    ``out`` gets ``checkpoints/``, ``journal.jsonl``, ``status.json`` and ``lock``. SIGTERM and
    Ctrl-C save and return; see ``Outcome.signal``.

    Args:
        recipe: What to train; None for the stored recipe of a run that is resumed.
        out: Folder for this run only, on a file system that all ranks share.
        resume: Continue from the newest complete checkpoint in ``out``, or from the named one.
        allow_changes: Resume even if the recipe differs from the stored one in settings that change
            the outcome. Other differences, such as the number of workers, need no permission.
        hooks: Called every ``recipe.run.validate_every`` steps, and at the end, on every rank.
        dataset: Dataset to use instead of the recipe's data.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        trackers: Any of ``"tensorboard"`` and ``"wandb"``, to which numbers are sent.

    Raises:
        ConfigError: Before step 0: the folder is in use or holds another run, the recipe does not
            fit it or would change the outcome.
        DataError: A label is out of range (before step 0); or too many samples are corrupt, or too
            many steps were not finite.
        CheckpointError: A checkpoint could not be saved, or none can be read.
        RankError: Another rank failed.

    Examples:
        >>> import tempfile
        >>> from qmargin.recipes import get_recipe
        >>> from qmargin.training.recipe_files import apply_settings
        >>> recipe = apply_settings(get_recipe("debug"), ["run.max_steps=2"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     outcome = train(recipe, folder, device="cpu")
        ...     (outcome.step, outcome.checkpoint.name)
        (2, 'step-000002')
    """
    try:
        with open_run(
            recipe,
            out,
            resume=resume,
            allow_changes=allow_changes,
            hooks=hooks,
            dataset=dataset,
            device=device,
            trackers=trackers,
        ) as run:
            return run.go()
    except Interrupted as stop:  # before the first step
        return Outcome(0, 0, math.nan, None, 0, signal=stop.signal)


@contextmanager
def open_run(
    recipe: Recipe | None,
    out: str | Path,
    *,
    resume: bool | str | Path = False,
    allow_changes: bool = False,
    hooks: Sequence[Hook] = (),
    dataset: Dataset | None = None,
    device: str = "auto",
    trackers: Sequence[str] = (),
) -> Iterator[Run]:
    """Build a run and close it; a signal before the first step raises ``Interrupted``."""
    folder = Path(out)
    check_trackers(trackers)
    recipe = recipe_to_train(recipe, folder, resume=resume)
    with StopRequest() as request, ExitStack() as stack:
        with request.raising_at_once():
            group = start_process_group(recipe.run.timeout_s, device=device)
            process = stack.enter_context(group)
            with process.name_lost_ranks():
                stack.enter_context(locked(folder, process))
                start = find_start(
                    recipe, folder, process, resume=resume, allow_changes=allow_changes
                )
                session = build_session(recipe, process, dataset, checkpoint=start.checkpoint)
                run_on_all(process, lambda: _check_space(session, folder))
                reporter = Reporter(folder, session, trackers)
                stack.callback(reporter.close)
                stack.enter_context(reporter.recording_failures())
                saver = stack.enter_context(_saver(folder, session))
                _announce(session, start, reporter)
        yield Run(session, saver, reporter, request, hooks)


def _check_space(session: Session, folder: Path) -> None:
    """Refuse a disk without space for the first checkpoint."""
    if session.process.is_first:
        size = session.process.world * snapshot(session).num_bytes()
        check_writable(folder / CHECKPOINTS, needed_bytes=size)


def _saver(folder: Path, session: Session) -> AsyncSaver:
    process, keep = session.process, session.recipe.run.keep
    if process.world > 1:
        timeout = timedelta(seconds=process.timeout_s)
        with process.collective():  # a separate group: its messages come at any time
            group = dist.new_group(backend="gloo", timeout=timeout)
        process = replace(process, control=group, heartbeat=None)
    return AsyncSaver(folder / CHECKPOINTS, process=process, keep=keep)


def _announce(session: Session, start: Start, reporter: Reporter) -> None:
    """Report recipe, devices and first step."""
    recipe, process, step = session.recipe, session.process, session.progress.step
    reporter.event(
        "start",
        step=step,
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        weights_sha256=session.weights_sha256,
        checkpoint=None if start.checkpoint is None else start.checkpoint.path.name,
        changes=start.changes,
        unreached=session.unreached,
        total_steps=session.total_steps,
        steps_per_epoch=session.order.steps_per_epoch,
        num_samples=session.order.n,
        num_classes=session.head.num_classes,
        world=process.world,
        device=str(process.device),
        version=qmargin.__version__,
        torch=torch.__version__,
    )
    ranks = f"on {process.device}" if process.world == 1 else f"on {process.world} ranks"
    described = (
        f"training {recipe.name} {ranks}: {session.order.n:,} samples of "
        f"{session.head.num_classes:,} classes, {session.total_steps:,} steps of "
        f"{recipe.data.batch_size:,}{f', from step {step}' if step else ''}"
    )
    warnings = [f"warning: {sentence}" for sentence in session.unreached]
    for note in (*start.notes, described, *warnings):
        reporter.note(note)


def _step_record(
    session: Session, result: StepResult, rates: Mapping[str, float | None]
) -> dict[str, Any]:
    """A record of the step that was just taken; every rank must call, and it waits for the GPU."""
    head, step, device = session.head, session.progress.step, session.process.device
    stats, per_epoch = head.last_step, session.order.steps_per_epoch
    reach = head.loss.reach
    record: dict[str, Any] = {
        "step": step,
        "total_steps": session.total_steps,
        "epoch": session.order.epoch_of(step - 1),
        "loss": result.loss,
        "lr": session.optimizers.backbone.param_groups[0]["lr"],
        "effective_margin": head.loss.effective_margin,
        "reach": None if reach is None or math.isinf(reach) else reach,
        "cosine_gap": result.gap,
        **loss_settings(session.recipe, step - 1, per_epoch).as_record(),
        "grad_norm": result.grad_norm,
        "num_skipped": session.progress.num_skipped,
        "num_corrupt": session.budget.count,
        "num_redone": head.num_redone,
        "num_classes": head.num_classes,
        **rates,
    }
    if session.scaler.is_enabled():
        record["loss_scale"] = session.scaler.get_scale()
    if device.type == "cuda":
        record["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30  # of this rank
    names = (
        *("support_mean", "support_max", "satisfied_share", "target_posterior"),
        *("path", "mass_error", "num_overflowed"),
    )
    return record | {name: None if stats is None else getattr(stats, name) for name in names}


@dataclass
class Run:
    """One call of ``train``, once everything is built."""

    session: Session
    saver: AsyncSaver
    reporter: Reporter
    request: StopRequest
    hooks: Sequence[Hook]
    loss: float = math.nan
    signal: int = 0
    has_room: bool = False  # in host memory, for a background save

    def __post_init__(self) -> None:
        # a complete run is left unchanged
        self.saved_step = self.validated_step = self.step or None
        self.meter = Meter(self.step)

    @property
    def step(self) -> int:
        """Steps that have been taken."""
        return self.session.progress.step

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or a signal came."""
        return self.step >= self.session.total_steps or self.signal != 0

    def go(self) -> Outcome:
        """Take the remaining steps, and finish."""
        if self.session.spikes.factor is not None and self.step == 0:
            self.save()  # a roll-back needs a checkpoint
        while not self.is_over:
            with self.session.stream() as batches:
                while not self.is_over and self.next_step(batches):
                    pass
        return self.end()

    def next_step(self, batches: Iterator[Batch]) -> bool:
        """Take a step; False if the run rolled back, and needs a new stream of batches."""
        session, failure = self.session, None
        try:
            self.note_saved(self.saver.poll())
        except CheckpointError as error:
            failure = error
        with session.process.name_lost_ranks():
            result = take_step(session, batches, stop=self.request.number, failure=failure)
        self.account(result)
        if result.skipped is None and session.spikes.is_spike(result.loss):
            self.roll_back(result.loss)
            return False
        self.advance(result)
        return True

    def account(self, result: StepResult) -> None:
        """Count corrupt samples and steps that were skipped; stop above the recipe's limits."""
        session, step = self.session, self.step
        budget, progress = session.budget, session.progress
        self.meter.add(batch_rows(session.order, step))
        budget.add(session.epoch, ())
        if result.num_corrupt:
            samples = _all_of(session.process, result.replaced)
            self.reporter.event("corrupt", step=step, samples=samples)
            budget.count += result.num_corrupt
            budget.check(budget.count, last=samples[-1])
        if result.skipped is None:
            self.loss = result.loss
            return
        samples = _all_of(session.process, result.samples)
        self.reporter.event("skip", step=step, reason=result.skipped, samples=samples)
        if result.skipped == OVERFLOW:
            return  # the scale of fp16 adapts by skipped steps
        progress.num_skipped += 1
        more = f" and {len(samples) - NUM_SHOWN} more" if len(samples) > NUM_SHOWN else ""
        shown = ", ".join(samples[:NUM_SHOWN]) + more
        text = f"step {step} was skipped because {result.skipped} ({shown})"
        self.reporter.note(text)
        limit = session.recipe.run.nan_budget
        if progress.num_skipped > limit:
            raise DataError(
                f"{text}; {progress.num_skipped} steps skipped and run.nan_budget allows {limit}, "
                "check these samples or lower the learning rate"
            )

    def advance(self, result: StepResult) -> None:
        """Report, save and validate after a step, where the recipe asks for it."""
        session, run = self.session, self.session.recipe.run
        session.progress.step += 1
        self.reporter.moved(self.step, self.meter.eta_s(self.step, session.total_steps))
        if not self.has_room:  # optimizers have their state by now
            self.saver.reserve(snapshot(session))
            self.has_room = True
        self.signal = result.stop if self.step < session.total_steps else 0
        if session.is_recorded(self.step) or self.is_over:
            rates = self.meter.read(self.step, session.total_steps)
            self.reporter.step(_step_record(session, result, rates))
        if self.step % run.save_every_steps == 0:
            self.save()
        if run.validate_every is not None and self.step % run.validate_every == 0:
            self.validate()

    def save(self) -> None:
        """Start to save this step, unless that was done."""
        if self.saved_step == self.step:
            return
        self.note_saved(self.saver.wait())
        self.saver.save(snapshot(self.session, journal_bytes=self.reporter.sync()))
        self.saved_step = self.step

    def note_saved(self, path: Path | None) -> None:
        """Report a checkpoint that is complete."""
        if path is not None:
            self.reporter.event("checkpoint", checkpoint=path.name)
            self.reporter.status(checkpoint=path.name)

    @torch.no_grad()
    def validate(self) -> None:
        """Run the hooks, unless that was done for this step."""
        if not self.hooks or self.validated_step == self.step:
            return
        session, process = self.session, self.session.process
        session.broadcast_buffers_()
        average = None if session.average is None else dict(session.average.tensors)
        backbone, head = session.backbone.eval(), session.head
        state = HookState(
            self.step, session.epoch, session.recipe, process, backbone, head, average
        )
        results: dict[str, float] = {}
        try:
            for hook in self.hooks:
                found = run_on_all(process, lambda hook=hook: hook(state))  # type: ignore[misc]
                results |= {name: float(value) for name, value in found.items()}
        finally:
            session.backbone.train()
        self.reporter.validation(results, self.step)
        self.validated_step = self.step

    def roll_back(self, loss: float) -> None:
        """Restore the weights of the newest checkpoint, and continue after the window."""
        session, progress, spike = self.session, self.session.progress, self.step
        self.note_saved(self.saver.wait())
        checkpoint = agree_on_newest(self.saver.folder, session.process).checkpoint
        assert checkpoint is not None  # at least that of step 0
        progress.rollbacks.append(checkpoint.step)
        if progress.rollbacks.count(checkpoint.step) > MOST_ROLLBACKS:
            raise DataError(
                f"the loss of step {spike} spiked to {loss:.4g} after {MOST_ROLLBACKS} roll-backs "
                f"to step {checkpoint.step}; lower the learning rate, or raise run.spike_factor"
            )
        restore_(session, checkpoint)
        session.spikes.losses.clear()
        after = max(spike + 1, checkpoint.step + session.recipe.run.spike_window)
        progress.step = min(after, session.total_steps)
        places = {"checkpoint": checkpoint.step, "next_step": progress.step}
        self.reporter.event("rollback", step=spike, loss=loss, **places)
        self.reporter.note(
            f"the loss of step {spike} spiked to {loss:.4g}: restored the weights of step "
            f"{checkpoint.step}, continuing with step {progress.step}"
        )

    def end(self) -> Outcome:
        """Validate, save the last step, write averages and report how the run ended."""
        session, folder = self.session, self.saver.folder
        if not self.signal:
            self.validate()
        self.save()
        self.note_saved(self.saver.wait())
        saved = list(list_steps(folder).values())
        if not self.signal:
            last = saved[: session.recipe.run.average_last]
            arguments = (last, session.average) if session.process.is_first else ([], None)
            run_on_all(session.process, lambda: write_averages(folder.parent, *arguments))
        state = "stopped" if self.signal else "finished"
        self.reporter.event(state, step=self.step, loss=self.loss, signal=self.signal)
        self.reporter.status(state=state, step=self.step, signal=self.signal)
        newest = next(iter(saved), None)
        self.reporter.note(
            f"{state} at step {self.step} of {session.total_steps}, saved in {newest}"
        )
        taken, skipped = (self.step, session.total_steps), session.progress.num_skipped
        return Outcome(*taken, self.loss, newest, skipped, signal=self.signal)


def _all_of(process: Process, samples: Sequence[str]) -> list[str]:
    """Samples of all ranks."""
    return [sample for part in gather(process, list(samples)) for sample in part]
