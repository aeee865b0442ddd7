"""What a function is given: state, time, the current key.

>>> from statebackend.operator_state import OperatorStateBackend
>>> from statebackend.registry import create_backend
>>> keyed = create_backend("reference").create_keyed_backend(int)
>>> ctx = FunctionContext(keyed, OperatorStateBackend(), Metrics())
>>> keyed.set_current_key(7)
>>> ctx.current_key
7
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from statebackend.backend import KeyedStateBackend
from statebackend.descriptors import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from statebackend.errors import UsageError
from statebackend.functions.metrics import Metrics
from statebackend.operator_state import OperatorStateBackend
from statebackend.state import (
    AggregatingState,
    FoldingState,
    KeyedListState,
    MapState,
    ReducingState,
    ValueState,
)
from statebackend.ttl import StateTtlConfig

__all__ = ["FunctionContext"]


class FunctionContext:
    """What every method of a function gets. Ask for states in ``open`` and keep the handles.

    >>> from statebackend.registry import create_backend
    >>> backend = create_backend("reference")
    >>> ctx = FunctionContext(backend.create_keyed_backend(int), OperatorStateBackend(), Metrics())
    >>> ctx.get_state(ValueStateDescriptor("count", int)).descriptor.name
    'count'
    """

    __slots__ = (
        "_has_event_time",
        "_keys",
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
    ) -> None:
        #: The keyed backend itself: namespaces, enumeration, `apply_to_all_keys`.
        self.keyed_state_store = keyed_state_store
        #: Where list and broadcast states are asked for.
        self.operator_state_store = operator_state_store
        #: The function's own counters.
        self.metrics = metrics
        #: The time of the batch, in milliseconds: it stands still while a batch runs.
        self.now: int = 0
        #: The id of the batch that runs.
        self.batch_id: int = 0
        self._keys: pa.Array | None = None
        self._has_event_time = has_event_time

    @property
    def current_key(self) -> Any:
        """The key of the row, or of the timer; `UsageError` where there is none, as for broadcast rows.

        >>> from statebackend.registry import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(str)
        >>> keyed.set_current_key("ann")
        >>> FunctionContext(keyed, OperatorStateBackend(), Metrics()).current_key
        'ann'
        """
        return self.keyed_state_store.current_key

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
    def timers(self) -> Any:
        """The timers of the current key: ``register(ts, domain)``, ``delete(ts)``, ``pending()``."""
        return self.keyed_state_store.timers

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
