"""State: the types of handles, the descriptors that declare state, and the interface of a backend.

`StateBackend` and `KeyedStateBackend` are the interfaces. `BaseKeyedStateBackend` is the shared part of all
implementations: a backend derives from it and writes the methods that it lists. A handle belongs to one state of one
backend, and works on the backend's current key and namespace.
"""

from statebackend.state import clocks
from statebackend.state.aggregates import (
    AGGREGATE_NAMES,
    REDUCTION_NAMES,
    AggregateFunction,
    NamedAggregate,
    Reduction,
    named_aggregate,
    named_reduction,
)
from statebackend.state.backend_interface import (
    KeyedStateBackend,
    StateBackend,
    StateGetters,
    Watermarks,
    overrides,
)
from statebackend.state.base import (
    NO_TIME,
    BaseKeyedStateBackend,
    WatchedIterator,
    checked_budget,
    checked_range,
)
from statebackend.state.clocks import SystemClock
from statebackend.state.descriptors import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.handles import (
    AddingState,
    AggregatingState,
    FoldingState,
    KeyedListState,
    KeyedState,
    ListState,
    MapState,
    ReducingState,
    State,
    ValueState,
)
from statebackend.state.marks import BackendMark, MarkStack
from statebackend.state.scalar_fallback import Changed, times_of_rows
from statebackend.state.timers import (
    DOMAINS,
    RESERVED,
    DueTimers,
    TimerRow,
    Timers,
    checked_domain,
    checked_time,
    timer_state,
    timestamp_column,
)
from statebackend.state.ttl import (
    MAX_TIMESTAMP,
    StateTtlConfig,
    expiration_timestamp,
    expired,
    newest_expired,
    written_at,
)
from statebackend.state.units import Duration, Size, milliseconds, number_of_bytes
from statebackend.state.value_columns import (
    check_lengths,
    check_values,
    elements_of,
    entries_of,
    from_arrow,
    has_objects,
    to_arrow,
    to_chunks,
    to_values,
)

__all__ = [
    "AGGREGATE_NAMES",
    "AggregateFunction",
    "AddingState",
    "AggregatingState",
    "AggregatingStateDescriptor",
    "Changed",
    "Duration",
    "Size",
    "milliseconds",
    "number_of_bytes",
    "NO_TIME",
    "BaseKeyedStateBackend",
    "DOMAINS",
    "FoldingState",
    "FoldingStateDescriptor",
    "KeyedListState",
    "KeyedState",
    "KeyedStateBackend",
    "ListState",
    "ListStateDescriptor",
    "MAX_TIMESTAMP",
    "MapState",
    "MapStateDescriptor",
    "BackendMark",
    "MarkStack",
    "NamedAggregate",
    "REDUCTION_NAMES",
    "RESERVED",
    "ReducingState",
    "ReducingStateDescriptor",
    "Reduction",
    "State",
    "StateBackend",
    "StateGetters",
    "StateDescriptor",
    "StateTtlConfig",
    "SystemClock",
    "DueTimers",
    "TimerRow",
    "Timers",
    "ValueState",
    "ValueStateDescriptor",
    "WatchedIterator",
    "Watermarks",
    "check_lengths",
    "check_values",
    "checked_budget",
    "clocks",
    "checked_domain",
    "checked_range",
    "checked_time",
    "elements_of",
    "entries_of",
    "expiration_timestamp",
    "expired",
    "from_arrow",
    "has_objects",
    "named_aggregate",
    "named_reduction",
    "newest_expired",
    "overrides",
    "timer_state",
    "times_of_rows",
    "timestamp_column",
    "to_arrow",
    "to_chunks",
    "to_values",
    "written_at",
]
