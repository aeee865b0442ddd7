"""What the tests of the RocksDB binding share: rows as offsets and bytes, elements of lists."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from statebackend._core.rocksdb.binding.callbacks import CommittedClock, ExpiryRules
from statebackend._core.rocksdb.binding.database import ColumnFamily, Database
from statebackend._core.rocksdb.binding.database_options import MemoryBudget, Options
from statebackend._core.rocksdb.binding.iterators import Iterator
from statebackend._core.rocksdb.binding.library import live_counters, load
from statebackend._core.rocksdb.binding.write_batch import WriteBatch
from statebackend.backends.rocksdb.library_location import find_library

__all__ = [
    "ColumnFamily",
    "CommittedClock",
    "Database",
    "ExpiryRules",
    "Iterator",
    "MemoryBudget",
    "Options",
    "WriteBatch",
    "delete",
    "elements",
    "element",
    "find_library",
    "live_counters",
    "load",
    "merge",
    "open_database",
    "put",
    "rows",
    "texts",
]


def open_database(path: Path | str, names: Sequence[str] = ("a",), **options: object) -> Database:
    """Open a database whose column families, beside the default one, have these names and options."""
    return Database(path, Options(), {name: Options(**options) for name in names})  # type: ignore[arg-type]


def put(db: Database, family: ColumnFamily, key: bytes, value: bytes, **how: bool) -> None:
    """Write one value."""
    batch = WriteBatch(db)
    batch.put(family, key, value)
    batch.write(**how)


def merge(db: Database, family: ColumnFamily, key: bytes, operand: bytes) -> None:
    """Append to one list."""
    batch = WriteBatch(db)
    batch.merge(family, key, operand)
    batch.write()


def delete(db: Database, family: ColumnFamily, key: bytes) -> None:
    """Remove one key."""
    batch = WriteBatch(db)
    batch.delete(family, key)
    batch.write()


def rows(texts: Iterable[bytes]) -> tuple[NDArray[np.int64], bytes]:
    """Make offsets and data of these rows."""
    kept = list(texts)
    offsets = np.zeros(len(kept) + 1, np.int64)
    np.cumsum([len(text) for text in kept], out=offsets[1:])
    return offsets, b"".join(kept)


def texts(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> list[bytes]:
    """Cut data into its rows."""
    whole = data.tobytes()
    return [whole[a:b] for a, b in itertools.pairwise(offsets.tolist())]


def element(timestamp: int, text: bytes) -> bytes:
    """An element of a list of variable length, with its timestamp in front."""
    return struct.pack("<Iq", 8 + len(text), timestamp) + text


def elements(data: bytes | None) -> list[tuple[int, bytes]]:
    """The elements of such a list."""
    found, at = [], 0
    while at < len(data or b""):
        n, timestamp = struct.unpack_from("<Iq", data, at)
        found.append((timestamp, data[at + 12 : at + 4 + n]))
        at += 4 + n
    return found


#: For programs that use these names, with the library loaded.
PRELUDE = """
import sys
from rocks import *
load(find_library().path)
"""
