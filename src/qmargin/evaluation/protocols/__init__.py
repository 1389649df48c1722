"""Evaluation protocols, one kind per file: which pairs, which scores, which measures."""
