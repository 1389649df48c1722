"""Checkpoints: written so that a kill leaves whole ones, read into any number of ranks."""
