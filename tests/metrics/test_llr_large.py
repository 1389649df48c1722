"""Calibration of many scores: the start that bins give changes nothing."""

import numpy as np
import pytest

from qmargin.errors import ProtocolError
from qmargin.metrics import llr


def calibrations(genuine: np.ndarray, impostor: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    """With the coarse start, and from zero."""
    found = llr.calibrate(genuine, impostor)
    monkeypatch.setattr(llr, "_coarse_solution", lambda sides, prior: np.zeros(2))
    return found, llr.calibrate(genuine, impostor)


@pytest.mark.parametrize("gap", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("kind", ["normal", "heavy", "rounded", "constant"])
def test_the_coarse_start_does_not_change_the_solution(
    gap: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    genuine, impostor = draw.standard_normal(900) + gap, draw.standard_normal(100_000)
    if kind == "heavy":
        genuine, impostor = genuine**3, draw.standard_t(2, 100_000)
    if kind == "rounded":
        genuine, impostor = genuine.round(1), impostor.round(1)
    if kind == "constant":
        genuine = np.append(np.full(900, gap), [-3.0, 3.0])
    found, plain = calibrations(genuine, impostor, monkeypatch)
    assert found.scale == pytest.approx(plain.scale, rel=1e-9)
    assert found.offset == pytest.approx(plain.offset, rel=1e-9, abs=1e-9)


def test_an_overlap_inside_one_bin_is_still_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of bins are separated where the scores just are not."""
    impostor = np.append(np.linspace(0.0, 1.0, 100_000), 1.0 + 2e-6)
    genuine = np.append(np.linspace(1.0 + 3e-6, 2.0, 500), 1.0 + 1e-6)
    found, plain = calibrations(genuine, impostor, monkeypatch)
    assert found.scale == pytest.approx(plain.scale, rel=1e-6)
    assert found.offset == pytest.approx(plain.offset, rel=1e-6)


def test_separated_scores_are_refused() -> None:
    with pytest.raises(ProtocolError, match="separates"):
        llr.calibrate(np.linspace(2.0, 3.0, 100_000), np.linspace(0.0, 1.0, 100_000))
