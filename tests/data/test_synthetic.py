"""Identities from a seed."""

import numpy as np
import pytest
import torch

from qmargin.data.samples import check_labels
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.errors import ConfigError


@pytest.mark.parametrize("shape", [(16,), (3, 8, 8)])
def test_samples_are_functions_of_their_index_and_seed(shape: tuple[int, ...]) -> None:
    dataset = SyntheticIdentities(7, 3, shape=shape, seed=1)
    check_labels(dataset)
    for index in (0, 20):
        inputs, label = dataset.read(index, seed=4)
        assert tuple(inputs.shape) == shape
        assert inputs.dtype == torch.float32
        assert label == dataset.labels[index] == index // 3
        assert torch.equal(inputs, SyntheticIdentities(7, 3, shape=shape, seed=1).read(index, 4)[0])
        assert not torch.equal(inputs, dataset.read(index, seed=5)[0])
        other = SyntheticIdentities(7, 3, shape=shape, seed=2)
        assert not torch.equal(inputs, other.read(index, seed=4)[0])


def test_noise_and_augmentation_have_the_size_asked_for() -> None:
    dataset = SyntheticIdentities(2, 2, shape=(20_000,), noise=0.5, augmentation=0.1)
    same = dataset.read(0, 0)[0] - dataset.read(0, 1)[0]
    sibling = dataset.read(0, 0)[0] - dataset.read(1, 0)[0]
    stranger = dataset.read(0, 0)[0] - dataset.read(2, 0)[0]
    for difference, variance in [(same, 0.01), (sibling, 0.26), (stranger, 1.26)]:
        assert float(difference.var()) == pytest.approx(2 * variance, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "num_classes is 0"),
        ({"samples_per_class": 1.5}, "samples_per_class is 1.5"),
        ({"shape": ()}, "shape is empty"),
        ({"shape": (3, 0)}, "a size in shape is 0"),
        ({"noise": -1.0}, "noise is -1.0"),
        ({"augmentation": np.nan}, "augmentation is nan"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticIdentities(**{"num_classes": 2, "samples_per_class": 2, **options})


def test_samples_as_bytes_are_the_same_samples() -> None:
    options = {"num_classes": 3, "samples_per_class": 2, "shape": (3, 16, 16)}
    inputs, label = SyntheticIdentities(**options).read(4, 7)
    pictures, same = SyntheticIdentities(**options, as_bytes=True).read(4, 7)
    assert pictures.dtype == torch.uint8 and same == label
    expected = (32.0 * inputs + 128.0).clamp(0.0, 255.0)
    assert (pictures.float() - expected).abs().max() <= 0.5
