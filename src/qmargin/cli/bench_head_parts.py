"""Parts of ``qmargin bench head`` that time the head alone: products, paths, settings, growth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional

import qmargin
from qmargin.cli.bench_common import CommonHead
from qmargin.cli.bench_head_steps import (
    FORWARD_BACKWARD,
    PADDING,
    RULE,
    HeadBenchmark,
    Variant,
    Workbench,
    memory_reason,
    path_variants,
)
from qmargin.cli.bench_timing import Row, clean_up, guarded, median, peak_gib

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
