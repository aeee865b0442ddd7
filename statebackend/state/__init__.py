"""The handles through which a function reaches its state, with PyFlink's names.

A handle belongs to one state of one backend, and is scoped to the backend's current key and namespace.

>>> from statebackend.registry import create_backend
>>> from statebackend.descriptors import ValueStateDescriptor
>>> with create_backend("reference").create_keyed_backend(str) as keyed:
...     count = keyed.get_value_state(ValueStateDescriptor("count", int, default=0))
...     for word in ("a", "b", "a"):
...         keyed.set_current_key(word)
...         count.update(count.value() + 1)
...     keyed.set_current_key("a")
...     count.value()
2
"""

from statebackend.state.handles import (
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

__all__ = [
    "AggregatingState",
    "FoldingState",
    "KeyedListState",
    "KeyedState",
    "ListState",
    "MapState",
    "ReducingState",
    "State",
    "ValueState",
]
