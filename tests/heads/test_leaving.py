"""The gradient that a backward pass leaves, in each form."""

from types import SimpleNamespace

import pytest
import torch

from qmargin.heads.leaving import leave_blocks
from qmargin.heads.step import RowsUpdate


@pytest.mark.parametrize("num_classes", [0, 1, 5])  # ranks may have no class at all
@pytest.mark.parametrize("is_listed", [False, True])
def test_sparse_and_dense_gradients_say_the_same(num_classes: int, is_listed: bool) -> None:
    classes = torch.arange(0, num_classes, 2) if is_listed else None
    rows = torch.randn(num_classes if classes is None else len(classes), 3)
    rows[1:2] = 0.0
    left = {}
    for gradient in ("dense", "sparse"):
        head = SimpleNamespace(
            gradient=gradient, prototypes=torch.zeros(num_classes, 3), may_have_moved=False
        )
        left[gradient] = leave_blocks(head, RowsUpdate(rows.clone(), num_classes, classes))
        assert head.may_have_moved
    assert left["sparse"].is_sparse and left["sparse"].shape == (num_classes, 3)
    assert left["sparse"]._nnz() == int((rows != 0).any(1).sum())
    torch.testing.assert_close(left["sparse"].to_dense(), left["dense"], rtol=0, atol=0)
