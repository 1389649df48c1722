"""Benchmarks, one kind per file: what is compared, how scores come about, what is measured."""
