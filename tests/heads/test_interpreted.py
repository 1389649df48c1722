"""Whole steps of the head on the Triton kernels: in the interpreter, where there is no GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from helpers.heads import assert_same, make_head, make_loss, random_batch, screened, step, truth_of
from qmargin.errors import ConfigError
from qmargin.heads.optimizers import ExactSGD, SparseSGD
from qmargin.kernels import dispatch
from qmargin.kernels.triton import head as support

if torch.cuda.is_available():
    pytest.skip("test_paths_gpu.py runs them for real", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's masked lanes


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(dispatch, "may_interpret", True)
    monkeypatch.setattr(support, "ROOM", 32)


def half_head(alpha, batch, *, path, **options):
    """A head whose steps go by lists and by blocks; ``test_matrix.py`` has those by one matrix."""
    taken = replace(screened(path, torch.float16), matrix_logits=0)
    head = make_head(make_loss(alpha), batch, path=taken, **options)
    assert head.kernels.__name__.endswith("triton.head")
    return head


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_sparse_steps_with_lengths_unknown_known_and_too_short(alpha):
    batch = random_batch(200, dim=16, rows=3)
    head = half_head(alpha, batch, path="sparse")
    truth = truth_of(make_loss(alpha), batch)
    assert head.list_lengths is None
    for _ in range(2):
        assert_same(step(head, batch), truth, tolerance=2e-5)
        assert head.last_step.path == "sparse"
    found = head.list_lengths
    head.list_lengths = found._replace(candidates=1)
    assert_same(step(head, batch), truth, tolerance=2e-5)
    assert head.list_lengths == found
    for _ in range(2):  # the second without a length to expect
        head.path = replace(head.path, list_capacity=0)
        assert_same(step(head, batch), truth, tolerance=5e-3)
        assert head.last_step.path == "chunked" and head.list_lengths is None


def test_softmax_by_blocks():
    batch = random_batch(200, dim=16, rows=3)
    truth = truth_of(make_loss(1.0), batch)
    assert_same(step(half_head(1.0, batch, path="chunked"), batch), truth, tolerance=5e-3)


@pytest.mark.parametrize("alpha", [1.01, 1.05, 1.3, 2.0])  # at 1.01 without kernels
def test_wide_supports_with_an_ignored_row(alpha):
    batch = random_batch(200, dim=16, rows=4)
    kept = torch.tensor([0, 2, 3])
    truth = truth_of(
        make_loss(alpha),
        replace(batch, embeddings=batch.embeddings[kept], labels=batch.labels[kept]),
    )
    batch.labels[1] = -100
    batch.embeddings[1] = torch.nan
    outcome = step(half_head(alpha, batch, path="chunked"), batch)
    assert outcome.embeddings[1].tolist() == [0.0] * 16
    assert_same(replace(outcome, embeddings=outcome.embeddings[kept]), truth, tolerance=5e-3)


@pytest.mark.parametrize("optimizer", [ExactSGD, SparseSGD])
@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_updates(optimizer, path):
    batch = random_batch(70, dim=16, rows=3)
    plain = make_head(make_loss(1.5), batch, path="sparse", gradient="fused")
    heads = (half_head(1.5, batch, path=path, gradient="fused"), plain)
    for head in heads:
        update = optimizer(head, 0.1)
        for _ in range(2):
            head(batch.embeddings, batch.labels).backward()
            update.step()
    tolerance = 1e-5 if path == "sparse" else 2e-3
    torch.testing.assert_close(heads[0].prototypes, plain.prototypes, atol=tolerance, rtol=0)


@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_a_speculative_step_gives_the_same(path):
    batch = random_batch(70, dim=16, rows=3)
    heads = [half_head(1.5, batch, path=path, gradient="fused") for _ in range(2)]
    updates = [ExactSGD(head, 0.1) for head in heads]
    for _ in range(2):
        for head, update, speculative in zip(heads, updates, (False, True), strict=True):
            head(batch.embeddings, batch.labels, speculative=speculative).backward()
            assert head.is_verified != speculative
            assert head.verify() and head.is_verified
            update.step()
    assert torch.equal(heads[0].prototypes, heads[1].prototypes)


def test_lists_that_were_too_short_are_found_by_verify():
    batch = random_batch(300, dim=16, rows=4)
    head = half_head(1.25, batch, path="sparse", gradient="fused")
    update = ExactSGD(head, 0.1)
    head(batch.embeddings, batch.labels)
    head.list_lengths = head.list_lengths._replace(candidates=1)
    head(batch.embeddings, batch.labels, speculative=True).backward()
    assert head.last_step is None
    with pytest.raises(ConfigError, match="verify"):
        update.step()
    assert not head.verify()
    assert head.fused_gradient is None and head.list_lengths is None
    assert_same(step(head, batch), truth_of(make_loss(1.25), batch), tolerance=2e-5)


def test_a_pass_that_is_not_verified_cannot_be_overlooked():
    batch = random_batch(70, dim=16, rows=3)
    rows, labels = batch.embeddings, batch.labels
    head = half_head(1.5, batch, path="sparse", gradient="fused")
    head(rows, labels, speculative=True).backward()
    head.discard()
    assert head.fused_gradient is None and head.is_verified and head.last_step is None
    head.discard()  # there is nothing left to forget
    with torch.no_grad():  # whoever asks for a loss alone gets one that is valid
        head(rows, labels, speculative=True)
    assert head.is_verified
    head(rows, labels, speculative=True).backward()
    with pytest.raises(ConfigError, match="discard"):
        head(rows, labels)
    assert head.verify()
    left = head.fused_gradient
    for end in (head.verify, head.discard):  # another batch, without a backward pass
        head(rows[:1], labels[:1], speculative=True)
        end()
        assert head.is_verified and head.fused_gradient is left


@pytest.mark.parametrize(
    ("path", "alpha", "value"),
    [("sparse", 1.5, 0.0), ("sparse", 3.0, 3e38), ("chunked", 1.0, 3e38), ("chunked", 1.5, 0.0)],
)
def test_a_prototype_without_a_direction_makes_loss_and_gradients_nan(path, alpha, value):
    batch = random_batch(70, dim=16, rows=3)
    batch.labels.clamp_(max=68)
    head = half_head(alpha, batch, path=path, gradient="fused")
    step(head, batch)
    with torch.no_grad():
        head.prototypes[69] = value
    outcome = step(head, batch)
    assert outcome.loss.isnan() and outcome.embeddings.isnan().all()
    assert outcome.prototypes[batch.labels].isnan().any(1).all()
    optimizer = ExactSGD(head, lr=0.1)
    before = head.prototypes.detach().clone()
    head(batch.embeddings, batch.labels).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1
    torch.testing.assert_close(head.prototypes.detach(), before, rtol=0, atol=0, equal_nan=True)
