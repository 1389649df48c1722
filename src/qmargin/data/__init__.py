"""Inputs of training: datasets, their order, and batches on every rank."""
