"""Labels before the first step, and corrupt samples."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qmargin.data.samples import CorruptBudget, Replacement, check_labels, read_sample
from qmargin.errors import ConfigError, CorruptSample, DataError


class Listed:
    """Labels from a list; some samples corrupt."""

    num_classes = 5

    def __init__(self, labels: Any, corrupt: frozenset[int] = frozenset()) -> None:
        self.labels, self.corrupt = labels, corrupt

    def __len__(self) -> int:
        return 12 if self.labels is None else len(self.labels)

    def read(self, index: int, seed: int) -> tuple[Tensor, int]:
        if index in self.corrupt:
            raise CorruptSample(f"byte {index} is wrong")
        return torch.tensor([index, seed]), self.labels[index]

    def sample_id(self, index: int) -> str:
        return f"{index}.jpg"

    def source(self, index: int) -> str:
        return f"train.lst, row {index + 1}"


@pytest.mark.parametrize(
    "labels",
    [
        np.arange(5),
        np.arange(5, dtype=np.uint8),
        np.arange(5, dtype=np.float32),
        list(range(5)),
        None,
    ],
)
def test_good_labels_pass(labels: Any) -> None:
    check_labels(Listed(labels))


@pytest.mark.parametrize("bad", [5, -1, 1.5, np.nan, np.inf, -0.5])
def test_a_bad_label_is_named_with_file_and_row(bad: float) -> None:
    labels = np.zeros(3_000_000, dtype=type(bad) if isinstance(bad, float) else np.int64)
    labels[[2_500_000, 2_999_999]] = bad
    with pytest.raises(DataError) as caught:
        check_labels(Listed(labels))
    message = str(caught.value)
    assert message.startswith(f"train.lst, row 2500001: label {labels[2_500_000]} of sample")
    assert "'2500000.jpg'" in message
    assert "[0, 5) (2 of 3000000" in message


@pytest.mark.parametrize(
    "labels", [np.array(["0", "1"]), np.array([True]), np.array([[0], [1]]), np.array([None])]
)
def test_labels_that_are_no_numbers_are_refused(labels: Any) -> None:
    with pytest.raises(DataError, match=r"they must be integers|one label per sample"):
        check_labels(Listed(labels))


@pytest.mark.parametrize("bad", [5, -1, 1.5])
def test_a_label_that_was_only_known_when_read_is_checked_then(bad: float) -> None:
    with pytest.raises(DataError, match=r"train.lst, row 2: label .* '1.jpg'"):
        read_sample(Listed([0, bad]), 1, seed=0, epoch=0)


def test_a_corrupt_sample_is_replaced_by_a_function_of_seed_epoch_and_index() -> None:
    dataset = Listed([0, 1, 2, 3, 4] * 20, frozenset(range(0, 100, 2)))
    chosen = {}
    for seed in range(3):
        for epoch in range(10):
            sample = read_sample(dataset, 8, seed=seed, epoch=epoch)
            again = read_sample(dataset, 8, seed=seed, epoch=epoch)
            assert sample.index == again.index
            assert torch.equal(sample.inputs, again.inputs)
            assert sample.index % 2 == 1
            assert sample.label == dataset.labels[sample.index]
            assert sample.replaced[0] == Replacement(8, "8.jpg", "byte 8 is wrong")
            assert all(item.index % 2 == 0 for item in sample.replaced)
            chosen[seed, epoch] = sample.index
    assert len(set(chosen.values())) > 10


def test_a_set_that_is_corrupt_throughout_is_an_error() -> None:
    with pytest.raises(DataError, match=r"'3.jpg' and 31 drawn in its place are all corrupt"):
        read_sample(Listed([0] * 12, frozenset(range(12))), 3, seed=0, epoch=0)


def test_the_budget_counts_epochs_apart_and_logs_ids(caplog: pytest.LogCaptureFixture) -> None:
    budget = CorruptBudget(limit=2)
    with caplog.at_level(logging.WARNING, logger="qmargin.data"):
        for epoch in range(3):
            budget.add(epoch, [Replacement(7, "7.jpg", "zero bytes")])
            budget.add(epoch, [Replacement(9, "9.jpg", "is HTML")])
            assert budget.count == 2
    assert caplog.messages[0] == "corrupt sample '7.jpg' replaced: zero bytes"
    with pytest.raises(DataError, match=r"3 corrupt samples in epoch 2, the last is '8.jpg'"):
        budget.add(2, [Replacement(8, "8.jpg", "truncated")])


def test_the_budget_goes_on_where_a_run_was_stopped() -> None:
    budget = CorruptBudget(limit=5, epoch=3, count=5)
    budget.add(3, [])
    with pytest.raises(DataError, match="max_corrupt allows 5"):
        budget.add(3, [Replacement(8, "8.jpg", "truncated")])
    with pytest.raises(ConfigError, match="epoch 2 comes after"):
        budget.add(2, [])


def test_the_budget_of_several_ranks_is_checked_on_their_sum() -> None:
    budget = CorruptBudget(limit=5)
    budget.check(5)
    with pytest.raises(DataError, match="6 corrupt samples"):
        budget.check(6)
    CorruptBudget(None).check(10**9)
