"""Definitions in plain PyTorch: divergences, margins, the threshold, the loss."""
