"""What a sweep measures: all pairs of samples of identities that no trial is trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from qmargin.data.faces import normalised
from qmargin.data.order import derived_seed
from qmargin.data.samples import Dataset, Sample, read_sample
from qmargin.errors import ConfigError
from qmargin.evaluation.all_pairs import evaluate_all_pairs
from qmargin.evaluation.views import embed_turned
from qmargin.metrics.sufficiency import sufficiency
from qmargin.training.build import build_dataset
from qmargin.training.hooks import HookState
from qmargin.training.image_data import STORED
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import apply_settings

FARS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
EER = "eer"
BATCH = 256
VALIDATION = 0x76616C  # tells the identities of validation from those of training
NUM_CLASSES, NUM_SAMPLES = 200, 10  # of data that is made: two million pairs
# what makes training data worse on purpose, switched off
PLAIN_IMAGES = {"flip": 0.0}
PLAIN_SPEECH = {
    "speed_perturbation": False,
    "keep_speed_classes": False,
    "augment": 0.0,
    "dither": 0.0,
    "mask_probability": 0.0,
}


@dataclass(frozen=True)
class TrialData:
    """Data of a trial; the identities of both parts are disjoint.

    Attributes:
        validation: Samples as they are, without augmentation.
        train: None for what the recipe itself describes.
        num_views: Of a validation sample, see ``embed_turned``.
    """

    validation: Dataset
    train: Dataset | None = None
    num_views: int = 1


DataSource: TypeAlias = Callable[[Recipe], TrialData]
"""The data of a trial's recipe; a function at the top of a module, so that workers can have it."""


@dataclass(frozen=True)
class RecipeData:
    """The recipe's own data, and other identities of the same kind.

    Args:
        settings: What of the recipe's data is different for validation, such as
            ``data.path=faces/validation``. Synthetic and stroke identities need none: others are
            made.
    """

    settings: tuple[str, ...] = ()

    def __call__(self, recipe: Recipe) -> TrialData:
        """The data of a trial."""
        return TrialData(build_dataset(validation_recipe(recipe, self.settings)))


def validation_recipe(recipe: Recipe, settings: Sequence[str] = ()) -> Recipe:
    """A recipe whose data are the validation identities, without augmentation.

    Examples:
        >>> from qmargin.recipes.debug import debug
        >>> part = validation_recipe(debug()).data
        >>> part.num_classes, part.options["samples_per_class"], part.options["augmentation"]
        (200, 10, 0.0)
    """
    for setting in settings:
        if not setting.startswith("data."):
            raise ConfigError(
                f"the validation setting is {setting!r}; give settings of the data, as in "
                "data.path=DIR"
            )
    part = recipe.data
    options = dict(part.options)
    if part.kind == "images":
        options = {name: options[name] for name in (*STORED, "size") if name in options}
        options |= PLAIN_IMAGES
    elif part.kind == "audio":
        options |= PLAIN_SPEECH
    elif part.kind == "strokes":
        options |= {"split": "validation", "shift": 0, "samples_per_class": NUM_SAMPLES}
    else:
        seed = derived_seed(recipe.seed, VALIDATION)
        options |= {"seed": seed, "augmentation": 0.0, "samples_per_class": NUM_SAMPLES}
    is_stored = part.path is not None
    data = replace(part, options=options, num_classes=None if is_stored else NUM_CLASSES)
    if is_stored and not settings:
        raise ConfigError(
            f"the {part.kind} at {part.path} are for training; name those of other identities with "
            "--validation PATH"
        )
    changed = apply_settings(replace(recipe, data=data), settings)
    if is_stored and changed.data == data:
        raise ConfigError(
            f"the validation data are those of the training, {part.path}; name other identities"
        )
    return changed


class PairsHook:
    """EER, and TARs that are measured well, over all pairs of a dataset, as a hook of ``train``.

    Args:
        dataset: Of validation identities.
        num_views: Of a sample, see ``embed_turned``.
        seed: Of the readings; the same for every call.
    """

    def __init__(self, dataset: Dataset, *, num_views: int = 1, seed: int = 0) -> None:
        self.dataset, self.num_views, self.seed = dataset, num_views, seed

    def __call__(self, state: HookState) -> dict[str, float]:
        """Measures by name: ``eer``, ``tar@0.001`` and the like."""
        embeddings, labels = self._embed(state)
        num_genuine, num_impostors = num_pairs(labels)
        if not num_genuine or not num_impostors:
            raise ConfigError(
                f"the validation data have {num_genuine:,} pairs of one identity and "
                f"{num_impostors:,} of two; both are needed"
            )
        fars = fars_for(num_impostors)
        device = state.process.device.type
        found = evaluate_all_pairs(embeddings, labels, fars, num_hardest=0, device=device)
        return {EER: found.eer.eer, **{tar_name(at.far_target): at.tar for at in found.tar}}

    def _embed(self, state: HookState) -> tuple[Tensor, list[int]]:
        device, rows, labels = state.process.device, [], []
        for start in range(0, len(self.dataset), BATCH):
            indices = range(start, min(start + BATCH, len(self.dataset)))
            samples = [self._read(index) for index in indices]
            inputs = torch.from_numpy(np.stack([np.asarray(one.inputs) for one in samples]))
            inputs = inputs.to(device)
            if inputs.dtype == torch.uint8:  # pictures travel as bytes, as in training
                inputs = normalised(inputs)
            rows.append(embed_turned(state.backbone, inputs, self.num_views).cpu())
            labels += [sample.label for sample in samples]
        return torch.cat(rows), labels

    def _read(self, index: int) -> Sample:
        return read_sample(self.dataset, index, seed=self.seed, epoch=0)


def num_pairs(labels: Sequence[int]) -> tuple[int, int]:
    """Pairs of one identity, and of two.

    Examples:
        >>> num_pairs([0, 0, 1])
        (1, 2)
    """
    counts = torch.tensor(labels).bincount()
    genuine = int((counts * (counts - 1)).sum()) // 2
    return genuine, len(labels) * (len(labels) - 1) // 2 - genuine


def tar_name(far: float) -> str:
    """Name of the TAR at a FAR.

    Examples:
        >>> tar_name(1e-3), far_of("tar@0.001"), far_of("eer")
        ('tar@0.001', 0.001, None)
    """
    return f"tar@{far:g}"


def far_of(measure: str) -> float | None:
    """The FAR of a TAR's name; None for other measures."""
    kind, _, text = measure.partition("@")
    try:
        return float(text) if kind == "tar" else None
    except ValueError:
        return None


def fars_for(num_impostors: int) -> list[float]:
    """The rates that so many impostor pairs measure well.

    Examples:
        >>> fars_for(2_000_000)
        [0.01, 0.001, 0.0001]
    """
    return [far for far in FARS if sufficiency(far, num_impostors).status == "ok"]


def choose_measure(asked: str | None, num_impostors: int) -> str:
    """A measure by the name that results have, or the strictest TAR that is measured well.

    Examples:
        >>> choose_measure("tar@1e-3", 2_000_000), choose_measure(None, 2_000_000)
        ('tar@0.001', 'tar@0.0001')
        >>> choose_measure(None, 100)
        'eer'
    """
    names = [tar_name(far) for far in fars_for(num_impostors)]
    if asked is None:
        return names[-1] if names else EER
    far = far_of(asked)
    name = asked if far is None else tar_name(far)
    if name not in (EER, *names):
        raise ConfigError(
            f"the measure is {asked!r}; with {num_impostors:,} impostor pairs of validation "
            f"samples there are {', '.join((EER, *names))}"
        )
    return name


def is_better(measure: str, value: float, other: float) -> bool:
    """Whether a value of a measure is better than another: errors are small, acceptances large."""
    return value < other if measure == EER else value > other
