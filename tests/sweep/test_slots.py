"""Processes that run trials end when they should."""

import time
from pathlib import Path

import pytest

from helpers.runs import tiny_recipe
from helpers.sweeps import few_identities
from qmargin.sweep.slots import TrialOptions, open_slots
from qmargin.sweep.trial import RESULT, Trial
from qmargin.training.signals import StopRequest


@pytest.mark.slow
def test_a_worker_whose_trial_is_over_is_not_waited_for(tmp_path: Path) -> None:
    """Its result is in the pipe, nobody took it, and then everything is to stop."""
    options = TrialOptions(few_identities, "eer")
    trial = Trial({}, tiny_recipe("run.max_steps=2"), tmp_path / "trial")
    with StopRequest() as request:
        with open_slots(options, devices=("cpu",), parallel=2, request=request) as slots:
            slots.start(trial)
            while not (trial.folder / RESULT).exists():
                time.sleep(0.05)
            time.sleep(1.0)  # it waits for another trial now, where signals are not noted
            slots._workers[0].process.terminate = lambda: None  # as if it had come a moment earlier
            began = time.monotonic()
        assert time.monotonic() - began < 30.0
