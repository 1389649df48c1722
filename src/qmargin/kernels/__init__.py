"""Row operations over whole batches: the same definitions, made fast."""
