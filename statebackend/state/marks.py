"""Marks: points to roll back to, newest last."""

from __future__ import annotations

from typing import Any

from statebackend.errors import UsageError


class BackendMark:
    """A point to roll back to, made by ``mark()``. Only the backend that made it can use it."""

    __slots__ = ("__weakref__", "_owner", "is_open", "point")

    def __init__(self, owner: MarkStack, point: Any) -> None:
        self._owner = owner
        #: The information that the backend needs to find back.
        self.point = point
        #: True while a rollback to it is possible: it was not released, and no rollback went behind it.
        self.is_open = True

    def __repr__(self) -> str:
        return f"<{'open' if self.is_open else 'closed'} mark of {self._owner.name}>"


class MarkStack:
    """The open marks of one backend."""

    __slots__ = ("_marks", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._marks: dict[BackendMark, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._marks)

    def open(self, point: Any) -> BackendMark:
        """A new mark, the newest. O(1)."""
        mark = BackendMark(self, point)
        self._marks[mark] = None
        return mark

    def points(self) -> list[Any]:
        return [mark.point for mark in self._marks]

    def newer_than(self, count: int) -> list[BackendMark]:
        """The open marks except for the oldest ones, newest first."""
        return list(self._marks)[count:][::-1]

    def point_of(self, mark: BackendMark) -> Any:
        """The point of an open mark. O(1)."""
        self._check_own(mark)
        if not mark.is_open:
            raise UsageError(
                "the mark is no longer valid",
                code="USAGE.STALE_MARK",
                hint="it was released, or an older mark was rolled back to",
            )
        return mark.point

    def back_to(self, mark: BackendMark) -> Any:
        """The point of an open mark, which stays open; closes newer marks. O(newer marks)."""
        point = self.point_of(mark)
        # A finaliser may end any of them meanwhile.
        while mark.is_open and (newest := next(reversed(self._marks), mark)) is not mark:
            newest.is_open = False
            self._marks.pop(newest, None)
        return point

    def release(self, mark: BackendMark) -> bool:
        """Close a mark; return True if it was open. O(1)."""
        self._check_own(mark)
        if not mark.is_open:
            return False
        del self._marks[mark]
        mark.is_open = False
        return True

    def close(self) -> None:
        for mark in self._marks:
            mark.is_open = False
        self._marks.clear()

    def _check_own(self, mark: Any) -> None:
        if not isinstance(mark, BackendMark) or mark._owner is not self:
            raise UsageError(
                "this is not a mark of this backend",
                code="USAGE.FOREIGN_MARK",
                hint="use what mark() of the same backend returned",
            )
