"""``python -m qmargin`` is the same as ``qmargin``."""

import sys

from qmargin.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
