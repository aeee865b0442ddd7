"""The context of a function: state, time, the current key.

>>> from statebackend.operator_state import OperatorStateBackend
>>> from statebackend.backends import create_backend
>>> keyed = create_backend("reference").create_keyed_backend(int)
>>> ctx = FunctionContext(keyed, OperatorStateBackend(), Metrics())
>>> keyed.set_current_key(7)
>>> ctx.current_key
7
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pyarrow as pa

from statebackend.errors import UsageError
from statebackend.functions.metrics import Metrics
from statebackend.operator_state import OperatorStateBackend
from statebackend.state import (
    AggregatingState,
    AggregatingStateDescriptor,
    FoldingState,
    FoldingStateDescriptor,
    KeyedListState,
    KeyedStateBackend,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingState,
    ReducingStateDescriptor,
    StateDescriptor,
    StateTtlConfig,
    Timers,
    ValueState,
    ValueStateDescriptor,
)

__all__ = ["FunctionContext"]


class ProcessingTimers:
    """The timers of a job without event time.

    >>> from statebackend.backends import create_backend
    >>> keyed = create_backend("reference").create_keyed_backend(int)
    >>> keyed.set_current_key(1)
    >>> ProcessingTimers(keyed.timers).register(10)
    Traceback (most recent call last):
    statebackend.errors.UsageError: a timer in event time needs rows that tell it. Hint: ...
    """

    __slots__ = ("_timers",)

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def register(self, timestamp: int, domain: str = "event") -> None:
        """As `Timers.register`."""
        self._of(domain).register(timestamp, domain)

    def delete(self, timestamp: int, domain: str = "event") -> None:
        """As `Timers.delete`."""
        self._of(domain).delete(timestamp, domain)

    def pending(self, domain: str = "event") -> list[int]:
        """As `Timers.pending`."""
        return self._of(domain).pending(domain)

    def _of(self, domain: str) -> Timers:
        if domain == "event":
            raise UsageError(
                "a timer in event time needs rows that tell it",
                hint="name their column with event_time=, or write register(ts, 'processing')",
            )
        return self._timers


class FunctionContext:
    """The context that every method of a function gets. Ask for states in ``open`` and keep the handles.

    >>> from statebackend.backends import create_backend
    >>> backend = create_backend("reference")
    >>> ctx = FunctionContext(backend.create_keyed_backend(int), OperatorStateBackend(), Metrics())
    >>> ctx.get_state(ValueStateDescriptor("count", int)).descriptor.name
    'count'
    """

    __slots__ = (
        "_has_event_time",
        "_has_timers",
        "_keys",
        "_timers",
        "batch_id",
        "keyed_state_store",
        "metrics",
        "now",
        "operator_state_store",
    )

    def __init__(
        self,
        keyed_state_store: KeyedStateBackend,
        operator_state_store: OperatorStateBackend,
        metrics: Metrics,
        *,
        has_event_time: bool = True,
        has_timers: bool = True,
    ) -> None:
        #: The keyed backend itself, for namespaces, enumeration, `apply_to_all_keys`.
        self.keyed_state_store = keyed_state_store
        #: Provides list and broadcast states.
        self.operator_state_store = operator_state_store
        #: The function's own counters.
        self.metrics = metrics
        #: The time of the batch, in milliseconds; it stands still while a batch runs.
        self.now: int = 0
        #: The id of the running batch.
        self.batch_id: int = 0
        self._keys: pa.Array | None = None
        self._has_event_time = has_event_time
        self._has_timers = has_timers
        self._timers: Timers | ProcessingTimers | None = None

    # Without a frame of Python's own: functions ask for every row.
    current_key: Any = property(
        attrgetter("keyed_state_store.current_key"),
        doc="""The key of the row or of the timer; `UsageError` if there is none, as for broadcast rows.

        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(str)
        >>> keyed.set_current_key("ann")
        >>> FunctionContext(keyed, OperatorStateBackend(), Metrics()).current_key
        'ann'
        """,
    )

    @property
    def keys(self) -> pa.Array:
        """The key column of the batch that a `BatchProcessFunction` works on."""
        if self._keys is None:
            raise UsageError(
                "there is no column of keys here",
                hint="process_batch has one; process_element has ctx.current_key",
            )
        return self._keys

    @property
    def timers(self) -> Timers | ProcessingTimers:
        """The timers of the current key: ``register(ts, domain)``, ``delete(ts)``, ``pending()``.

        Timers that are due fire after the rows of the batch, through `KeyedProcessFunction.on_timer`. A job without
        ``event_time=`` has processing time only.
        """
        if self._timers is None:
            if not self._has_timers:
                raise UsageError(
                    "a BatchProcessFunction is not called for timers", hint="use a KeyedProcessFunction"
                )
            timers = self.keyed_state_store.timers
            self._timers = timers if self._has_event_time else ProcessingTimers(timers)
        return self._timers

    # --- states: as on the keyed backend ---

    def get_state(self, descriptor: StateDescriptor) -> Any:
        """The state of a descriptor of any kind."""
        return self._get(descriptor, self.keyed_state_store.get_state)

    def get_value_state(self, descriptor: ValueStateDescriptor) -> ValueState:
        """The value state of a descriptor."""
        state: ValueState = self._get(descriptor, self.keyed_state_store.get_value_state)
        return state

    def get_list_state(self, descriptor: ListStateDescriptor) -> KeyedListState:
        """The list state of a descriptor."""
        state: KeyedListState = self._get(descriptor, self.keyed_state_store.get_list_state)
        return state

    def get_map_state(self, descriptor: MapStateDescriptor) -> MapState:
        """The map state of a descriptor."""
        state: MapState = self._get(descriptor, self.keyed_state_store.get_map_state)
        return state

    def get_reducing_state(self, descriptor: ReducingStateDescriptor) -> ReducingState:
        """The reducing state of a descriptor."""
        state: ReducingState = self._get(descriptor, self.keyed_state_store.get_reducing_state)
        return state

    def get_aggregating_state(self, descriptor: AggregatingStateDescriptor) -> AggregatingState:
        """The aggregating state of a descriptor."""
        state: AggregatingState = self._get(descriptor, self.keyed_state_store.get_aggregating_state)
        return state

    def get_folding_state(self, descriptor: FoldingStateDescriptor) -> FoldingState:
        """The folding state of a descriptor."""
        state: FoldingState = self._get(descriptor, self.keyed_state_store.get_folding_state)
        return state

    def _get(self, descriptor: Any, get: Any) -> Any:
        config = getattr(descriptor, "ttl_config", None)
        event_time = StateTtlConfig.TtlTimeCharacteristic.EventTime
        if config is not None and config.ttl_time_characteristic is event_time and not self._has_event_time:
            raise UsageError(
                "a time to live in event time needs rows that tell it",
                detail=f"state {descriptor.name!r}",
                hint="name the column with event_time=",
            )
        return get(descriptor)
