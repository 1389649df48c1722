"""Scores from embeddings and files, and results from scores."""
