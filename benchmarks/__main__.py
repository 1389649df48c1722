"""``python -m benchmarks SUBJECT``: measure speed on this machine, from a checkout."""

from __future__ import annotations

import sys

from benchmarks import build_parser
from qmargin.cli.main import main

if __name__ == "__main__":
    sys.exit(main(parser=build_parser))
