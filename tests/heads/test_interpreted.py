"""Whole steps of the head on the Triton kernels: in the interpreter, where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from helpers.heads import assert_same, make_head, make_loss, random_batch, step, truth_of
from qmargin.errors import ConfigError
from qmargin.heads import classifier
from qmargin.heads.updates import ExactSGD, SparseSGD
from qmargin.kernels.dispatch import Call, load_backend
from qmargin.kernels.triton import support

if torch.cuda.is_available():
    pytest.skip("test_paths_gpu.py runs them for real", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's masked lanes


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    def load(call, name):
        call = Call(call.device, call.dtype, call.screen_dtype, may_interpret=True)
        return load_backend(call, name)

    monkeypatch.setattr(classifier, "load_backend", load)
    monkeypatch.setattr(support, "ROOM", 64)


def half_head(alpha, batch, **options):
    head = make_head(make_loss(alpha), batch, screen_dtype=torch.float16, **options)
    head.chunk_dtype = torch.float16
    assert head.kernels.__name__.endswith("triton.head")
    return head


@pytest.mark.parametrize("alpha", [1.25, 2.0])
def test_sparse_steps_with_lengths_unknown_known_and_too_short(alpha):
    batch = random_batch(700, dim=64, rows=6)
    head = half_head(alpha, batch, path="sparse")
    truth = truth_of(make_loss(alpha), batch)
    assert head.lengths is None
    for _ in range(2):
        assert_same(step(head, batch), truth, tolerance=2e-5)
        assert head.last_step.path == "sparse"
    found = head.lengths
    head.lengths = found._replace(candidates=1)
    assert_same(step(head, batch), truth, tolerance=2e-5)
    assert head.lengths == found
    for _ in range(2):  # the second without a length to expect
        head.list_capacity = 0
        assert_same(step(head, batch), truth, tolerance=5e-3)
        assert head.last_step.path == "chunked" and head.lengths is None


def test_softmax_by_blocks():
    batch = random_batch(700, dim=64, rows=6)
    truth = truth_of(make_loss(1.0), batch)
    assert_same(step(half_head(1.0, batch, path="chunked"), batch), truth, tolerance=5e-3)


@pytest.mark.parametrize("optimizer", [ExactSGD, SparseSGD])
@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_updates(optimizer, path):
    batch = random_batch(300, dim=64, rows=6)
    plain = make_head(make_loss(1.25), batch, path="sparse", gradient="fused")
    heads = (half_head(1.25, batch, path=path, gradient="fused"), plain)
    for head in heads:
        update = optimizer(head, 0.1)
        for _ in range(2):
            head(batch.embeddings, batch.labels).backward()
            update.step()
    tolerance = 1e-5 if path == "sparse" else 2e-3
    torch.testing.assert_close(heads[0].prototypes, plain.prototypes, atol=tolerance, rtol=0)


@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_a_head_that_does_not_wait_gives_the_same(path):
    batch = random_batch(300, dim=64, rows=6)
    heads = [half_head(1.25, batch, path=path, gradient="fused") for _ in range(2)]
    heads[1].waits = False
    updates = [ExactSGD(head, 0.1) for head in heads]
    for _ in range(3):
        for head, update in zip(heads, updates, strict=True):
            head(batch.embeddings, batch.labels).backward()
            assert head.is_confirmed == head.waits
            assert head.confirm() and head.is_confirmed
            update.step()
    assert torch.equal(heads[0].prototypes, heads[1].prototypes)


def test_lists_that_were_too_short_are_found_by_asking():
    batch = random_batch(700, dim=64, rows=6)
    head = half_head(1.25, batch, path="sparse", gradient="fused")
    update = ExactSGD(head, 0.1)
    head(batch.embeddings, batch.labels)
    head.lengths, head.waits = head.lengths._replace(candidates=1), False
    head(batch.embeddings, batch.labels).backward()
    assert head.last_step is None
    with pytest.raises(ConfigError, match="confirm"):
        update.step()
    assert not head.confirm()
    assert head.pending is None and head.lengths is None
    head.waits = True
    assert_same(step(head, batch), truth_of(make_loss(1.25), batch), tolerance=2e-5)


def test_a_batch_that_is_discarded_leaves_nothing():
    batch = random_batch(300, dim=64, rows=6)
    head = half_head(1.25, batch, path="sparse", gradient="fused")
    head.waits = False
    head(batch.embeddings, batch.labels).backward()
    head.discard()
    assert head.pending is None and head.is_confirmed and head.last_step is None
    head.discard()  # there is nothing left to forget


def test_a_pass_that_is_not_confirmed_cannot_be_overlooked():
    batch = random_batch(700, dim=64, rows=6)
    head = half_head(1.25, batch, path="sparse", gradient="fused")
    head(batch.embeddings, batch.labels)
    head.waits = False
    with torch.no_grad():  # whoever asks for a loss alone gets one that stands
        head(batch.embeddings, batch.labels)
    assert head.is_confirmed
    head(batch.embeddings, batch.labels).backward()
    with pytest.raises(ConfigError, match="discard"):
        head(batch.embeddings, batch.labels)
    assert head.confirm()
    left = head.pending
    head(batch.embeddings[:1], batch.labels[:1])  # another batch, whose gradient nobody asks for
    assert head.confirm() and head.pending is left
    head(batch.embeddings[:1], batch.labels[:1])
    head.discard()
    assert head.pending is left


@pytest.mark.parametrize("value", [0.0, 3e38])
@pytest.mark.parametrize(
    ("path", "alpha"), [("sparse", 1.25), ("sparse", 3.0), ("chunked", 1.0), ("chunked", 1.5)]
)
def test_a_prototype_without_a_direction_makes_loss_and_gradients_nan(path, alpha, value):
    batch = random_batch(300, dim=64, rows=4)
    batch.labels.clamp_(max=298)
    head = half_head(alpha, batch, path=path, gradient="fused")
    step(head, batch)
    with torch.no_grad():
        head.prototypes[299] = value
    outcome = step(head, batch)
    assert outcome.loss.isnan() and outcome.embeddings.isnan().all()
    assert outcome.prototypes[batch.labels].isnan().any(1).all()
    optimizer = ExactSGD(head, lr=0.1)
    before = head.prototypes.detach().clone()
    head(batch.embeddings, batch.labels).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1
    torch.testing.assert_close(head.prototypes.detach(), before, rtol=0, atol=0, equal_nan=True)


def test_an_embedding_whose_length_overflows_has_no_finite_loss():
    batch = random_batch(300, dim=64, rows=4)
    head = half_head(1.5, batch, path="sparse")
    unit, norms = head.kernels.unit_rows(batch.embeddings * 1e37, batch.labels, -100)
    assert norms.isinf().all() and unit.isnan().all()
