"""What the benchmarks beside this file share that train networks."""

from pathlib import Path

from qmargin.study.pictures import PictureMaterial
from qmargin.sweep.trial import Trial, TrialResult, run_trial
from qmargin.training.recipe import Recipe


def trained(
    material: PictureMaterial, recipe: Recipe, folder: Path, *, device: str = "cpu"
) -> TrialResult:
    """One training, and its numbers on validation identities."""
    result = run_trial(Trial({}, recipe, folder / recipe.sha256), material, device=device)
    if result.state != "finished":
        raise RuntimeError(f"{recipe.name}: {result.error}")
    return result
