"""The time that rows tell, for the rows of one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.checkpoint.store.sealed import MAX_INTEGER
from statebackend.errors import usage
from statebackend.functions import EventTime
from statebackend.keys import TimeColumn, time_column

_EVENT_TIME = "the event-time column"
#: The event time while there is none: nothing has expired by then.
NO_TIME = -(2**63)


@dataclass(frozen=True)
class RowTimes:
    """The times of the rows of a batch, and the watermarks before and after it, in milliseconds."""

    #: The watermark before the batch, and after it; None while no row has had a time.
    before: int | None
    after: int | None
    #: The time of each row; whatever for a null.
    own: NDArray[np.int64]
    is_null: NDArray[np.bool_]
    #: The rows that are late, and those whose time is too far ahead of the clock.
    is_late: NDArray[np.bool_]
    is_ahead: NDArray[np.bool_]
    #: True if a row of the batch had a time that counts.
    told: bool = False

    @classmethod
    def of(
        cls,
        event_time: EventTime,
        table: pa.Table,
        *,
        watermark: int | None,
        clock: int | None = None,
        idle: int | None = None,
    ) -> RowTimes:
        """The times of the rows of a table, after ``watermark``. ``max_ahead`` counts from ``clock``. O(rows).

        ``idle`` is the watermark by the clock, for a table without a time, if rows have stayed away for long.
        """
        own, is_null = _times(table, event_time.column)
        is_ahead = np.zeros(len(own), dtype=np.bool_)
        if event_time.max_ahead is not None and clock is not None:
            is_ahead = ~is_null & (own > clock + _whole(event_time.max_ahead))
        is_late = np.zeros(len(own), dtype=np.bool_)
        if watermark is not None:
            is_late = ~(is_null | is_ahead) & (own < watermark)
        telling = own[~(is_null | is_ahead)]
        after = watermark
        if len(telling):
            newest = int(telling.max()) - _whole(event_time.watermark_delay)
            after = newest if watermark is None else max(watermark, newest)
            _check_storable(after, event_time.column)
        elif watermark is not None and idle is not None:
            after = max(watermark, idle)
        return cls(watermark, after, own, is_null, is_late, is_ahead, len(telling) > 0)

    @classmethod
    def of_broadcast(cls, event_time: EventTime, table: pa.Table) -> RowTimes:
        """The times of rows that belong to no key: they move no watermark, and are not late. O(rows)."""
        own, is_null = _times(table, event_time.column)
        never = np.zeros(len(own), dtype=np.bool_)
        return cls(None, None, own, is_null, never, never)

    @classmethod
    def of_none(cls, before: int | None, after: int | None) -> RowTimes:
        """The times of a batch without rows."""
        nothing = np.zeros(0, dtype=np.bool_)
        return cls(before, after, np.zeros(0, dtype=np.int64), nothing, nothing, nothing)

    @property
    def by(self) -> NDArray[np.int64]:
        """The time that state uses for each row: its own, or the watermark after the batch if it has none."""
        after = NO_TIME if self.after is None else self.after
        return np.where(self.is_null | self.is_ahead, after, self.own)

    @property
    def num_late(self) -> int:
        return int(np.count_nonzero(self.is_late))

    @property
    def num_ahead(self) -> int:
        """The number of rows whose time is too far ahead of the clock."""
        return int(np.count_nonzero(self.is_ahead))

    @property
    def is_on_time(self) -> NDArray[np.bool_]:
        """The rows that are neither late nor too far ahead."""
        return ~(self.is_late | self.is_ahead)

    def take(self, rows: NDArray[Any]) -> RowTimes:
        """The times of some of the rows, by their numbers or by a mask; the watermarks stay. O(rows)."""
        return replace(
            self,
            own=self.own[rows],
            is_null=self.is_null[rows],
            is_late=self.is_late[rows],
            is_ahead=self.is_ahead[rows],
        )

    def __len__(self) -> int:
        return len(self.own)


def _times(table: pa.Table, column: str) -> TimeColumn:
    return time_column(table.column(column), _EVENT_TIME, f"column {column!r} is ")


def _whole(duration: Any) -> int:
    """A duration as `EventTime` has made it: milliseconds."""
    assert isinstance(duration, int)
    return duration


def _check_storable(watermark: int, column: str) -> None:
    if abs(watermark) > MAX_INTEGER:
        raise usage.column(
            "the time of a row is further from 1970 than checkpoints can tell",
            detail=f"column {column!r}",
            hint="it is a timestamp, or milliseconds; EventTime(..., max_ahead=...) lets no such time count",
        )
