"""``train``: a recipe from its first step, or its newest checkpoint, to its last step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from qmargin.data.loader import Batch
from qmargin.data.samples import Dataset
from qmargin.errors import CheckpointError, DataError
from qmargin.training.async_saver import AsyncSaver
from qmargin.training.averaging import write_averages
from qmargin.training.exchange import group_exchange
from qmargin.training.folders import check_writable, list_steps
from qmargin.training.hooks import Hook, run_hooks
from qmargin.training.process import start_process_group
from qmargin.training.recipe import Recipe
from qmargin.training.records import describe_run, start_record, step_record
from qmargin.training.reporting import Meter, Reporter
from qmargin.training.session import Session, open_session, restore_, snapshot
from qmargin.training.signals import Interrupted, StopRequest
from qmargin.training.spikes import MOST_ROLLBACKS
from qmargin.training.starting import (
    CHECKPOINTS,
    Start,
    find_newest,
    find_start,
    locked,
    recipe_to_train,
)
from qmargin.training.step import OVERFLOW, StepResult, batch_rows, take_step
from qmargin.training.together import gather_texts, together
from qmargin.training.trackers import check_trackers

NUM_SHOWN = 5  # samples that a message names; the journal has all of them


@dataclass(frozen=True)
class Outcome:
    """How a call of ``train`` ended.

    Attributes:
        step: Steps that have been taken; 0 if a signal came while the run was built.
        total_steps: Steps of the whole run; 0 if a signal came while it was built.
        loss: Of the last step that was taken; NaN if there was none.
        checkpoint: The newest.
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
    """Train by a recipe; on several GPUs or machines, call it in every process of ``torchrun``.

    ``out`` gets ``checkpoints/``, ``journal.jsonl``, ``status.json`` and ``lock``. SIGTERM and
    Ctrl-C save and return; see ``Outcome.signal``.

    Args:
        recipe: What to train; None for the stored recipe of a run that is resumed.
        out: Folder of this run alone, on a file system that all ranks share.
        resume: Go on from the newest whole checkpoint in ``out``, or from one that is named.
        allow_changes: Resume even if the recipe differs from the stored one in what decides the
            outcome. Other differences, such as the number of workers, need no permission.
        hooks: Called every ``recipe.run.validate_every`` steps, and at the end, on every rank.
        dataset: Instead of the recipe's own data.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        trackers: Of ``"tensorboard"`` and ``"wandb"``, those to send numbers to.

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
    """Everything that ``train`` does before the first step and after the last.

    Raises:
        Interrupted: By a signal while the run is built; nothing is left but what was there.
    """
    folder = Path(out)
    check_trackers(trackers)
    recipe = recipe_to_train(recipe, folder, resume=resume)
    with StopRequest() as request, ExitStack() as stack:
        with request.obeyed_at_once():
            group = start_process_group(recipe.run.timeout_s, device=device)
            process = stack.enter_context(group)
            with process.naming_ranks():
                stack.enter_context(locked(folder, process))
                start = find_start(
                    recipe, folder, process, resume=resume, allow_changes=allow_changes
                )
                session, journal_bytes = open_session(
                    recipe, process, dataset, checkpoint=start.checkpoint
                )
                _check_space(session, folder)
                reporter = Reporter(
                    folder,
                    process,
                    recipe,
                    step=session.progress.step,
                    total_steps=session.total_steps,
                    journal_bytes=journal_bytes,
                    trackers=trackers,
                )
                stack.callback(reporter.close)
                stack.enter_context(reporter.telling_failures())
                saver = stack.enter_context(_saver(folder, session))
                _announce(session, start, reporter)
        yield Run(session, saver, reporter, request, hooks)


def _announce(session: Session, start: Start, reporter: Reporter) -> None:
    reporter.event("start", **start_record(session, start))
    warnings = [f"warning: {sentence}" for sentence in session.unreached]
    for note in (*start.notes, describe_run(session), *warnings):
        reporter.note(note)


class Run:
    """One call of ``train``, once everything is built."""

    def __init__(
        self,
        session: Session,
        saver: AsyncSaver,
        reporter: Reporter,
        request: StopRequest,
        hooks: Sequence[Hook],
    ) -> None:
        self.session, self.saver, self.reporter = session, saver, reporter
        self.request, self.hooks = request, hooks
        self.loss, self.signal = math.nan, 0
        # nothing to do at once after a resume: a run that is complete is left as it is
        self.saved_step = self.validated_step = self.step or None
        self.has_room = False
        self.meter = Meter(self.step)

    @property
    def step(self) -> int:
        """Steps that have been taken."""
        return self.session.progress.step

    @property
    def is_over(self) -> bool:
        """Whether the last step was taken, or a signal came."""
        return self.step >= self.session.total_steps or self.signal != 0

    def go(self) -> Outcome:
        """Take the steps that are left, and end."""
        if self.session.spikes.factor is not None and self.step == 0:
            self.save()  # a roll-back needs something to go back to
        while not self.is_over:
            with self.session.stream() as batches:
                self.follow(batches)
        return self.end()

    def follow(self, batches: Iterator[Batch]) -> None:
        """Take steps until the run is over, or has to go back and read on elsewhere."""
        while not self.is_over and self.next_step(batches):
            pass

    def next_step(self, batches: Iterator[Batch]) -> bool:
        """Take a step; False if the run went back, and reads on elsewhere."""
        result = self.take_step(batches)
        self.account(result)
        if result.skipped is None and self.session.spikes.is_spike(result.loss):
            self.roll_back(result.loss)
            return False
        self.advance(result)
        return True

    def take_step(self, batches: Iterator[Batch]) -> StepResult:
        """One step, with a word on the save in the background before it."""
        failure = None
        try:
            self.note_saved(self.saver.poll())
        except CheckpointError as error:
            failure = error
        with self.session.process.naming_ranks():
            return take_step(self.session, batches, stop=self.request.number, failure=failure)

    def account(self, result: StepResult) -> None:
        """Count corrupt samples and steps that were skipped; stop above the recipe's limits."""
        session, step = self.session, self.step
        budget, progress = session.budget, session.progress
        self.meter.add(batch_rows(session.order, step))
        budget.add(session.epoch, ())
        if result.num_corrupt:
            samples = gather_texts(session.process, result.replaced)
            self.reporter.event("corrupt", step=step, samples=samples)
            budget.count += result.num_corrupt
            budget.check(budget.count, last=samples[-1])
        if result.skipped is None:
            self.loss = result.loss
            return
        samples = gather_texts(session.process, result.samples)
        self.reporter.event("skip", step=step, reason=result.skipped, samples=samples)
        if result.skipped == OVERFLOW:
            return  # how the scale of fp16 finds its value
        progress.num_skipped += 1
        text = f"step {step} was skipped because {result.skipped} ({_listed(samples)})"
        self.reporter.note(text)
        limit = session.recipe.run.nan_budget
        if progress.num_skipped > limit:
            raise DataError(
                f"{text}, the {progress.num_skipped}. such step, and run.nan_budget allows {limit};"
                " look at these samples, or lower the learning rate"
            )

    def advance(self, result: StepResult) -> None:
        """What follows a step: tell, save, validate."""
        session, run = self.session, self.session.recipe.run
        session.progress.step += 1
        self.reporter.moved(self.step, self.meter.eta_s(self.step, session.total_steps))
        if not self.has_room:  # optimizers have their state now: no later step waits for memory
            self.saver.reserve(snapshot(session))
            self.has_room = True
        self.signal = result.stop if self.step < session.total_steps else 0
        if self.step % run.log_every == 0 or self.is_over:
            rates = self.meter.read(self.step, session.total_steps)
            self.reporter.step(step_record(session, result, rates))
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
        """Tell of a checkpoint that is complete."""
        if path is not None:
            self.reporter.event("checkpoint", checkpoint=path.name)
            self.reporter.status(checkpoint=path.name)

    def validate(self) -> None:
        """Run the hooks, unless that was done for this step."""
        if self.hooks and self.validated_step != self.step:
            self.reporter.validation(run_hooks(self.hooks, self.session), self.step)
            self.validated_step = self.step

    def roll_back(self, loss: float) -> None:
        """Go back to the weights of the newest checkpoint, and on after the window."""
        session, progress, spike = self.session, self.session.progress, self.step
        self.note_saved(self.saver.wait())
        checkpoint = find_newest(self.saver.folder, session.process).checkpoint
        assert checkpoint is not None  # that of step 0, if no other
        progress.rollbacks.append(checkpoint.step)
        if progress.rollbacks.count(checkpoint.step) > MOST_ROLLBACKS:
            raise DataError(
                f"the loss of step {spike} is {loss:.4g}, a spike, and the run has gone back to "
                f"step {checkpoint.step} {MOST_ROLLBACKS} times; lower the learning rate, or raise "
                "run.spike_factor"
            )
        restore_(session, checkpoint)
        session.spikes.forget()
        after = max(spike + 1, checkpoint.step + session.recipe.run.spike_window)
        progress.step = min(after, session.total_steps)
        places = {"checkpoint": checkpoint.step, "next_step": progress.step}
        self.reporter.event("rollback", step=spike, loss=loss, **places)
        self.reporter.note(
            f"the loss of step {spike} is {loss:.4g}, a spike: back to the weights of step "
            f"{checkpoint.step}, on with step {progress.step}"
        )

    def end(self) -> Outcome:
        """Validate and save the last step, and tell how the run ended."""
        session, folder = self.session, self.saver.folder.parent
        if not self.signal:
            self.validate()
        self.save()
        self.note_saved(self.saver.wait())
        if not self.signal:
            last = list(list_steps(self.saver.folder).values())[: session.recipe.run.average_last]
            chosen = last if session.process.is_first else []
            moving = session.average if session.process.is_first else None
            together(session.process, lambda: write_averages(folder, chosen, moving))
        state = "stopped" if self.signal else "finished"
        self.reporter.event(state, step=self.step, loss=self.loss, signal=self.signal)
        self.reporter.status(state=state, step=self.step, signal=self.signal)
        newest = next(iter(list_steps(self.saver.folder).values()), None)
        self.reporter.note(
            f"{state} at step {self.step} of {session.total_steps}, saved in {newest}"
        )
        return Outcome(
            step=self.step,
            total_steps=session.total_steps,
            loss=self.loss,
            checkpoint=newest,
            num_skipped=session.progress.num_skipped,
            signal=self.signal,
        )


def _check_space(session: Session, folder: Path) -> None:
    """Refuse a disk that the first checkpoint would not fit on."""

    def check() -> None:
        if session.process.is_first:
            needed = session.process.world * snapshot(session).num_bytes()
            check_writable(folder / CHECKPOINTS, needed_bytes=needed)

    together(session.process, check)


def _saver(folder: Path, session: Session) -> AsyncSaver:
    process, exchange = session.process, None
    if process.world > 1:
        timeout = timedelta(seconds=process.timeout_s)
        with process.meeting():  # a group of its own: its messages come at any time
            exchange = group_exchange(dist.new_group(backend="gloo", timeout=timeout))
    return AsyncSaver(
        folder / CHECKPOINTS,
        rank=process.rank,
        world=process.world,
        exchange=exchange,
        keep=session.recipe.run.keep,
    )


def _listed(samples: Sequence[str]) -> str:
    shown = ", ".join(samples[:NUM_SHOWN])
    return shown + (f" and {len(samples) - NUM_SHOWN} more" if len(samples) > NUM_SHOWN else "")
