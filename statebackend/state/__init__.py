"""State: the types of handles, the descriptors that declare state, and the interface of a backend.

`StateBackend` and `KeyedStateBackend` are the interfaces. `BaseKeyedStateBackend` is the shared part of all
implementations: a backend derives from it and writes the methods that it lists. A handle belongs to one state of one
backend, and works on the backend's current key and namespace.
"""

from statebackend.state import clocks as clocks
from statebackend.state.aggregates import (
    AGGREGATE_NAMES as AGGREGATE_NAMES,
    REDUCTION_NAMES as REDUCTION_NAMES,
    AggregateFunction as AggregateFunction,
    NamedAggregate as NamedAggregate,
    Reduction as Reduction,
    named_aggregate as named_aggregate,
    named_reduction as named_reduction,
)
from statebackend.state.backend_interface import (
    KeyedStateBackend as KeyedStateBackend,
    StateBackend as StateBackend,
    StateGetters as StateGetters,
    Watermarks as Watermarks,
    overrides as overrides,
)
from statebackend.state.base import (
    NO_TIME as NO_TIME,
    BaseKeyedStateBackend as BaseKeyedStateBackend,
    WatchedIterator as WatchedIterator,
    checked_budget as checked_budget,
    checked_range as checked_range,
)
from statebackend.state.clocks import SystemClock as SystemClock
from statebackend.state.descriptors import (
    AggregatingStateDescriptor as AggregatingStateDescriptor,
    FoldingStateDescriptor as FoldingStateDescriptor,
    ListStateDescriptor as ListStateDescriptor,
    MapStateDescriptor as MapStateDescriptor,
    ReducingStateDescriptor as ReducingStateDescriptor,
    StateDescriptor as StateDescriptor,
    ValueStateDescriptor as ValueStateDescriptor,
)
from statebackend.state.handles import (
    AddingState as AddingState,
    AggregatingState as AggregatingState,
    FoldingState as FoldingState,
    KeyedListState as KeyedListState,
    KeyedState as KeyedState,
    ListState as ListState,
    MapState as MapState,
    ReducingState as ReducingState,
    State as State,
    ValueState as ValueState,
)
from statebackend.state.marks import BackendMark as BackendMark, MarkStack as MarkStack
from statebackend.state.scalar_fallback import Changed as Changed, times_of_rows as times_of_rows
from statebackend.state.timers import (
    DOMAINS as DOMAINS,
    RESERVED as RESERVED,
    DueTimers as DueTimers,
    TimerRow as TimerRow,
    Timers as Timers,
    checked_domain as checked_domain,
    checked_time as checked_time,
    timer_state as timer_state,
    timestamp_column as timestamp_column,
)
from statebackend.state.ttl import (
    MAX_TIMESTAMP as MAX_TIMESTAMP,
    StateTtlConfig as StateTtlConfig,
    expiration_timestamp as expiration_timestamp,
    expired as expired,
    newest_expired as newest_expired,
    written_at as written_at,
)
from statebackend.state.units import (
    Duration as Duration,
    Size as Size,
    milliseconds as milliseconds,
    number_of_bytes as number_of_bytes,
)
from statebackend.state.value_columns import (
    check_lengths as check_lengths,
    check_values as check_values,
    elements_of as elements_of,
    entries_of as entries_of,
    from_arrow as from_arrow,
    has_objects as has_objects,
    to_arrow as to_arrow,
    to_chunks as to_chunks,
    to_values as to_values,
)
