"""``qmargin bench train``: what a whole training step costs, and how much of it is the loop."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmargin.cli.options import new_file
from qmargin.cli.recipes import load_recipe
from qmargin.cli.tables import output_console, print_table
from qmargin.errors import ConfigError
from qmargin.files import write_atomically

if TYPE_CHECKING:
    from qmargin.cli.bench_timing import Step
    from qmargin.training.recipe import Recipe

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


def add_bench_train(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``train`` to the subjects of ``qmargin bench``."""
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
    add("--json", type=new_file, metavar="FILE", help="also write everything here")
    parser.set_defaults(run=run_bench_train)


def run_bench_train(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    from qmargin.cli.bench_timing import describe_machine
    from qmargin.training.process import find_device

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
    found = run_train_benchmark(settings)
    print_results(found)
    if arguments.json is not None:
        record = {
            "command": "qmargin " + shlex.join(sys.argv[1:]),
            "machine": describe_machine(device, arguments.commit),
            **found,
        }
        write_atomically(arguments.json, (json.dumps(record, indent=1) + "\n").encode())


def run_train_benchmark(settings: TrainBenchmark) -> dict[str, Any]:
    """Measure; everything in one record."""
    import torch

    from qmargin.cli import bench_train_steps as steps
    from qmargin.cli.bench_timing import median, time_turns
    from qmargin.training.recipe_files import to_dict

    recipe = settings.recipe
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=settings.out)))

        def opened(name: str, recipe: Recipe) -> steps.Looped:
            return stack.enter_context(steps.looped(recipe, folder / name, settings.device))

        ours = opened("q-margin", steps.q_margin_recipe(recipe))
        session, read = ours.run.session, next(ours.batches)
        batch = replace(read, inputs=steps.as_floats(read.inputs))
        device: torch.device = session.process.device
        bare = steps.Bare(session, batch)
        contenders: dict[str, Step] = {
            LOOP: ours,
            ARCFACE: opened("arcface", steps.arcface_recipe(recipe)),
            BARE: bare.whole,
            BACKBONE: bare.backbone,
        }
        common = steps.common_step(recipe, batch, session.head.num_classes, device)
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
            "save": steps.measure_save(ours, num_steps=settings.save_steps),
        }


def fits(step: Step) -> bool:
    """Whether a step that makes all cosines at once has the memory for it."""
    import torch

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


def print_results(found: dict[str, Any]) -> None:
    """Two tables: times of steps, and what they and the save say."""
    console = output_console()
    ms, batch = found["ms"], found["batch"]
    print_table(
        console,
        f"{found['recipe']['model']['backbone']}, {found['classes']:,} classes, batch {batch}; "
        f"head {found['head']}",
        ["step", "what", "ms", "samples/s"],
        [
            [name, WHAT[name], f"{value:.2f}", f"{1e3 * batch / value:,.0f}"]
            for name, value in ms.items()
        ],
    )
    print_table(console, "What it says", ["quantity", "value"], list(_facts(found)))


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
