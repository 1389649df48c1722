"""Reference measures on synthetic people: which of them help, and on which data.

Margin and scale of CosFace and AdaFace are those of the demo. Q-Margin has a reach of 0.66, which a
short run can attain: the demo's Q-Margin has 1.35, so that no row is ever satisfied and the
target's measure has little effect. An arm chooses the strength of its reference, or without one the
margin, from three values. Data with equal numbers of portraits have no ``ClassPrior``, because its
measures are one there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from qmargin.experiments.experiment import TITLES, Arm, Experiment, Search, TestProtocol
from qmargin.experiments.named import (
    MARGIN_KINDS,
    PEOPLE_SIZES,
    Setting,
    Size,
    drawn_recipe,
    setting_point,
)
from qmargin.experiments.named.demo import DEMO_SETTINGS
from qmargin.experiments.space import Point, value_text
from qmargin.experiments.worlds import Made
from qmargin.registry import register_experiment
from qmargin.report.systems import Primary
from qmargin.schema import Option

SEEDS = (0, 1, 2)
NUM_REPLICATES = 400  # of the bootstrap, as in the simulations of intervals
Q_MARGIN: Setting = (1.25, 10.0, 0.2)
SHARES = (0.5, 1.0, 1.5)  # of the margin, of arms without a reference
LOOK_ALIKE = "loss.reference.look_alike"


class Scale(NamedTuple):
    """Size of training and test on a kind of device, and the FAR of the comparison."""

    size: Size
    pixels: int
    world: Made
    far: float
    dtype: Literal["fp32", "bf16"]
    search: tuple[str, ...] = ()  # settings of a search


SCALES = {
    "cpu": Scale(
        PEOPLE_SIZES["cpu"]._replace(num_classes=1000, epochs=5),
        pixels=32,
        world=Made(300, 10, 1000, 8),
        far=1e-3,
        dtype="fp32",
    ),
    "cuda": Scale(
        PEOPLE_SIZES["cuda"],
        pixels=64,
        world=Made(500, 10, 2000, 10),
        far=1e-4,
        dtype="bf16",
        search=("run.epochs=8",),
    ),
}


class Referenced(NamedTuple):
    """A loss with a reference, and the strengths that it tries."""

    loss: str
    title: str
    reference: str  # as in a recipe
    key: str  # of the number that is searched
    strengths: tuple[float, ...]


ARMS = {
    "q_margin_class_prior": Referenced(
        "q_margin",
        "Q-Margin, class prior",
        "class_prior",
        "loss.reference.class_prior.strength",
        (0.25, 0.5, 1.0),
    ),
    "q_margin_look_alike": Referenced(
        "q_margin",
        "Q-Margin, look-alikes",
        "{look_alike: {threshold: 0.1}}",
        f"{LOOK_ALIKE}.strength",
        (0.1, 0.3, 1.0),
    ),
    "q_margin_damped": Referenced(
        "q_margin",
        "Q-Margin, damped look-alikes",
        "{look_alike: {strength: 0, split_threshold: 0.5}}",
        f"{LOOK_ALIKE}.damping",
        (0.3, 1.0, 3.0),
    ),
    "q_margin_quality": Referenced(
        "q_margin",
        "Q-Margin, quality",
        "quality",
        "loss.reference.quality.strength",
        (0.15, 0.33, 0.66),
    ),
    "cosface_class_prior": Referenced(
        "cosface",
        "CosFace, logit adjustment",
        "class_prior",
        "loss.reference.class_prior.strength",
        (0.25, 0.5, 1.0),
    ),
}
PLAIN = ("q_margin", "adaface", "cosface")
USUAL = ("q_margin_look_alike", "q_margin_quality")


@register_experiment("references-clean")
def references_clean(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Q-Margin with references for look-alikes and for quality, on people with correct labels."""
    return study(
        "references-clean",
        "synthetic people",
        "Does a reference for look-alikes or for quality help where all labels are right?",
        "No difference between Q-Margin with and without LookAlike is shown: few people look "
        "alike, and those who do are most of the support already.",
        focus="q_margin_look_alike",
        rivals=("q_margin", "cosface"),
        device=device,
    )


@register_experiment("references-long-tail")
def references_long_tail(device: str = "cpu", data: Path | None = None) -> Experiment:
    """The same with 3 to 200 portraits per person, and references for these numbers as well."""
    return study(
        "references-long-tail",
        "synthetic people, 3 to 200 portraits each",
        "Does a class prior help where people have very different numbers of portraits?",
        "Q-Margin with ClassPrior is ahead of Q-Margin: rare people have to lead by more.",
        focus="q_margin_class_prior",
        rivals=("q_margin", "cosface_class_prior"),
        more=("q_margin_class_prior", "cosface_class_prior"),
        device=device,
        count_spread=0.9,
    )


@register_experiment("references-flips")
def references_flips(device: str = "cpu", data: Path | None = None) -> Experiment:
    """The same people; a tenth of the training portraits show another person."""
    return study(
        "references-flips",
        "synthetic people, 10 % of the labels wrong",
        "Does a reference for look-alikes or for quality help where labels are wrong?",
        "No difference between Q-Margin with and without Quality is shown: the length of an "
        "embedding does not depend on its label.",
        focus="q_margin_quality",
        rivals=("q_margin", "adaface"),
        device=device,
        flips=0.1,
    )


@register_experiment("references-splits")
def references_splits(device: str = "cpu", data: Path | None = None) -> Experiment:
    """The same people; 2 % of the labels have a second label for the same person."""
    return study(
        "references-splits",
        "synthetic people, 2 % of the identities split",
        "Does it help to lower the measure of nearly identical people?",
        "No difference between Q-Margin with and without damping is shown: 2 % of the labels are "
        "a small part of the loss.",
        focus="q_margin_damped",
        rivals=("q_margin", "cosface"),
        more=("q_margin_damped",),
        device=device,
        splits=0.02,
    )


@register_experiment("references-quality")
def references_quality(device: str = "cpu", data: Path | None = None) -> Experiment:
    """The same people; half of the portraits, also in the test, have half the quality."""
    return study(
        "references-quality",
        "synthetic people, half of the portraits of low quality",
        "Does a margin that follows the quality help where portraits are good or bad?",
        "Q-Margin with Quality is ahead of Q-Margin: bad portraits, whose gap is out of reach, "
        "ask for less.",
        focus="q_margin_quality",
        rivals=("q_margin", "adaface"),
        device=device,
        poor=0.5,
    )


def study(
    name: str,
    title: str,
    question: str,
    expected: str,
    *,
    focus: str,
    rivals: tuple[str, ...],
    more: Sequence[str] = (),
    device: str = "cpu",
    scale: Scale | None = None,
    **options: Option,
) -> Experiment:
    """Comparison of references on people with these options of the data."""
    scale = scale or SCALES[device]
    recipe = drawn_recipe(scale.size, dtype=scale.dtype, data_seed=0)
    options = {**recipe.data.options, "size": scale.pixels, **options}
    return Experiment(
        name,
        replace(recipe, data=replace(recipe.data, options=options)),
        arms_for(device, (*PLAIN, *USUAL, *more)),
        scale.world,
        title,
        TestProtocol(num_replicates=NUM_REPLICATES),
        Search(measure=f"tar@{scale.far:g}", settings=scale.search),
        seeds=SEEDS,
        primary=Primary(focus, rivals, scale.far),
        question=question,
        expected=expected,
    )


def arms_for(device: str, names: Sequence[str]) -> dict[str, Arm]:
    """Arms of these names; AdaFace has the settings of CosFace."""
    cosface = DEMO_SETTINGS["people"][device]["cosface"]
    settings = {"q_margin": Q_MARGIN, "cosface": cosface, "adaface": cosface}
    arms = {}
    for name in names:
        loss, given = name, ARMS.get(name)
        if given is not None:
            loss = given.loss
        alpha, scale, margin = settings[loss]
        kind = f"loss.margin_kind={MARGIN_KINDS[loss]}"
        if given is None:
            margins = [(alpha, scale, round(share * margin, 6)) for share in SHARES]
            arms[name] = Arm(TITLES[loss], (kind,), points=tuple(map(setting_point, margins)))
            continue
        fixed = [f"{key}={text}" for key, text in setting_point((alpha, scale, margin)).items()]
        points: list[Point] = [{given.key: value_text(number)} for number in given.strengths]
        reference = f"loss.reference={given.reference}"
        arms[name] = Arm(given.title, (kind, *fixed, reference), points=tuple(points))
    return arms
