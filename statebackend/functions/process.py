"""The base classes of functions, those that keep operator state among them, and functions from a plain callable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.errors import SerializationTypeError, usage
from statebackend.functions.context import FunctionContext
from statebackend.state import ValueStateDescriptor
from statebackend.types import of

if TYPE_CHECKING:
    from statebackend.operator_state.operator_backend import OperatorStateBackend
    from statebackend.state import KeyedStateBackend


class CheckpointedFunction(ABC):
    """A function that keeps operator state.

    `initialize_state` runs once before the first row, both at a first start and after a restore; `snapshot_state` runs
    before every checkpoint.

    >>> class Source(CheckpointedFunction):
    ...     offset = 0
    ...     def initialize_state(self, ctx):
    ...         from statebackend.state import ListStateDescriptor
    ...         self.state = ctx.operator_state_store.get_list_state(ListStateDescriptor("offset", int))
    ...         for offset in self.state.get():
    ...             self.offset = offset
    ...     def snapshot_state(self, ctx):
    ...         self.state.update([self.offset])
    >>> from statebackend.operator_state import OperatorStateBackend
    >>> source, store = Source(), OperatorStateBackend()
    >>> source.initialize_state(FunctionInitializationContext(store))
    >>> source.offset = 7
    >>> source.snapshot_state(FunctionSnapshotContext(checkpoint_id=1, checkpoint_timestamp=0))
    >>> source.state.get()
    [7]
    """

    @abstractmethod
    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        """Ask for states; if ``ctx.is_restored``, read from them what an earlier run left."""

    @abstractmethod
    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        """Write into the states what a restart must restore."""


class FunctionInitializationContext:
    """The context for `CheckpointedFunction.initialize_state`."""

    def __init__(
        self,
        operator_state_store: OperatorStateBackend,
        keyed_state_store: KeyedStateBackend | None = None,
        *,
        restored_checkpoint_id: int | None = None,
    ) -> None:
        #: Provides list and broadcast states.
        self.operator_state_store = operator_state_store
        self._keyed_state_store = keyed_state_store
        #: The id of the restored checkpoint; None at a first start.
        self.restored_checkpoint_id = restored_checkpoint_id

    @property
    def is_restored(self) -> bool:
        """True if an earlier run left state."""
        return self.restored_checkpoint_id is not None or self.operator_state_store.is_restored

    @property
    def keyed_state_store(self) -> KeyedStateBackend:
        """The backend that provides keyed states; `UsageError` in a function without keys."""
        if self._keyed_state_store is None:
            raise usage.no_key("this function lacks keys, and so keyed state")
        return self._keyed_state_store


class FunctionSnapshotContext:
    """The context for `CheckpointedFunction.snapshot_state`."""

    def __init__(self, *, checkpoint_id: int, checkpoint_timestamp: int) -> None:
        #: The id of the checkpoint that is being taken.
        self.checkpoint_id = checkpoint_id
        #: Its time, in milliseconds.
        self.checkpoint_timestamp = checkpoint_timestamp


class CheckpointListener:
    """A function that learns the outcome of its batches. A crash, among other things, may skip either call.

    >>> class Outbox(CheckpointListener):
    ...     def notify_checkpoint_complete(self, checkpoint_id):
    ...         print(f"batch {checkpoint_id} has happened")
    >>> Outbox().notify_checkpoint_complete(3)
    batch 3 has happened
    """

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Called after the batch with this id has been committed. If it raises, the query stops; the commit stands."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Called if the batch failed after its snapshot was taken, before this copy is discarded."""


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

        In event time, ``ctx.watermark`` is the one that fires it: a timer registered for later is not due yet.
        """
        raise NotImplementedError(f"{type(self).__qualname__} registers timers but lacks on_timer")

    def process_broadcast(self, row: Any, ctx: FunctionContext) -> Iterable[Any] | None:
        """Called for every broadcast row, before the other rows of the batch, with no key current."""
        raise NotImplementedError(f"{type(self).__qualname__} lacks process_broadcast")


class KeyedProcessFunction(_KeyedFunction):
    """A function over rows, one at a time, with the state of each row's key.

    Rows are light named tuples. It yields the rows of the output: tuples, dicts, named tuples, Spark rows.

    >>> class Doubled(KeyedProcessFunction):
    ...     def process_element(self, row, ctx):
    ...         yield ctx.current_key, 2 * row.n
    >>> from statebackend.testing import Harness
    >>> with Harness(Doubled(), key="id") as harness:
    ...     harness.process_element({"id": 1, "n": 21})
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
    >>> with Harness(Spread(), key="user") as harness:
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
    ...         users, sums, _ = self.sum.add_many(ctx.keys, batch["n"], return_changed=True)
    ...         return pa.record_batch({"user": users, "sum": sums})
    >>> from statebackend.testing import Harness
    >>> with Harness(Sums(), key="user", schema="user string, sum bigint") as harness:
    ...     harness.process_batch(pa.table({"user": ["a", "b", "a"], "n": [1, 2, 3]}))
    [Row(user='b', sum=2), Row(user='a', sum=4)]
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
        raise NotImplementedError(f"{type(self).__qualname__} registers timers but lacks on_timers")

    def process_broadcast(
        self, batch: pa.RecordBatch, ctx: FunctionContext
    ) -> pa.RecordBatch | Iterable[pa.RecordBatch] | None:
        """Called with the broadcast rows of a batch, if there are any, before `process_batch`."""
        raise NotImplementedError(f"{type(self).__qualname__} lacks process_broadcast")


STATE = "state"


class _WithState(KeyedProcessFunction):
    def __init__(self, function: Callable[[Any, Any], tuple[Any, Any]], state_type: Any) -> None:
        if not callable(function):
            raise usage.function("a function (row, state) -> (out, new_state) is needed")
        self._function = function
        self._type = of(state_type)

    def open(self, ctx: FunctionContext) -> None:
        self._state = ctx.get_value_state(ValueStateDescriptor(STATE, self._type))

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        return f"<{type(self).__name__.strip('_')} of {name}, {self._type!r}>"

    def _call(self, row: Any) -> tuple[Any, Any]:
        """The result of the function for a row: the emitted row and the new state."""
        given: Any = self._function(row, self._state.value())
        if not isinstance(given, tuple) or len(given) != 2:
            what = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
            raise SerializationTypeError(
                f"the function gave {what}, not what goes out and the new state",
                code="SERIALIZATION.OUTPUT",
                detail=getattr(self._function, "__qualname__", type(self._function).__qualname__),
                hint="return (out, new_state); None for out gives nothing, None for new_state clears it",
            )
        return given


class _MapWithState(_WithState):
    def process_element(self, row: Any, ctx: FunctionContext) -> Iterable[Any]:
        out, new = self._call(row)
        self._state.update(new)
        return () if out is None else (out,)


class _FlatMapWithState(_WithState):
    def process_element(self, row: Any, ctx: FunctionContext) -> Iterable[Any] | None:
        out, new = self._call(row)
        if out is not None and (isinstance(out, (str, bytes, dict)) or not isinstance(out, Iterable)):
            raise SerializationTypeError(
                f"the function gave a {type(out).__name__} for the rows that go out",
                code="SERIALIZATION.OUTPUT",
                detail=getattr(self._function, "__qualname__", type(self._function).__qualname__),
                hint="return (rows, new_state) with a list of rows; map_with_state gives one row",
            )
        # The result may be a generator that has yet to run and may read the state as it was.
        rows = None if out is None else list(out)
        self._state.update(new)
        return rows


def map_with_state(function: Callable[[Any, Any], tuple[Any, Any]], state_type: Any) -> KeyedProcessFunction:
    """Make a function from ``function(row, state or None) -> (row out or None, new state or None)``.

    Each key has one value of ``state_type``, in a state called "state"; returning None as the new state clears it.

    >>> def numbered(row, seen):
    ...     seen = (seen or 0) + 1
    ...     return (row.word, seen), seen
    >>> from statebackend.testing import Harness
    >>> with Harness(map_with_state(numbered, int), key="word") as harness:
    ...     harness.process_batch([{"word": "to"}, {"word": "be"}, {"word": "to"}])
    [('to', 1), ('be', 1), ('to', 2)]
    """
    return _MapWithState(function, state_type)


def flat_map_with_state(
    function: Callable[[Any, Any], tuple[Iterable[Any] | None, Any]], state_type: Any
) -> KeyedProcessFunction:
    """The same for a function that returns any number of rows: ``(rows, new state or None)``.

    >>> def pairs(row, first):
    ...     return ([], row.n) if first is None else ([(first, row.n)], None)
    >>> from statebackend.testing import Harness
    >>> with Harness(flat_map_with_state(pairs, int), key="user") as harness:
    ...     harness.process_batch([{"user": "a", "n": n} for n in (1, 2, 3)])
    [(1, 2)]
    """
    return _FlatMapWithState(function, state_type)
