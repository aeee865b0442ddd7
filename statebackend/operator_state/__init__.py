"""Operator state: state of an instance, not of a key, redistributed when the number of instances changes.

>>> from statebackend.state import ListStateDescriptor
>>> backend = OperatorStateBackend()
>>> offsets = backend.get_list_state(ListStateDescriptor("offsets", int))
>>> offsets.add_all([1, 2, 3])
>>> two = [OperatorStateBackend(subtask_index=i, parallelism=2, restore=[backend.contents()]) for i in (0, 1)]
>>> [each.get_list_state(ListStateDescriptor("offsets", int)).get() for each in two]
[[1, 2], [3]]
"""

from statebackend.operator_state.operator_backend import OperatorStateBackend
from statebackend.operator_state.operator_snapshots import OperatorContents, redistribute
from statebackend.operator_state.operator_states import (
    BroadcastState,
    OperatorListState,
    ReadOnlyBroadcastState,
)

__all__ = [
    "BroadcastState",
    "OperatorContents",
    "OperatorListState",
    "OperatorStateBackend",
    "ReadOnlyBroadcastState",
    "redistribute",
]
