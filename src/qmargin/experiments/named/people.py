"""Synthetic people: the comparison of losses on an embedded world that looks like faces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qmargin.experiments.experiment import SEARCH_SEED, Experiment, Search, TestProtocol
from qmargin.experiments.named import PEOPLE_SIZES, Size, drawn_recipe
from qmargin.experiments.named.design import SEEDS, study_arms, study_recipe
from qmargin.experiments.worlds import Made
from qmargin.registry import register_experiment
from qmargin.schema import Option

MEASURE = "tar@0.0001"
FINALIST_SEEDS = (SEARCH_SEED, SEARCH_SEED + 1)
TESTED = Made(500, 10, 2000, 10)
SIZE = PEOPLE_SIZES["cuda"]._replace(epochs=30)
LARGE = SIZE._replace(num_classes=100_000, epochs=6, batch_size=1024)
LARGE_LOSSES = ("arcface", "cosface", "q_margin", "entmax", "sampled")

QUESTION = "Does Q-Margin verify people at a low false acceptance rate better than CosFace does"


@register_experiment("people-10k")
def people_10k(device: str = "cuda", data: Path | None = None) -> Experiment:
    """10,000 synthetic people of 20 portraits, settings chosen by each loss."""
    return study(
        "people-10k",
        "10,000 synthetic people",
        f"{QUESTION}, with many easy negatives, some look-alikes and long training?",
        "Q-Margin is ahead of CosFace: most negatives are easy, a few look alike.",
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
    """100,000 synthetic people of 20 portraits, settings chosen by each loss."""
    made = study(
        "people-100k",
        "100,000 synthetic people",
        f"{QUESTION}, with ten times the identities?",
        "Q-Margin gains more on CosFace than in `people-10k`: more negatives are easy.",
        size=LARGE,
    )
    search = replace(made.search, settings=("run.epochs=1",), finalists=2, finalist_seeds=())
    return replace(made.with_arms(LARGE_LOSSES), search=search)


def study(
    name: str,
    title: str,
    question: str,
    expected: str,
    *,
    size: Size = SIZE,
    **noise: Option,
) -> Experiment:
    """Comparison of losses on this number of people, with label noise."""
    recipe = study_recipe(drawn_recipe(size, dtype="bf16", data_seed=0))
    options = {**recipe.data.options, **noise}
    return Experiment(
        name,
        replace(recipe, data=replace(recipe.data, options=options)),
        study_arms(recipe),
        TESTED,
        title,
        TestProtocol(),
        Search(
            measure=MEASURE,
            settings=("run.epochs=8",),
            finalists=3,
            finalist_seeds=FINALIST_SEEDS,
        ),
        seeds=SEEDS,
        question=question,
        expected=expected,
    )
