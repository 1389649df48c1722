"""Steps of the head that the benchmark times: settings, batches, paths, and the bare product."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import qmargin
from qmargin.cli.bench_timing import (
    Row,
    Step,
    allocated_bytes,
    clean_up,
    guarded,
    median,
    peak_gib,
    time_turns,
)
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.memory import available_memory
from qmargin.heads.pending import as_pending
from qmargin.heads.step import RowsUpdate
from qmargin.heads.updates import ExactSGD, SparseSGD

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
    options: dict[str, float] = field(default_factory=dict)  # attributes of the head
    bytes_per_logit: float = 0.0  # what a path that builds [B, k] tensors takes, roughly
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> str:
        """What is timed."""
        return FORWARD_BACKWARD + (f" + {self.optimizer}" if self.optimizer else "")


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
            path="sparse",
            gradient="fused",
            screen_dtype=bench.screen,
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
        self.leaf.grad = self.head.prototypes.grad = self.head.pending = self.head._step = None

    def measure(self, variant: Variant) -> Row:
        """Time a variant in turns with the product, and what memory it takes."""
        self.forget()
        self.head._shares.clear()  # supports that `auto` measured with another loss
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
        head.path, head.loss, head.gradient = variant.path, variant.loss, variant.gradient
        for name, value in variant.options.items():
            setattr(head, name, value)
        optimizer = OPTIMIZERS[variant.optimizer](head, **RULE) if variant.optimizer else None

        def step() -> None:
            self.leaf.grad = head.prototypes.grad = head.pending = None
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
    """Make a pending gradient that is only promised, block by block, and drop it.

    A chunked step leaves the prototypes' product to the update; a time without it would be a lie.
    The sparse step leaves lists that hold all of its gradient, other paths the rows themselves.
    """
    pending = head.pending
    if pending is None or isinstance(pending, tuple | RowsUpdate):
        return
    for _ in as_pending(head, pending).raw_blocks():
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
        options = {"sample_rate": rate}
        for optimizer in (None, "ExactSGD"):
            label = f"sampled {100 * rate:g} %, {name}"
            yield Variant(label, "sampled", loss, optimizer, "fused", options, 20.0 * rate)
    for percent in (1.0, 5.0, 100.0):
        options = {"top_percent": percent}
        for optimizer in (None, "ExactSGD"):
            label = f"paper {percent:g} %, {name}"
            yield Variant(label, "paper", loss, optimizer, "fused", options, 20.0)
