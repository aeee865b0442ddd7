"""`Points`: the moments since which a backend can tell what has changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    def rows_held(self) -> int:
        """About how many rows there are now."""

    def is_outgrown(self, point: Point) -> bool:
        """Return True if keeping what has changed since a point costs more than it can be worth; asked often."""
        return False
