"""The files that a checkpoint builds on, and the moment since which changes are known.

    committed ---- in flight ---- in flight ---- now
        |              |              |
     chain.point  snapshot.point  snapshot.point     points: later changes can be read
        |
     base + deltas, and perhaps a file that will replace some of them: several deltas in one, or a new base, of the
     moment of a snapshot, in place of all files of that snapshot

Every snapshot builds on the newest checkpoint that was committed when it was taken. It opens its own point, which
becomes the chain's when it is committed. An aborted snapshot drops its point: its changes are read again, from the
chain's point. A point that a rollback has gone behind is no longer valid, and the next snapshot is a base.

The module also decides which files of a checkpoint are merged, so that files stay few and no row is written often.

A file belongs to a tier by its size; each tier begins at eight times the size at which the one below begins. Eight
neighbours of one tier are merged into one file, which then usually belongs to the next tier. So a change is written
once for each tier on its way, and a restore usually opens at most seven files of a tier. The number of tiers grows with
the logarithm of the changes. When the deltas have outgrown the base, a new base is written from memory instead. It is
near when neighbours are half of that: they are not merged, since a row of a merge takes several times as long.

>>> run_to_merge([5_000] * 8, base=1_000_000)
range(0, 8)
>>> run_to_merge([40_000] * 7 + [5_000] * 7, base=1_000_000) is None  # seven of each tier
True
>>> run_to_merge([70_000] * 8, base=1_000_000) is None  # a base is near
True
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StoredFile
from statebackend.checkpoint.store.pending import Snapshot

#: A moment since which a backend can read the changes. Only that backend knows its type.
Point: TypeAlias = Any


class ChangePoints(ABC):
    """Opens and drops points. `SnapshotLog` knows nothing else of a backend."""

    @abstractmethod
    def open(self) -> Point:
        """Remember this moment."""

    @abstractmethod
    def drop(self, point: Point) -> None:
        """Forget a point, valid or not. Idempotent."""

    @abstractmethod
    def is_valid(self, point: Point) -> bool:
        """Return True if no rollback has gone behind the point, and it was not dropped."""

    @abstractmethod
    def changes_since(self, point: Point) -> int:
        """About how many changes have been made since a valid point."""

    @abstractmethod
    def row_counts(self) -> Iterator[int]:
        """About how many rows there are now, table by table, each counted when it is asked for."""

    def holds(self, rows: int) -> bool:
        """Return True if there are about so many rows, or more. Looks at no more tables than it must."""
        return rows <= 0 or any(map(rows.__le__, itertools.accumulate(self.row_counts())))

    def is_outgrown(self, point: Point) -> bool:
        """Return True if keeping the changes since a point costs more than they are worth; asked often."""
        return False


#: How many neighbours are merged at once; also the ratio of the sizes at which two tiers begin.
FAN = 8
#: More files are not merged at once: each is open meanwhile.
MOST_MERGED = 64
#: Files below this size are of the lowest tier.
SMALLEST_TIER = 8 << 10
#: No base is written for deltas that are smaller than this together.
SMALLEST_BASE = 256 << 10


def is_base_due(base: int, deltas: int) -> bool:
    """Return True if deltas of this total size have outgrown a base of this size."""
    return deltas > max(base, SMALLEST_BASE)


def run_to_merge(sizes: Sequence[int], base: int) -> range | None:
    """The deltas to merge, as positions in the order in which they are applied; None if no tier has eight neighbours.

    Also None if these are more than half of the size at which another base is due.

    Only neighbours are merged, so smaller files written just before a large one count as being of its tier. O(files).

    >>> run_to_merge([5_000] * 9 + [300_000] + [5_000] * 3, base=1_000_000)
    range(0, 10)
    >>> run_to_merge([5_000] * 1000, base=1_000_000)
    range(0, 64)
    """
    last = len(sizes)
    while last:
        first = last - 1
        tier = _tier(sizes[first])
        while first and _tier(sizes[first - 1]) <= tier:
            first -= 1
        if last - first >= FAN:
            run = range(first, min(last, first + MOST_MERGED))
            return None if is_base_due(base, 2 * sum(sizes[at] for at in run)) else run
        last = first
    return None


def _tier(size: int) -> int:
    tier, limit = 0, SMALLEST_TIER
    while size >= limit:
        tier, limit = tier + 1, limit * FAN
    return tier


class Chain(NamedTuple):
    """A committed checkpoint that can be built on."""

    files: tuple[StoredFile, ...]
    #: The moment of the checkpoint, for the backend.
    point: Point
    #: The writers of those files that no manifest names yet.
    unnamed: tuple[DataWriter, ...] = ()

    @property
    def deltas(self) -> tuple[StoredFile, ...]:
        return tuple(file for file in self.files if file.kind == "delta")

    def is_kept_for(self, writer: DataWriter) -> bool:
        """Return True if the files will be there when the snapshot of ``writer`` is committed."""
        own = {name for each in self.unnamed if each.shares_store_with(writer) for name in each.unsettled}
        return all(file.name in writer.builds_on or file.name in own for file in self.files)

    @property
    def is_base_due(self) -> bool:
        """True if the deltas have outgrown the base."""
        return is_base_due(self.base_size, sum(file.size for file in self.deltas))

    @property
    def base_size(self) -> int:
        """The bytes of the base: about what another one would take."""
        return sum(file.size for file in self.files if file.kind != "delta")

    @property
    def mergeable(self) -> tuple[StoredFile, ...]:
        """Deltas that are to be merged into one. If a base is due, but lacks room, their size does not matter."""
        deltas = self.deltas
        sizes = [file.size for file in deltas]
        run = run_to_merge(sizes, 2 * sum(sizes) if self.is_base_due else self.base_size)
        return () if run is None else deltas[run.start : run.stop]

    def with_merged(self, rewriting: KeyedSnapshot, made: tuple[StoredFile, ...]) -> Chain | None:
        """The same with the rewritten files in place of their parts; None if these are not in it."""
        parts = rewriting.parts
        if not parts or parts[0] not in self.files:
            return None
        first = self.files.index(parts[0])
        if self.files[first : first + len(parts)] != parts:
            return None
        files = (*self.files[:first], *made, *self.files[first + len(parts) :])
        return Chain(files, self.point, (*self.unnamed, rewriting.writer))


class KeyedSnapshot(Snapshot):
    """A snapshot of keyed state.

    Without a checkpoint it is written in the background, without a point, and a later snapshot names its files in place
    of ``replaces``: some deltas, or all files of a snapshot of the same moment.
    """

    def __init__(
        self,
        writer: DataWriter,
        point: Point | None = None,
        *,
        chain: Chain | None = None,
        now: int | None = None,
        watermark: int | None = None,
        replaces: tuple[StoredFile, ...] | KeyedSnapshot = (),
    ) -> None:
        super().__init__(writer)
        self.point = point
        #: The checkpoint it builds on; None for a base.
        self.chain = chain
        self.now = now
        self.watermark = watermark
        self.replaces = replaces
        #: All files that it consists of; None until they are written.
        self.files: tuple[StoredFile, ...] | None = None

    @property
    def parts(self) -> tuple[StoredFile, ...]:
        """The files to replace; none as long as they are not all written."""
        return (self.replaces.files or ()) if isinstance(self.replaces, KeyedSnapshot) else self.replaces

    @property
    def names(self) -> set[str]:
        """The files that its manifest names, as far as they are known yet."""
        built_on = () if self.chain is None else self.chain.files
        return {file.name for file in self.files or built_on}

    @property
    def has_landed(self) -> bool:
        """True if its checkpoint is committed."""
        return self.files is not None and self.writer.is_committed

    def made(self) -> tuple[StoredFile, ...] | None:
        """The files that were written in the background; None if nothing came of it."""
        return None if self.writer.is_aborted else self.files
