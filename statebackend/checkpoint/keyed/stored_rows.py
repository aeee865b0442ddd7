"""The rows of a restored state, left in their files. They are read when they are asked for, one batch at a time.

>>> import pyarrow as pa
>>> rows = StoredRows()
>>> rows.add(lambda: iter([GroupedBatch.of(pa.record_batch({"key": [1, 2]}), [4, 9])]))
>>> [each.batch["key"].to_pylist() for each in rows], bool(rows), bool(StoredRows())
([[1, 2]], True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from statebackend.checkpoint.format import DataFileReader, GroupedBatch, read_data_file
from statebackend.checkpoint.store.manifest import StoredFile
from statebackend.checkpoint.store.reader import Checkpoint
from statebackend.keys import KeyGroupRange

__all__ = ["RestoredFile", "StoredRows", "close_most"]

#: So many files stay open until their states are declared; further ones are opened again.
_MOST_OPEN = 64


class StoredRows:
    """Rows in the order in which to apply them, as often as they are asked for. One thread at a time reads them.

    >>> list(StoredRows())
    []
    """

    def __init__(self) -> None:
        self._sources: list[Callable[[], Iterator[GroupedBatch]]] = []
        self._kept: list[GroupedBatch] | None = None
        #: The first source, if its rows lie where nobody else removes or changes them.
        self._held: Callable[[], Iterator[GroupedBatch]] | None = None

    def hold(self, source: Callable[[], Iterator[GroupedBatch]]) -> None:
        """Begin with rows that stay where they are: `keep` leaves them there."""
        self._held = source

    def take_changes(self) -> StoredRows:
        """Take out what comes after the rows that are held."""
        changes = StoredRows()
        changes._sources, self._sources = self._sources, []
        return changes

    def add(self, source: Callable[[], Iterator[GroupedBatch]]) -> None:
        """Append rows that a call reads."""
        self._sources.append(source)

    def __iter__(self) -> Iterator[GroupedBatch]:
        if self._held is not None:
            yield from self._held()
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
            self._kept = [rows for source in self._sources for rows in source()]
            self._sources.clear()


class RestoredFile:
    """A data file of a checkpoint whose rows are read later; it is compared with its checksums now."""

    def __init__(self, checkpoint: Checkpoint, file: StoredFile, key_groups: KeyGroupRange) -> None:
        self._checkpoint = checkpoint
        self._file = file
        self._key_groups = key_groups
        reader = self._opened()
        reader.compare(key_groups)
        #: The states in it.
        self.states = reader.states
        self._reader: DataFileReader | None = reader

    def _opened(self) -> DataFileReader:
        return read_data_file(self._checkpoint.open_file(self._file), self._file.name)

    def close(self) -> None:
        """Do not hold it open: it is opened again where its rows are asked for, and must still be there."""
        self._reader = None

    def read(self, name: str) -> Iterator[GroupedBatch]:
        """The rows of a state."""
        reader = self._opened() if self._reader is None else self._reader
        yield from reader.read(name, self._key_groups)


def close_most(files: Sequence[RestoredFile]) -> None:
    """Hold no more files open than a process may have.

    >>> close_most([])
    """
    for file in files[:-_MOST_OPEN]:
        file.close()
