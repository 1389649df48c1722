"""Two ways to score what was listed: by pairs of row and group, and by blocks of classes."""

import pytest
import torch

from qmargin.kernels import head_reference as plain
from qmargin.kernels.head_reference import GROUP, Batch, Candidates, Pairs, PreparedRows


def random_rows(num_classes: int, num_rows: int, dtype: torch.dtype, dim: int = 24) -> Batch:
    torch.manual_seed(num_classes)
    prototypes = torch.randn(num_classes, dim, dtype=dtype)
    embeddings = torch.nn.functional.normalize(torch.randn(num_rows, dim, dtype=dtype))
    labels = torch.randint(num_classes, (num_rows,))
    zeros = torch.zeros(num_rows, dtype=dtype)
    prepared = PreparedRows(embeddings, embeddings, zeros, embeddings, zeros)
    return Batch(prepared, prototypes, prototypes, 1.0 / prototypes.norm(dim=1), labels)


def true_cosines(batch: Batch) -> torch.Tensor:
    unit = batch.prototypes * batch.inverse_norms[:, None]
    cosines = batch.prepared.embeddings @ unit.t()
    return cosines.scatter(1, batch.labels[:, None], -torch.inf)


def listed_pairs(cosines: torch.Tensor, floor: torch.Tensor) -> Pairs:
    missing = -cosines.shape[1] % GROUP
    padded = torch.nn.functional.pad(cosines, (0, missing), value=-torch.inf)
    is_listed = padded.unflatten(1, (-1, GROUP)).amax(2).double() > floor[:, None] - 1e-5
    rows, groups = is_listed.nonzero(as_tuple=True)
    starts = torch.nn.functional.pad(is_listed.sum(1).cumsum(0), (1, 0))
    return Pairs(groups, rows, starts, floor, torch.full_like(floor, 1e-5))


def assert_lists(found: Candidates, cosines: torch.Tensor, floor: torch.Tensor) -> None:
    rows, columns = (cosines.double() > floor[:, None]).nonzero(as_tuple=True)
    assert torch.equal(found.rows, rows)
    assert torch.equal(found.columns, columns)
    torch.testing.assert_close(found.scores, cosines[rows, columns], atol=1e-6, rtol=0)
    counts = torch.bincount(rows, minlength=len(floor))
    assert torch.equal(found.starts, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize("num_rows", [1, 37])  # more than a group takes at a time
@pytest.mark.parametrize("num_classes", [1, 31, 64, 601])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_both_list_every_class_above_the_floor(
    share: float,
    num_classes: int,
    num_rows: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = random_rows(num_classes, num_rows, dtype)
    cosines = true_cosines(batch)
    finite = cosines.nan_to_num(neginf=-1.0).double()
    floor = finite.quantile(1.0 - share, dim=1) + (1.0 if share == 0.0 else 1e-4)
    if share == 1.0:
        floor = torch.full_like(floor, -2.0)
    pairs = listed_pairs(cosines, floor)
    monkeypatch.setattr(plain, "BLOCK_CLASSES", 256)  # several blocks
    monkeypatch.setattr(plain, "BLOCK_ENTRIES", 8 * GROUP)
    for limit in (0.0, 2.0):  # of the share of pairs that are scored one by one
        monkeypatch.setattr(plain, "DENSE_SHARE", limit)
        assert_lists(plain.score_candidates(batch, pairs), cosines, floor)


def test_a_score_at_the_floor_is_not_listed() -> None:
    """The floor is float64: in float32 it must neither rise nor hide the number above it."""
    batch = random_rows(64, 1, torch.float32)
    cosines = true_cosines(batch)
    middle = cosines[0].sort().values[40]
    above = torch.nextafter(middle, torch.tensor(2.0))
    for floor in (middle.double(), (middle.double() + above.double()) / 2):
        found = plain._score_blocks(batch, floor[None])
        assert len(found.rows) == int((cosines.double() > floor).sum())
