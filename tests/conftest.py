"""What every test gets: a seed, one thread, NaN in uninitialised memory, GPU skips."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        # Workers fill the cores already, and processes of the tests, which have one thread, are
        # compared bit for bit.
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make ``torch.empty`` return NaN, so that reading what was never written shows."""
    if "gpu" in request.keywords:  # some CUDA operations have no deterministic form
        yield
        return
    torch.use_deterministic_algorithms(True)  # what fill_uninitialized_memory, on by default, needs
    yield
    torch.use_deterministic_algorithms(False)
