"""Real faces: a training folder and a test folder, each with a folder per person."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qmargin.experiments.experiment import Experiment, find_recipe
from qmargin.experiments.named import Grid, loss_arm
from qmargin.experiments.worlds import Stored
from qmargin.registry import register_experiment
from qmargin.training.recipe import PrecisionPart, SchedulePart

# Starting points of the authors or the paper; none was searched on sets of five thousand people.
SETTINGS: Grid = {
    "arcface": ((1.0, 64.0, 0.5),),
    "cosface": ((1.0, 64.0, 0.35),),
    "entmax": ((1.25, 64.0, 0.5),),
    "sparsemax": ((2.0, 1.9, 0.2),),
    "q_margin": ((1.25, 32.0, 0.2),),
}
BUDGET = 800_000  # pictures that a run reads in total: five runs take half an hour on one GPU
BATCH = 512
LR_RATIO = 10.0  # prototypes to network: sparse losses need faster prototypes
NUM_WORKERS = 8  # that decode


@register_experiment("faces")
def faces(device: str = "cuda", data: Path | None = None) -> Experiment:
    """Five losses on folders of real faces: --set data.train=DIR --set data.test=DIR."""
    base = find_recipe("faces_r18_arcface")
    is_gpu = device == "cuda"
    options = {name: base.data.options[name] for name in ("photometric", "low_resolution")}
    recipe = replace(
        base,
        data=replace(
            base.data, batch_size=BATCH, options=options, num_workers=NUM_WORKERS if is_gpu else 0
        ),
        optimizer=replace(base.optimizer, lr=0.1, base_batch=None),
        head=replace(base.head, lr_ratio=LR_RATIO),
        schedule=SchedulePart("cosine", warmup_epochs=0.5),
        precision=PrecisionPart("bf16" if is_gpu else "fp32", channels_last=True),
    )
    train, test = ("", "") if data is None else (str(data / "train"), str(data / "test"))
    return Experiment(
        "faces",
        recipe,
        {name: loss_arm(name, points) for name, points in SETTINGS.items()},
        Stored(train, test, budget=BUDGET),
        "faces",
        seeds=(0,),
        question="Which of five losses verifies faces best, at the settings where one would start?",
    )
