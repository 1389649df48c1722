"""Shares of satisfied rows, target posteriors and gaps: the same on every path, as by hand."""

import math

import pytest
import torch

import qmargin
from qmargin import AngularMargin, Chunked, Dense, MarginClassifier, PriorMargin, Sparse, TopK

PATHS = {"dense": Dense(), "chunked": Chunked(), "sparse": Sparse(), "top_k": TopK(percent=10.0)}
CLASSES, DIM, ROWS = 70, 16, 24


def made(alpha, margin, path, scale=24.0, **options):
    divergence = qmargin.Alpha(alpha)
    loss = qmargin.MarginLoss(divergence, margin, scale=scale, **options)
    head = MarginClassifier(DIM, CLASSES, loss, path=path, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        head.prototypes.copy_(torch.randn(CLASSES, DIM, dtype=torch.float64))
    labels = torch.arange(ROWS) % CLASSES
    noise = torch.randn(ROWS, DIM, dtype=torch.float64)
    # from rows on top of their prototype to rows that have nothing to do with it
    pull = torch.linspace(8.0, 0.0, ROWS, dtype=torch.float64)[:, None]
    unit = torch.nn.functional.normalize(head.prototypes.detach()[labels])
    return head, noise + pull * unit, labels


def by_hand(head, embeddings, labels):
    cosines = head.cosines(embeddings).detach()
    own = cosines.gather(1, labels[:, None]).squeeze(1)
    others = cosines.scatter(1, labels[:, None], -math.inf).amax(1)
    return own, own - others


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("margin", [PriorMargin(0.1), AngularMargin(0.1)], ids=["prior", "arc"])
@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0])
def test_paths_agree_with_the_definition(name, margin, alpha):
    if alpha == 1.0 and name in ("sparse", "top_k"):
        pytest.skip("not a path of softmax")
    head, embeddings, labels = made(alpha, margin, PATHS[name])
    embeddings.requires_grad_()
    loss = head(embeddings, labels)
    stats = head.last_step
    assert stats.path == name
    own, gaps = by_hand(head, embeddings, labels)
    torch.testing.assert_close(head.gaps(embeddings, labels), gaps)
    needed = [
        qmargin.reach(alpha, 24.0, margin, target_cosine=min(1.0, float(cosine))) for cosine in own
    ]
    satisfied = (gaps >= torch.tensor(needed, dtype=torch.float64)).double().mean()
    assert stats.satisfied_share == pytest.approx(float(satisfied))
    assert (alpha > 1.0) == (stats.satisfied_share > 0.0) and stats.satisfied_share < 1.0
    exact = head.loss.with_stats(head.cosines(embeddings), labels).target_posterior
    assert stats.target_posterior == pytest.approx(float(exact.mean()), abs=1e-6)
    assert loss.requires_grad  # the graph is as it was


@pytest.mark.parametrize("name", PATHS)
def test_ignored_rows_do_not_count(name):
    head, embeddings, labels = made(1.25, PriorMargin(0.05), PATHS[name])
    head(embeddings[:8], labels[:8])
    few = head.last_step
    ignored = labels.clone()
    ignored[8:] = head.loss.ignore_index
    head(embeddings, ignored)
    many = head.last_step
    assert many.satisfied_share == pytest.approx(few.satisfied_share)
    assert many.target_posterior == pytest.approx(few.target_posterior)
    gaps = head.gaps(embeddings, ignored)
    assert gaps[8:].isnan().all() and not gaps[:8].isnan().any()


def test_gaps_of_a_sampled_path_are_of_all_classes():
    path = qmargin.Sampled(rate=0.4, seed=1)
    head, embeddings, labels = made(1.0, AngularMargin(0.2), path)
    head(embeddings, labels)
    torch.testing.assert_close(head.gaps(embeddings, labels), by_hand(head, embeddings, labels)[1])
    assert head.last_step.satisfied_share == 0.0


def test_gaps_of_more_classes_than_a_block(monkeypatch):
    head, embeddings, labels = made(1.25, PriorMargin(0.1), Dense())
    whole = head.gaps(embeddings, labels)
    monkeypatch.setattr("qmargin.heads.classifier.BLOCK_CLASSES", 9)
    torch.testing.assert_close(head.gaps(embeddings, labels), whole)
    assert head.predict(embeddings).shape == labels.shape


def test_a_penalty_is_no_part_of_satisfaction():
    """MagFace's penalty is never zero, and its posterior may be."""
    loss = qmargin.MarginLoss(
        qmargin.Alpha(2.0), qmargin.MagFaceMargin(lower_margin=0.0, upper_margin=0.0), scale=40.0
    )
    head = MarginClassifier(DIM, 4, loss, path=Dense())
    labels = torch.arange(4)
    loss = head(head.prototypes.detach().clone(), labels)
    assert loss.item() > 0.0 and head.last_step.satisfied_share == 1.0
