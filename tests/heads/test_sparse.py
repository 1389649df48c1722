"""The sparse step where it could go wrong: edges, ties, full lists, rounding (F1-F7)."""

import copy

import pytest
import torch

import qmargin
from helpers.heads import Batch, assert_same, make_head, make_loss, random_batch, step, truth_of
from qmargin.kernels.head_reference import GROUP

ALPHAS = (1.05, 1.25, 2.0, 3.0)
HALVES = (torch.float16, torch.bfloat16)


def sparse_head(loss, batch, dtype=torch.float64, **settings):
    return make_head(loss, batch, path=qmargin.Sparse(**settings), dtype=dtype)


def from_cosines(cosines, labels):
    """A row of embeddings with the given cosines, by prototypes in general position."""
    values = torch.tensor(cosines)
    rest = (1.0 - values.square()).clamp_min(0.0).sqrt()
    prototypes = torch.cat([values[:, None], torch.diag(rest)], 1)
    embeddings = torch.zeros(len(labels), len(cosines) + 1)
    embeddings[:, 0] = 1.0
    return Batch(embeddings, torch.tensor(labels), prototypes)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("capacity", [0, 1])
def test_lists_that_overflow_are_redone_by_blocks(alpha, capacity):
    """F7: nothing is thrown away silently, and the step says so."""
    batch = random_batch(257, seed=1)
    loss = make_loss(alpha, 4.0)
    outcome = step(sparse_head(loss, batch, list_capacity=capacity), batch)
    assert_same(outcome, truth_of(loss, batch), tolerance=1e-9)
    assert outcome.stats.path == "chunked" and "lists" in outcome.stats.reason
    assert outcome.stats.num_overflowed == len(batch.labels)


def test_an_overflow_does_not_show_a_margin_the_batch_twice():
    batch = random_batch(97)
    for margin in (qmargin.AdaFaceMargin(), qmargin.ElasticMargin(seed=5)):
        losses, margins = [], [copy.deepcopy(margin) for _ in range(2)]
        for own, capacity in zip(margins, (0, 10**6), strict=True):
            head = sparse_head(make_loss(1.25, margin=own), batch, list_capacity=capacity)
            losses.append([step(head, batch).loss for _ in range(3)])
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0.0)
        assert str(margins[0].state_dict()) == str(margins[1].state_dict())


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0, 3.0])
def test_classes_exactly_at_the_edge_stay_out(alpha):
    """M3: at ``tau + edge`` the posterior is zero."""
    scale = 1.0 / (alpha - 1.0)  # a class alone has tau at its own logit: the edge is at cosine 0
    batch = from_cosines([1.0, *([0.0] * 70)], [5, 40, 70])
    loss = make_loss(alpha, scale, qmargin.CosineMargin(0.0))
    outcome = step(sparse_head(loss, batch), batch)
    assert_same(outcome, truth_of(loss, batch), tolerance=1e-9)
    assert outcome.stats.support_max == 1
    batch.prototypes[50:60, 0] = 1e-4
    outcome = step(sparse_head(loss, batch), batch)
    assert_same(outcome, truth_of(loss, batch), tolerance=1e-7)
    assert outcome.stats.support_max == 11


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("screen", [None, *HALVES])
def test_all_prototypes_equal(alpha, screen):
    """Every class ties with every other: the support is all of them, whatever the rounding."""
    batch = random_batch(131, seed=2)
    batch = Batch(batch.embeddings, batch.labels, batch.prototypes[:1].expand(131, -1).contiguous())
    loss = make_loss(alpha, 8.0)
    outcome = step(sparse_head(loss, batch, torch.float32, screen_dtype=screen), batch)
    assert_same(outcome, truth_of(loss, batch), tolerance=1e-4)
    assert outcome.stats.support_max >= 130


@pytest.mark.parametrize("num_classes", [2 * GROUP, 2 * GROUP + 1, 3 * GROUP - 1])
def test_a_target_in_every_position_of_a_group(num_classes):
    batch = random_batch(num_classes, rows=num_classes, seed=3)
    batch = Batch(batch.embeddings, torch.arange(num_classes), batch.prototypes)
    for scale in (2.0, 16.0):
        loss = make_loss(1.5, scale)
        assert_same(step(sparse_head(loss, batch), batch), truth_of(loss, batch), tolerance=1e-9)


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 2.0])
def test_supports_of_one_class_and_of_all(alpha):
    batch = random_batch(257, dim=64, rows=5, seed=5)
    own = Batch(batch.prototypes[batch.labels], batch.labels, batch.prototypes)
    few = make_loss(alpha, 30.0 / (alpha - 1.0), qmargin.CosineMargin(0.0))
    satisfied = step(sparse_head(few, own), own)
    assert satisfied.loss == 0.0 and (satisfied.prototypes == 0).all()
    assert satisfied.stats.support_max == 1
    many = make_loss(alpha, 0.1)
    outcome = step(sparse_head(many, batch), batch)
    assert_same(outcome, truth_of(many, batch), tolerance=1e-9)
    if alpha < 2.0:
        assert outcome.stats.support_mean == 257.0 and outcome.stats.active_share == 1.0


@pytest.mark.parametrize("screen", HALVES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_rounded_screen_changes_nothing(alpha, screen):
    """F3: the slack from measured rounding errors keeps every active class."""
    for seed, num_classes in enumerate((33, 257, 1031)):
        batch = random_batch(num_classes, dim=64, rows=8, seed=seed)
        for scale in (4.0, 32.0):
            loss = make_loss(alpha, scale, qmargin.PriorMargin(0.02))
            plain = step(sparse_head(loss, batch, torch.float32), batch)
            head = sparse_head(loss, batch, torch.float32, screen_dtype=screen)
            outcome = step(head, batch)
            assert head.copy.dtype == screen
            assert_same(outcome, plain, tolerance=1e-6, note=(num_classes, scale))
            assert_same(outcome, truth_of(loss, batch), tolerance=2e-5)
            assert outcome.stats.support_mean == plain.stats.support_mean


@pytest.mark.parametrize("screen", HALVES)
@pytest.mark.parametrize("scale", [20.0, 2e3, 2e5])
def test_prototypes_that_the_screen_cannot_tell_apart(screen, scale):
    """Adversarial: prototypes around a few centres differ by less than a rounding error, so the
    order of the rounded cosines says nothing, and the scale makes it matter."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        centres = torch.nn.functional.normalize(torch.randn(5, 64, generator=generator))
        chosen = torch.randint(5, (257,), generator=generator)
        noise = 0.3 * torch.finfo(screen).eps * torch.randn(257, 64, generator=generator) / 8
        prototypes = centres[chosen] + noise
        embeddings = prototypes[:6] + 0.05 * torch.randn(6, 64, generator=generator)
        batch = Batch(embeddings, torch.randint(257, (6,), generator=generator), prototypes)
        for alpha in (1.25, 1.5, 2.0):
            loss = make_loss(alpha, scale, qmargin.CosineMargin(0.1))
            plain = step(sparse_head(loss, batch, screen_dtype=torch.float64), batch)
            assert_same(plain, truth_of(loss, batch), tolerance=1e-8)
            outcome = step(sparse_head(loss, batch, screen_dtype=screen), batch)
            assert_same(outcome, plain, tolerance=1e-10, note=(seed, alpha))
            assert outcome.stats.support_mean == plain.stats.support_mean


def test_stats_count_what_was_done():
    batch = random_batch(1031, dim=64, rows=8)
    outcome = step(sparse_head(make_loss(1.5, 32.0), batch), batch)
    stats = outcome.stats
    has_gradient = (outcome.prototypes != 0).any(1)
    has_gradient[batch.labels] = True
    assert stats.active_share == pytest.approx(int(has_gradient.sum()) / 1031)
    assert stats.num_candidates < 1031 / 4 and stats.mass_error < 1e-12
    assert 1.0 <= stats.support_mean <= stats.support_max
