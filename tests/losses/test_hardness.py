"""The hardness of a loss: against drawn classes, and as a scale."""

import itertools
import math
import time

import pytest
import torch

import qmargin
from qmargin.errors import ConfigError
from qmargin.losses import hardness as module

SIZES = {"num_classes": 50_000, "embedding_dim": 64}
HUGE = {"num_classes": 100_000_000, "embedding_dim": 64}
LIMIT = {10: 1.5388, 1000: 3.2414, 100_000: 4.3829}  # expected maxima of normal numbers


def drawn(alpha, scale, num_classes, embedding_dim, num_rows):
    """Hardness, its standard error and the support over drawn rows."""
    generator = torch.Generator().manual_seed(1)
    means, supports, size = [], [], max(1, 1_000_000 // num_classes)
    for start in range(0, num_rows, size):
        shape = (min(size, num_rows - start), num_classes)
        z = torch.randn(shape, generator=generator, dtype=torch.float64)
        posterior = qmargin.softargmax(scale * z / math.sqrt(embedding_dim), alpha=alpha)
        means.append((posterior * z).sum(1))
        supports.append((posterior > 0).sum(1).double())
    mean = torch.cat(means)
    return float(mean.mean()), float(mean.std() / num_rows**0.5), float(torch.cat(supports).mean())


@pytest.mark.parametrize(
    "alpha, scale, num_classes, embedding_dim",
    [
        (1.0, 12.0, 20_000, 64),
        (1.0, 64.0, 1000, 128),  # scale / sqrt(d) is 5.66, the nearest of 1000 at 3.24
        (1.0, 30.0, 100, 64),
        (1.0, 8.0, 2, 64),
        (1.1, 6.0, 20_000, 64),
        (1.25, 2.0, 20_000, 64),
        (1.25, 35.0, 1000, 128),  # a few classes are left
        (1.5, 0.5, 20_000, 64),
        (1.5, 20.0, 300, 32),
        (2.0, 0.02, 20_000, 64),
        (2.0, 10.0, 10, 16),
        (3.0, 0.001, 2000, 64),
        (3.0, 1.0, 2000, 64),
    ],
)
def test_it_is_that_of_drawn_classes(alpha, scale, num_classes, embedding_dim):
    num_rows = max(100, min(100_000, 2_000_000 // num_classes))
    sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim}
    mean, error, support = drawn(alpha, scale, num_rows=num_rows, **sizes)
    found = qmargin.hardness(alpha, scale, **sizes)
    assert found.mean == pytest.approx(mean, abs=0.01 + 4.0 * error)
    assert found.support == pytest.approx(support, rel=0.04)


def test_softmax_is_the_exact_expectation():
    """Against ``k E[z exp(s z) / Z]`` by quadrature, with ``1/Z`` the integral of ``exp(-t Z)``."""
    z, num_classes = torch.linspace(-9.0, 9.0, 4001, dtype=torch.float64), 1000
    density = (-z * z / 2.0).exp() / math.sqrt(2.0 * math.pi) * (z[1] - z[0])
    for sharpness in (0.5, 2.0, 4.0, 8.0):
        t = torch.linspace(-90.0, 30.0, 6001, dtype=torch.float64)
        mean = torch.zeros(())
        for part in t.split(500):  # t is exp of these numbers
            kernel = (-(part[:, None] + sharpness * z).exp()).exp() * density
            weighted = kernel * (part[:, None] + sharpness * z).exp()
            others = kernel.sum(1).clamp(max=1.0) ** (num_classes - 1)
            mean = mean + (num_classes * (weighted * z).sum(1) * others).sum() * (t[1] - t[0])
        scale = sharpness * 8.0
        found = qmargin.hardness(1.0, scale, num_classes=num_classes, embedding_dim=64).mean
        assert found == pytest.approx(float(mean), abs=0.01)


@pytest.mark.parametrize("num_classes, limit", LIMIT.items())
@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
def test_it_ends_at_the_expected_maximum(alpha, num_classes, limit):
    found = qmargin.hardness(alpha, 1e6, num_classes=num_classes, embedding_dim=64).mean
    assert found == pytest.approx(limit, abs=0.01)
    assert limit < math.sqrt(2.0 * math.log(num_classes))


@pytest.mark.parametrize("num_classes", [2, 300, 100_000_000])
@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5, 2.0, 3.0])
def test_it_never_falls_with_the_scale(alpha, num_classes):
    sizes = {"num_classes": num_classes, "embedding_dim": 64}
    scales = torch.logspace(-3, 3, 61).tolist()
    means = [qmargin.hardness(alpha, scale, **sizes).mean for scale in scales]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(means))


@pytest.mark.parametrize("num_classes", [2, 10, 1000, 100_000_000])
def test_another_sample_of_rows_changes_little(monkeypatch, num_classes):
    def found(seed):
        monkeypatch.setattr(module, "_SEED", seed)
        module._rows_of.cache_clear()
        module._hardness.cache_clear()
        sizes = {"num_classes": num_classes, "embedding_dim": 64}
        settings = ((1.0, 8.0), (1.0, 32.0), (1.25, 8.0), (2.0, 1.0))
        return [qmargin.hardness(*setting, **sizes).mean for setting in settings]

    first, others = found(0), [found(seed) for seed in range(1, 6)]
    assert found(0) == first
    for other in others:
        assert other != first
        assert other == pytest.approx(first, abs=0.03)  # both samples are off
    module._rows_of.cache_clear()
    module._hardness.cache_clear()


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
    for mean in (0.05, 0.3, 0.5):
        scales.append(qmargin.scale_of_hardness(mean, alpha, **sizes))
        assert qmargin.hardness(alpha, scales[-1], **sizes).mean == pytest.approx(mean, rel=1e-6)
    assert scales == sorted(scales)


@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("short", [0.05, 1e-3, 1e-6])
def test_the_scale_is_found_up_to_the_nearest_class(alpha, short):
    sizes = {"num_classes": 5000, "embedding_dim": 128}
    limit = qmargin.hardness(alpha, 1e9, **sizes).mean
    scale = qmargin.scale_of_hardness(limit - short, alpha, **sizes)
    assert qmargin.hardness(alpha, scale, **sizes).mean == pytest.approx(limit - short, abs=1e-7)


def test_a_scale_is_found_in_milliseconds():
    sizes = {"num_classes": 123_457, "embedding_dim": 128}
    qmargin.scale_of_hardness(2.1, 1.25, **sizes)
    took = []
    for mean in (2.2, 2.3, 2.4, 2.5, 2.6):
        began = time.perf_counter()
        qmargin.scale_of_hardness(mean, 1.25, **sizes)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.3  # 15 ms on an idle core


def test_more_classes_are_harder_above_alpha_one_only():
    for alpha, grows in ((1.0, False), (1.25, True)):
        few, many = (
            qmargin.hardness(alpha, 4.0, num_classes=k, embedding_dim=64) for k in (1000, 1_000_000)
        )
        assert (many.mean > few.mean + 0.5) == grows


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: qmargin.hardness(0.5, 1.0, **SIZES), "alpha is 0.5; .* at least 1"),
        (lambda: qmargin.hardness(17.0, 1.0, **SIZES), "alpha"),
        (lambda: qmargin.hardness(1.25, 0.0, **SIZES), "scale is 0"),
        (lambda: qmargin.hardness(1.25, 1.0, num_classes=1, embedding_dim=64), "num_classes is 1"),
        (lambda: qmargin.hardness(1.25, 1.0, num_classes=9, embedding_dim=1), "embedding_dim is 1"),
        (lambda: qmargin.scale_of_hardness(0.0, 1.25, **SIZES), "hardness is 0; .* below 4.23"),
        (lambda: qmargin.scale_of_hardness(4.3, 1.25, **SIZES), "nearest of 50,000 classes"),
        (lambda: qmargin.scale_of_hardness(math.nan, 1.25, **SIZES), "hardness is nan"),
        (lambda: qmargin.scale_of_hardness(0.01, 8.0, **HUGE), "no scale gives alpha=8"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
