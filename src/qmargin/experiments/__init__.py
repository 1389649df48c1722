"""Experiments: train several losses by one recipe, choose settings, test, tabulate."""
