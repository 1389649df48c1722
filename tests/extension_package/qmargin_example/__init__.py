"""One of everything that can be added to qmargin, one file each."""
