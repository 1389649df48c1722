"""The paper's figures: DET curves, and pairs that one model gets right and another wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qmargin.demo.evaluate import Pictures
from qmargin.demo.losses import LOSSES
from qmargin.demo.run import part_embeddings
from qmargin.errors import DataError
from qmargin.evaluation.pair_scores import unit_rows
from qmargin.evaluation.result import read_result
from qmargin.files import replacing
from qmargin.paper import numbers
from qmargin.paper.runs import Request, demo_parts, loss_of, results_for
from qmargin.report.figures import has_matplotlib
from qmargin.report.write import ReportOptions, write_report

PAIRS_FAR = 1e-3
NUM_PAIRS = 8
ENLARGED = 3
GAP = 6  # pixels between the pictures of a grid, before they are enlarged


def figure_det_face(request: Request) -> list[Path]:
    """DET curves of the five losses."""
    return _det(request, "figure-det-face", results_for(request, list(LOSSES.values())))


def figure_det_speaker(request: Request) -> list[Path]:
    """DET curves of the settings for speakers."""
    losses = [loss_of(row) for row in numbers.SPEAKER]
    return _det(request, "figure-det-speaker", results_for(request, losses))


def _det(request: Request, name: str, results: list[Path]) -> list[Path]:
    """A page with the curves, and figures for print where matplotlib is installed."""
    options = ReportOptions(
        title="DET curves, for the paper's figure", has_figures=has_matplotlib()
    )
    return write_report(results, request.out / name, options)


def figure_pairs(request: Request) -> list[Path]:
    """Pairs that Q-Margin gets right and ArcFace wrong: genuine above, impostors below."""
    options, parts = demo_parts(request)
    is_right, scores = {}, {}
    for key, part in parts.items():
        world, embeddings = part_embeddings(options, part)
        points = read_result(part.result).metrics.tar
        threshold = next(
            (point.threshold for point in points if point.far_target == PAIRS_FAR), None
        )
        if threshold is None:
            raise DataError(f"{part.result} has no threshold at FAR {PAIRS_FAR:g}; test more pairs")
        unit = unit_rows(embeddings).astype(np.float32)
        accepted = (unit @ unit.T) - np.float32(threshold)  # [n, n], above 0 is accepted
        labels = world.test.labels
        is_same = labels[:, None] == labels
        is_right[key] = (accepted >= 0) == is_same
        scores[key] = np.where(is_same, accepted, -accepted)
    rows = [
        _clearest(is_right, scores, is_same & upper_triangle(len(labels))),
        _clearest(is_right, scores, ~is_same & upper_triangle(len(labels))),
    ]
    flip = np.uint8(255 if world.is_ink else 0)
    path = request.out / "figure-pairs.png"
    request.out.mkdir(parents=True, exist_ok=True)
    _write_grid(path, [_pairs(world.test, pairs, flip) for pairs in rows])
    return [path]


def upper_triangle(count: int) -> NDArray[np.bool_]:
    """Every pair once."""
    return np.triu(np.ones((count, count), dtype=bool), k=1)


def _clearest(
    is_right: dict[str, NDArray[np.bool_]],
    scores: dict[str, NDArray[np.float32]],
    is_kind: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Pairs ``[n, 2]`` of a kind on which the two models differ most, in Q-Margin's favour."""
    wanted = is_kind & is_right["q_margin"] & ~is_right["arcface"]
    first, second = np.nonzero(wanted)
    lead = (scores["q_margin"] - scores["arcface"])[first, second]
    best = np.argsort(-lead, kind="stable")[:NUM_PAIRS]
    return np.stack([first[best], second[best]], axis=1)


def _pairs(dataset: Pictures, pairs: NDArray[np.int64], flip: np.uint8) -> list[NDArray[np.uint8]]:
    return [np.hstack([picture ^ flip for picture in dataset.images(pair)]) for pair in pairs]


def _write_grid(path: Path, rows: list[list[NDArray[np.uint8]]]) -> None:
    """Pairs in rows on a grey ground."""
    from PIL import Image

    side = 32
    width = NUM_PAIRS * (2 * side + GAP) + GAP
    canvas = np.full((len(rows) * (side + GAP) + GAP, width), 160, dtype=np.uint8)
    for number, row in enumerate(rows):
        top = GAP + number * (side + GAP)
        for place, pair in enumerate(row):
            left = GAP + place * (2 * side + GAP)
            canvas[top : top + side, left : left + 2 * side] = pair
    enlarged = canvas.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
    with replacing(path) as temporary:
        Image.fromarray(enlarged).save(temporary, format="PNG")
