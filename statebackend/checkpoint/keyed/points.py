"""`Points`: the moments since which a backend can tell what has changed."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeAlias

__all__ = ["Point", "Points"]

#: A moment since which a backend can tell what has changed. What it is, only that backend knows.
Point: TypeAlias = Any


class Points(ABC):
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
        """Return True if keeping what has changed since a point costs more than it can be worth; asked often."""
        return False
