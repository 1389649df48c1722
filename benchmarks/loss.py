"""The dense loss timed next to cross-entropy and the entmax package."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import qmargin
from benchmarks.common import (
    Tables,
    add_outputs,
    benchmark_options,
    command_line,
    positive,
    write_blocks,
)
from benchmarks.sizes_page import short_command
from benchmarks.timing import describe_machine
from qmargin.cli.doctor import installed_version
from qmargin.cli.options import count, named_path
from qmargin.cli.tables import markdown_table, stage_progress
from qmargin.errors import ConfigError
from qmargin.files import write_atomically
from qmargin.training.distributed import find_device

TARGET_COSINE = 0.4  # a sample in mid-training: above chance, not yet beyond the margin
MOST_SOLVER_ROWS = 32  # the counts of table two hardly vary over rows; more would only cost time
PACKAGES = ("torch", "triton", "entmax")  # whose versions matter
CROSS_ENTROPY_SCALE = 64.0  # of the unit of the table of shapes
SPREAD = 1 / 22  # of cosines of random directions in 512 dimensions


@dataclass(frozen=True)
class LossBenchmark:
    """What to measure; the fields are the command's options."""

    rows: int = 256
    classes: int = 100_000
    alphas: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0)
    scale: float = 32.0
    effective_margin: float = 0.5
    dim: int = 512
    repeats: int = 5
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)

    def prior_margin(self, alpha: float) -> qmargin.PriorMargin:
        """The margin that asks for the same cosine gap at every alpha."""
        return qmargin.PriorMargin.from_effective(
            self.effective_margin, alpha=alpha, scale=self.scale
        )

    def margin_loss(self, alpha: float) -> qmargin.MarginLoss:
        """Loss of each row with that margin."""
        margin = self.prior_margin(alpha)
        return qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=self.scale, reduction="none")


@dataclass(frozen=True)
class Contender:
    """One loss in the race: ``loss(source, labels)`` has one value per row, ``[B]``."""

    name: str
    alpha: float
    loss: Callable[[Tensor, Tensor], Tensor]
    is_ours: bool = False
    wants_cosines: bool = False


@dataclass(frozen=True)
class Timing:
    """Median seconds of forward + backward, and how far the losses are from ours."""

    name: str
    alpha: float
    seconds: float
    seconds_all: list[float]
    versus_cross_entropy: float
    versus_ours: float | None
    loss_difference: float | None


@dataclass(frozen=True)
class ShapeTiming:
    """Median milliseconds of forward + backward from cosines of one shape and dtype."""

    name: str
    rows: int
    classes: int
    dtype: str
    milliseconds: float
    versus_cross_entropy: float
    milliseconds_all: list[float]


@dataclass(frozen=True)
class SolverCount:
    """Evaluations of the mass that a solver needed over the rows of a batch."""

    alpha: float
    solver: str
    bracket: str
    mean_evaluations: float
    max_evaluations: int
    max_mass_error: float


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``loss`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "loss",
        help="the dense loss against cross-entropy and the entmax package",
        description="Time forward + backward of the dense loss on a matrix of cosines, next to "
        "F.cross_entropy and the entmax package, and count the solver's evaluations.",
    )
    parser.add_argument("--rows", type=count, default=256, help="samples in the batch")
    parser.add_argument("--classes", type=count, default=100_000, help="identities")
    parser.add_argument(
        "--alphas", type=positive, nargs="+", default=[1.0, 1.25, 1.5, 2.0], help="orders to time"
    )
    parser.add_argument("--scale", type=positive, default=32.0, help="logits = scale * cosines")
    parser.add_argument(
        "--effective-margin",
        type=positive,
        default=0.5,
        metavar="GAP",
        help="cosine gap that the q_margin rows add",
    )
    parser.add_argument("--dim", type=count, default=512, help="embedding size of the cosines")
    parser.add_argument("--repeats", type=count, default=5, help="timed turns; medians are shown")
    parser.add_argument("--device", default="cpu", help="where to run, such as cpu or cuda")
    parser.add_argument("--threads", type=count, help="CPU threads (default: what torch chooses)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cosines and labels")
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        default=[],
        metavar="ROWSxCLASSES",
        help="time presets on cosines of these shapes only, e.g. 256x5994 1024x93431",
    )
    parser.add_argument(
        "--dtypes",
        type=dtype_name,
        nargs="+",
        default=["float32"],
        metavar="DTYPE",
        help="dtypes of the cosines of --shapes: float32, bfloat16, float16",
    )
    parser.add_argument("--commit", help="recorded in the file of --shapes (default: ask git)")
    parser.add_argument(
        "--from",
        dest="stored",
        type=named_path,
        metavar="FILE",
        help="a file of --shapes --json, instead of measuring",
    )
    add_outputs(parser)
    parser.set_defaults(run=run)


def dtype_name(text: str) -> str:
    """Check the name of a dtype of cosines."""
    if text not in ("float32", "bfloat16", "float16"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of float32, bfloat16, float16")
    return text


def shape(text: str) -> str:
    """Check ``ROWSxCLASSES``, two positive integers."""
    rows, _, classes = text.partition("x")
    if not (rows.isdigit() and classes.isdigit() and int(rows) and int(classes)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCLASSES, such as 256x5994")
    return text


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, "loss")
    stored, commit = options.pop("stored"), options.pop("commit")
    if stored is not None or arguments.shapes:
        record = None if stored is None else read_shapes(stored)
        if record is None:
            options |= {"shapes": tuple(arguments.shapes), "dtypes": tuple(arguments.dtypes)}
            options["alphas"] = tuple(arguments.alphas)
            record = measure_shapes(LossBenchmark(**options), json_path, commit)
        show_shapes(record, tables)
        if arguments.page is not None:
            write_blocks(arguments.page, shape_blocks(record))
        return
    for name in ("alphas", "shapes", "dtypes"):
        options[name] = tuple(options[name])
    run_loss_benchmark(LossBenchmark(**options), json_path=json_path, tables=tables)
    tables.write(PACKAGES)


def run_loss_benchmark(
    settings: LossBenchmark, *, json_path: Path | None = None, tables: Tables | None = None
) -> None:
    """Measure, print two tables and write the numbers to ``json_path`` if it is given."""
    find_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    tables = tables or Tables()
    cosines, labels = cosine_batch(settings)
    others, missing = entmax_contenders(settings)
    timings = time_contenders([*own_contenders(settings), *others], cosines, labels, settings)
    counts = count_evaluations(cosines, labels, settings)
    tables.show(
        "timings",
        f"forward + backward on [{settings.rows}, {settings.classes}] float32, "
        f"{_machine()['threads']} threads, medians of {settings.repeats}",
        ["loss", "alpha", "ms", "x cross-entropy", "x ours", "max loss difference"],
        [*map(_timing_row, timings), *([reason, "", "", "", "", ""] for reason in missing)],
    )
    tables.show(
        "evaluations",
        f"evaluations of the mass per row, scale {settings.scale:g}, "
        f"effective margin {settings.effective_margin:g}",
        ["solver", "bracket", "alpha", "mean", "max", "max mass error"],
        [_count_row(count) for count in counts],
    )
    if json_path is not None:
        record = {
            "settings": asdict(settings),
            "machine": _machine(),
            "not_measured": missing,
            "timings": [asdict(timing) for timing in timings],
            "evaluations": [asdict(count) for count in counts],
        }
        json_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure_shapes(
    settings: LossBenchmark, json_path: Path | None = None, commit: str | None = None
) -> dict[str, Any]:
    """Time presets next to cross-entropy on cosines, for every shape and dtype.

    The file is rewritten after each, so that a run that is cut short leaves what it has.
    """
    device = find_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    record: dict[str, Any] = {
        "command": command_line(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "settings": asdict(settings),
        "machine": {**_machine(), **describe_machine(device, commit)},
        "not_measured": [],
        "shapes": [],
    }
    for text in settings.shapes:
        rows, classes = map(int, text.split("x"))
        for dtype in settings.dtypes:
            found, record["not_measured"] = time_shape(rows, classes, dtype, settings)
            record["shapes"] += [asdict(timing) for timing in found]
            if json_path is not None:
                write_atomically(json_path, (json.dumps(record, indent=2) + "\n").encode())
    return record


def read_shapes(path: Path) -> dict[str, Any]:
    """Contents of a file of ``loss --shapes --json``.

    Raises:
        ConfigError: It is another file.
    """
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name a file of --json") from error
    if not isinstance(record, dict) or not {"shapes", "command", "date"} <= set(record):
        raise ConfigError(f"{path} was not written by `loss --shapes --json`; measure again")
    return record


def show_shapes(record: dict[str, Any], tables: Tables) -> None:
    """Print the times."""
    machine, repeats = record["machine"], record["settings"]["repeats"]
    rows = [
        [
            f"[{row['rows']}, {row['classes']}] {row['dtype']}",
            row["name"],
            f"{row['milliseconds']:.3f}",
            f"{row['versus_cross_entropy']:.2f}",
        ]
        for row in record["shapes"]
    ]
    tables.show(
        "shapes",
        f"forward + backward from cosines on {machine['device']}, medians of {repeats}",
        ["cosines", "loss", "ms", "x cross-entropy"],
        [*rows, *(["", reason, "", ""] for reason in record["not_measured"])],
    )


def shape_blocks(record: dict[str, Any]) -> dict[str, str]:
    """The places of a page: the machine, and a table with a column for each matrix of cosines."""
    machine = record["machine"]
    cells: dict[str, dict[str, str]] = {}
    headings: dict[str, None] = {}
    for row in record["shapes"]:
        heading = f"[{row['rows']}, {row['classes']:,}] {row['dtype']}"
        headings[heading] = None
        shown = f"{row['milliseconds']:.2f} ({row['versus_cross_entropy']:.2f})"
        cells.setdefault(row["name"], {})[heading] = shown
    rows = [[name, *(own.get(heading, "") for heading in headings)] for name, own in cells.items()]
    known = [name for name in ("torch", "triton", "entmax") if machine.get(name)]
    repeats = record["settings"]["repeats"]
    versions = ", ".join(f"{name} {machine[name]}" for name in known)
    return {
        "loss-machine": f"`{short_command(record['command'])}`, commit `{machine['commit']}`, "
        f"{record['date']}, {machine['device']}, {versions}; medians of {repeats}",
        "shapes": markdown_table(["loss", *headings], rows),
    }


def time_shape(
    rows: int, classes: int, dtype: str, settings: LossBenchmark
) -> tuple[list[ShapeTiming], list[str]]:
    """All contenders in turns on one matrix of cosines; and what is not measured."""
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    device = settings.device
    cosines = torch.randn(rows, classes, device=device, generator=generator)
    cosines = (cosines * SPREAD).clamp_(-1.0, 1.0)
    labels = torch.randint(classes, (rows,), device=device, generator=generator)
    cosines = cosines.to(getattr(torch, dtype))
    contenders, missing = shape_contenders(settings)
    milliseconds: dict[str, list[float]] = {name: [] for name in contenders}
    warmup = 3
    for turn in range(settings.repeats + warmup):  # the first turns compile
        for name, loss_fn in contenders.items():
            leaf = cosines.detach().requires_grad_()
            _wait_for(leaf)
            start = time.perf_counter()
            loss_fn(leaf, labels).backward()
            _wait_for(leaf)
            if turn >= warmup:
                milliseconds[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in milliseconds.items()}
    unit = medians["F.cross_entropy"]
    timings = [
        ShapeTiming(name, rows, classes, dtype, median, median / unit, milliseconds[name])
        for name, median in medians.items()
    ]
    return timings, missing


def shape_contenders(
    settings: LossBenchmark,
) -> tuple[dict[str, Callable[[Tensor, Tensor], Tensor]], list[str]]:
    """Cross-entropy on scaled cosines, plain and compiled; presets of ours; the entmax package."""

    def cross_entropy(cosines: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(CROSS_ENTROPY_SCALE * cosines.float(), labels)

    contenders: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"F.cross_entropy": cross_entropy}
    missing = []
    if settings.device.startswith("cuda"):
        contenders["F.cross_entropy, compiled"] = torch.compile(cross_entropy)
    for alpha in (1.25, 1.5, 2.0):
        margin = settings.prior_margin(alpha)
        loss_fn = qmargin.MarginLoss(qmargin.Alpha(alpha), margin, scale=settings.scale)
        contenders[f"qmargin.q_margin, alpha {alpha:g}"] = loss_fn
    contenders["qmargin.cosface"] = qmargin.cosface()
    contenders["qmargin.arcface"] = qmargin.arcface()
    contenders["qmargin.sparsemax_face"] = qmargin.sparsemax_face()
    try:
        import entmax
    except ImportError:
        missing.append("entmax: not installed, so not measured (pip install entmax)")
    else:

        def mean(cosines: Tensor, labels: Tensor, *, loss: Callable[..., Tensor]) -> Tensor:
            return loss(settings.scale * cosines.float(), labels).mean()

        others = {
            "entmax15_loss": entmax.entmax15_loss,
            "entmax15_loss k=100": partial(entmax.entmax15_loss, k=100),
            "sparsemax_loss k=100": partial(entmax.sparsemax_loss, k=100),
            "entmax_bisect_loss n_iter=24": partial(
                entmax.entmax_bisect_loss, alpha=1.25, n_iter=24
            ),
        }
        contenders |= {f"entmax.{name}": partial(mean, loss=loss) for name, loss in others.items()}
    return contenders, missing


def cosine_batch(settings: LossBenchmark) -> tuple[Tensor, Tensor]:
    """Cosines ``[B, k]`` of random directions, targets near 0.4, and labels ``[B]``."""
    generator = torch.Generator().manual_seed(settings.seed)
    embeddings = torch.randn(settings.rows, settings.dim, generator=generator)
    prototypes = torch.randn(settings.classes, settings.dim, generator=generator)
    labels = torch.randint(settings.classes, (settings.rows,), generator=generator)
    spread = torch.randn(settings.rows, 1, generator=generator) * 0.1
    cosines = functional.normalize(embeddings) @ functional.normalize(prototypes).t()  # [B, k]
    cosines.scatter_(1, labels[:, None], (TARGET_COSINE + spread).clamp(-1.0, 1.0))
    return cosines.to(settings.device), labels.to(settings.device)


def own_contenders(settings: LossBenchmark) -> list[Contender]:
    """Cross-entropy first, as the unit of the ratios, then our losses for every alpha."""
    contenders = [
        Contender(
            "F.cross_entropy",
            1.0,
            partial(functional.cross_entropy, reduction="none"),
        )
    ]
    for alpha in settings.alphas:
        plain = partial(qmargin.fenchel_young_loss, alpha=alpha)
        contenders.append(Contender("qmargin.fenchel_young_loss", alpha, plain, is_ours=True))
        contenders.append(
            Contender("qmargin.q_margin", alpha, settings.margin_loss(alpha), wants_cosines=True)
        )
    return contenders


def entmax_contenders(settings: LossBenchmark) -> tuple[list[Contender], list[str]]:
    """What the entmax package offers for each alpha, and why something is not measured."""
    try:
        import entmax
    except ImportError:
        return [], ["entmax: not installed, so not measured (pip install entmax)"]
    exact = {1.5: entmax.entmax15_loss, 2.0: entmax.sparsemax_loss}
    contenders = []
    for alpha in settings.alphas:
        if alpha == 1.0:
            continue  # the package divides by alpha - 1
        if alpha in exact:
            sort = exact[alpha]
            for top in (None, 100):
                name = f"entmax.{sort.__name__} k={top}"
                contenders.append(Contender(name, alpha, partial(sort, k=top)))
        for steps in (50, 24):  # its default, and what its documentation calls enough for float32
            bisect = partial(entmax.entmax_bisect_loss, alpha=alpha, n_iter=steps)
            contenders.append(Contender(f"entmax.entmax_bisect_loss n_iter={steps}", alpha, bisect))
    return contenders, []


def time_contenders(
    contenders: list[Contender], cosines: Tensor, labels: Tensor, settings: LossBenchmark
) -> list[Timing]:
    """Time every contender in turns, so that a slow spell of the machine meets all of them."""
    logits = settings.scale * cosines
    seconds: list[list[float]] = [[] for _ in contenders]
    losses: list[Tensor] = []
    with stage_progress() as progress:
        for turn in range(settings.repeats + 1):
            progress("timing", turn, settings.repeats + 1)
            for index, contender in enumerate(contenders):
                source = cosines if contender.wants_cosines else logits
                elapsed, loss = _timed_step(contender, source, labels)
                if turn == 0:  # the first turn only warms up and keeps the values
                    losses.append(loss)
                else:
                    seconds[index].append(elapsed)
    return _timings(contenders, seconds, losses)


def _timed_step(contender: Contender, source: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    source = source.detach().requires_grad_()
    _wait_for(source)
    start = time.perf_counter()
    loss = contender.loss(source, labels)
    loss.mean().backward()
    _wait_for(source)
    return time.perf_counter() - start, loss.detach()


def _wait_for(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _timings(
    contenders: list[Contender], seconds: list[list[float]], losses: list[Tensor]
) -> list[Timing]:
    medians = [statistics.median(values) for values in seconds]
    ours = {c.alpha: index for index, c in enumerate(contenders) if c.is_ours}
    timings = []
    for index, contender in enumerate(contenders):
        own = ours.get(contender.alpha)
        versus_ours = None if own is None else medians[index] / medians[own]
        difference = None
        if own is not None and own != index and not contender.wants_cosines:
            difference = float((losses[index] - losses[own]).abs().max())
        timings.append(
            Timing(
                contender.name,
                contender.alpha,
                medians[index],
                seconds[index],
                medians[index] / medians[0],
                versus_ours,
                difference,
            )
        )
    return timings


def count_evaluations(
    cosines: Tensor, labels: Tensor, settings: LossBenchmark
) -> list[SolverCount]:
    """Evaluations that each solver needs on the first rows, with the margin's reference."""
    logits = settings.scale * cosines[:MOST_SOLVER_ROWS]
    counts = []
    for alpha in settings.alphas:
        target = settings.prior_margin(alpha)(logits[:, 0], settings.scale).log_reference  # [B]
        # Full size, because solve_tau knows no target.
        log_reference = torch.zeros_like(logits)
        log_reference.scatter_(1, labels[:MOST_SOLVER_ROWS, None], target[:, None])
        for solver, bracket in _solvers(alpha):
            counts.append(_count(logits, log_reference, alpha, solver, bracket))
    return counts


def _count(
    logits: Tensor, log_reference: Tensor, alpha: float, solver: str, bracket: str
) -> SolverCount:
    solutions = [  # one call per row, because a call counts for its slowest row
        qmargin.solve_tau(row, alpha=alpha, log_reference=reference, solver=solver, bracket=bracket)
        for row, reference in zip(logits, log_reference, strict=True)
    ]
    evaluations = [int(solution.num_evaluations) for solution in solutions]
    return SolverCount(
        alpha,
        solver,
        bracket,
        statistics.mean(evaluations),
        max(evaluations),
        max(float(solution.mass_error) for solution in solutions),
    )


def _solvers(alpha: float) -> list[tuple[str, str]]:
    bisections = [("bisection", "tight"), ("bisection", "paper")]
    return bisections if alpha > 2.0 else [("newton", "tight"), *bisections]


def _timing_row(timing: Timing) -> list[str]:
    return [
        timing.name,
        f"{timing.alpha:g}",
        f"{1e3 * timing.seconds:.1f}",
        f"{timing.versus_cross_entropy:.2f}",
        "" if timing.versus_ours is None else f"{timing.versus_ours:.2f}",
        "" if timing.loss_difference is None else f"{timing.loss_difference:.1e}",
    ]


def _count_row(count: SolverCount) -> list[str]:
    return [
        count.solver,
        count.bracket,
        f"{count.alpha:g}",
        f"{count.mean_evaluations:.1f}",
        str(count.max_evaluations),
        f"{count.max_mass_error:.1e}",
    ]


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **{name: installed_version(name) or "not installed" for name in ("qmargin", *PACKAGES)},
    }
