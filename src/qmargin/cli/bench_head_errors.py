"""Part of ``qmargin bench head`` that checks results: what is timed must also be right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import qmargin
from qmargin.cli.bench_head_parts import grid_of
from qmargin.cli.bench_head_steps import HeadBenchmark, Workbench
from qmargin.cli.bench_timing import Row, clean_up, guarded
from qmargin.heads.batch import unit_rows
from qmargin.heads.chunked import ChunkedStep
from qmargin.heads.classifier import PATHS, STEPS, MarginClassifier
from qmargin.heads.paper import PaperStep
from qmargin.heads.sparse import SparseStep
from qmargin.heads.step import StepRecord
from qmargin.kernels.head_records import ListOverflow
from qmargin.losses.module import LossOutput
from qmargin.maths.threshold import slacks

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
    head.path = path
    head.top_percent = 5.0
    head.refresh()
    try:
        loss, record = _solved(head, path, workbench.leaf.detach(), workbench.labels)
    except ListOverflow:
        return Row(path, "tau and loss", failed="too many for lists, takes chunked", facts=facts)
    stats = record.stats()
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
    if path in PATHS:
        return PATHS[path](head, unit, labels, norms)
    head.lengths = None
    step = STEPS[path](head, unit, labels)
    loss = head.loss
    term = loss.margin(step.target_cosines().double(), loss.scale, labels=labels, norms=norms)
    solution = step.solve(term.logits, term.log_reference, has_gradient=False)
    step.confirm()
    return solution.loss, step


def _tau(record: object) -> Tensor:
    """Of every row, from what a path keeps of its step."""
    assert isinstance(record, SparseStep | ChunkedStep | PaperStep) and record.solved is not None
    if isinstance(record, ChunkedStep):
        solved = record.solved
        assert solved is not None
        return solved.anchor - slacks(solved.level, record.chunks.order)
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
        path=path,
        screen_dtype=None if dtype == torch.float64 else workbench.bench.screen,
        device=head.prototypes.device,
        dtype=dtype,
    )
    with torch.no_grad():
        copy.prototypes.copy_(head.prototypes)
    leaf = workbench.leaf.detach().to(dtype, copy=True).requires_grad_()
    copy(leaf, workbench.labels).backward()
    assert leaf.grad is not None and copy.prototypes.grad is not None
    return leaf.grad, copy.prototypes.grad
