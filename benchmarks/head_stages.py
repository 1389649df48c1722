"""Times every stage of the sparse head on a GPU, with its errors against float64.

Run: python benchmarks/head_stages.py [--classes 2059906] [--screen float16|bfloat16]
"""

import argparse
import math

import torch

import qmargin
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.sparse import SparseStep, sparse_rows
from qmargin.heads.unit import unit_rows


def median_ms(function, repeats=10, warm=3):
    for _ in range(warm):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def make_batch(head, rows, low=0.3, high=0.7):
    with torch.no_grad():
        labels = torch.randint(head.num_classes, (rows,), device="cuda")
        own = torch.nn.functional.normalize(head.prototypes[labels])
        noise = torch.randn_like(own)
        noise = torch.nn.functional.normalize(noise - (noise * own).sum(1, keepdim=True) * own)
        cosine = torch.empty(rows, 1, device="cuda").uniform_(low, high)
        return cosine * own + (1 - cosine**2).sqrt() * noise, labels


def exact(head, embeddings, labels, rows):
    """Float64 loss and tau of a few rows over all classes, from the stored prototypes."""
    unit = torch.nn.functional.normalize(embeddings[:rows].double())
    parts = []
    for block in head.prototypes.detach().split(1 << 18):
        parts.append(unit @ torch.nn.functional.normalize(block.double()).t())
    return head.loss.with_stats(torch.cat(parts, 1), labels[:rows])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--classes", type=int, default=2_059_906)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--screen", default="float16")
    options = parser.parse_args()
    torch.manual_seed(0)
    k, d, rows = options.classes, options.dim, options.rows
    screen = getattr(torch, options.screen)
    padded = -(-k // 256) * 256
    a = torch.randn(rows, d, device="cuda", dtype=screen)
    b = torch.randn(padded, d, device="cuda", dtype=screen)
    gemm = median_ms(lambda: a @ b.t())
    print(f"one GEMM {gemm:.2f} ms")
    del a, b
    head = MarginClassifier(d, k, qmargin.q_margin(scale=35.0), device="cuda", path="sparse",
                            gradient="fused", screen_dtype=screen)  # fmt: skip
    embeddings, labels = make_batch(head, rows)
    settings = [(1.25, 35.0, 0.2), (1.5, 10.0, 0.1), (1.75, 5.0, 0.1), (2.0, 1.9, 0.2),
                (1.25, 64.0, 0.2), (1.25, 20.0, 0.2)]  # fmt: skip
    for alpha, scale, margin in settings:
        head.loss = qmargin.q_margin(alpha=alpha, scale=scale, margin=margin)
        report(head, embeddings, labels, gemm, (alpha, scale, margin))


def whole(head, leaf, labels):
    leaf.grad = head.pending = None
    head(leaf, labels).backward()


def report(head, embeddings, labels, gemm, name):
    kernels, order, scale = head.kernels, head.order, head.loss.scale
    head.refresh()
    leaf = embeddings.clone().requires_grad_()
    unit = torch.nn.functional.normalize(embeddings)
    prototypes, norms = head.prototypes.detach(), head.inverse_norms
    prepared = kernels.prepare_rows(unit, labels, prototypes, norms, head.copy.dtype)
    step = SparseStep(head, prepared, labels)
    term = head.loss.margin(prepared.target_cosines.double(), scale, labels=labels)
    terms = (term.logits, term.log_reference)
    numbers = {"scale": scale, "order": order}
    slack = step.slack()
    stages = {
        "prepare": lambda: kernels.prepare_rows(unit, labels, prototypes, norms, head.copy.dtype),
        "screen": lambda: kernels.group_maxima(
            prepared.rounded, head.copy, labels, head.num_classes
        ),
        "list": lambda: kernels.list_pairs(maxima, *terms, slack, **numbers),
        "candidates": lambda: kernels.score_candidates(
            prepared, head.copy, prototypes, norms, labels, pairs
        ),
        "solve": lambda: kernels.solve_lists(candidates, *terms, **numbers),
        "embedding gradient": lambda: kernels.embedding_gradient(
            solved, labels, prototypes, norms, weights, weights
        ),
        "sort by class": lambda: kernels.sort_by_class(solved, labels, weights, weights),
        "prototype gradient": lambda: kernels.prototype_gradient(gradient, unit, prototypes, norms),
    }
    maxima = stages["screen"]()
    pairs = stages["list"]()
    candidates = stages["candidates"]()
    solved = stages["solve"]()
    weights = torch.full((len(unit),), scale / len(unit), device="cuda")
    gradient = stages["sort by class"]()

    def forward():
        return sparse_rows(head, unit_rows(leaf, kernels)[0], labels, None)[0].mean()

    def both():
        leaf.grad = None
        head.pending = None
        forward().backward()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    times = {stage: median_ms(function) for stage, function in stages.items()}
    times["forward"] = median_ms(forward)
    times["forward + backward"] = median_ms(both)
    head.pending = None
    times["module"] = median_ms(lambda: whole(head, leaf, labels))
    buffer = torch.zeros_like(prototypes)
    one = torch.ones((), device="cuda")
    for only_active in (True, False):
        stage = "row-sparse SGD" if only_active else "exact SGD"
        times[stage] = median_ms(
            lambda only=only_active: kernels.sgd_update(
                gradient,
                unit,
                prototypes,
                buffer,
                norms,
                head.copy,
                lr=0.0,
                momentum=0.9,
                weight_decay=5e-4,
                nesterov=False,
                grad_scale=one,
                only_active=only,
            )  # fmt: skip
        )
    del buffer
    truth = exact(head, embeddings, labels, 16)
    error = (solved.tau[:16] - truth.tau.double()).abs().max()
    loss_error = ((solved.loss[:16] - truth.loss) / truth.loss.clamp_min(1e-3)).abs().max()
    print(
        f"{name}: "
        + ", ".join(f"{stage} {ms:.2f}" for stage, ms in times.items())
        + f" | ratio {times['forward + backward'] / gemm:.2f} | pairs/row {len(pairs.groups) / len(unit):.0f}"
        + f" candidates/row {len(solved.columns) / len(unit):.0f} peak {peak:.2f} GiB | tau error {error:.1e} loss {loss_error:.1e}"
        + f" mass error {solved.mass_error.max():.1e} slack {slack.max():.1e}",
        flush=True,
    )
    assert math.isfinite(float(error))


if __name__ == "__main__":
    main()
