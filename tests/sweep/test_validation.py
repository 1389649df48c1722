"""What a sweep measures on: other identities, as they are, all of their pairs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.sweeps import few_identities
from qmargin.data.strokes import StrokeIdentities
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.errors import ConfigError
from qmargin.metrics import eer, tar_at_far
from qmargin.recipes import get_recipe
from qmargin.sweep.validation import (
    PairsHook,
    RecipeData,
    choose_measure,
    is_better,
    validation_recipe,
)
from qmargin.training.build import build_backbone, build_dataset, build_head
from qmargin.training.hooks import HookState
from qmargin.training.process import Process
from qmargin.training.recipe import DataPart, ModelPart


def test_synthetic_identities_are_other_ones_without_augmentation() -> None:
    recipe = get_recipe("debug")
    train, other = build_dataset(recipe), RecipeData()(recipe).validation
    assert isinstance(other, SyntheticIdentities) and isinstance(train, SyntheticIdentities)
    assert other.seed != train.seed and other.augmentation == 0.0
    assert torch.equal(other.read(3, seed=1)[0], other.read(3, seed=2)[0])
    again = RecipeData()(replace(recipe, seed=1)).validation
    assert isinstance(again, SyntheticIdentities) and again.seed != other.seed


def test_strokes_are_of_the_validation_split() -> None:
    data = DataPart("strokes", 16, num_classes=50, options={"samples_per_class": 4, "shift": 2})
    recipe = replace(get_recipe("debug"), data=data, model=ModelPart("stroke_net", 32), seed=5)
    other = RecipeData()(recipe).validation
    assert isinstance(other, StrokeIdentities)
    assert (other.split, other.shift, other.seed) == ("validation", 0, 5)


def test_stored_data_need_a_place_of_their_own() -> None:
    recipe = get_recipe("faces_r18_q_margin")
    with pytest.raises(ConfigError, match="--validation PATH"):
        validation_recipe(recipe)
    with pytest.raises(ConfigError, match="are those of the training"):
        validation_recipe(recipe, ["data.path=data/faces"])
    with pytest.raises(ConfigError, match="give settings of the data"):
        validation_recipe(recipe, ["loss.margin=0.1"])
    part = validation_recipe(recipe, ["data.path=data/other"]).data
    assert part.path == "data/other" and part.options == {"flip": 0.0}
    speech = get_recipe("speakers_r34_q_margin_a150")
    options = validation_recipe(speech, ["data.options.split=dev"]).data.options
    assert options["augment"] == 0.0 and options["split"] == "dev"


def test_measures_are_those_of_all_pairs() -> None:
    """Against the metrics of explicit lists of scores."""
    recipe = get_recipe("debug")
    dataset = few_identities(recipe).validation
    backbone = build_backbone(recipe).eval()
    state = HookState(0, 0, recipe, Process(), backbone, build_head(recipe), None)
    with torch.no_grad():
        found = PairsHook(dataset)(state)
        inputs = torch.stack([dataset.read(index, seed=0)[0] for index in range(len(dataset))])
        unit = torch.nn.functional.normalize(backbone(inputs).double()).numpy()
    first, second = np.triu_indices(len(dataset), k=1)
    scores = (unit @ unit.T)[first, second]
    is_genuine = dataset.labels[first] == dataset.labels[second]
    genuine, impostors = scores[is_genuine], scores[~is_genuine]
    assert list(found) == ["eer", "tar@0.01"]  # 17,400 impostors measure no smaller rate well
    assert found["eer"] == pytest.approx(eer(genuine, impostors).eer, abs=1e-6)
    expected = tar_at_far(genuine, impostors, 1e-2).tar
    assert found["tar@0.01"] == pytest.approx(expected, abs=2 / len(genuine))


def test_a_measure_must_be_measurable() -> None:
    assert choose_measure("tar@1e-2", 20_000) == "tar@0.01"
    with pytest.raises(ConfigError, match=r"17,400 impostor pairs .* there are eer, tar@0\.01"):
        choose_measure("tar@1e-4", 17_400)
    with pytest.raises(ConfigError, match="the measure is 'accuracy'"):
        choose_measure("accuracy", 10**9)
    assert is_better("eer", 0.1, 0.2) and is_better("tar@0.01", 0.2, 0.1)


def test_a_set_of_single_samples_is_refused(tmp_path: Path) -> None:
    recipe = get_recipe("debug")
    hook = PairsHook(SyntheticIdentities(5, 1, shape=(32,)))
    state = HookState(
        0, 0, recipe, Process(), build_backbone(recipe).eval(), build_head(recipe), None
    )
    with torch.no_grad(), pytest.raises(ConfigError, match="0 pairs of one identity and 10 of two"):
        hook(state)
