"""Which keys have been written or removed, since each of several moments.

`KeyChanges` says how it is told what has become of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from statebackend._core.rocksdb.overlay.key_changes import KeyChanges

#: Writes are refused where these are to take what they change.
_REFUSING = KeyChanges(is_busy=True)


class Segment:
    """The changes from one remembered moment to the next."""

    __slots__ = ("is_of_mark", "is_valid", "tables")

    def __init__(self, tables: int, *, is_of_mark: bool = False) -> None:
        #: True for a mark, or for the batch that the first mark begins; False for a snapshot.
        self.is_of_mark = is_of_mark
        #: By the number of the table: each key, and what has become of it.
        self.tables = [KeyChanges() for _ in range(tables)]
        #: False once it was dropped, or a rollback went behind it.
        self.is_valid = True

    def __len__(self) -> int:
        return sum(map(len, self.tables))


class ChangeLog:
    """The segments between the moments that marks and points remember, oldest first; ``note_in`` gets the newest one.

    While nobody remembers a moment nothing is noted.
    """

    def __init__(self, note_in: Callable[[list[KeyChanges] | None], object]) -> None:
        self._segments: list[Segment] = []
        self._tables = 0
        self._note_in = note_in

    def __len__(self) -> int:
        return len(self._segments)

    def add_table(self) -> int:
        """The number of a new table."""
        self._tables += 1
        for segment in self._segments:
            segment.tables.append(KeyChanges())
        return self._tables - 1

    def open(self, *, is_of_mark: bool = False) -> Segment:
        """Remember this moment. O(tables)."""
        self._segments.append(Segment(self._tables, is_of_mark=is_of_mark))
        self._note()
        return self._segments[-1]

    def _note(self) -> None:
        self._note_in(self._segments[-1].tables if self._segments else None)

    def drop(self, segment: Segment) -> None:
        """Forget a moment. What has changed since is passed on to the moment before, if there is one. Idempotent."""
        if not segment.is_valid:
            return
        segment.is_valid = False
        try:
            # Or another thread writes into a table that is joined already.
            self._note_in([_REFUSING] * self._tables)
            at = self._segments.index(segment)
            del self._segments[at]
            if at:
                before = self._segments[at - 1].tables
                for number, noted in enumerate(segment.tables):
                    before[number] = _joined(before[number], noted)
        finally:
            self._note()

    def drop_lost(self, known: Collection[Segment | None]) -> bool:
        """Forget the moments of marks that are not among the known ones, and what has changed since.

        Return True if there were any: then the next snapshot must be a base.
        """
        lost = [each for each in self._segments if each.is_of_mark and each not in known]
        for segment in lost:
            segment.is_valid = False
            self._segments.remove(segment)
        if lost:
            self._note()
        return bool(lost)

    def back_to(self, segment: Segment) -> None:
        """Forget what has changed since a moment, and the moments after it. O(changes)."""
        at = self._segments.index(segment)
        for later in self._segments[at + 1 :]:
            later.is_valid = False
        del self._segments[at + 1 :]
        segment.tables[:] = [KeyChanges() for _ in range(self._tables)]
        self._note()

    def since(self, segment: Segment, number: int) -> KeyChanges:
        """The keys of a table that have changed since a moment. O(changes)."""
        at = self._segments.index(segment)
        return _joined_all(self._segments[at:], number)

    def between(self, first: Segment, last: Segment, number: int) -> KeyChanges:
        """The keys that have changed from a moment on until a later one."""
        start, end = self._segments.index(first), self._segments.index(last)
        return _joined_all(self._segments[start:end], number)

    def count_since(self, segment: Segment) -> int:
        """About how many keys have changed since a moment. O(moments and tables)."""
        return sum(map(len, self._segments[self._segments.index(segment) :]))

    def close(self) -> None:
        for segment in self._segments:
            segment.is_valid = False
        self._segments.clear()
        self._note()


def _joined(before: KeyChanges, after: KeyChanges) -> KeyChanges:
    """One of the two, changed to hold both. O(the smaller one)."""
    if len(after) <= len(before):
        before.follow(after)
        return before
    after.precede(before)
    return after


def _joined_all(segments: list[Segment], number: int) -> KeyChanges:
    """What a table has in all of them; not to be changed."""
    filled = [each.tables[number] for each in segments if len(each.tables[number])]
    if len(filled) == 1:
        return filled[0]
    joined = KeyChanges()
    for each in filled:
        joined = _joined(joined, each.copy())
    return joined
