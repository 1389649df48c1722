"""Training runs: recipes, optimizers, checkpoints and the processes that share them."""
