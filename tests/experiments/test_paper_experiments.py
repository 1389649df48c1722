"""Experiments that train the settings of the paper's tables."""

import pytest

from qmargin.cli.paper import EXPERIMENTS
from qmargin.experiments.named import get_experiment, list_experiments
from qmargin.report.paper_layouts import FACE_ROWS, SEEDS_ROW, SPEAKER_ROWS, Setting


@pytest.mark.parametrize(
    ("name", "rows", "num_seeds"),
    [
        ("paper-face", FACE_ROWS, 1),
        ("paper-speaker", SPEAKER_ROWS, 1),
        ("paper-seeds", (SEEDS_ROW,), 3),
    ],
)
def test_arms_are_the_settings_of_a_table(name, rows, num_seeds):
    experiment = get_experiment(name)
    assert len(experiment.seeds) == num_seeds and not experiment.searched
    found = []
    for key, arm in experiment.arms.items():
        (point,) = arm.candidates
        loss = experiment.run_recipe(key, point, seed=0, is_search=False).loss
        found.append(Setting(loss.margin_kind, loss.alpha, loss.scale, loss.margin))
    assert found == [row.setting for row in rows]


def test_the_command_names_experiments_that_exist():
    assert set(EXPERIMENTS.values()) <= list_experiments().keys()
