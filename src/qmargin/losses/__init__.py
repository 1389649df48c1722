"""Losses: autograd, modules and the published presets."""
