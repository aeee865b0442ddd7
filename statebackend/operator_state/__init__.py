"""Operator state: state of an instance, not of a key, redistributed when the number of instances changes."""

from statebackend.operator_state.operator_backend import OperatorStateBackend as OperatorStateBackend
from statebackend.operator_state.operator_snapshots import (
    OperatorContents as OperatorContents,
    redistribute as redistribute,
)
from statebackend.operator_state.operator_states import (
    BroadcastState as BroadcastState,
    OperatorListState as OperatorListState,
    ReadOnlyBroadcastState as ReadOnlyBroadcastState,
)
