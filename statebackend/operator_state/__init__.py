"""Operator state: state of an instance, not of a key, redistributed when the number of instances changes."""

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
