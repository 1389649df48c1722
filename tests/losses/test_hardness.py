"""The hardness of a loss: against drawn classes, and as a scale."""

import math

import pytest
import torch

import qmargin
from qmargin.errors import ConfigError

SIZES = {"num_classes": 50_000, "embedding_dim": 64}


@pytest.mark.parametrize(
    "alpha, scale", [(1.0, 12.0), (1.1, 6.0), (1.25, 2.0), (1.5, 0.5), (2.0, 0.02), (3.0, 0.001)]
)
def test_it_is_that_of_drawn_classes(alpha, scale):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(8, SIZES["num_classes"], generator=generator, dtype=torch.float64)
    posterior = qmargin.softargmax(scale * z / math.sqrt(SIZES["embedding_dim"]), alpha=alpha)
    found = qmargin.hardness(alpha, scale, **SIZES)
    assert found.mean == pytest.approx(float((posterior * z).sum(1).mean()), rel=0.02)
    assert found.support == pytest.approx(float((posterior > 0).sum(1).double().mean()), rel=0.02)


@pytest.mark.parametrize(
    "num_classes, embedding_dim, settings",
    [(2_059_906, 512, [(1.25, 35.0), (2.0, 1.9)]), (5994, 256, [(1.5, 10.0), (1.75, 5.0)])],
    ids=["faces", "speakers"],
)
def test_what_the_paper_chose_for_several_alphas_is_equally_hard(
    num_classes, embedding_dim, settings
):
    sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim}
    first, second = (qmargin.hardness(*setting, **sizes).mean for setting in settings)
    assert first == pytest.approx(second, abs=0.05)


@pytest.mark.parametrize("num_classes", [2, 1000, 10_000_000])
@pytest.mark.parametrize("alpha", [1.0, 1.02, 1.25, 4.0])
def test_scale_and_hardness_are_inverse(alpha, num_classes):
    sizes = {"num_classes": num_classes, "embedding_dim": 128}
    scales = []
    for mean in (0.1, 0.7, 1.1):
        scales.append(qmargin.scale_of_hardness(mean, alpha, **sizes))
        assert qmargin.hardness(alpha, scales[-1], **sizes).mean == pytest.approx(mean, rel=1e-8)
    assert scales == sorted(scales)


def test_more_classes_are_harder_above_alpha_one_only():
    for alpha, grows in ((1.0, False), (1.25, True)):
        few, many = (
            qmargin.hardness(alpha, 4.0, num_classes=k, embedding_dim=64) for k in (1000, 1_000_000)
        )
        assert (many.mean > few.mean + 0.5) == grows


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: qmargin.hardness(0.5, 1.0, **SIZES), "alpha is 0.5; .* from alpha 1"),
        (lambda: qmargin.hardness(17.0, 1.0, **SIZES), "alpha"),
        (lambda: qmargin.hardness(1.25, 0.0, **SIZES), "scale is 0"),
        (lambda: qmargin.hardness(1.25, 1.0, num_classes=1, embedding_dim=64), "num_classes is 1"),
        (lambda: qmargin.hardness(1.25, 1.0, num_classes=9, embedding_dim=1), "embedding_dim is 1"),
        (lambda: qmargin.scale_of_hardness(0.0, 1.25, **SIZES), "hardness is 0; .* below 4.65"),
        (lambda: qmargin.scale_of_hardness(4.7, 1.25, **SIZES), "nearest of 50,000 classes"),
        (lambda: qmargin.scale_of_hardness(math.nan, 1.25, **SIZES), "hardness is nan"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
