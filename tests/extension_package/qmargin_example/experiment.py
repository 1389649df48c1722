"""An experiment: two losses, trained by the recipe of this package."""

from pathlib import Path

from qmargin.experiments.experiment import Arm, Experiment
from qmargin.experiments.worlds import Made
from qmargin.recipes import get_recipe


def example_experiment(device: str = "cpu", data: Path | None = None) -> Experiment:
    """CosFace and Q-Margin on synthetic identities, for a few steps."""
    arms = {
        "cosface": Arm("CosFace", ("loss.preset=cosface", "loss.scale=8")),
        "q_margin": Arm("Q-Margin", ("loss.preset=q_margin", "loss.scale=8")),
    }
    world = Made(num_validation=20, samples_validation=4, num_test=20, samples_test=4)
    recipe = get_recipe("example-recipe")
    return Experiment("example-experiment", recipe, arms, world, "Two losses", seeds=(0,))
