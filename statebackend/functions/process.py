"""The base classes of functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from statebackend.functions.context import FunctionContext

__all__ = [
    "BatchProcessFunction",
    "CheckpointListener",
    "KeyRowsFunction",
    "KeyedProcessFunction",
    "ProcessFunction",
]


class CheckpointListener:
    """A function that learns the outcome of its batches. A crash, among other things, may skip either call.

    >>> class Outbox(CheckpointListener):
    ...     def notify_checkpoint_complete(self, checkpoint_id):
    ...         print(f"batch {checkpoint_id} has happened")
    >>> Outbox().notify_checkpoint_complete(3)
    batch 3 has happened
    """

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Called after the batch with this id has been committed. If it raises, the query stops; the commit stands.

        >>> CheckpointListener().notify_checkpoint_complete(3)
        """

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Called if the batch failed after its snapshot was taken, before this copy is discarded.

        >>> CheckpointListener().notify_checkpoint_aborted(3)
        """


class ProcessFunction:
    """The shared base of all functions: `open` and `close`.

    A job never runs the object that you give it; it works on copies. It makes a copy at the start and after every
    batch that failed, so attributes must not hold anything that has to survive: use state for that. Derive from
    `CheckpointedFunction` too for operator state.
    """

    def open(self, ctx: FunctionContext) -> None:
        """Called once on every copy, before anything else: ask for states here."""

    def close(self) -> None:
        """Called once on every copy that was opened, before it is discarded."""


class _KeyedFunction(ProcessFunction, ABC):
    """The shared part of functions that are called with one key current."""

    def on_timer(self, timestamp: int, ctx: FunctionContext) -> Iterable[Any] | None:
        """Called for every timer that is due, with its key and namespace current.

        In event time, ``ctx.watermark`` is the one that fires it: what is registered for later is not due yet.
        """
        raise NotImplementedError(f"{type(self).__qualname__} registers timers and has no on_timer")

    def process_broadcast(self, row: Any, ctx: FunctionContext) -> Iterable[Any] | None:
        """Called for every broadcast row, before the other rows of the batch, with no key current."""
        raise NotImplementedError(f"{type(self).__qualname__} has no process_broadcast")


class KeyedProcessFunction(_KeyedFunction):
    """A function over rows, one at a time, with the state of each row's key.

    Rows are light named tuples. It yields the rows of the output: tuples, dicts, named tuples, Spark rows.

    >>> class Doubled(KeyedProcessFunction):
    ...     def process_element(self, row, ctx):
    ...         yield ctx.current_key, 2 * row.n
    >>> from statebackend.testing import Harness
    >>> with Harness(Doubled(), int) as harness:
    ...     harness.process_element(1, {"n": 21})
    [(1, 42)]
    """

    @abstractmethod
    def process_element(self, row: Any, ctx: FunctionContext) -> Iterable[Any] | None:
        """Called for every row, with its key current."""


class KeyRowsFunction(_KeyedFunction):
    """A function over the rows of a key: it is called once for each key of a batch, with all rows of that key.

    >>> class Spread(KeyRowsFunction):
    ...     def process_rows(self, key, rows, ctx):
    ...         yield key, max(row.n for row in rows) - min(row.n for row in rows)
    >>> from statebackend.testing import Harness
    >>> with Harness(Spread(), str, key="user") as harness:
    ...     harness.process_batch([{"user": user, "n": n} for user, n in (("ann", 3), ("bob", 1), ("ann", 8))])
    [('ann', 5), ('bob', 0)]
    """

    @abstractmethod
    def process_rows(self, key: Any, rows: list[Any], ctx: FunctionContext) -> Iterable[Any] | None:
        """Called for every key of a batch, in the order of their first rows, with the key current.

        ``rows`` is a list of light named tuples, in the order of the batch: by ``order_by``, if there is one. The key
        is as in ``ctx.current_key``. The rows may tell several times, so ``ctx.timestamp`` is None.
        """


class BatchProcessFunction(ProcessFunction, ABC):
    """A function over whole batches, with the vectorised calls of its states.

    >>> class Sums(BatchProcessFunction):
    ...     def open(self, ctx):
    ...         from statebackend.state import ReducingStateDescriptor
    ...         self.sum = ctx.get_reducing_state(ReducingStateDescriptor("sum", "sum", int))
    ...     def process_batch(self, batch, ctx):
    ...         users, sums = self.sum.add_many(ctx.keys, batch["n"], return_changed=True)
    ...         return pa.record_batch({"user": users, "sum": sums})
    >>> from statebackend.testing import Harness
    >>> with Harness(Sums(), str, key="user", schema="user string, sum bigint") as harness:
    ...     harness.process_batch(pa.table({"user": ["a", "b", "a"], "n": [1, 2, 3]}))
    [Row(user='a', sum=4), Row(user='b', sum=2)]
    """

    @abstractmethod
    def process_batch(
        self, batch: pa.RecordBatch, ctx: FunctionContext
    ) -> pa.RecordBatch | Iterable[pa.RecordBatch] | None:
        """Called with the rows of a batch; ``ctx.keys`` is the column of their keys.

        A batch from Spark comes as one record batch, unless its strings exceed 2 GB. It may have no rows.
        """

    def on_timers(
        self, keys: pa.Array, timestamps: pa.Array, namespaces: pa.Array | list[Any], ctx: FunctionContext
    ) -> pa.RecordBatch | Iterable[pa.RecordBatch] | None:
        """Called with the timers that are due, as columns in the order in which they fire, with no key current.

        Times are milliseconds. ``namespaces`` is a column of structs of start and end for windows, of int64, string or
        binary for others, with null for ``VOID``; a list of namespaces if they are tuples, or of several sorts. It is
        as the ``namespaces`` of vectorised calls. Called again while timers that it registers are due.
        """
        raise NotImplementedError(f"{type(self).__qualname__} registers timers and has no on_timers")

    def process_broadcast(
        self, batch: pa.RecordBatch, ctx: FunctionContext
    ) -> pa.RecordBatch | Iterable[pa.RecordBatch] | None:
        """Called with the broadcast rows of a batch, if there are any, before `process_batch`."""
        raise NotImplementedError(f"{type(self).__qualname__} has no process_broadcast")
