"""Where the search for a root over blocks begins, and how it ends."""

from unittest import mock

import pytest
import torch

import qmargin
from helpers.heads import assert_same, make_head, make_loss, random_batch, step, truth_of
from qmargin.heads import chunked
from qmargin.heads.chunked import Chunks, RootSearch, solve
from qmargin.kernels.head_reference import Target


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks of classes, the last one incomplete."""
    monkeypatch.setitem(chunked.CHUNK_LOGITS, "cpu", 1 << 10)


def spy(method):
    cls, name = (RootSearch if hasattr(RootSearch, method) else Chunks), method
    return mock.patch.object(cls, name, autospec=True, side_effect=getattr(cls, name))


@pytest.mark.parametrize(("alpha", "scale"), [(1.25, 1.0), (1.5, 0.2), (2.0, 0.003)])
def test_where_many_classes_are_active_a_sample_starts_the_search(alpha, scale):
    batch = random_batch(8001, rows=5)
    batch.labels[0] = 16 * 71  # in the sample
    loss = make_loss(alpha, scale)
    head = make_head(loss, batch, path="chunked", dtype=torch.float64)
    with spy("row_sums") as sums:
        outcome = step(head, batch)
        from_sample = [call.args[0].weight for call in sums.call_args_list]
        sums.reset_mock()
        with mock.patch.object(chunked, "MIN_SUPPORT", 8001):
            step(head, batch)
    assert outcome.stats.support_mean > 0.1 * 8001
    assert {call.args[0].weight for call in sums.call_args_list} == {1.0}
    assert 1 <= from_sample.count(1.0) < sums.call_count
    assert_same(outcome, truth_of(loss, batch), tolerance=1e-9)


def test_rows_with_few_active_classes_start_at_the_maxima():
    """A target holds a part of its row's mass, which leaves one class of the sample active."""
    batch = random_batch(4000, rows=5)
    batch.embeddings[2] = batch.prototypes[batch.labels[2]]
    loss = make_loss(1.5, 3.0, qmargin.PriorMargin(0.0))
    head = make_head(loss, batch, path="chunked", dtype=torch.float64)
    begin = mock.patch.object(RootSearch, "from_bounds", side_effect=RootSearch.from_bounds)
    with mock.patch.object(chunked, "MIN_SUPPORT", 2), begin as from_bounds:
        outcome = step(head, batch)
    assert [call.args[0].weight for call in from_bounds.call_args_list] == [16.0, 1.0]
    assert_same(outcome, truth_of(loss, batch), tolerance=1e-9)


def make_chunks(alpha, batch, unit):
    head = make_head(make_loss(alpha, 1.0), batch, path="chunked", dtype=unit.dtype)
    head.refresh()
    zeros = torch.zeros(len(unit)).double()
    return Chunks(head, unit, batch.labels), Target(zeros - 5.0, zeros)


def test_many_classes_at_the_edge_of_alpha_two():
    """Newton's unchecked last step then leaves an error, which the sums show and a search ends."""
    batch = random_batch(97, dim=64, rows=1)
    one, target = make_chunks(2.0, batch, torch.nn.functional.normalize(batch.embeddings.double()))
    cosines = torch.linspace(0.0, 1e-9, 97).double()[None]
    cosines[0, :3] = 1.0 / 3.0  # alone they have tau at 1, and the others at the edge
    one.cosines = lambda where, unit: cosines[:, where].clone()
    with spy("run") as run:
        solved = solve(one, target, pulls=False)
    assert run.call_count == 2 and float(solved.mass_error) < 1e-14


def test_a_row_that_is_not_finite_does_not_hang_the_search():
    batch = random_batch(97)
    unit = torch.nn.functional.normalize(batch.embeddings)
    unit[2] = torch.nan
    solved = solve(*make_chunks(1.5, batch, unit), pulls=True)
    assert solved.level.isnan().tolist() == [False, False, True, False, False, False]


def test_a_row_whose_search_finds_no_root_is_nan(monkeypatch):
    """A search that is cut short leaves masses far from one; a loss of them would be wrong."""
    batch = random_batch(997, dim=64, rows=6)
    margin = qmargin.PriorMargin(0.05)
    loss = qmargin.MarginLoss(qmargin.Alpha(3.0), margin, scale=1e-4, reduction="none")

    def rows_of(passes):
        monkeypatch.setattr(chunked, "MAX_PASSES", passes)
        head = make_head(loss, batch, path="chunked", dtype=torch.float64)
        embeddings = batch.embeddings.double().requires_grad_()
        value = head(embeddings, batch.labels)
        value.sum().backward()
        return value.detach(), embeddings.grad, head.last_step.mass_error

    exact, _, error = rows_of(chunked.MAX_PASSES)
    assert bool(exact.isfinite().all()) and error < 1e-9
    found, pulled, error = rows_of(1)
    assert error > 1e-2 and bool(found.isnan().any())
    kept = ~found.isnan()
    torch.testing.assert_close(found[kept], exact[kept], rtol=2e-2, atol=1e-3)
    assert bool(pulled[~kept].isnan().all()) and bool(pulled[kept].isfinite().all())
