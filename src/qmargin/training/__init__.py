"""Training runs: recipes, optimizers, checkpoints and ranks."""
