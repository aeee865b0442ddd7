"""The rows of a restored state where they lie. They are read when they are asked for, one batch at a time.

>>> rows = StoredRows()
>>> rows.add(lambda: iter([GroupedBatch.of(pa.record_batch({"key": [1, 2]}), [4, 9])]))
>>> [each.batch["key"].to_pylist() for each in rows], bool(rows), bool(StoredRows())
([[1, 2]], True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from statebackend.checkpoint.format import DataFileReader, GroupedBatch, read_data_file
from statebackend.checkpoint.store.manifest import StoredFile
from statebackend.checkpoint.store.reader import Checkpoint
from statebackend.keys import KeyGroupRange

__all__ = ["StoredRows", "open_data_file"]


class StoredRows:
    """Rows in the order in which to apply them, as often as they are asked for. One thread at a time reads them.

    >>> list(StoredRows())
    []
    """

    def __init__(self) -> None:
        self._sources: list[Callable[[], Iterator[GroupedBatch]]] = []
        self._kept: list[GroupedBatch] | None = None

    def add(self, source: Callable[[], Iterator[GroupedBatch]]) -> None:
        """Append rows that a call reads."""
        self._sources.append(source)

    def __iter__(self) -> Iterator[GroupedBatch]:
        if self._kept is not None:
            yield from self._kept
            return
        for source in self._sources:
            yield from source()

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def keep(self) -> None:
        """Hold the rows in memory from now on: the files may go, and any thread may read. O(rows), once."""
        if self._kept is None:
            self._kept = list(self)
            self._sources.clear()


def open_data_file(checkpoint: Checkpoint, file: StoredFile, key_groups: KeyGroupRange) -> DataFileReader:
    """A reader that stays open for as long as it is used. Compares what holds these key groups with its checksums."""
    reader = read_data_file(checkpoint.open_file(file), file.name)
    reader.compare(key_groups)
    return reader
