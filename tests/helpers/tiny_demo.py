"""A demo that takes a second: tests of the demo patch it in and run it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qmargin.demo import plan
from qmargin.demo import report as demo_report
from qmargin.demo.recipe import Size
from qmargin.demo.run import DemoOptions

TINY = Size(
    num_classes=40,
    samples_per_class=4,
    epochs=1,
    batch_size=32,
    width=8,
    depth=0,
    embedding_dim=16,
    num_test=40,
    samples_test=4,
)


def patch_demo(monkeypatch: pytest.MonkeyPatch, size: Size = TINY) -> None:
    """Give the demo this size, and no figures, which take seconds."""
    monkeypatch.setitem(plan.SIZES, "cpu", size)
    monkeypatch.setattr(plan, "_seconds_per_step", lambda size, device: 0.001)
    monkeypatch.setattr(demo_report, "has_matplotlib", lambda: False)


def options_for(folder: Path, **changes: Any) -> DemoOptions:
    """Two losses on a CPU."""
    standard = DemoOptions(folder, losses=("cosface", "q_margin"), device="cpu")
    return replace(standard, **changes)
