"""The settings that every loss tries in a study: the same number, over the same region.

A setting has a hardness of the negatives (which decides the scale), a margin and an update of the
weights. Each hardness is combined with each margin once, and with each update equally often, so
that twenty settings represent all eighty. Q-Margin has a reach instead of the margin, and with each
hardness the alphas that have such a reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import NormalDist

from qmargin.experiments.experiment import FOCUS, HEADLINE, RIVALS, TITLES, Arm, Search
from qmargin.experiments.named import LR_RATIO, MARGIN_KINDS
from qmargin.experiments.space import HARDNESS, REACH, Point, value_text
from qmargin.losses.hardness import scale_of_hardness
from qmargin.report.systems import Primary
from qmargin.training.recipe import Recipe

# Arms with six tested runs; the others have three.
COMPARED = ("arcface", "cosface", "q_margin")
SEEDS = tuple(range(6))
SEEDS_OF_OTHERS = tuple(range(3))
PRIMARY = Primary(FOCUS, RIVALS, HEADLINE)  # refused where the test cannot measure it
MEASURE = "tar@0.0001"  # by which settings are chosen, where the pairs allow it
FINALISTS = 2  # settings of each loss that are trained by the full recipe before one is chosen
REPLICATES = 400  # of the bootstrap: what intervals take from it is a variance
LEVELS = (0.45, 0.58, 0.71, 0.84, 0.97)  # of hardness, as shares of that of the nearest class
REACHES = (0.3, 1.2)  # least and most, unless the gap without a margin is larger
MARGINS: dict[str, tuple[float, ...]] = {
    "arcface": (0.05, 0.2, 0.35, 0.5),
    "cosface": (0.1, 0.25, 0.4, 0.6),
    "entmax": (0.05, 0.2, 0.35, 0.5),
    "sparsemax": (0.05, 0.2, 0.35, 0.5),
    "adaface": (0.1, 0.25, 0.4, 0.6),
    "magface": (0.05, 0.2, 0.35, 0.45),  # of the shortest embeddings
    "sampled": (0.05, 0.2, 0.35, 0.5),
}
ALPHAS: dict[str, tuple[float, ...]] = {"entmax": (1.25, 1.5), "sparsemax": (2.0,)}
Q_MARGIN_ALPHAS = (1.1, 1.25, 1.5)
LOSSES = (*COMPARED, "entmax", "sparsemax", "adaface", "magface", "sampled")
MORE = (1.02, 1.25)  # times the reach without a margin: least, and most if that is large
RATES = (0.1, 0.3)  # of classes that a step of ArcFace samples
SAMPLED = "ArcFace, sampled classes"
MAGFACE_RISE = 0.35  # from the margin of the shortest embeddings to that of the longest
MAGFACE_NORMS = (10.0, 110.0)  # as published, for 512 dimensions
PUBLISHED_DIM = 512

# The paper's optimizer, as in its recipes for faces, and AdamW as in those for drawings.
SGD = {
    "optimizer.kind": "sgd",
    "optimizer.lr": "0.1",
    "optimizer.momentum": "0.9",
    "optimizer.weight_decay": "0.0005",
    "optimizer.clip_norm": "5",
}
UPDATES: tuple[Point, ...] = tuple(
    {"optimizer.kind": "adamw", **kind, "head.lr_ratio": value_text(ratio)}
    for kind, ratio in product(({}, SGD), (1.0, 10.0))
)


def study_recipe(recipe: Recipe) -> Recipe:
    """A recipe whose optimizer and whose head's rate are left to the settings."""
    assert recipe.optimizer.kind == "adamw" and recipe.head.lr_ratio in (1.0, LR_RATIO)
    return replace(
        recipe,
        optimizer=replace(recipe.optimizer, clip_head=False),  # as the paper's recipes clip
        head=replace(recipe.head, lr_ratio=1.0),
    )


def study_points(name: str, classes: int, dim: int) -> tuple[Point, ...]:
    """Settings of a loss; the nearest class is at the cosine that one of all classes exceeds.

    Examples:
        >>> points = study_points("cosface", 10_000, 128)
        >>> len(points), points[0]["hardness"], points[-1]["hardness"], points[0]["loss.margin"]
        (20, '1.67', '3.61', '0.1')
    """
    nearest = NormalDist().inv_cdf(1.0 - 1.0 / classes)
    alphas, found = ALPHAS.get(name, (1.0,)), []
    for row, column in product(range(len(LEVELS)), range(len(UPDATES))):
        level, turn = round(LEVELS[row] * nearest, 2), (column + 1) // 2  # with each update
        point = {HARDNESS: value_text(level), **UPDATES[(row + column) % len(UPDATES)]}
        if name == "q_margin":
            alpha, gap = _alpha_and_reach(level, turn, column, classes, dim)
            point |= {"loss.alpha": value_text(alpha), REACH: value_text(gap)}
        else:
            margin = MARGINS[name][column]
            alpha = alphas[(row + turn) % len(alphas)]
            point |= {"loss.alpha": value_text(alpha), "loss.margin": value_text(margin)}
        if name == "magface":
            point["loss.options.upper_margin"] = value_text(round(margin + MAGFACE_RISE, 6))
        if name == "sampled":
            point["head.sample_rate"] = value_text(RATES[(row + turn) % len(RATES)])
        found.append(point)
    return tuple(found)


def _alpha_and_reach(
    level: float, turn: int, column: int, classes: int, dim: int
) -> tuple[float, float]:
    """Settings of the two sparsest alphas in turn, from the smallest reach to the largest."""
    low, high = REACHES
    least = {
        alpha: 1.0
        / ((alpha - 1.0) * scale_of_hardness(level, alpha, num_classes=classes, embedding_dim=dim))
        for alpha in Q_MARGIN_ALPHAS
    }
    able = [alpha for alpha in Q_MARGIN_ALPHAS if least[alpha] < high] or [Q_MARGIN_ALPHAS[0]]
    alpha = able[-2:][turn % len(able[-2:])]
    start, end = max(low, MORE[0] * least[alpha]), max(high, MORE[1] * least[alpha])
    return alpha, round(start + column / (len(UPDATES) - 1) * (end - start), 3)


def study_search(*settings: str, measure: str = MEASURE) -> Search:
    """All settings in short runs, changed by ``settings``, and the best by the full recipe."""
    return Search(measure=measure, settings=settings, finalists=FINALISTS)


def study_arms(recipe: Recipe, names: Sequence[str] = COMPARED) -> dict[str, Arm]:
    """Arms of the losses, for an experiment with ``SEEDS``."""
    classes, dim = recipe.data.num_classes, recipe.model.embedding_dim
    assert classes is not None  # hardness depends on it
    arms = {}
    for name in names:
        kind = MARGIN_KINDS["arcface" if name == "sampled" else name]
        settings = [f"loss.margin_kind={kind}"]
        if name == "magface":  # norms grow with the root of the dimensions
            share = (dim / PUBLISHED_DIM) ** 0.5
            settings += [
                f"loss.options.{end}_norm={value_text(round(share * norm, 3))}"
                for end, norm in zip(("lower", "upper"), MAGFACE_NORMS, strict=True)
            ]
        if name == "sampled":
            settings.append("head.path=sampled")
        arms[name] = Arm(
            SAMPLED if name == "sampled" else TITLES[name],
            tuple(settings),
            points=study_points(name, classes, dim),
            seeds=None if name in COMPARED else SEEDS_OF_OTHERS,
        )
    return arms
