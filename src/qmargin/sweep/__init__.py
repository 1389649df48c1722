"""Many trainings by one recipe: grids and searches over its settings, with seeds and a table."""
