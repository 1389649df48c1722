"""The copy that is screened is that of the prototypes as they are, whoever moved them."""

from unittest import mock

import pytest
import torch

from helpers.heads import Batch, assert_same, make_head, make_loss, random_batch, step, truth_of
from qmargin.heads.classifier import MarginClassifier


@pytest.mark.parametrize("path", ["sparse", "chunked", "auto"])
def test_the_copy_follows_the_prototypes(path: str) -> None:
    batch = random_batch(257)
    other = Batch(batch.embeddings, batch.labels, random_batch(257, seed=8).prototypes)
    loss = make_loss(1.5)
    head = make_head(loss, batch, path=path)
    step(head, batch)
    head.load_state_dict(make_head(loss, other).state_dict())
    assert_same(step(head, other), truth_of(loss, other), tolerance=2e-5)
    torch.optim.SGD([head.prototypes], 0.3).step()
    stepped = Batch(batch.embeddings, batch.labels, head.prototypes.detach().clone())
    assert_same(step(head, stepped), truth_of(loss, stepped), tolerance=2e-5)
    head.prototypes.data.copy_(batch.prototypes)  # behind PyTorch's back
    head.refresh(force=True)
    assert_same(step(head, batch), truth_of(loss, batch), tolerance=2e-5)
    assert_same(step(head.double(), batch), truth_of(loss, batch), tolerance=1e-9)
    assert_same(step(head.float(), batch), truth_of(loss, batch), tolerance=2e-5)


def test_nothing_is_copied_while_the_prototypes_stay() -> None:
    batch = random_batch(97)
    head = make_head(make_loss(1.5), batch, path="sparse")
    head(batch.embeddings, batch.labels)
    with mock.patch.object(MarginClassifier, "kernels", None):
        head.refresh()  # would need kernels to do anything
    with torch.no_grad():
        head.prototypes.mul_(2.0)
    with mock.patch.object(MarginClassifier, "kernels", None), pytest.raises(AttributeError):
        head.refresh()


@pytest.mark.parametrize("path", ["sparse", "chunked"])
@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_an_optimizer_that_leaves_no_trace_is_noticed(path: str, gradient: str) -> None:
    """Fused optimizers of PyTorch change weights and not their version."""
    batch = random_batch(300, dim=16, rows=8)
    head = make_head(make_loss(1.25), batch, path=path, gradient=gradient)
    for turn in range(3):
        head.zero_grad(set_to_none=turn != 1)
        head(batch.embeddings, batch.labels).backward()
        with torch.no_grad():
            head(batch.embeddings, batch.labels)  # a look in between
        head.prototypes.data.add_(torch.randn_like(head.prototypes))
        moved = make_head(make_loss(1.25), batch, path="dense")
        moved.prototypes.data.copy_(head.prototypes)
        with torch.no_grad():
            found, truth = (one(batch.embeddings, batch.labels) for one in (head, moved))
        torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)
