"""The backends of functions, and how batches come to them."""

from __future__ import annotations

import pytest
from pieces import either_way

__all__ = ["each_way", "either_way"]

#: Each backend, and each way in which a batch may come; pieces are cut above the backends.
each_way = pytest.mark.parametrize(
    ("backend", "either_way"),
    [("heap", None), ("heap", 1), ("reference", 1), ("rocksdb", None)],
    ids=["heap", "heap in pieces", "reference in pieces", "rocksdb"],
    indirect=["either_way"],
)
