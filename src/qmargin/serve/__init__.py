"""``qmargin serve``: a local page and a small HTTP interface for one model."""
