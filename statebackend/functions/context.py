"""The context of a function: state, time, the current key, counters."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from statebackend.errors import UsageError, usage
from statebackend.operator_state import OperatorStateBackend
from statebackend.state import (
    KeyedStateBackend,
    StateDescriptor,
    StateGetters,
    StateTtlConfig,
    Timers,
    overrides,
)

if TYPE_CHECKING:
    from statebackend._core.handles.row_loop import Output


class BatchPosition(NamedTuple):
    """Where a job is in a batch: at a row or a timer of this time, or at none."""

    timestamp: int | None


NOWHERE = BatchPosition(None)


class PlannedTimes(NamedTuple):
    """The times that the engine has planned for a batch, in milliseconds."""

    #: The time of the batch by the engine's clock.
    now: int
    #: The watermark that fires timers, and the one through which rows are late.
    watermark: int
    late: int
    #: True if the engine would run a batch without rows when the watermark advances.
    runs_without_rows: bool = False


def no_event_time(what: str, *, detail: str | None = None, hint: str = "") -> UsageError:
    """The error for a job without ``event_time=``."""
    return UsageError(
        f"{what} needs event time",
        code="USAGE.NO_EVENT_TIME",
        detail=detail,
        hint=f"name the column of the time with event_time={hint}",
    )


class NoEventTime:
    """Stands for the row at hand in a job without ``event_time=``, whose rows have no time."""

    @property
    def timestamp(self) -> NoReturn:
        raise no_event_time("ctx.timestamp", hint="; ctx.now is the time of the batch by the clock")


class ProcessingTimers:
    """The timers of a job without event time: those in processing time, as the backend has them."""

    def __init__(self, timers: Timers) -> None:
        for name in _IN_PROCESSING_TIME:
            setattr(self, name, getattr(timers, name))

    def current_watermark(self) -> None:
        """None: no row tells the time."""

    def _refuse(self, *_arguments: Any, **_named: Any) -> NoReturn:
        raise no_event_time("a timer in event time", hint=", or use a timer in processing time")

    register_event_time_timer = delete_event_time_timer = pending_event_time_timers = _refuse
    register_event_time_timers = delete_event_time_timers = _refuse


_IN_PROCESSING_TIME = (
    "register_processing_time_timer",
    "register_processing_time_timers",
    "delete_processing_time_timer",
    "delete_processing_time_timers",
    "pending_processing_time_timers",
    "current_processing_time",
)


def no_output(name: object, outputs: Collection[str]) -> UsageError:
    """The error for an unknown name of an output."""
    return UsageError(
        "the job lacks an output of this name",
        code="USAGE.NO_OUTPUT",
        detail=f"{name!r}; outputs {', '.join(outputs)}",
        hint="name it in schema=, a dict of output to schema",
    )


class FunctionContext(StateGetters):
    """The context that every method of a function gets. Ask for states in ``open`` and keep the handles.

    >>> from statebackend.backends import create_backend
    >>> from statebackend.state import ValueStateDescriptor
    >>> backend = create_backend("reference")
    >>> ctx = FunctionContext(backend.create_keyed_backend(int), OperatorStateBackend(), Metrics())
    >>> ctx.get_state(ValueStateDescriptor("count", int)).descriptor.name
    'count'
    """

    __slots__ = (
        "_at",
        "_descriptors",
        "_has_event_time",
        "_keys",
        "_nowhere",
        "_outputs",
        "_planned",
        "_timers",
        "batch_id",
        "keyed_backend",
        "metrics",
        "now",
        "operator_backend",
        "time_domain",
        "watermark",
    )

    def __init__(
        self,
        keyed_backend: KeyedStateBackend,
        operator_backend: OperatorStateBackend,
        metrics: Metrics,
        *,
        has_event_time: bool = True,
    ) -> None:
        #: The keyed backend itself, for namespaces, enumeration, `apply_to_all_keys`.
        self.keyed_backend = keyed_backend
        #: Provides list and broadcast states.
        self.operator_backend = operator_backend
        #: The function's own counters.
        self.metrics = metrics
        #: The time of the batch by the clock, in milliseconds; it stands still while a batch runs.
        self.now: int = 0
        #: With ``event_time=``, the watermark before the batch: rows that are older are late. None before any row.
        #: For a timer in event time, the watermark that fires it, which is never below the timer's time.
        self.watermark: int | None = None
        #: In ``on_timer`` and ``on_timers``, ``"event"`` or ``"processing"``: the time of the timer. None elsewhere.
        self.time_domain: str | None = None
        #: The times that the engine has planned for the batch; None if they are unknown.
        self._planned: PlannedTimes | None = None
        #: The id of the running batch.
        self.batch_id: int = 0
        #: The state at hand between rows and timers, and for every row of a job without event time.
        self._nowhere: BatchPosition | NoEventTime = NOWHERE if has_event_time else NoEventTime()
        #: The row or timer at hand: anything with a ``timestamp``.
        self._at: Any = self._nowhere
        self._keys: pa.Array | None = None
        #: While a batch runs, the collector of each output.
        self._outputs: Mapping[str, Output] | None = None
        self._descriptors: dict[str, StateDescriptor] = {}
        self._has_event_time = has_event_time
        self._timers: Any = keyed_backend.timers if keyed_backend.has_timers else None
        if self._timers is not None and not has_event_time:
            self._timers = ProcessingTimers(self._timers)

    # Without a frame of Python's own: functions ask for every row.
    current_key: Any = property(
        attrgetter("keyed_backend.current_key"),
        doc="""The key of the row or of the timer; `UsageError` if there is none, as for broadcast rows.

        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(str)
        >>> keyed.set_current_key("ann")
        >>> FunctionContext(keyed, OperatorStateBackend(), Metrics()).current_key
        'ann'
        """,
    )

    timestamp: int | None = property(  # type: ignore[assignment]
        attrgetter("_at.timestamp"),
        doc="""The event time of the row or of the timer, in milliseconds; None if it is null, or no row is at hand.

        `UsageError` in a job without ``event_time=``.

        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(str)
        >>> FunctionContext(keyed, OperatorStateBackend(), Metrics()).timestamp is None
        True
        """,
    )

    @property
    def current_namespace(self) -> Any:
        """The current namespace, which you may set; in ``on_timer``, the timer's.

        It holds until it is set again, or the batch ends.

        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(str)
        >>> from statebackend.keys import TimeWindow
        >>> ctx = FunctionContext(keyed, OperatorStateBackend(), Metrics())
        >>> ctx.current_namespace = TimeWindow.of(65_000, 60_000)
        >>> ctx.current_namespace
        TimeWindow(start=60000, end=120000)
        """
        return self.keyed_backend.current_namespace

    @current_namespace.setter
    def current_namespace(self, namespace: Any) -> None:
        self.keyed_backend.set_current_namespace(namespace)

    @property
    def keys(self) -> pa.Array:
        """The key column of the batch that a `BatchProcessFunction` works on."""
        if self._keys is None:
            raise usage.no_key(
                "the column of keys is missing here",
                hint="process_batch has one; process_element has ctx.current_key",
            )
        return self._keys

    def timer_service(self) -> Timers:
        """The timers of the current key, and of columns of keys, with PyFlink's names. O(1).

        You may keep it. A timer that is due fires through ``on_timer`` or ``on_timers``: in processing time after the
        rows of the batch, in event time as `EventTime` says. A job without ``event_time=`` has processing time only.

        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(str)
        >>> keyed.set_current_key("ann")
        >>> timers = FunctionContext(keyed, OperatorStateBackend(), Metrics()).timer_service()
        >>> timers.register_event_time_timer(60_000)
        >>> timers.pending_event_time_timers()
        [60000]
        """
        timers: Timers = self.keyed_backend.timers if self._timers is None else self._timers
        return timers

    def output(self, name: str, row: Any) -> None:
        """Give a row to the output of this name, of those that the job's ``schema`` names. O(1).

        All outputs are committed together, with the state. A row that is yielded goes to the main output, the first.

        >>> from statebackend.functions import KeyedProcessFunction
        >>> class Split(KeyedProcessFunction):
        ...     def process_element(self, row, ctx):
        ...         ctx.output("even" if row.n % 2 == 0 else "odd", row)
        >>> from statebackend.testing import Harness
        >>> with Harness(Split(), key="n", schema={"odd": "n int", "even": "n int"}) as harness:
        ...     harness.process_element({"n": 8}), harness.outputs["even"]
        ([], [Row(n=8)])
        """
        outputs = self._outputs
        if outputs is None:
            raise usage.no_batch(
                "rows are emitted while a batch runs", hint="call ctx.output in process_element"
            )
        output = outputs.get(name)
        if output is None:
            raise no_output(name, outputs)
        output.add(row)

    def __repr__(self) -> str:
        states = ", ".join(map(repr, self._descriptors)) or "none"
        return f"<FunctionContext of batch {self.batch_id}, states: {states}>"

    # --- states: as on the keyed backend ---

    def _state_of(self, descriptor: Any) -> Any:
        config = getattr(descriptor, "ttl_config", None)
        event_time = StateTtlConfig.TtlTimeCharacteristic.EventTime
        if config is not None and config.ttl_time_characteristic is event_time:
            if not self._has_event_time:
                raise no_event_time("a time to live in event time", detail=f"state {descriptor.name!r}")
            if not overrides(self.keyed_backend, "begin", "set_event_time"):
                raise UsageError(
                    f"{type(self.keyed_backend).__name__} lacks event time: state would expire by the clock",
                    code="USAGE.NOT_AVAILABLE",
                    detail=f"state {descriptor.name!r}",
                    hint="use a backend that overrides begin and set_event_time",
                )
        state = self.keyed_backend.get_state(descriptor)
        self._descriptors[descriptor.name] = descriptor
        return state

    def delete_state(self, name: str) -> None:
        """Clear a state of the function for all keys, in all namespaces. O(entries).

        The handle stays good. A state that the function no longer needs is deleted so: it asks for it in ``open``, then
        calls this. The clearing is part of the batch, or of the first batch if it is called in ``open``.

        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(int)
        >>> ctx = FunctionContext(keyed, OperatorStateBackend(), Metrics())
        >>> from statebackend.state import ValueStateDescriptor
        >>> old = ctx.get_value_state(ValueStateDescriptor("old", str))
        >>> old.update_many([1, 2], ["a", "b"])
        >>> ctx.delete_state("old")
        >>> keyed.num_entries("old")
        0
        """
        descriptor = self._descriptors.get(name)
        if descriptor is None:
            raise UsageError(
                "the function has asked for no state of this name",
                code="USAGE.NO_STATE",
                detail=f"{name!r}; asked for: {', '.join(map(repr, self._descriptors)) or 'none'}",
                hint="ask for it with its descriptor first; or drop it with sb.tools.drop_state",
            )
        self.keyed_backend._clear_state(descriptor)


_LEAST, _MOST = -(2**63), 2**63 - 1


class Counter:
    """A 64-bit integer that a function increments and decrements. Undoing a batch does not undo its counts.

    Every checkpoint stores the counters, so a count that it could not hold is refused at once.

    >>> counter = Counter()
    >>> counter.inc(3)
    >>> counter.dec()
    >>> counter.get_count()
    2
    """

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def inc(self, n: int = 1) -> None:
        """Increment by ``n``, an int or a numpy integer."""
        if type(n) is not int:
            n = _whole(n)
        self._set(self._count + n)

    def dec(self, n: int = 1) -> None:
        """Decrement by ``n``, an int or a numpy integer."""
        if type(n) is not int:
            n = _whole(n)
        self._set(self._count - n)

    def _set(self, count: int) -> None:
        if not _LEAST <= count <= _MOST:
            raise usage.argument("a counter holds 64 bits", hint="count in larger units")
        self._count = count

    def get_count(self) -> int:
        """The number."""
        return self._count

    def __repr__(self) -> str:
        return f"<Counter {self._count:,}>"


class Metrics:
    """The counters of a function. They outlive its copies and appear in the progress of every batch.

    >>> metrics = Metrics()
    >>> metrics.counter("late") is metrics.counter("late")
    True
    """

    __slots__ = ("_counters",)

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}

    def counter(self, name: str) -> Counter:
        """The counter of this name, a non-empty str that UTF-8 can encode; the first call makes it."""
        if type(name) is not str or not name:
            raise usage.name("the name of a counter is a non-empty str")
        counter = self._counters.get(name)
        if counter is None:
            try:
                name.encode("utf-8")
            except UnicodeEncodeError:
                raise usage.name(
                    "the name of a counter has a lone surrogate, which no file can hold"
                ) from None
            counter = self._counters[name] = Counter()
        return counter

    def values(self) -> dict[str, int]:
        """All counters by name."""
        return {name: counter.get_count() for name, counter in self._counters.items()}

    def __repr__(self) -> str:
        return f"<Metrics {self.values()}>"


def _whole(n: Any) -> int:
    try:
        if isinstance(n, (bool, np.bool_)):
            raise TypeError
        return operator.index(n)
    except TypeError:
        raise usage.argument(
            f"a counter counts in whole numbers, not by a {type(n).__name__}",
            hint="write an int; for a sum of other numbers use state, or int(...)",
        ) from None
