"""Decides which files of a checkpoint are merged, so that they stay few and no row is written often.

A file belongs to a tier by its size; each tier begins at eight times the size at which the one below begins. Eight
neighbours of one tier are merged into one file, which then usually belongs to the next tier. So a change is written
once for each tier on its way, and a restore usually opens at most seven files of a tier. The number of tiers grows with
the logarithm of what has changed. When the deltas have outgrown the base, a new base is written from memory instead.

>>> run_to_merge([5_000] * 8)
range(0, 8)
>>> run_to_merge([40_000] * 7 + [5_000] * 7) is None  # seven of each tier
True
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["is_base_due", "run_to_merge"]

#: How many neighbours are merged at once; also the ratio of the sizes at which two tiers begin.
FAN = 8
#: More files are not merged at once: each is open meanwhile.
MOST_MERGED = 64
#: Files below this size are of the lowest tier.
SMALLEST_TIER = 8 << 10
#: No base is written for deltas that are smaller than this together.
SMALLEST_BASE = 256 << 10


def is_base_due(base: int, deltas: int) -> bool:
    """Return True if deltas of this total size have outgrown a base of this size.

    >>> is_base_due(10_000_000, 9_000_000), is_base_due(10_000_000, 11_000_000)
    (False, True)
    """
    return deltas > max(base, SMALLEST_BASE)


def run_to_merge(sizes: Sequence[int]) -> range | None:
    """The deltas to merge, as positions in the order in which they are applied; None if no tier has eight neighbours.

    Only neighbours are merged, so smaller files written just before a large one count as being of its tier. O(files).

    >>> run_to_merge([5_000] * 9 + [300_000] + [5_000] * 3), run_to_merge([5_000] * 1000)
    (range(0, 10), range(0, 64))
    """
    last = len(sizes)
    while last:
        first = last - 1
        tier = _tier(sizes[first])
        while first and _tier(sizes[first - 1]) <= tier:
            first -= 1
        if last - first >= FAN:
            return range(first, min(last, first + MOST_MERGED))
        last = first
    return None


def _tier(size: int) -> int:
    tier, limit = 0, SMALLEST_TIER
    while size >= limit:
        tier, limit = tier + 1, limit * FAN
    return tier
