"""Losses of several scales, beside the hardness of their negatives.

Run `python docs/benchmarks/hardness.py`. It trains losses of several alphas and scales on 20,000
synthetic stroke identities of two samples for two epochs and measures other identities; see
`prototype_rate.py` beside it. Two trainings at a time take a quarter of an hour on a CPU.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from prototype_rate import MEASURES, material_of, measured

from qmargin import hardness
from qmargin.study.studies import SEARCH_SEED, SYSTEMS, Setting

CASE, RATIO, EPOCHS = "20,000 of 2", 20.0, 2
SETTINGS: list[tuple[str, Setting]] = [
    *(("cosface", (1.0, scale, 0.3)) for scale in (10.0, 16.0, 24.0)),
    *(("q_margin", (1.25, scale, 0.4)) for scale in (1.0, 2.0, 4.0, 7.0)),
    *(("sparsemax", (2.0, scale, 0.1)) for scale in (0.001, 0.006, 0.03, 0.3)),
]


def main() -> None:
    """Print a table."""
    with TemporaryDirectory() as name, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        folder = Path(name)
        size = material_of(CASE, folder).study.size
        material_of(CASE, folder).prepare([SEARCH_SEED])
        running = [
            pool.submit(measured, folder, CASE, key, setting, RATIO, EPOCHS)
            for key, setting in SETTINGS
        ]
        fars = " | ".join(f"TAR % at {far}" for far in MEASURES.values())
        sys.stdout.write(
            f"| loss | alpha | scale | hardness | classes with a gradient | {fars} |\n"
        )
        sys.stdout.write(f"| --- |{' ---: |' * (4 + len(MEASURES))}\n")
        for (key, (alpha, scale, _)), result in zip(SETTINGS, running, strict=True):
            found = hardness(
                alpha, scale, num_classes=size.num_classes, embedding_dim=size.embedding_dim
            )
            cells = [f"{alpha:g}", f"{scale:g}", f"{found.mean:.2f}", f"{found.support:,.0f}"]
            metrics = result.result().metrics
            cells += [f"{100 * metrics[measure]:.1f}" for measure in MEASURES]
            sys.stdout.write(f"| {SYSTEMS[key].title} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
