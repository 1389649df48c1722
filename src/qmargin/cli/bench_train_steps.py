"""Training steps that ``qmargin bench train`` times, by the loop and without it."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qmargin.cli.bench_common import CommonHead
from qmargin.cli.bench_timing import Step, median
from qmargin.data.faces import normalised
from qmargin.data.loader import Batch
from qmargin.errors import ConfigError
from qmargin.training.build import build_backbone
from qmargin.training.loop import Run, open_run
from qmargin.training.optim import clip_gradients_, parameter_groups
from qmargin.training.recipe import HeadPart, LossPart, Recipe, SchedulePart
from qmargin.training.session import Session
from qmargin.training.step import prepare_step_

# So small that no weight changes, and every turn sees the same supports; zero is not a rate.
RATE = 1e-30
MANY = 1_000_000  # epochs: the benchmark ends the run, not the recipe


def still(recipe: Recipe) -> Recipe:
    """A recipe that does all its work, changes no weight and never ends or saves by itself."""
    if recipe.optimizer.accumulation > 1:
        raise ConfigError(
            f"optimizer.accumulation is {recipe.optimizer.accumulation}; whole batches are timed, "
            "set it to 1"
        )
    return replace(
        recipe,
        optimizer=replace(recipe.optimizer, lr=RATE, base_batch=None),
        schedule=SchedulePart(),
        run=replace(
            recipe.run,
            epochs=MANY,
            max_steps=None,
            save_every_steps=MANY * MANY,
            validate_every=None,
            spike_factor=None,
        ),
        margin_schedule=None,
        scale_schedule=None,
        alpha_schedule=None,
    )


def q_margin_recipe(recipe: Recipe) -> Recipe:
    """Q-Margin by lists of active classes."""
    return replace(still(recipe), head=replace(recipe.head, path="sparse"))


def arcface_recipe(recipe: Recipe) -> Recipe:
    """ArcFace by blocks of classes; everything else is the same."""
    head = HeadPart("chunked", update=recipe.head.update, chunk_dtype=recipe.head.chunk_dtype)
    return replace(still(recipe), loss=LossPart.from_preset("arcface"), head=head)


@dataclass
class Looped:
    """A run of ``train`` that is taken step by step."""

    run: Run
    batches: Iterator[Batch]

    def __call__(self) -> None:
        """Take a step with all that the loop does around it."""
        self.run.next_step(self.batches)
        if self.run.signal:  # the run would save and end; there is nothing to save here
            raise KeyboardInterrupt


@contextmanager
def looped(recipe: Recipe, folder: Path, device: str) -> Iterator[Looped]:
    """A run with its data, ready for the first step; its own display is silent."""
    with ExitStack() as stack:
        with redirect_stderr(io.StringIO()):  # a display looks for a terminal when it is opened
            run = stack.enter_context(open_run(recipe, folder, device=device))
        yield Looped(run, stack.enter_context(run.session.stream()))


def as_floats(inputs: Tensor) -> Tensor:
    """A copy of a batch's inputs as a backbone takes them; their memory goes back to the loader."""
    return normalised(inputs) if inputs.dtype == torch.uint8 else inputs.clone()


class Bare:
    """Steps on the weights of a run without its loop: backbone, head, clipping and updates.

    The batch lies on the device, and nothing is checked, told or agreed on.
    """

    def __init__(self, session: Session, batch: Batch) -> None:
        self.session, device = session, session.process.device
        self.inputs = batch.inputs.to(device)
        if session.recipe.precision.channels_last and self.inputs.dim() == 4:
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
        self.labels = batch.labels.to(device)
        shape = (len(self.labels), session.recipe.model.embedding_dim)
        # not zeros or ones: what a GPU multiplies decides what power it draws, hence its clock
        self.gradient = torch.randn(shape, device=device) / len(self.labels)
        prepare_step_(session)

    def whole(self) -> None:
        """A step of backbone and head."""
        session, optimizers = self.session, self.session.optimizers
        optimizers.zero_grad()
        session.head.waits = not session.runs_ahead
        loss = session.head(self._embed(), self.labels)
        session.scaler.scale(loss).backward()
        if not session.head.confirm():
            raise RuntimeError("lists of the same batch have grown")  # which no weight explains
        session.head.waits = True
        for optimizer in optimizers:
            session.scaler.unscale_(optimizer)
        self._clip()
        for optimizer in optimizers:
            session.scaler.step(optimizer)
        session.scaler.update()

    def backbone(self) -> None:
        """A step of the backbone alone, which gets a random gradient."""
        optimizer = self.session.optimizers.backbone
        self.session.optimizers.zero_grad()
        embeddings = self._embed()
        embeddings.backward(self.gradient.to(embeddings.dtype))
        if self.session.recipe.optimizer.clip_norm is not None:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(weights, self.session.recipe.optimizer.clip_norm)
        optimizer.step()

    def _embed(self) -> Tensor:
        with self.session.autocast():
            embeddings: Tensor = self.session.model(self.inputs)
        return embeddings

    def _clip(self) -> None:
        part = self.session.recipe.optimizer
        if part.clip_norm is not None:
            clip_gradients_(self.session.optimizers, part.clip_norm, with_head=part.clip_head)


def common_step(recipe: Recipe, batch: Batch, num_classes: int, device: torch.device) -> Step:
    """A step as most training code has it: eager, NCHW, fp16 and a dense ArcFace head.

    On a CPU, which has no fast fp16, bf16 takes its place.
    """
    plain = replace(recipe, precision=replace(recipe.precision, channels_last=False, compile=False))
    backbone = build_backbone(plain, device=device)
    head = CommonHead(recipe.model.embedding_dim, num_classes, device=device)
    part = recipe.optimizer
    groups = parameter_groups(backbone, part)
    groups.append({"params": [head.weight], "weight_decay": part.weight_decay})
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    inputs, labels = batch.inputs.to(device), batch.labels.to(device)
    weights = list(backbone.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            embeddings = backbone(inputs)
        scaler.scale(head(embeddings.float(), labels)).backward()
        scaler.unscale_(optimizer)
        if part.clip_norm is not None:
            nn.utils.clip_grad_norm_(weights, part.clip_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def measure_save(step: Looped, *, num_steps: int) -> dict[str, Any]:
    """Seconds of steps while a checkpoint is saved in the background, beside those of others.

    Every step ends with a number that the host reads, so that a clock on the host sees all of it.

    Args:
        step: Of a run.
        num_steps: Before the save, to know what a step takes.
    """
    run = step.run
    for _ in range(3):  # the first reserves memory for copies
        step()
    usual = [_seconds(step) for _ in range(num_steps)]
    began = time.perf_counter()
    run.save()
    copied = time.perf_counter() - began
    during = [copied + _seconds(step)]
    while run.saver.is_busy:
        during.append(_seconds(step))
    took = time.perf_counter() - began
    path = run.saver.wait()
    assert path is not None  # a save that fails raises
    return {
        "usual_s": median(usual),
        "largest_usual_s": max(usual),
        "largest_s": max(during),
        "stall_s": max(during) - median(usual),
        "copy_s": copied,
        "save_s": took,
        "steps_during": len(during),
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
    }


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
