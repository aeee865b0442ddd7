"""The keys of a comparison: the same on both sides, in the same random orders.

The keys go to the JVM as a file of little-endian int64 in insertion order. The order in which a round visits
them is not handed over: both sides sort by the same invertible mix of the key (SplitMix64's finaliser),
salted with the seed and the number of the round. A fresh order per round matters, because the value objects
that a round allocates lie in memory in the order of that round: repeating one order would walk memory
forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
_Uint64Array = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_KEY = 1_000_000_000


def random_keys(n: int, seed: int = 1) -> Int64Array:
    """Return ``n`` distinct keys in random order: dense numbers of ten digits, as ids of users are. O(n).

    All lie outside the range for which Java shares boxed objects (-128 to 127).

    >>> sorted(random_keys(3).tolist())
    [1000000000, 1000000001, 1000000002]
    """
    return np.random.default_rng(seed).permutation(n).astype(np.int64) + _FIRST_KEY


def round_order(keys: Int64Array, seed: int, round_number: int) -> Int64Array:
    """Return the keys in the random order of one round, as the JVM side visits them. O(n log n), a new array.

    Rounds count from 0 and include the warm-up. The order depends on the set of keys, not on their order.

    >>> keys = random_keys(5)
    >>> bool((round_order(keys, 1, 0) == round_order(keys[::-1], 1, 0)).all())
    True
    """
    salt = np.uint64(_mix_int((seed + (round_number + 1) * _GOLDEN) & _MASK))
    mixed = _mix(keys.astype(np.int64).view(np.uint64) ^ salt)
    # Java sorts them as signed numbers.
    ordered = np.sort(mixed.view(np.int64)).view(np.uint64)
    return (_unmix(ordered) ^ salt).view(np.int64)


def checksum(values: Int64Array) -> int:
    """Return a sum that depends on every value and on its place, as a signed 64-bit integer. O(n)."""
    weights = np.arange(len(values), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    total = int((values.view(np.uint64) * weights).sum(dtype=np.uint64))
    return total - (1 << 64) if total >> 63 else total


@dataclass(frozen=True)
class KeyFile:
    """A file of keys, with what the JVM needs to see that it reads the right one."""

    path: Path
    n: int
    checksum: int
    seed: int
    order_checksum: int

    @classmethod
    def write(cls, path: Path, keys: npt.ArrayLike, seed: int) -> KeyFile:
        """Write distinct int64 keys in insertion order. O(n log n); the keys are copied once."""
        array = np.ascontiguousarray(keys)
        if array.ndim != 1 or array.dtype.kind != "i" or len(array) == 0:
            raise ValueError("keys must be a one-dimensional array of signed integers with at least one key")
        array = array.astype(np.int64)
        if len(np.unique(array)) != len(array):
            raise ValueError("keys must be distinct")
        array.astype("<i8").tofile(path)
        return cls(path, len(array), checksum(array), seed, checksum(round_order(array, seed, 0)))


def _mix(z: _Uint64Array) -> _Uint64Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _unmix(z: _Uint64Array) -> _Uint64Array:
    z = (z ^ (z >> np.uint64(31)) ^ (z >> np.uint64(62))) * np.uint64(0x319642B2D24D8EC3)
    z = (z ^ (z >> np.uint64(27)) ^ (z >> np.uint64(54))) * np.uint64(0x96DE1B173F119089)
    unmixed: _Uint64Array = z ^ (z >> np.uint64(30)) ^ (z >> np.uint64(60))
    return unmixed


def _mix_int(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
