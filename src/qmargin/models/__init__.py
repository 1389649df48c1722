"""Backbones: networks that map inputs to embeddings, and know nothing of losses."""
