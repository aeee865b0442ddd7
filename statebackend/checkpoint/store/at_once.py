"""Many small requests at once: an object store takes as long for a thousand as for a few, if they do not queue here.

>>> at_once(len, ["a", "bc"])
[1, 2]
>>> at_once(len, ["x" * length for length in range(20)]) == list(range(20))
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["at_once"]

T = TypeVar("T")
R = TypeVar("R")

#: So many are done one after the other: a thread costs more than a request to a local disk.
_FEW = 8
_THREADS = 32


def at_once(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call a function for each item, from several threads if there are many; its results in order.

    If calls raise, the first error is raised here, when all others have ended.
    """
    if len(items) <= _FEW:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        return list(pool.map(call, items))
