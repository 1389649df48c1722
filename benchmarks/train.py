"""What a whole training step costs, and how much of it is the loop."""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Tables, add_outputs, command_line
from benchmarks.timing import CommonHead, Step, describe_machine, median, time_turns
from qmargin.cli.recipes import load_recipe
from qmargin.data.faces import normalised
from qmargin.data.loader import Batch
from qmargin.errors import ConfigError
from qmargin.files import write_atomically
from qmargin.training.build import build_backbone
from qmargin.training.distributed import find_device
from qmargin.training.loop import Run, open_run
from qmargin.training.optim import clip_gradients_, parameter_groups
from qmargin.training.recipe import HeadPart, LossPart, Recipe, SchedulePart
from qmargin.training.recipe_files import to_dict
from qmargin.training.session import Session
from qmargin.training.step import prepare_step_

RECIPES = {"cuda": "synthetic2m_r100_q_margin", "cpu": "debug"}  # by device, where none is named
LOOP, ARCFACE, COMMON = "Q-Margin, sparse", "ArcFace, chunked", "ArcFace, common"
BARE, BACKBONE = "Q-Margin without the loop", "backbone alone"
WHAT = {
    LOOP: "a step of `qmargin train`",
    ARCFACE: "a step of `qmargin train`",
    COMMON: "eager NCHW fp16 backbone, dense head, no loop",
    BARE: "backbone, head, clipping, updates; the batch lies on the device",
    BACKBONE: "with a random gradient for the embeddings",
}


@dataclass(frozen=True)
class TrainBenchmark:
    """What to measure.

    Attributes:
        recipe: Of Q-Margin; the others follow from it.
        device: As on the command line.
        repeats: Turns.
        seconds: Slow steps get fewer turns, three at least, to stay near this time.
        save_steps: Steps before the save, to know what one takes.
        out: Folder whose disk takes the checkpoint; None for that of temporary files.
    """

    recipe: Recipe
    device: str = "auto"
    repeats: int = 20
    seconds: float = 120.0
    save_steps: int = 20
    out: Path | None = None

    def __post_init__(self) -> None:
        if min(self.repeats, self.save_steps) < 1:
            raise ConfigError(
                f"repeats is {self.repeats} and save_steps {self.save_steps}; both must be at "
                "least 1"
            )


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``train`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "train",
        help="whole training steps: loop, head, losses, and the stall of a checkpoint",
        description="Time whole training steps in turns: Q-Margin and ArcFace by the loop of "
        "`qmargin train`, the same without the loop and without the head, and a plain eager model "
        "with a dense ArcFace head. Then save a checkpoint while training goes on, and look for "
        "the longest step.",
    )
    add = parser.add_argument
    add("recipe", nargs="?", metavar="NAME_OR_FILE", help="of Q-Margin (by the device)")
    add(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the recipe; may be repeated",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--repeats", type=int, default=20, help="timed turns; medians are shown (20)")
    add("--seconds", type=float, default=120.0, help="fewer turns where they take longer (120)")
    add("--save-steps", type=int, default=20, help="steps before the checkpoint (20)")
    add("--out", type=Path, metavar="DIR", help="whose disk takes the checkpoint (temporary files)")
    add("--commit", help="recorded in the file (default: ask git)")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    device = find_device(arguments.device)
    name = arguments.recipe or RECIPES[device.type]
    settings = TrainBenchmark(
        recipe=load_recipe(name, arguments.settings),
        device=device.type,
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        save_steps=arguments.save_steps,
        out=arguments.out,
    )
    tables = Tables("train", arguments.page)
    found = run_train_benchmark(settings)
    print_results(found, tables)
    tables.write(("torch", "triton"))
    if arguments.json is not None:
        record = {
            "command": command_line(),
            "machine": describe_machine(device, arguments.commit),
            **found,
        }
        write_atomically(arguments.json, (json.dumps(record, indent=1) + "\n").encode())


def run_train_benchmark(settings: TrainBenchmark) -> dict[str, Any]:
    """Measure; everything in one record."""
    recipe = settings.recipe
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=settings.out)))

        def opened(name: str, recipe: Recipe) -> Looped:
            return stack.enter_context(looped(recipe, folder / name, settings.device))

        ours = opened("q-margin", q_margin_recipe(recipe))
        session, read = ours.run.session, next(ours.batches)
        batch = replace(read, inputs=as_floats(read.inputs))
        device: torch.device = session.process.device
        bare = Bare(session, batch)
        contenders: dict[str, Step] = {
            LOOP: ours,
            ARCFACE: opened("arcface", arcface_recipe(recipe)),
            BARE: bare.whole,
            BACKBONE: bare.backbone,
        }
        common = common_step(recipe, batch, session.head.num_classes, device)
        if fits(common):
            contenders[COMMON] = common
        turns = {"repeats": settings.repeats, "seconds": settings.seconds}
        times = time_turns(list(contenders.values()), device, **turns)  # type: ignore[arg-type]
        ms = {name: median(own) for name, own in zip(contenders, times, strict=True)}
        stats = session.head.last_step
        return {
            "recipe": to_dict(recipe),
            "batch": recipe.data.batch_size,
            "classes": session.head.num_classes,
            "head": "" if stats is None else f"{stats.path}: {stats.reason}",
            "ms": ms,
            "ms_all": dict(zip(contenders, times, strict=True)),
            **shares(ms),
            "save": measure_save(ours, num_steps=settings.save_steps),
        }


def fits(step: Step) -> bool:
    """Whether a step that makes all cosines at once has the memory for it."""
    try:
        step()
    except torch.OutOfMemoryError:
        return False
    return True


def shares(ms: dict[str, float]) -> dict[str, float | None]:
    """What the times of the contenders say about each other; None where one did not fit.

    Examples:
        >>> ms = {LOOP: 100.0, ARCFACE: 110.0, COMMON: 170.0, BARE: 98.0, BACKBONE: 95.0}
        >>> {name: round(share or 0.0, 3) for name, share in shares(ms).items()}
        {'loop_share': 0.02, 'head_share': 0.03, 'versus_arcface': 1.1, 'versus_common': 1.7}
    """
    return {
        "loop_share": (ms[LOOP] - ms[BARE]) / ms[LOOP],
        "head_share": (ms[BARE] - ms[BACKBONE]) / ms[LOOP],
        "versus_arcface": ms[ARCFACE] / ms[LOOP],
        "versus_common": ms[COMMON] / ms[LOOP] if COMMON in ms else None,
    }


def print_results(found: dict[str, Any], tables: Tables | None = None) -> None:
    """Two tables: times of steps, and what they and the save say."""
    tables = tables or Tables()
    ms, batch = found["ms"], found["batch"]
    tables.show(
        "steps",
        f"{found['recipe']['model']['backbone']}, {found['classes']:,} classes, batch {batch}; "
        f"head {found['head']}",
        ["step", "what", "ms", "samples/s"],
        [
            [name, WHAT[name], f"{value:.2f}", f"{1e3 * batch / value:,.0f}"]
            for name, value in ms.items()
        ],
    )
    tables.show("shares", "What it says", ["quantity", "value"], list(_facts(found)))


def _facts(found: dict[str, Any]) -> Iterator[list[str]]:
    save = found["save"]
    yield ["loop, share of the step", f"{100 * found['loop_share']:.2f} %"]
    yield ["head, share of the step", f"{100 * found['head_share']:.2f} %"]
    yield ["samples/s, times ArcFace chunked", f"{found['versus_arcface']:.3f}"]
    common = found["versus_common"]
    text = "out of memory" if common is None else f"{common:.3f}"
    yield ["samples/s, times ArcFace common", text]
    yield ["checkpoint", f"{save['bytes'] / 2**30:.2f} GiB in {save['save_s']:.2f} s"]
    yield ["steps taken during the save", f"{save['steps_during']}"]
    yield ["usual step, median and largest", _both(save["usual_s"], save["largest_usual_s"])]
    yield ["longest step during the save", f"{1e3 * save['largest_s']:.1f} ms"]
    yield ["stall: longest step less the median", f"{save['stall_s']:.3f} s"]


def _both(first: float, second: float) -> str:
    return f"{1e3 * first:.1f} ms, {1e3 * second:.1f} ms"


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
        loss = session.head(self._embed(), self.labels, speculative=session.runs_ahead)
        session.scaler.scale(loss).backward()
        if not session.head.verify():
            raise RuntimeError("lists of the same batch have grown")  # which no weight explains
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
