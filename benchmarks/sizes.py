"""A training step of the head from six thousand to eight million classes, beside plain PyTorch.

All contenders of a size share prototypes, momentum, screened copy and batch, and take turns. The
JSON file is rewritten after every size, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qmargin
from benchmarks.common import command_line, existing_file, new_file, positive
from benchmarks.head import (
    PADDING,
    RULE,
    finish_gradient,
    make_batch,
    memory_reason,
    step_stats,
)
from benchmarks.sizes_page import (
    ARCFACE_AUTO,
    ARCFACE_GRADIENTS,
    AUTO,
    CHUNKED,
    COMPARED,
    COSFACE_AUTO,
    DENSE,
    LARGEST,
    PLAIN,
    PLAIN_EAGER,
    PRODUCT,
    SAMPLED_10,
    SAMPLED_30,
    SPARSE,
    SPARSE_AGAIN,
    SPARSE_GRADIENTS,
    VERSION,
    WIDE_GRADIENTS,
    Outputs,
    page_tables,
    read_losses,
    read_records,
)
from benchmarks.timing import (
    Row,
    Step,
    allocated_bytes,
    clean_up,
    describe_machine,
    median,
    peak_gib,
    time_turns,
)
from qmargin.cli.options import count, named_path
from qmargin.cli.tables import output_console, print_table
from qmargin.errors import ConfigError
from qmargin.files import write_atomically
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.optimizers import ExactSGD
from qmargin.heads.paths import Sampled, StepPath
from qmargin.heads.sharding import Prototypes
from qmargin.training.distributed import find_device

WARM_CALLS = 6  # the first compiles; CUDA graphs are captured after three steps
PLAIN_BYTES = 24.0  # per logit: what autograd keeps of a plain head, roughly
DENSE_BYTES = 20.0
MOST_DENSE_BYTES = 8 << 30  # larger dense steps are slow, and known to be
ALPHA, SCALE, MARGIN = 1.25, 35.0, 0.2
WIDE_SCALE = 10.0  # of which a hundredth of two million classes are active


@dataclass(frozen=True)
class Size:
    """Classes, embedding size and samples in a batch."""

    classes: int
    dim: int
    rows: int

    def __str__(self) -> str:
        return f"{self.classes}x{self.dim}x{self.rows}"

    @property
    def num_logits(self) -> int:
        """``B * k``."""
        return self.rows * self.classes


SIZES = {
    "cuda": (
        Size(5_994, 256, 256),  # VoxCeleb2
        Size(17_982, 256, 512),  # the same with three speeds
        Size(93_431, 512, 512),  # MS1MV3
        Size(93_431, 512, 1024),
        Size(360_232, 512, 1024),  # Glint360K
        Size(1_000_000, 512, 1024),
        Size(2_059_906, 512, 1024),  # WebFace42M
        Size(8_000_000, 512, 1024),
    ),
    "cpu": (Size(1_000, 64, 64), Size(5_994, 64, 64), Size(17_982, 64, 64)),
}


def find_sizes(names: Sequence[str] | None, device: torch.device) -> tuple[Size, ...]:
    """Sizes by their classes, as in ``5994``, or any by all three, as in ``300x8x4``.

    Examples:
        >>> find_sizes(["5994", "300x8x4"], torch.device("cuda"))
        (Size(classes=5994, dim=256, rows=256), Size(classes=300, dim=8, rows=4))
    """
    known = SIZES["cpu" if device.type == "cpu" else "cuda"]
    if names is None:
        return known
    found: list[Size] = []
    for name in names:
        parts = name.split("x")
        if len(parts) == 3 and all(part.isdecimal() and int(part) > 0 for part in parts):
            found.append(Size(*map(int, parts)))
            continue
        matching = [size for size in known if str(size.classes) == name]
        if not matching:
            listed = ", ".join(dict.fromkeys(str(size.classes) for size in known))
            raise ConfigError(
                f"no size {name!r}; known are {listed}, or write CLASSESxDIMxBATCH, as in "
                "5994x256x256"
            )
        found += matching
    return tuple(dict.fromkeys(found))


class Stage:
    """What all contenders of a size share, so that they fit on one device together.

    An update with a learning rate of zero does all its work and leaves the prototypes as they are.
    """

    def __init__(self, size: Size, device: torch.device, seed: int) -> None:
        clean_up()
        self.size, self.device = size, device
        torch.manual_seed(seed)
        loss = qmargin.q_margin(alpha=ALPHA, scale=SCALE, margin=MARGIN)
        self._owner = MarginClassifier(
            size.dim, size.classes, loss, path="sparse", gradient="fused", device=device
        )
        self._owner.refresh()
        self.momentum = torch.zeros_like(self._owner.prototypes.detach())
        self.embeddings, self.labels = make_batch(self._owner.prototypes, size.rows, seed)

    def weights(self) -> Tensor:
        """The prototypes ``[k, d]``, with a version of their own: others' updates do not show."""
        return self._owner.prototypes.data

    def head(self, loss: qmargin.MarginLoss, path: str | StepPath) -> MarginClassifier:
        """A head on the shared prototypes and their screened copy."""
        size = self.size
        head = MarginClassifier(
            size.dim, size.classes, loss, path=path, gradient="fused", device="meta"
        )
        head.prototypes = Prototypes(self.weights())
        head.refresh()
        for name in ("copy", "inverse_norms", "copy_error"):
            setattr(head, name, getattr(self._owner, name))
        return head

    def step(
        self, loss: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer
    ) -> Step:
        """Forward, backward and update."""
        parameter = optimizer.param_groups[0]["params"][0]
        optimizer.state[parameter]["momentum_buffer"] = self.momentum

        def step() -> None:
            loss(self.embeddings.detach().requires_grad_(), self.labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def product(self) -> Step:
        """One product ``[B, d] x [d, k]`` in the precision of the copy, k padded."""
        copy = self._owner.copy[: -(-self.size.classes // PADDING) * PADDING]
        rows = functional.normalize(self.embeddings).to(copy.dtype)
        found = rows.new_empty(len(rows), len(copy))
        return lambda: torch.mm(rows, copy.t(), out=found)


@dataclass
class Entrant:
    """A contender that is built: its step, and its head if it is one of ours."""

    step: Step
    head: MarginClassifier | None = None
    peak: float | None = None


@dataclass(frozen=True)
class Contender:
    """What takes part, and how much memory it needs."""

    name: str
    build: Callable[[Stage], Entrant]
    bytes_per_logit: float = 0.0
    most_bytes: float | None = None  # above which it is not tried
    fewest_classes: int = 0  # below which it does not take part
    has_goal: bool = True  # or is compared with one that has

    def reason_to_skip(self, stage: Stage) -> str | None:
        """Why it is not tried; None if it is."""
        needed = self.bytes_per_logit * stage.size.num_logits
        if self.most_bytes is not None and needed > self.most_bytes:
            return f"skipped: needs about {needed / 2**30:.1f} GiB"
        if needed:
            needed += 2 * stage.momentum.nbytes  # gradient and unit prototypes
        return memory_reason(needed, stage.device)


def plain_arcface(embeddings: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """ArcFace in plain PyTorch: a bfloat16 product, the margin by index, cross-entropy."""
    with torch.autocast(embeddings.device.type, dtype=torch.bfloat16):
        cosines = functional.linear(functional.normalize(embeddings), functional.normalize(weight))
    cosines = cosines.float().clamp(-1.0, 1.0)  # [B, k]
    rows = torch.arange(len(labels), device=labels.device)
    angle = torch.acos(cosines[rows, labels].clamp(-1.0 + 1e-7, 1.0 - 1e-7))
    logits = cosines.index_put((rows, labels), torch.cos(angle + 0.5)) * 64.0
    return functional.cross_entropy(logits, labels)


def build_plain(stage: Stage, *, is_compiled: bool) -> Entrant:
    """The plain head with the fused SGD of PyTorch."""
    weight = nn.Parameter(stage.weights())
    loss: Callable[..., Tensor] = plain_arcface
    if is_compiled:
        loss = torch.compile(plain_arcface, dynamic=False)
    optimizer = torch.optim.SGD([weight], **RULE, fused=True)
    return Entrant(stage.step(partial(loss, weight=weight), optimizer))


def build_head(stage: Stage, *, loss: qmargin.MarginLoss, path: str | StepPath) -> Entrant:
    """A head of ours with ExactSGD."""
    head = stage.head(loss, path)
    return Entrant(stage.step(head, ExactSGD(head, **RULE)), head)


def build_gradients(stage: Stage, *, loss: qmargin.MarginLoss, path: str | StepPath) -> Entrant:
    """Forward and backward of a head of ours, its fused gradient made and dropped."""
    head = stage.head(loss, path)

    def step() -> None:
        head.fused_gradient = None
        head(stage.embeddings.detach().requires_grad_(), stage.labels).backward()
        finish_gradient(head)

    return Entrant(step, head)


def build_product(stage: Stage) -> Entrant:
    """The unit of some ratios."""
    return Entrant(stage.product())


def all_contenders() -> list[Contender]:
    """The plain head first: others are compared with it."""
    ours = qmargin.q_margin(alpha=ALPHA, scale=SCALE, margin=MARGIN)
    arcface, cosface = qmargin.arcface(), qmargin.cosface()

    def head(name: str, loss: qmargin.MarginLoss, path: str | StepPath, **limits: Any) -> Contender:
        return Contender(name, partial(build_head, loss=loss, path=path), **limits)

    def gradients(name: str, loss: qmargin.MarginLoss, path: str) -> Contender:
        build = partial(build_gradients, loss=loss, path=path)
        return Contender(name, build, fewest_classes=LARGEST[0])

    wide = qmargin.q_margin(alpha=ALPHA, scale=WIDE_SCALE, margin=MARGIN)
    eager = Contender(PLAIN_EAGER, partial(build_plain, is_compiled=False), PLAIN_BYTES)
    return [
        replace(eager, has_goal=False),
        Contender(PLAIN, partial(build_plain, is_compiled=True), PLAIN_BYTES),
        head(AUTO, ours, "auto"),
        head(SPARSE, ours, "sparse"),
        head(SPARSE_AGAIN, ours, "sparse"),
        head(CHUNKED, ours, "chunked"),
        head(DENSE, ours, "dense", bytes_per_logit=DENSE_BYTES, most_bytes=MOST_DENSE_BYTES),
        head(ARCFACE_AUTO, arcface, "auto"),
        head(COSFACE_AUTO, cosface, "auto"),
        head(SAMPLED_10, arcface, Sampled(0.1), bytes_per_logit=0.1 * DENSE_BYTES, has_goal=False),
        head(SAMPLED_30, arcface, Sampled(0.3), bytes_per_logit=0.3 * DENSE_BYTES, has_goal=False),
        gradients(SPARSE_GRADIENTS, ours, "sparse"),
        gradients(ARCFACE_GRADIENTS, arcface, "chunked"),
        gradients(WIDE_GRADIENTS, wide, "auto"),
        Contender(PRODUCT, build_product, 2.0),
    ]


@dataclass(frozen=True)
class SizesBenchmark:
    """What to measure; the fields are the command's options."""

    sizes: tuple[Size, ...]
    device: torch.device
    repeats: int = 20
    seconds: float = 5.0  # of the turns of a size, as far as three turns allow
    seed: int = 0
    only_goals: bool = False

    def contenders(self, size: Size) -> list[Contender]:
        """Who takes part at a size."""
        return [
            contender
            for contender in all_contenders()
            if size.classes >= contender.fewest_classes
            and (contender.has_goal or not self.only_goals)
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        loss = {"alpha": ALPHA, "scale": SCALE, "margin": MARGIN}
        sizes = [str(size) for size in self.sizes]
        return {**asdict(self), "sizes": sizes, "device": str(self.device), **loss}


class StepFailed(Exception):
    """A contender failed in its turn."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.name, self.reason = name, failure(error)


def failure(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


@dataclass
class Race:
    """The contenders of a size that are still in it, and the reasons of those that are not."""

    stage: Stage
    bench: SizesBenchmark
    entrants: dict[str, Entrant] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def enter(self, contender: Contender) -> None:
        """Build a contender, warm it up and read its peak of memory, or note why not."""
        name, reason = contender.name, contender.reason_to_skip(self.stage)
        if reason is None:
            try:
                self.entrants[name] = self._warm(contender)
            except Exception as error:  # whatever it is belongs in its row
                reason = failure(error)
        if reason is not None:
            self.reasons[name] = reason
            clean_up()  # the traceback, and the tensors in its frames, are gone

    def _warm(self, contender: Contender) -> Entrant:
        device, floor = self.stage.device, allocated_bytes(self.stage.device)
        entrant = contender.build(self.stage)
        entrant.step()  # what it compiles is not its memory

        def others() -> None:
            for _ in range(WARM_CALLS - 1):
                entrant.step()

        entrant.peak = peak_gib(others, device, floor)
        if entrant.peak is None:
            others()
        return entrant

    def time(self, **options: Any) -> dict[str, list[float]]:
        """Milliseconds of the turns of each; one that fails is out, and the others start again."""
        bench = self.bench
        while self.entrants:
            steps = [partial(_named_step, name, one.step) for name, one in self.entrants.items()]
            try:
                times = time_turns(
                    steps, bench.device, repeats=bench.repeats, seconds=bench.seconds, **options
                )
                return dict(zip(self.entrants, times, strict=True))
            except StepFailed as failed:
                name, self.reasons[failed.name] = failed.name, failed.reason
            del self.entrants[name], steps
            clean_up()
        return {}


def _named_step(name: str, step: Step) -> None:
    try:
        step()
    except Exception as error:
        raise StepFailed(name, error) from None


def measure_size(size: Size, bench: SizesBenchmark) -> dict[str, Any]:
    """A size with a row for each contender, as in the JSON file."""
    start = time.perf_counter()
    found: dict[str, Any] = asdict(size)
    contenders = bench.contenders(size)
    names = [contender.name for contender in contenders]
    try:
        race = Race(Stage(size, bench.device, bench.seed), bench)
        for contender in contenders:
            race.enter(contender)
        retries = _alloc_retries(bench.device)
        bursts, single = race.time(), race.time(burst=1)
        found["alloc_retries"] = _alloc_retries(bench.device) - retries
        rows = [_row(name, race, bursts, single) for name in names]
    except Exception as error:  # too large to begin with; other sizes may not be
        rows = [Row(name, failed=failure(error)) for name in names]
    race = None  # type: ignore[assignment]
    clean_up()
    torch.compiler.reset()
    return {
        **found,
        "seconds": time.perf_counter() - start,
        "contenders": [row.as_dict() for row in rows],
    }


def _row(
    name: str, race: Race, bursts: dict[str, list[float]], single: dict[str, list[float]]
) -> Row:
    if name not in race.entrants:
        return Row(name, failed=race.reasons[name])
    entrant, reference = race.entrants[name], bursts.get(PLAIN)
    facts: dict[str, Any] = {"single_ms": median(single[name]), "single_all": single[name]}
    stats = None if entrant.head is None else step_stats(entrant.head)
    if stats is not None:
        facts["stats"] = stats
    row = Row(name, "", median(bursts[name]), bursts[name], peak_gib=entrant.peak, facts=facts)
    if reference is None or row.ms is None:
        return row
    return replace(row, reference_ms=median(reference), ratio=row.ms / median(reference))


def _alloc_retries(device: torch.device) -> int:
    """How often memory had to be given back before more could be had: it makes steps slow."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def run_sizes_benchmark(
    bench: SizesBenchmark,
    *,
    json_path: Path | None = None,
    commit: str | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Measure size after size, and write everything to ``json_path`` after each."""
    record: dict[str, Any] = {
        "subject": "sizes",
        "version": VERSION,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "settings": bench.as_dict(),
        "machine": describe_machine(bench.device, commit),
        "sizes": [],
    }
    for size in bench.sizes:
        found = measure_size(size, bench)
        record["sizes"].append(found)
        for row in found["contenders"]:
            result = row["failed"] or f"{row['ms']:.3f} ms, single {row['facts']['single_ms']:.3f}"
            sys.stderr.write(f"{size}: {row['name']}: {result}\n")
        sys.stderr.write(f"{size}: {found['seconds']:.1f} s\n")
        sys.stderr.flush()
        if json_path is not None:
            write_atomically(json_path, (json.dumps(record, indent=1) + "\n").encode())
    return record


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``sizes`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "sizes",
        help="a step of the head from 6 thousand to 8 million classes, beside plain PyTorch",
        description="Time forward, backward and momentum SGD over all classes for several numbers "
        "of classes: plain PyTorch, eager and compiled, our paths, and sampling, all in turns.",
    )
    add = parser.add_argument
    add("--sizes", nargs="+", metavar="SIZE", help="classes, as 5994, or CLASSESxDIMxBATCH (all)")
    add("--device", default="auto", help="auto, cpu or cuda (auto)")
    add("--repeats", type=count, default=20, help="timed turns; medians are shown (20)")
    add("--seconds", type=positive, default=5.0, help="slow sizes get fewer turns (5)")
    add("--seed", type=int, default=0, help="seed of prototypes and batch (0)")
    add("--commit", help="recorded in the file (default: ask git)")
    add("--json", type=new_file, metavar="FILE", help="write everything here, after every size")
    add("--page", type=new_file, metavar="FILE", help="write the page here")
    add("--figure", type=new_file, metavar="FILE.svg", help="draw step time over classes here")
    add("--readme", type=existing_file, metavar="FILE", help="rewrite the place `sizes` there")
    add("--goals", action="store_true", help="sizes and contenders that the goals need, only")
    add(
        "--loss",
        type=named_path,
        metavar="FILE",
        help="a file of `loss --shapes --json`, whose goals join the table",
    )
    add(
        "--from",
        dest="stored",
        type=named_path,
        nargs="+",
        metavar="FILE",
        help="files of --json of one machine, instead of measuring",
    )
    add(
        "--grid",
        type=new_file,
        metavar="FILE",
        help="time every path over batches, classes, dimensions and supports instead, for the "
        "cost model of path='auto', and write rows here",
    )
    add(
        "--grid-seconds",
        type=positive,
        default=160.0,
        help="after which the rest of the grid is left out (160)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    outputs = Outputs(arguments.page, arguments.figure, arguments.readme)
    if arguments.grid is not None:
        if arguments.stored is not None:
            raise ConfigError("--grid measures and --from reads files; give one of them")
        from benchmarks.sizes_grid import run_grid

        run_grid(
            find_device(arguments.device),
            arguments.grid,
            seconds=arguments.grid_seconds,
            seed=arguments.seed,
            commit=arguments.commit,
        )
        return
    outputs.check()
    if arguments.stored is not None:
        record = read_records(arguments.stored)
    else:
        device = find_device(arguments.device)
        sizes = find_sizes(arguments.sizes, device)
        if arguments.goals and arguments.sizes is None:
            keys = {*COMPARED, LARGEST}
            sizes = tuple(size for size in sizes if (size.classes, size.rows) in keys) or sizes
        settings = {name: getattr(arguments, name) for name in ("repeats", "seconds", "seed")}
        record = run_sizes_benchmark(
            SizesBenchmark(sizes, device, **settings, only_goals=arguments.goals),
            json_path=arguments.json,
            commit=arguments.commit,
            command=command_line(),
        )
    if arguments.loss is not None:
        record["losses"] = read_losses(arguments.loss)
    console = output_console()
    for table in page_tables(record):
        print_table(console, table.title, table.columns, table.rows)
    outputs.write(record)
