"""Every way to take a step of the head, beside the bare products.

The parts are measured one after the other; each prints its table as soon as it is done, and the
JSON file is rewritten after every row, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qmargin
from benchmarks.common import command_line, new_file, positive
from benchmarks.head_page import TABLES, table_cells
from benchmarks.timing import (
    CommonHead,
    Row,
    Step,
    allocated_bytes,
    clean_up,
    describe_machine,
    guarded,
    median,
    peak_gib,
    time_turns,
)
from qmargin.cli.options import count
from qmargin.cli.tables import output_console, print_table
from qmargin.errors import ConfigError
from qmargin.heads.checks import available_memory
from qmargin.heads.chunked import ChunkedGradient, ChunkedStep
from qmargin.heads.classifier import ROW_LOSSES, STEPS, MarginClassifier
from qmargin.heads.dense import TopKStep
from qmargin.heads.optimizers import ExactSGD, SparseSGD
from qmargin.heads.paths import StepPath, as_path
from qmargin.heads.sparse import SparseStep
from qmargin.heads.step import StepRecord, unit_rows
from qmargin.kernels.head_reference import ListOverflow, Target
from qmargin.kernels.solver import slacks
from qmargin.losses.margin_loss import LossOutput
from qmargin.models import create_backbone
from qmargin.training.distributed import find_device

FORWARD_BACKWARD = "forward + backward"
PADDING = 128  # classes: keeps every row pitch of a [B, k] matrix a multiple of 16 bytes
BATCH_SEED = 1 << 20
# A learning rate of zero does all the work of an update and leaves every turn the same prototypes.
RULE: dict[str, Any] = {"lr": 0.0, "momentum": 0.9, "weight_decay": 5e-4}
OPTIMIZERS = {"SparseSGD": SparseSGD, "ExactSGD": ExactSGD}


@dataclass(frozen=True)
class HeadBenchmark:
    """What to measure; the fields are the command's options."""

    rows: int
    dim: int
    classes: int
    device: torch.device
    screen: torch.dtype
    alpha: float = 1.25
    scale: float = 35.0
    margin: float = 0.2
    paths: tuple[str, ...] = ("sparse", "chunked", "dense", "sampled", "paper", "common")
    grid: str = "one"
    growth_classes: tuple[int, ...] = ()
    backbone: str = "iresnet100"
    batch: int = 512
    repeats: int = 10
    seconds: float = 10.0  # most that one row's turns take, as far as three turns allow
    seed: int = 0

    @property
    def loss(self) -> qmargin.MarginLoss:
        """Q-Margin as asked for."""
        return qmargin.q_margin(alpha=self.alpha, scale=self.scale, margin=self.margin)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "device": str(self.device), "screen": dtype_name(self.screen)}

    def time(self, *steps: Step) -> list[list[float]]:
        """Milliseconds of each step, in turns."""
        return time_turns(steps, self.device, repeats=self.repeats, seconds=self.seconds)


def dtype_name(dtype: torch.dtype) -> str:
    """As on the command line: ``float16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Variant:
    """A path with its loss, and what is timed of its step."""

    name: str
    path: str
    loss: qmargin.MarginLoss
    optimizer: str | None = None  # a key of OPTIMIZERS
    gradient: str = "fused"
    options: dict[str, float] = field(default_factory=dict)  # settings of the path
    bytes_per_logit: float = 0.0  # what a path that builds [B, k] tensors takes, roughly
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> str:
        """What is timed."""
        return FORWARD_BACKWARD + (f" + {self.optimizer}" if self.optimizer else "")


def path_of(name: str, screen: torch.dtype | None, **settings: float) -> StepPath:
    """A path by its name, with those of the settings that it has."""
    kind = type(as_path(name))
    given = {"screen_dtype": screen, **settings}
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})


def make_batch(prototypes: Tensor, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Embeddings ``[B, d]`` and labels ``[B]`` as in mid-training: target cosines 0.3 to 0.7."""
    device, (num_classes, dim) = prototypes.device, prototypes.shape
    # Not the prototypes' seed: the noise would repeat their numbers, and be one of them.
    generator = torch.Generator(device).manual_seed(seed + BATCH_SEED)
    labels = torch.randint(num_classes, (rows,), device=device, generator=generator)
    own = functional.normalize(prototypes.detach()[labels])
    noise = torch.randn(rows, dim, device=device, generator=generator)
    noise = functional.normalize(noise - (noise * own).sum(1, keepdim=True) * own)
    cosine = 0.3 + 0.4 * torch.rand(rows, 1, device=device, generator=generator)
    return cosine * own + (1.0 - cosine.square()).sqrt() * noise, labels


class Workbench:
    """One head with a batch, and the product of their shapes that everything is compared with."""

    def __init__(self, bench: HeadBenchmark, num_classes: int | None = None) -> None:
        clean_up()
        self.bench, self.device = bench, bench.device
        self.floor = allocated_bytes(bench.device)
        torch.manual_seed(bench.seed)
        self.head = MarginClassifier(
            bench.dim,
            num_classes or bench.classes,
            bench.loss,
            path=path_of("sparse", bench.screen),
            gradient="fused",
            device=bench.device,
        )
        self.head.refresh()
        embeddings, self.labels = make_batch(self.head.prototypes, bench.rows, bench.seed)
        self.leaf = embeddings.requires_grad_()
        padded = -(-self.head.num_classes // PADDING) * PADDING
        operand = functional.normalize(embeddings.detach()).to(bench.screen)
        self._operands = (operand, self.head.copy[:padded].t())  # [B, d], [d, K]
        self._product = operand.new_empty(bench.rows, padded)

    def gemm(self) -> None:
        """One product ``[B, d] x [d, k]`` in the precision of the screen, k padded."""
        torch.mm(*self._operands, out=self._product)

    def known_bytes(self, *others: Tensor | None) -> int:
        """Parameters, copy, the bare product's own matrices, and what else is named."""
        named = (self.head.prototypes, self.head.copy, self._operands[0], self._product, *others)
        return self.floor + sum(tensor.nbytes for tensor in named if tensor is not None)

    def forget(self) -> None:
        """Drop what the last step left, some of which the head keeps for questions about it."""
        self.leaf.grad = self.head.prototypes.grad = None
        self.head.fused_gradient = self.head._step = None

    def measure(self, variant: Variant) -> Row:
        """Time a variant in turns with the product, and what memory it takes."""
        self.forget()
        self.head._shares.clear()  # supports that `auto` measured with another loss
        self.head._reading = None
        if self.device.type == "cuda":
            gc.collect()  # no optimizer of an earlier row may count as this one's memory
        missing = self._missing_memory(variant)
        if missing is not None:
            return Row(variant.name, variant.step, failed=missing, facts=variant.facts)
        row = guarded(variant.name, variant.step, lambda: self._measure(variant), variant.facts)
        self.forget()
        return row

    def _measure(self, variant: Variant) -> Row:
        head = self.head
        head.path = path_of(variant.path, self.bench.screen, **variant.options)
        head.loss, head.gradient = variant.loss, variant.gradient
        optimizer = OPTIMIZERS[variant.optimizer](head, **RULE) if variant.optimizer else None

        def step() -> None:
            self.leaf.grad = head.prototypes.grad = head.fused_gradient = None
            head(self.leaf, self.labels).backward()
            if optimizer is not None:
                optimizer.step()
            else:
                finish_gradient(head)

        own, reference = self.bench.time(step, self.gemm)
        stats = step_stats(head)
        self.forget()
        state = {} if optimizer is None else optimizer.state[head.prototypes]
        buffer = state.get("momentum_buffer")
        peak = peak_gib(step, self.device, self.known_bytes(buffer))
        return self.row(variant.name, variant.step, own, reference, peak, variant.facts, stats)

    def row(
        self,
        name: str,
        step: str,
        own: list[float],
        reference: list[float],
        peak: float | None,
        facts: dict[str, Any],
        stats: dict[str, Any] | None = None,
    ) -> Row:
        """A row from the turns of a step and of the product."""
        ms, reference_ms = median(own), median(reference)
        facts = {**facts, "stats": stats} if stats else facts
        return Row(name, step, ms, own, reference_ms, ms / reference_ms, peak, None, facts)

    def _missing_memory(self, variant: Variant) -> str | None:
        """Why a variant that builds ``[B, k]`` tensors is not tried."""
        num_logits = self.bench.rows * self.head.num_classes
        needed = variant.bytes_per_logit * num_logits
        if needed:
            needed += 3 * self.head.prototypes.nbytes
        return memory_reason(needed, self.device)


def step_stats(head: MarginClassifier) -> dict[str, Any] | None:
    """What the last step did, if there is memory left to tell."""
    try:
        stats = head.last_step
    except torch.OutOfMemoryError:
        return None
    return None if stats is None else asdict(stats)


def memory_reason(needed: float, device: torch.device) -> str | None:
    """Why something of that many bytes is not tried; None if it fits."""
    available = available_memory(device)
    if available is None or needed <= available:
        return None
    return f"skipped: needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


def finish_gradient(head: MarginClassifier) -> None:
    """Make a fused gradient whose products are left to the update, block by block, and drop it.

    That of a chunked step is: a time without it would be a lie. The lists of the sparse step hold
    all of its gradient, other paths have the rows themselves.
    """
    if isinstance(head.fused_gradient, ChunkedGradient):
        for _ in head.fused_gradient.raw_blocks():
            pass


def path_variants(bench: HeadBenchmark) -> Iterator[Variant]:
    """Everything that the paths' table has, apart from the common head."""
    loss, name = bench.loss, f"alpha {bench.alpha:g}"
    for optimizer in (None, "SparseSGD", "ExactSGD"):
        yield Variant(f"sparse, {name}", "sparse", loss, optimizer)
    yield Variant(f"sparse, {name}, .grad of active rows", "sparse", loss, gradient="sparse")
    losses = {name: loss, "ArcFace": qmargin.arcface(), "CosFace": qmargin.cosface()}
    for label, chunked in losses.items():
        for optimizer in (None, "ExactSGD"):
            yield Variant(f"chunked, {label}", "chunked", chunked, optimizer)
    for optimizer in (None, "ExactSGD"):
        yield Variant(f"dense, {name}", "dense", loss, optimizer, bytes_per_logit=20.0)
    for rate in (0.1, 0.3):
        options = {"rate": rate}
        for optimizer in (None, "ExactSGD"):
            label = f"sampled {100 * rate:g} %, {name}"
            yield Variant(label, "sampled", loss, optimizer, "fused", options, 20.0 * rate)
    for percent in (1.0, 5.0, 100.0):
        options = {"percent": percent}
        for optimizer in (None, "ExactSGD"):
            label = f"paper {percent:g} %, {name}"
            yield Variant(label, "paper", loss, optimizer, "fused", options, 20.0)


SETTINGS = (  # alpha, scale, margin: the paper's best rows, and supports small to large
    (1.25, 35.0, 0.2),
    (1.5, 10.0, 0.1),
    (1.75, 5.0, 0.1),
    (2.0, 1.9, 0.2),
    (1.25, 64.0, 0.2),
    (1.25, 20.0, 0.2),
    (1.25, 10.0, 0.2),
)


def grid_of(bench: HeadBenchmark) -> tuple[tuple[float, float, float], ...]:
    """Settings of alpha, scale and margin that were asked for."""
    return SETTINGS if bench.grid == "several" else ((bench.alpha, bench.scale, bench.margin),)


def products(bench: HeadBenchmark) -> Iterator[Row]:
    """Bare products: what any dense head must do, and what one of them costs."""
    facts = {"padded_classes": -(-bench.classes // PADDING) * PADDING}
    names = ("one GEMM, k padded", "one GEMM", "three GEMMs, k padded", "three GEMMs")
    clean_up()
    try:
        times = _time_products(bench)
    except Exception as error:  # a failure of all four is one row
        failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        yield Row("products", failed=failed, facts=facts)
        return
    reference = median(times[0])
    for name, own in zip(names, times, strict=True):
        ms = median(own)
        count = 3 if name.startswith("three") else 1
        flops = count * 2.0 * bench.rows * bench.dim * bench.classes
        row_facts = {**facts, "tflops": flops / ms / 1e9}
        yield Row(name, "", ms, own, reference, ms / reference, None, None, row_facts)


def _time_products(bench: HeadBenchmark) -> list[list[float]]:
    device, screen = bench.device, bench.screen
    padded = -(-bench.classes // PADDING) * PADDING
    torch.manual_seed(bench.seed)
    rows = functional.normalize(torch.randn(bench.rows, bench.dim, device=device)).to(screen)
    weights = torch.randn(padded, bench.dim, device=device, dtype=screen).mul_(bench.dim**-0.5)
    in_rows, in_weights = torch.empty_like(rows), torch.empty_like(weights)
    steps = []
    logits = {size: rows.new_empty(bench.rows, size) for size in {padded, bench.classes}}
    for is_three in (False, True):
        for size in (padded, bench.classes):

            def step(size: int = size, is_three: bool = is_three) -> None:
                torch.mm(rows, weights[:size].t(), out=logits[size])
                if is_three:
                    torch.mm(logits[size], weights[:size], out=in_rows)
                    torch.mm(logits[size].t(), rows, out=in_weights[:size])

            steps.append(step)
    return bench.time(*steps)


def paths(bench: HeadBenchmark) -> Iterator[Row]:
    """Every path, the paper's procedure, and the head that most training code has."""
    workbench = Workbench(bench)
    for variant in path_variants(bench):
        if variant.path in bench.paths:
            yield workbench.measure(variant)
    if "common" in bench.paths:
        for rate in (1.0, 0.3, 0.1):
            for has_update in (False, True):
                yield _measure_common(workbench, rate, has_update=has_update)


def _measure_common(workbench: Workbench, rate: float, *, has_update: bool) -> Row:
    name = "common ArcFace head" + (f", {100 * rate:g} % sampled" if rate < 1.0 else "")
    step_name = FORWARD_BACKWARD + (" + torch SGD" if has_update else "")
    bench, device = workbench.bench, workbench.device
    workbench.forget()
    weights = 4 * bench.classes * bench.dim
    needed = 20.0 * rate * bench.rows * bench.classes + 4 * weights
    missing = memory_reason(needed, device)
    if missing is not None:
        return Row(name, step_name, failed=missing)

    def measure() -> Row:
        head = CommonHead(bench.dim, bench.classes, rate=rate, device=device)
        optimizer = torch.optim.SGD(head.parameters(), **RULE)

        def step() -> None:
            workbench.leaf.grad = head.weight.grad = None
            head(workbench.leaf, workbench.labels).backward()
            if has_update:
                optimizer.step()

        own, reference = bench.time(step, workbench.gemm)
        workbench.leaf.grad = head.weight.grad = None
        buffer = optimizer.state[head.weight].get("momentum_buffer")
        known = workbench.known_bytes(head.weight, buffer)
        return workbench.row(name, step_name, own, reference, peak_gib(step, device, known), {})

    row = guarded(name, step_name, measure, {})
    workbench.leaf.grad = None
    clean_up()
    return row


def settings(bench: HeadBenchmark) -> Iterator[Row]:
    """The sparse path at several settings, beside what `auto` does and beside `chunked`."""
    workbench = Workbench(bench)
    for alpha, scale, margin in grid_of(bench):
        loss = qmargin.q_margin(alpha=alpha, scale=scale, margin=margin)
        facts = {"alpha": alpha, "scale": scale, "margin": margin}
        for path, optimizer in (
            ("sparse", None),
            ("sparse", "SparseSGD"),
            ("auto", None),
            ("chunked", None),
        ):
            yield workbench.measure(Variant(path, path, loss, optimizer, facts=facts))


REFERENCE_GOALS = {"class_prior": 1.05, "quality": 1.05, "look_alike": 1.3}  # x the plain step


def reference_losses(bench: HeadBenchmark) -> Iterator[tuple[str, qmargin.MarginLoss]]:
    """Q-Margin with each reference measure; counts have a long tail, as those of web faces do."""
    generator = torch.Generator().manual_seed(bench.seed)
    counts = torch.randn(bench.classes, generator=generator).add_(3.0).exp_().ceil_()
    for name, reference in (
        ("class_prior", qmargin.ClassPrior(counts.sort(descending=True).values, 0.5)),
        ("class_prior, classes in any order", qmargin.ClassPrior(counts, 0.5)),
        ("quality", qmargin.Quality(0.33)),
        ("look_alike", qmargin.LookAlike(0.1, 0.1)),
    ):
        margin = qmargin.PriorMargin(bench.margin)
        loss = qmargin.MarginLoss(
            qmargin.Alpha(bench.alpha), margin, scale=bench.scale, reference=reference
        )
        yield name, loss.to(bench.device)


def references(bench: HeadBenchmark) -> Iterator[Row]:
    """The sparse step with each reference measure, in turns with the same step without one."""
    workbench = Workbench(bench)
    for name, loss in reference_losses(bench):
        for update in ("SparseSGD", "ExactSGD"):
            step = f"{FORWARD_BACKWARD} + {update}"
            facts = {"goal": REFERENCE_GOALS[name]} if name in REFERENCE_GOALS else {}
            measure = partial(_measure_reference, workbench, loss, update)

            def row(
                name: str = name, step: str = step, measure: Any = measure, facts: Any = facts
            ) -> Row:
                own, others, found = measure()
                given = (own, others, None, {**facts, **found})
                return workbench.row(f"sparse, {name}", step, *given)

            yield guarded(f"sparse, {name}", step, row, facts)
    workbench.forget()


def _measure_reference(
    workbench: Workbench, loss: qmargin.MarginLoss, update: str
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Times of a step with a loss and of one without its reference, and what each of them did."""
    head, bench = workbench.head, workbench.bench
    optimizer, plain = OPTIMIZERS[update](head, **RULE), bench.loss
    lengths: dict[int, Any] = {}  # of the lists: each loss guesses from its own

    def step(loss: qmargin.MarginLoss) -> None:
        head.loss, head.list_lengths = loss, lengths.get(id(loss))
        workbench.leaf.grad = head.fused_gradient = None
        head(workbench.leaf, workbench.labels).backward()
        optimizer.step()
        lengths[id(loss)] = head.list_lengths

    own, others = bench.time(partial(step, loss), partial(step, plain))
    facts = {}
    for key, one in (("stats", loss), ("stats_without", plain)):
        step(one)
        facts[key] = step_stats(head)
    return own, others, facts


def growth(bench: HeadBenchmark) -> Iterator[Row]:
    """The sparse path for more and more classes."""
    for num_classes in bench.growth_classes:
        facts = {"classes": num_classes}
        try:
            workbench = Workbench(replace(bench, classes=num_classes))
        except Exception as error:  # too large to build: said in its row
            failed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            yield Row("sparse", FORWARD_BACKWARD, failed=failed, facts=facts)
            continue
        for optimizer in (None, "SparseSGD", "ExactSGD"):
            yield workbench.measure(Variant("sparse", "sparse", bench.loss, optimizer, facts=facts))
        del workbench


CHECKED_ROWS = 16
GRADIENT_CLASSES = 20_000  # a dense float64 gradient of these fits everywhere
BLOCK_CLASSES = 1 << 16
EXACT_PATHS = ("sparse", "chunked", "paper")


def errors(bench: HeadBenchmark) -> Iterator[Row]:
    """Tau and loss against float64 over all classes; gradients against float64 over fewer."""
    yield from _all_row_errors(bench)
    clean_up()
    yield from _gradient_errors(bench)


def _all_row_errors(bench: HeadBenchmark) -> Iterator[Row]:
    workbench = Workbench(bench)
    head = workbench.head
    for alpha, scale, margin in grid_of(bench):
        head.loss = qmargin.q_margin(alpha=alpha, scale=scale, margin=margin)
        facts = {"alpha": alpha, "scale": scale, "margin": margin}
        truth = exact_rows(head, workbench.leaf.detach(), workbench.labels)
        for path in EXACT_PATHS:
            if path in bench.paths:
                measure = partial(_row_errors, workbench, path, truth, facts)
                yield guarded(path, "tau and loss", measure, facts)


@torch.no_grad()
def exact_rows(head: MarginClassifier, embeddings: Tensor, labels: Tensor) -> LossOutput:
    """Float64 loss and tau of the first rows over all classes, from the stored prototypes."""
    unit = functional.normalize(embeddings[:CHECKED_ROWS].double())
    blocks = head.prototypes.split(BLOCK_CLASSES)
    cosines = [unit @ functional.normalize(block.double()).t() for block in blocks]
    return head.loss.with_stats(torch.cat(cosines, 1), labels[:CHECKED_ROWS])


def _row_errors(workbench: Workbench, path: str, truth: LossOutput, facts: dict[str, Any]) -> Row:
    """Largest errors of a path over the checked rows; the step itself takes the whole batch."""
    head = workbench.head
    head.path = path_of(path, workbench.bench.screen)
    head.refresh()
    try:
        loss, record = _solved(head, path, workbench.leaf.detach(), workbench.labels)
    except ListOverflow:
        return Row(path, "tau and loss", failed="too many for lists, takes chunked", facts=facts)
    stats = record.stats(workbench.labels >= 0)
    tau = _tau(record)[:CHECKED_ROWS].double()
    loss = loss.detach()[:CHECKED_ROWS].double()
    found = {
        "tau_error": float((tau - truth.tau.double()).abs().max()),
        "loss_error": float((loss - truth.loss.double()).abs().max()),
        "mass_error": stats.mass_error,
        "path_taken": stats.path,
        "rows": len(tau),
    }
    return Row(path, "tau and loss", facts={**facts, **found})


def _solved(
    head: MarginClassifier, path: str, embeddings: Tensor, labels: Tensor
) -> tuple[Tensor, StepRecord]:
    """Loss of each row, and the step's record."""
    unit, norms = unit_rows(embeddings, labels, -1, head.kernels)
    if head.path.name in ROW_LOSSES:
        return ROW_LOSSES[head.path.name](head, unit, labels, norms)
    head.list_lengths = None
    step = STEPS[path](head, unit, labels)
    loss = head.loss
    term = loss.target_margin(
        step.target_cosines().double(), loss.scale, labels=labels, norms=norms
    )
    solution = step.solve(Target(term.logits, term.log_reference), has_gradient=False)
    step.verify()
    return solution.loss, step


def _tau(record: object) -> Tensor:
    """Of every row, from what a path keeps of its step."""
    assert isinstance(record, SparseStep | ChunkedStep | TopKStep)
    if isinstance(record, ChunkedStep):
        solved = record.solved
        assert solved is not None
        return solved.anchor - slacks(solved.level, record.chunks.b)
    tau: Tensor = record.solved.tau
    return tau


def _gradient_errors(bench: HeadBenchmark) -> Iterator[Row]:
    """Gradients of embeddings and prototypes, relative to the largest element in float64."""
    small = replace(bench, classes=min(bench.classes, GRADIENT_CLASSES))
    workbench = Workbench(small)
    head, facts = workbench.head, {"classes": small.classes}
    truth = _gradients(head, workbench, "dense", torch.float64)
    for path in ("dense", "sparse", "chunked"):

        def measure(path: str = path) -> Row:
            own = _gradients(head, workbench, path, torch.float32)
            pairs = zip(own, truth, strict=True)
            found = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]
            errors = {"embedding_gradient_error": found[0], "prototype_gradient_error": found[1]}
            return Row(path, "gradients", facts={**facts, **errors})

        yield guarded(path, "gradients", measure, facts)


def _gradients(
    head: MarginClassifier, workbench: Workbench, path: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Dense gradients of a head with the same prototypes, in a precision of its own."""
    copy = MarginClassifier(
        head.embedding_dim,
        head.num_classes,
        workbench.bench.loss,
        path=path_of(path, None if dtype == torch.float64 else workbench.bench.screen),
        device=head.prototypes.device,
        dtype=dtype,
    )
    with torch.no_grad():
        copy.prototypes.copy_(head.prototypes)
    leaf = workbench.leaf.detach().to(dtype, copy=True).requires_grad_()
    copy(leaf, workbench.labels).backward()
    assert leaf.grad is not None and copy.prototypes.grad is not None
    return leaf.grad, copy.prototypes.grad


IMAGE_SIZE = 112
CLIP_NORM = 5.0
# Samples per second of the paper's throughput table: WebFace42M, ResNet-100, on eight GPUs.
PAPER_SAMPLES_PER_S = {
    "ArcFace": 2005.13,
    "Q-Margin 1 %": 1978.07,
    "Q-Margin 5 %": 1900.26,
    "Q-Margin 100 %": 1466.45,
}


@dataclass(frozen=True)
class Contender:
    """A head with its optimizer."""

    name: str
    loss: qmargin.MarginLoss | None  # None: the common head
    path: str = ""
    optimizer: str = "torch SGD"
    top_percent: float = 5.0
    paper_name: str | None = None
    bytes_per_logit: float = 0.0


def contenders(bench: HeadBenchmark) -> list[Contender]:
    """The paper's table, and the paths that need no ``[B, k]`` tensor."""
    found = [Contender("ArcFace, common head", None, "common", "torch SGD", 5.0, "ArcFace", 20.0)]
    found.append(Contender("ArcFace, chunked", qmargin.arcface(), "chunked", "ExactSGD"))
    for optimizer in ("ExactSGD", "SparseSGD"):
        found.append(Contender("Q-Margin, sparse", bench.loss, "sparse", optimizer))
    for percent in (1.0, 5.0, 100.0):
        name = f"Q-Margin {percent:g} %"
        found.append(
            Contender(f"{name}, paper", bench.loss, "paper", "ExactSGD", percent, name, 20.0)
        )
    return [contender for contender in found if contender.path in bench.paths]


def end_to_end(bench: HeadBenchmark) -> Iterator[Row]:
    """Images per second of a training step, each head in turns with the backbone alone."""
    clean_up()
    race = Race(replace(bench, rows=bench.batch))
    yield race.backbone_alone()
    arcface: float | None = None
    for contender in contenders(bench):
        row = race.measure(contender)
        speed, paper = (row.facts.get(f"{unit}_per_s") for unit in ("images", "paper_samples"))
        if contender.loss is None:
            arcface = speed
        if speed and arcface:
            row.facts["versus_arcface"] = speed / arcface
        if paper:
            row.facts["paper_versus_arcface"] = paper / PAPER_SAMPLES_PER_S["ArcFace"]
        yield row


class Race:
    """A backbone with its optimizer and a batch of random images, for one head after the other."""

    def __init__(self, bench: HeadBenchmark) -> None:
        self.bench, self.device = bench, bench.device
        torch.manual_seed(bench.seed)
        backbone = create_backbone(bench.backbone, embedding_dim=bench.dim).to(bench.device)
        self.backbone: nn.Module = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = [value for value in backbone.parameters() if value.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, **RULE)
        shape = (bench.rows, 3, IMAGE_SIZE, IMAGE_SIZE)
        images = torch.randn(shape, device=bench.device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(bench.classes, (bench.rows,), device=bench.device)
        # Not zeros or ones: what a GPU multiplies decides what power it draws, hence its clock.
        self.gradient = torch.randn(bench.rows, bench.dim, device=bench.device) / bench.rows

    def embed(self) -> Tensor:
        """Embeddings ``[B, d]``, convolutions in bfloat16."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            embeddings: Tensor = self.backbone(self.images)
        return embeddings.float()

    def update(self) -> None:
        """Clip and step the backbone."""
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()

    def alone(self) -> None:
        """A step without a head: the embeddings' gradient is random."""
        self.embed().backward(self.gradient)
        self.update()

    def backbone_alone(self) -> Row:
        """The ceiling: no head can be faster."""

        def measure() -> Row:
            (own,) = self.bench.time(self.alone)
            return self._row("backbone alone", "torch SGD", own, own, self.alone, {})

        return guarded("backbone alone", "torch SGD", measure, {})

    def measure(self, contender: Contender) -> Row:
        """Time a head behind the backbone."""
        bench = self.bench
        facts = {"paper_samples_per_s": PAPER_SAMPLES_PER_S.get(contender.paper_name or "")}
        weights = 4.0 * bench.classes * bench.dim
        needed = contender.bytes_per_logit * bench.rows * bench.classes + 3 * weights
        missing = memory_reason(needed, bench.device)
        if missing is not None:
            return Row(contender.name, contender.optimizer, failed=missing, facts=facts)

        def measure() -> Row:
            step, head = self._step(contender)
            own, reference = bench.time(step, self.alone)
            stats = None if isinstance(head, CommonHead) else step_stats(head)
            found = {**facts, **({"stats": stats} if stats else {})}
            return self._row(contender.name, contender.optimizer, own, reference, step, found)

        row = guarded(contender.name, contender.optimizer, measure, facts)
        clean_up()
        return row

    def _step(self, contender: Contender) -> tuple[Step, CommonHead | MarginClassifier]:
        """A whole training step with the head of a contender."""
        bench = self.bench
        head: CommonHead | MarginClassifier
        optimizer: torch.optim.Optimizer
        if contender.loss is None:
            head = CommonHead(bench.dim, bench.classes, device=bench.device)
            optimizer = torch.optim.SGD(head.parameters(), **RULE)
        else:
            head = MarginClassifier(
                bench.dim,
                bench.classes,
                contender.loss,
                path=path_of(contender.path, bench.screen, percent=contender.top_percent),
                gradient="fused",
                device=bench.device,
            )
            optimizer = OPTIMIZERS[contender.optimizer](head, **RULE)

        def step() -> None:
            optimizer.zero_grad()
            head(self.embed(), self.labels).backward()
            self.update()
            optimizer.step()

        return step, head

    def _row(
        self,
        name: str,
        optimizer: str,
        own: list[float],
        reference: list[float],
        step: Step,
        facts: dict[str, Any],
    ) -> Row:
        ms, reference_ms = median(own), median(reference)
        facts = {**facts, "images_per_s": 1e3 * self.bench.rows / ms}
        peak = peak_gib(step, self.device)
        return Row(name, optimizer, ms, own, reference_ms, ms / reference_ms, peak, None, facts)


PARTS: dict[str, Callable[[HeadBenchmark], Iterator[Row]]] = {
    "products": products,
    "paths": paths,
    "settings": settings,
    "growth": growth,
    "references": references,
    "errors": errors,
    "end-to-end": end_to_end,
}
DEFAULT_PARTS = ("products", "paths", "settings", "errors")
PATH_NAMES = ("sparse", "chunked", "dense", "sampled", "paper", "common")
GROWTH = (100_000, 250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000)
SIZES: dict[str, dict[str, Any]] = {  # what is not given follows the device
    "cuda": {
        "rows": 1024,
        "dim": 512,
        "classes": 2_059_906,
        "screen": "float16",
        "backbone": "iresnet100",
        "batch": 512,
    },
    "cpu": {
        "rows": 256,
        "dim": 128,
        "classes": 200_000,
        "screen": "float32",
        "backbone": "small_conv",
        "batch": 64,
    },
}


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``head`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "head",
        help="every path of MarginClassifier against the bare products, memory and errors",
        description="Time every way to take a step of the head on this machine, in turns with one "
        "product of the same size, with the memory it takes and its errors against float64.",
    )
    add = parser.add_argument
    add("--rows", type=count, help="samples in the batch (1024 on a GPU, 256 on a CPU)")
    add("--dim", type=count, help="embedding size (512; 128 on a CPU)")
    add("--classes", type=count, help="identities (2059906; 200000 on a CPU)")
    add("--alpha", type=positive, default=1.25, help="order of the divergence (1.25)")
    add("--scale", type=positive, default=35.0, help="logits = scale * cosines (35)")
    add("--margin", type=float, default=0.2, help="prior margin (0.2)")
    add("--paths", nargs="+", default=PATH_NAMES, metavar="NAME", help="ways to take a step")
    screens = ("float16", "bfloat16", "float32")
    add("--screen", choices=screens, help="precision of products (float16; float32 on a CPU)")
    add("--device", default="auto", help="auto, cpu or cuda (auto)")
    add("--parts", nargs="+", default=DEFAULT_PARTS, metavar="NAME", help=f"of {' '.join(PARTS)}")
    add(
        "--settings",
        choices=("one", "several"),
        default="one",
        help="several: seven settings of alpha, scale and margin; one: the given one (one)",
    )
    add("--growth", action="store_true", help="add the part growth")
    add("--growth-classes", type=count, nargs="+", default=GROWTH, metavar="K", help="its sizes")
    add("--end-to-end", action="store_true", help="add the part end-to-end")
    add("--backbone", help="of the part end-to-end (iresnet100; small_conv on a CPU)")
    add("--batch", type=count, help="images of the part end-to-end (512; 64 on a CPU)")
    add("--repeats", type=count, default=10, help="timed turns; medians are shown (10)")
    add(
        "--seconds",
        type=positive,
        default=10.0,
        help="limit of seconds: slower rows get fewer turns",
    )
    add("--seed", type=int, default=0, help="seed of prototypes and batch (0)")
    add("--commit", help="recorded in the file (default: ask git)")
    add("--json", type=new_file, metavar="FILE", help="also write everything here, after every row")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options: dict[str, Any] = vars(arguments).copy()
    extra = {name: options.pop(name) for name in ("growth", "end_to_end")}
    parts, options["paths"] = tuple(options.pop("parts")), tuple(options["paths"])
    parts += tuple(name.replace("_", "-") for name, is_asked in extra.items() if is_asked)
    del options["run"]
    saved = {"json_path": options.pop("json"), "commit": options.pop("commit")}
    options["growth_classes"] = tuple(options["growth_classes"])
    options["grid"] = options.pop("settings")
    run_head_benchmark(resolve_benchmark(options), parts, command=command_line(), **saved)


@dataclass
class Report:
    """Rows so far, and where they go."""

    record: dict[str, Any]
    json_path: Path | None = None
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, part: str, row: Row) -> None:
        """Keep a row, say it on standard error, and save."""
        self.rows.setdefault(part, []).append(row.as_dict())
        result = row.failed or ("" if row.ms is None else f"{row.ms:.2f} ms")
        if row.ratio is not None:
            result += f", ratio {row.ratio:.2f}"
        setting = " ".join(
            f"{name} {row.facts[name]:g}"
            for name in ("alpha", "scale", "classes")
            if name in row.facts
        )
        sys.stderr.write(f"{part}: {', '.join(filter(None, (row.name, row.step, setting)))}: ")
        sys.stderr.write(f"{result}\n")
        sys.stderr.flush()
        if self.json_path is not None:
            text = json.dumps({**self.record, "parts": self.rows}, indent=1)
            self.json_path.write_text(text + "\n", encoding="utf-8")


def resolve_benchmark(options: dict[str, Any]) -> HeadBenchmark:
    """Settings from the command's options; what is not given follows the device."""
    device = find_device(options.pop("device"))
    given = {name: value for name, value in options.items() if value is not None}
    settings = {**SIZES.get(device.type, SIZES["cuda"]), **given}
    _check_known("path", settings["paths"], PATH_NAMES)
    screen = getattr(torch, settings.pop("screen"))
    return HeadBenchmark(device=device, screen=screen, **settings)


def run_head_benchmark(
    bench: HeadBenchmark,
    parts: Sequence[str] = DEFAULT_PARTS,
    *,
    json_path: Path | None = None,
    commit: str | None = None,
    command: str = "",
) -> Report:
    """Measure the parts, print a table for each, and write everything to ``json_path``."""
    _check_known("part", parts, PARTS)
    record = {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "settings": bench.as_dict(),
        "machine": describe_machine(bench.device, commit),
    }
    report = Report(record, json_path)
    console = output_console()
    for part in dict.fromkeys(parts):
        try:
            for row in PARTS[part](bench):
                report.add(part, row)
        except Exception as error:  # the part could not even begin; the others may
            lines = str(error).splitlines() or [""]
            report.add(part, Row(part, failed=f"{type(error).__name__}: {lines[0]}"))
        clean_up()
        print_table(console, _title(part, bench, record), *table_cells(part, report.rows[part]))
    return report


def _title(part: str, bench: HeadBenchmark, record: dict[str, Any]) -> str:
    """What a table shows, with the settings that its numbers depend on."""
    rows = bench.batch if part == "end-to-end" else bench.rows
    sizes = f"B {rows}, d {bench.dim}"
    if part != "growth":
        sizes += f", k {bench.classes:,}"
    if part == "end-to-end":
        sizes += f", {bench.backbone}"
    screen = f"{dtype_name(bench.screen)} screen, {record['machine']['device']}"
    return f"{TABLES[part].title}: {sizes}, {screen}, medians of up to {bench.repeats} turns"


def _check_known(kind: str, names: Sequence[str], known: Sequence[str] | dict[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"no {kind} {name!r}; known are {', '.join(known)}")
