"""The rows of the heap backend's states: of a whole view, and of the changes since a mark."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.backends.heap.table_reader import RowCopy, TableReader, TableRows
from statebackend.checkpoint.format import GroupedBatch, Section
from statebackend.checkpoint.keyed import ExpiredAt, Source, compiled_backend as compiled
from statebackend.checkpoint.keyed.chain import Point
from statebackend.checkpoint.keyed.compiled_backend import CompiledPoints, cuts, group_ranges
from statebackend.checkpoint.keyed.row_source import grouped, joined_batches
from statebackend.columns.stored_columns import Array

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed_backend import HeapKeyedBackend


class HeapPoints(CompiledPoints):
    """Marks of the core: the journal since the oldest says what has changed."""

    def __init__(self, backend: HeapKeyedBackend) -> None:
        self._backend = backend
        self._core = backend.core

    def open(self) -> Point:
        return self._core.mark()

    def drop(self, point: Point) -> None:
        self._core.release_soon(point)

    def is_valid(self, point: Point) -> bool:
        return bool(point.is_open)

    def changes_since(self, point: Point) -> int:
        return self._core.changes_since(point)

    def row_counts(self) -> Iterator[int]:
        tables = (state.tables for state in self._backend._state_readers())
        return map(len, itertools.chain.from_iterable(tables))


class HeapView(Source):
    """All states at this moment. The view shares the maps and copies nothing; without times it leaves nothing out."""

    def __init__(self, backend: HeapKeyedBackend, expired_at: ExpiredAt | None) -> None:
        super().__init__("base", backend.key_group_range)
        self.threads = backend.threads
        self._states = backend._state_readers()
        self._max_parallelism = backend.max_parallelism
        self._expired_at = expired_at or ExpiredAt()
        self._have_rows = [any(map(len, state.tables)) for state in self._states]
        self._view = backend.core.snapshot()

    @property
    def is_empty(self) -> bool:
        return not any(self._have_rows)

    def sections(self) -> Sequence[Section]:
        return [
            Section(state.name, state.schema, self._batches(state)) if has_rows else state.without_rows
            for state, has_rows in zip(self._states, self._have_rows, strict=True)
        ]

    def _batches(self, state: TableReader) -> Iterator[GroupedBatch]:
        left_out = state.left_out(self._expired_at, self.expired)
        sizes = sum(map(self._view.group_sizes, state.tables))
        for first, last in group_ranges(sizes, state.first_group):
            yield from _batched(state.parts_of(self._view, first, last, left_out))

    def find(
        self, name: str, keys: pa.Array, namespace: bytes
    ) -> tuple[pa.RecordBatch | None, NDArray[np.int64]]:
        state = next(each for each in self._states if each.name == name)
        found, at = state.found(self._view, keys, self._max_parallelism, namespace)
        parts = [piece.rows()[0] for piece, _ in _pieces(found, compiled.BATCH_BYTES)]
        return joined_batches(parts, state.schema), at

    def release(self) -> None:
        self._view.release()


class HeapChanges(Source):
    """The rows inserted, written or removed since a mark. The backend's thread copies the columns at once."""

    def __init__(self, backend: HeapKeyedBackend, mark: Any) -> None:
        super().__init__("delta", backend.key_group_range)
        self._changes = []
        for state in backend.written_since(mark):
            parts = [part for part in state.changes_since(mark) if len(part)]
            if parts:
                self._changes.append((state, parts))

    @property
    def is_empty(self) -> bool:
        return not self._changes

    def sections(self) -> Sequence[Section]:
        return [
            Section(state.name, state.delta_schema, self._batches(state, parts))
            for state, parts in self._changes
        ]

    def _batches(self, state: TableReader, parts: list[RowCopy]) -> Iterator[GroupedBatch]:
        if len(parts) == 1:
            yield from _batched_part(parts[0])
            return
        sizes = np.bincount(np.concatenate([part.groups for part in parts]) - state.first_group)
        for first, last in group_ranges(sizes, state.first_group):
            yield from _batched([part.take(_rows_of(part, first, last)) for part in parts])

    def release(self) -> None:
        self._changes = []


def _batched(parts: Sequence[TableRows | RowCopy]) -> Iterator[GroupedBatch]:
    """The rows of some key groups in batches, in each key group in the order of the parts; each part is sorted."""
    parts = [part for part in parts if len(part)]
    whole = _whole(parts)
    if whole is not None:
        yield from _not_empty([piece.rows() for piece in whole])
        return
    for group in np.unique(np.concatenate([part.groups for part in parts])):
        for part in parts:
            yield from _batched_part(part.take(_rows_of(part, group, group)))


def _batched_part(part: TableRows | RowCopy) -> Iterator[GroupedBatch]:
    for piece, _ in _pieces(part, compiled.BATCH_BYTES):
        yield from _not_empty([piece.rows()])


def _whole(parts: Sequence[TableRows | RowCopy]) -> list[RowCopy] | None:
    """All rows of each part; None if they are too many for one batch."""
    found = []
    left = 2 * compiled.BATCH_BYTES
    for part in parts:
        piece, size = next(_pieces(part, max(left, 1)))
        left -= size
        if left < 0 or len(piece) < len(part):
            return None
        found.append(piece)
    return found


def _rows_of(part: TableRows | RowCopy, first: int, last: int) -> slice:
    start, end = part.groups.searchsorted([first, last + 1])
    return slice(int(start), int(end))


def _not_empty(parts: list[tuple[pa.RecordBatch, Array]]) -> Iterator[GroupedBatch]:
    """The parts as one batch without what has expired; nothing if no row is left."""
    left = [(batch, groups) for batch, groups in parts if batch.num_rows]
    if left:
        yield grouped(left)


def _pieces(part: TableRows | RowCopy, limit: int) -> Iterator[tuple[RowCopy, int]]:
    """The rows in pieces of at most about ``limit`` bytes, each with its weight."""
    if not len(part):
        return
    sizes = part.weights() + compiled.BATCH_BYTES // compiled.BATCH_ROWS
    if part.has_objects:
        yield from part.copied().serialised(sizes, limit)
        return
    whole = int(sizes.sum())
    if whole <= limit:
        yield part.copied(), whole
        return
    for start, end in itertools.pairwise([*cuts(sizes, limit), len(part)]):
        yield part.take(slice(start, end)).copied(), int(sizes[start:end].sum())
