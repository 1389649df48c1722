"""Readers, one format per file; see ``qmargin.data.reader`` to add one."""
