"""The end of a writer: for which reason it can write no more, and the error that every later call raises.

>>> over = Over(Reason.FENCED, CommitConflictError("another writer has opened the store", detail="/data/state"))
>>> over.again()
CommitConflictError('another writer has opened the store (/data/state) [COMMIT_CONFLICT]')
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from statebackend.errors import CommitConflictError, StoreError

__all__ = ["Over", "Reason"]


class Reason(Enum):
    """Why a writer can write no more.

    >>> Reason.FENCED.value
    'another writer has opened the store'
    """

    #: Its commits would be refused, and its files may be gone.
    FENCED = "another writer has opened the store"
    #: A write may or may not have happened; opening the store again shows which.
    UNKNOWN = "whether a write has happened is not known"


class Over(NamedTuple):
    """The reason, and the error that was raised when it was found."""

    reason: Reason
    error: CommitConflictError | StoreError

    def again(self) -> CommitConflictError | StoreError:
        """The same error as a new object: one that is raised twice would collect two tracebacks."""
        error = self.error
        again = type(error)(error.message, code=error.code, detail=error.detail)
        again.hint = error.hint
        if isinstance(again, StoreError):
            again.errno = error.errno  # type: ignore[union-attr]
        return again
