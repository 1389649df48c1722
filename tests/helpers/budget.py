"""How far a result may be from the truth."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# The numbers the project promises for posteriors, by the dtype of the result.
POSTERIOR_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
LOSS_RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-11}
LOSS_ABSOLUTE = {torch.float32: 1e-6, torch.float64: 1e-12}


def assert_posterior(posterior: Tensor, truth: np.ndarray, *, names: list[str]) -> None:
    """Rows sum to one and no entry is off by more than the promise for the dtype."""
    tolerance = POSTERIOR_TOLERANCE[posterior.dtype]
    values = posterior.detach().double()
    errors = (values - torch.from_numpy(truth)).abs().amax(dim=-1)
    masses = (values.sum(dim=-1) - 1).abs()
    failures = [
        f"{name}: error {error:.2e}, |mass - 1| {mass:.2e}"
        for name, error, mass in zip(names, errors.tolist(), masses.tolist(), strict=True)
        if not (error <= tolerance and mass <= tolerance)
    ]
    assert not failures, f"beyond {tolerance:g}: " + "; ".join(failures)


def assert_loss(
    loss: Tensor,
    truth: list[float],
    *,
    names: list[str],
    relative: float | None = None,
    absolute: float | None = None,
) -> None:
    """Each loss is close relatively or absolutely; by default, as promised for the dtype."""
    relative = LOSS_RELATIVE[loss.dtype] if relative is None else relative
    absolute = LOSS_ABSOLUTE[loss.dtype] if absolute is None else absolute
    failures = [
        f"{name}: {value!r} instead of {true!r}"
        for name, value, true in zip(names, loss.detach().double().tolist(), truth, strict=True)
        if not abs(value - true) <= max(relative * abs(true), absolute)
    ]
    assert not failures, f"beyond {relative:g} and {absolute:g}: " + "; ".join(failures)
