"""Synthetic people: the comparison of losses on an embedded world that looks like faces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qmargin.experiments.experiment import Experiment, TestProtocol
from qmargin.experiments.named import PEOPLE_SIZES, Size, drawn_recipe
from qmargin.experiments.named.design import (
    COMPARED,
    LOSSES,
    PRIMARY,
    REPLICATES,
    SEEDS,
    study_arms,
    study_recipe,
    study_search,
)
from qmargin.experiments.worlds import Made
from qmargin.registry import register_experiment
from qmargin.schema import Option

TESTED = Made(500, 10, 2000, 10)
# The network of the demo's strokes has four times the work with portraits of 64 pixels.
SIZE = PEOPLE_SIZES["cuda"]._replace(epochs=20, width=32, depth=1)
LARGE = SIZE._replace(num_classes=100_000, epochs=2)
SHORT = "run.epochs=2"  # in the search

QUESTION = "Does Q-Margin verify people at a low false acceptance rate better than CosFace does"


@register_experiment("people-10k")
def people_10k(device: str = "cuda", data: Path | None = None) -> Experiment:
    """10,000 synthetic people of 20 portraits, settings chosen by each loss."""
    return study(
        "people-10k",
        "10,000 synthetic people",
        f"{QUESTION}, with many easy negatives and some look-alikes?",
        "Q-Margin is ahead of CosFace: most negatives are easy, a few look alike.",
        losses=LOSSES,
    )


@register_experiment("people-10k-flips")
def people_10k_flips(device: str = "cuda", data: Path | None = None) -> Experiment:
    """The same people; a tenth of the training portraits show another person."""
    return study(
        "people-10k-flips",
        "10,000 synthetic people, 10 % of the labels wrong",
        f"{QUESTION}, where a tenth of the training labels are wrong?",
        "Q-Margin gains less on CosFace than in `people-10k`: wrong labels never reach their gap.",
        flips=0.1,
    )


@register_experiment("people-10k-splits")
def people_10k_splits(device: str = "cuda", data: Path | None = None) -> Experiment:
    """The same people; 2 % of the labels have a second label for the same person."""
    return study(
        "people-10k-splits",
        "10,000 synthetic people, 2 % of the identities split",
        f"{QUESTION}, where 2 % of the training identities have two labels?",
        "Q-Margin is behind CosFace: two labels of one person are never a gap apart.",
        splits=0.02,
    )


@register_experiment("people-100k")
def people_100k(device: str = "cuda", data: Path | None = None) -> Experiment:
    """100,000 synthetic people of 20 portraits, settings chosen by each loss.

    Settings are tried on a tenth of the people, with the scales of all of them.
    """
    made = study(
        "people-100k",
        "100,000 synthetic people",
        f"{QUESTION}, with ten times the identities?",
        "Q-Margin gains more on CosFace than in `people-10k`: more negatives are easy.",
        size=LARGE,
    )
    return replace(made, search=study_search(f"data.num_classes={SIZE.num_classes}", SHORT))


def study(
    name: str,
    title: str,
    question: str,
    expected: str,
    *,
    size: Size = SIZE,
    losses: Sequence[str] = COMPARED,
    **noise: Option,
) -> Experiment:
    """Comparison of losses on this number of people, with label noise."""
    recipe = study_recipe(drawn_recipe(size, dtype="bf16", data_seed=0))
    options = {**recipe.data.options, **noise}
    return Experiment(
        name,
        replace(recipe, data=replace(recipe.data, options=options)),
        study_arms(recipe, losses),
        TESTED,
        title,
        TestProtocol(num_replicates=REPLICATES),
        study_search(SHORT),
        seeds=SEEDS,
        primary=PRIMARY,
        question=question,
        expected=expected,
    )
