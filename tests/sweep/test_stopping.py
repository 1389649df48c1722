"""The median rule, on journals that are made up."""

import json
from pathlib import Path

import pytest

from qmargin.recipes import get_recipe
from qmargin.sweep.stopping import FEWEST_OTHERS, MedianRule, StoppedEarly
from qmargin.training.build import build_backbone, build_head
from qmargin.training.hooks import HookState
from qmargin.training.process import Process

RECIPE = get_recipe("debug")


def state(step: int) -> HookState:
    return HookState(step, 0, RECIPE, Process(), build_backbone(RECIPE), build_head(RECIPE), None)


def write(folder: Path, **values: float) -> None:
    folder.mkdir(parents=True)
    events = [
        {"event": "validation", "step": int(step[1:]), "metrics": {"eer": value}}
        for step, value in values.items()
    ]
    lines = [json.dumps(event) for event in [{"event": "start"}, *events]]
    text = "\n".join(lines) + '\n{"event": "st'  # a line that is being written
    (folder / "journal.jsonl").write_text(text, encoding="utf-8")


def rule(folder: Path, value: float, grace: int = 0) -> MedianRule:
    folder.mkdir(exist_ok=True)
    return MedianRule(lambda given: {"eer": value}, "eer", folder, grace=grace)


def others(folder: Path, *values: float) -> None:
    for number, value in enumerate(values):
        write(folder / f"other-{number}", s5=0.5, s10=value)


def test_a_trial_behind_the_median_is_stopped(tmp_path: Path) -> None:
    others(tmp_path, 0.1, 0.2, 0.3)
    with pytest.raises(StoppedEarly, match=r"behind the median, 0\.2, of the others at step 10"):
        rule(tmp_path / "own", 0.25)(state(10))
    assert rule(tmp_path / "own", 0.15)(state(10)) == {"eer": 0.15}


def test_the_best_so_far_counts(tmp_path: Path) -> None:
    others(tmp_path, 0.1, 0.2, 0.3)
    write(tmp_path / "own", s5=0.12)
    assert rule(tmp_path / "own", 0.9)(state(10)) == {"eer": 0.9}


def test_nobody_is_stopped_among_few_or_early(tmp_path: Path) -> None:
    others(tmp_path, *[0.1] * (FEWEST_OTHERS - 1))
    assert rule(tmp_path / "own", 0.9)(state(10)) == {"eer": 0.9}
    others(tmp_path / "more", 0.1, 0.1, 0.1)
    assert rule(tmp_path / "more" / "own", 0.9, grace=11)(state(10)) == {"eer": 0.9}
    assert rule(tmp_path / "more" / "own", 0.9)(state(7)) == {
        "eer": 0.9
    }  # nobody was measured at 7
