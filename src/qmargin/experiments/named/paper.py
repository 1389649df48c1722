"""The settings of the paper's tables at the scale of the demo, for ``qmargin paper``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qmargin.experiments.experiment import Arm, Experiment
from qmargin.experiments.named import setting_point
from qmargin.experiments.named.demo import demo_experiment
from qmargin.registry import register_experiment
from qmargin.report.paper_layouts import FACE_ROWS, SEEDS_ROW, SPEAKER_ROWS, PaperRow


def _experiment(name: str, rows: Sequence[PaperRow], device: str, data: Path | None) -> Experiment:
    arms = {}
    for row in rows:
        assert row.setting is not None
        kind, alpha, scale, margin = row.setting
        arms[f"{row.loss.lower()}-a{alpha:g}-s{scale:g}-m{margin:g}"] = Arm(
            f"{row.loss} ({row.setting.text})",
            (f"loss.margin_kind={kind}",),
            points=(setting_point((alpha, scale, margin)),),
        )
    return replace(demo_experiment(device, data), name=name, arms=arms)


@register_experiment("paper-face")
def paper_face(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Every setting of the paper's table of faces, at the scale of the demo."""
    return _experiment("paper-face", FACE_ROWS, device, data)


@register_experiment("paper-seeds")
def paper_seeds(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Three seeds of the setting that the paper repeats, at the scale of the demo."""
    return replace(_experiment("paper-seeds", (SEEDS_ROW,), device, data), seeds=(0, 1, 2))


@register_experiment("paper-speaker")
def paper_speaker(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Every setting of the paper's table of speakers, at the scale of the demo."""
    return _experiment("paper-speaker", SPEAKER_ROWS, device, data)
