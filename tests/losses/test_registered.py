"""Margins and divergences by name, with the number that recipes give alone."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import qmargin
from helpers.cases import spread_cosines
from qmargin import registry
from qmargin.errors import ConfigError
from qmargin.losses.margins import StatelessMargin, main_number

MARGINS = {
    "prior": "margin",
    "cosine": "margin",
    "angular": "margin",
    "multiplied": "multiplier",
    "adaface": "margin",
    "magface": "lower_margin",
    "elastic": "margin",
}
DIVERGENCES = {"alpha": "alpha", "jensen_shannon": None}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "extension_package")
    yield
    for name in [name for name in sys.modules if name.startswith("qmargin_example")]:
        del sys.modules[name]


def test_every_kind_is_registered_with_its_main_number():
    assert MARGINS.items() <= {n: main_number(registry.margins.get(n)) for n in MARGINS}.items()
    for name, main in DIVERGENCES.items():
        assert main_number(registry.divergences.get(name)) == main
    cosines, labels = spread_cosines()
    for name, main in MARGINS.items():
        margin = registry.margins.get(name)(**{main: 0.3 if name != "multiplied" else 1.2})
        loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), margin, scale=8.0)
        assert loss_fn(cosines, labels, torch.full((5,), 20.0)).isfinite()


def test_a_margin_from_a_file_of_its_own(example):
    from qmargin_example.margin import HalfCosine

    _, labels = spread_cosines()
    margin = HalfCosine(0.2)
    term = margin(torch.tensor([0.5, -0.5]), 10.0)
    torch.testing.assert_close(term.logits, torch.tensor([3.0, -6.0]))
    assert main_number(HalfCosine) == "margin" and margin == HalfCosine(0.2)
    both = qmargin.PriorMargin(0.1) + HalfCosine(qmargin.PerClass(torch.full((12,), 0.2)))
    for path in ("sparse", "chunked", "dense"):
        loss = qmargin.MarginLoss(qmargin.Alpha(1.5), both, scale=8.0)
        head = qmargin.MarginClassifier(4, 12, loss, path=path)
        head(torch.randn(5, 4), labels).backward()


class Unfinished(StatelessMargin):
    margin = 0.1

    def term(self, cosines, scale, labels, norms):
        return cosines * scale


def test_a_margin_that_is_not_written_to_the_end_is_refused():
    with pytest.raises(ConfigError, match=r"Unfinished.* not a dataclass"):
        qmargin.MarginLoss(qmargin.Alpha(1.25), Unfinished(), scale=8.0)
    loss_fn = qmargin.MarginLoss(qmargin.Alpha(1.25), dataclass(Unfinished)(), scale=8.0)
    with pytest.raises(ConfigError, match=r"Unfinished\.term returns a Tensor"):
        loss_fn(*spread_cosines())


def test_a_divergence_from_a_file_of_its_own(example):
    """Pearson's with weight one is the alpha-divergence at 2, through the generic solver."""
    from qmargin_example.divergence import Pearson

    cosines, labels = spread_cosines()
    losses = [
        qmargin.MarginLoss(divergence, qmargin.PriorMargin(0.1), scale=5.0, reduction="none")
        for divergence in (Pearson(), qmargin.Alpha(2.0))
    ]
    found, expected = (loss_fn(cosines.double(), labels) for loss_fn in losses)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert main_number(Pearson) == "weight"
