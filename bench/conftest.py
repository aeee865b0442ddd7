"""Benchmarks run with ``make bench``; comparisons with ``python -m bench.core`` and ``python -m bench.state``."""

import sys
from pathlib import Path

# `bench` is not an installed package: it is imported from the root of the repository.
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
