"""A job: a function, and how rows reach it. It is configuration only, checked when it is made.

>>> from statebackend.functions import map_with_state
>>> job = Job(map_with_state(lambda row, n: (None, 1), int), key="user")
>>> job.key, job.key_type({"user": "string", "n": "int"})
('user', STRING)
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from statebackend.backends import create_backend
from statebackend.errors import UsageError
from statebackend.functions import BatchProcessFunction, KeyedProcessFunction, ProcessFunction
from statebackend.runtime.row_writer import OutputSchema
from statebackend.state import StateBackend, checked_range
from statebackend.types import ROW, Type, of

__all__ = ["Job"]

NULL_KEYS = ("fail", "drop")


class Job:
    """A function with its key, schema, backend and the columns that steer it. Picklable if the function is.

    >>> from statebackend.functions import map_with_state
    >>> Job(map_with_state(lambda row, n: (None, 1), int), key=["user", "item"]).columns
    ('user', 'item')
    """

    def __init__(
        self,
        function: object,
        *,
        key: str | Sequence[str],
        schema: object = None,
        backend: str | StateBackend = "heap",
        max_parallelism: int = 128,
        event_time: str | None = None,
        delay: int | datetime.timedelta = 0,
        order_by: str | Sequence[str] | None = None,
        broadcast: str | None = None,
        null_keys: str = "fail",
    ) -> None:
        if isinstance(function, type) or not isinstance(function, ProcessFunction):
            what = f"class {function.__qualname__}" if isinstance(function, type) else type(function).__name__
            raise UsageError(
                f"a {what} is not a function with state",
                hint="give an object of a KeyedProcessFunction or BatchProcessFunction, or map_with_state(...)",
            )
        #: The object that was given. It never runs: see `fresh_function`.
        self.function: ProcessFunction = function
        #: The column of the key, or the columns of a composite one.
        self.key: str | tuple[str, ...] = key if isinstance(key, str) else tuple(key)
        if not self.key or not all(isinstance(each, str) for each in self.columns):
            raise UsageError("key is the name of a column, or a list of names")
        self.output = None if schema is None else OutputSchema(schema)
        self.backend = create_backend(backend) if isinstance(backend, str) else backend
        if not isinstance(self.backend, StateBackend):
            raise UsageError("backend is the name of one, or a StateBackend")
        checked_range(max_parallelism, None)
        self.max_parallelism = max_parallelism
        self.event_time = _column(event_time, "event_time")
        self.delay = _milliseconds(delay)
        if self.delay and event_time is None:
            raise UsageError("delay is that of the event time", hint="name its column with event_time=")
        names = () if order_by is None else (order_by,) if isinstance(order_by, str) else tuple(order_by)
        self.order_by: tuple[str, ...] = names
        self.broadcast = _column(broadcast, "broadcast")
        if broadcast is not None and self.is_batch:
            raise UsageError(
                "broadcast= is for a KeyedProcessFunction", hint="filter such rows in process_batch"
            )
        if null_keys not in NULL_KEYS:
            raise UsageError("null_keys is 'fail' or 'drop'")
        self.drops_null_keys = null_keys == "drop"

    @property
    def is_batch(self) -> bool:
        """True if the function takes whole batches."""
        return isinstance(self.function, BatchProcessFunction)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the key."""
        return (self.key,) if isinstance(self.key, str) else self.key

    def fresh_function(self) -> KeyedProcessFunction | BatchProcessFunction:
        """A copy of the function as it was given."""
        try:
            made: Any = copy.deepcopy(self.function)
        except Exception as error:
            raise UsageError(
                f"the function cannot be copied: {type(error).__name__}",
                detail=f"class {type(self.function).__qualname__}",
                hint="make connections, locks and the like in open(), not in __init__",
            ) from error
        return made  # type: ignore[no-any-return]

    def key_type(self, columns: Mapping[str, object]) -> Type:
        """The type of the key, given the types of all columns in any notation; for a composite key, a ROW.

        >>> from statebackend.functions import map_with_state
        >>> job = Job(map_with_state(lambda row, n: (None, 1), int), key=["a"])
        >>> job.key_type({"a": "int", "b": "string"})
        ROW(a=INT)
        """
        self.check_columns(list(columns))
        types = {name: of(columns[name]) for name in self.columns}
        return types[self.key] if isinstance(self.key, str) else ROW(**types)

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise unless a batch with these columns has each column that the job names exactly once."""
        wanted = [*self.columns, *self.order_by]
        wanted += [each for each in (self.event_time, self.broadcast) if each is not None]
        for name in wanted:
            self.check_column(name, names)
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice:
            raise UsageError(
                "two columns of the batch have the same name",
                detail=f"columns {', '.join(twice)}",
                hint="rename one before foreachBatch",
            )

    @staticmethod
    def check_column(name: str, names: Sequence[str]) -> None:
        """Raise unless ``names`` contains the name."""
        if name not in names:
            raise UsageError(
                f"the batch has no column {name!r}",
                code="USAGE.NO_COLUMN",
                detail=f"columns {', '.join(names)}",
            )


def _column(name: object, what: str) -> str | None:
    if name is not None and not isinstance(name, str):
        raise UsageError(f"{what} is the name of a column")
    return name


def _milliseconds(delay: int | datetime.timedelta) -> int:
    if isinstance(delay, datetime.timedelta):
        delay = delay // datetime.timedelta(milliseconds=1)
    if type(delay) is not int or delay < 0:
        raise UsageError("delay is a timedelta or a number of milliseconds, not negative")
    return delay
