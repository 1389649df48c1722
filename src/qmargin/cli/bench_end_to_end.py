"""Part of ``qmargin bench head`` that times whole training steps, backbone included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import qmargin
from qmargin.cli.bench_common import CommonHead
from qmargin.cli.bench_head_steps import (
    OPTIMIZERS,
    RULE,
    HeadBenchmark,
    memory_reason,
    step_stats,
)
from qmargin.cli.bench_timing import Row, Step, clean_up, guarded, median, peak_gib
from qmargin.heads.classifier import MarginClassifier
from qmargin.models.registry import create_backbone

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
                path=contender.path,
                gradient="fused",
                screen_dtype=bench.screen,
                top_percent=contender.top_percent,
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
