"""Keyed state for stream processing in Python.

By convention ``import statebackend as sb``. The import needs numpy and pyarrow and loads nothing compiled: the core
is loaded when it is first needed. ``sb.spark``, ``sb.testing`` and ``sb.tools`` load on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from statebackend import errors, types
from statebackend._version import __version__
from statebackend.backends import available_backends, create_backend, register_backend
from statebackend.checkpoint import Checkpoint, CheckpointStore, StateSnapshot
from statebackend.errors import (
    BackendUnavailableError,
    BatchGapError,
    ClosedError,
    CommitConflictError,
    CorruptCheckpointError,
    HostError,
    KeyGroupError,
    MemoryLimitError,
    MutationError,
    SerializationError,
    SerializationRangeError,
    SerializationTypeError,
    StateBackendError,
    StateMigrationError,
    StoreError,
    UsageError,
)
from statebackend.functions import (
    BatchProcessFunction,
    CheckpointedFunction,
    CheckpointListener,
    EventTime,
    FunctionContext,
    KeyedProcessFunction,
    KeyRowsFunction,
    flat_map_with_state,
    map_with_state,
    to_output,
)
from statebackend.keys import ALL_NAMESPACES, VOID, KeyGroupRange, TimeWindow, key_groups
from statebackend.operator_state import BroadcastState, OperatorStateBackend, ReadOnlyBroadcastState
from statebackend.state import (
    AggregateFunction,
    AggregatingState,
    AggregatingStateDescriptor,
    Changed,
    FoldingState,
    FoldingStateDescriptor,
    KeyedStateBackend,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingState,
    ReducingStateDescriptor,
    StateBackend,
    StateTtlConfig,
    ValueState,
    ValueStateDescriptor,
)
from statebackend.types import serializers

__all__ = [
    "__version__",
    # backends
    "available_backends",
    "create_backend",
    "register_backend",
    "StateBackend",
    "KeyedStateBackend",
    # keyed state
    "ValueStateDescriptor",
    "ListStateDescriptor",
    "MapStateDescriptor",
    "ReducingStateDescriptor",
    "AggregatingStateDescriptor",
    "FoldingStateDescriptor",
    "AggregateFunction",
    "StateTtlConfig",
    "ValueState",
    "ListState",
    "MapState",
    "ReducingState",
    "AggregatingState",
    "FoldingState",
    "Changed",
    # functions
    "KeyRowsFunction",
    "KeyedProcessFunction",
    "BatchProcessFunction",
    "FunctionContext",
    "CheckpointListener",
    "map_with_state",
    "flat_map_with_state",
    # rows
    "EventTime",
    "to_output",
    # checkpoints
    "CheckpointStore",
    "Checkpoint",
    "StateSnapshot",
    # operator state
    "OperatorStateBackend",
    "CheckpointedFunction",
    "BroadcastState",
    "ReadOnlyBroadcastState",
    # types and keys
    "types",
    "serializers",
    "key_groups",
    "KeyGroupRange",
    "TimeWindow",
    "VOID",
    "ALL_NAMESPACES",
    # errors
    "errors",
    "StateBackendError",
    "UsageError",
    "ClosedError",
    "HostError",
    "KeyGroupError",
    "StateMigrationError",
    "CorruptCheckpointError",
    "CommitConflictError",
    "BatchGapError",
    "MutationError",
    "BackendUnavailableError",
    "SerializationError",
    "SerializationRangeError",
    "SerializationTypeError",
    "MemoryLimitError",
    "StoreError",
]

if TYPE_CHECKING:  # otherwise type checkers would take all that they hold for Any
    from statebackend import spark as spark, testing as testing, tools as tools

#: Parts that need more than numpy and pyarrow, or that a job does not need.
_LOADED_ON_USE = ("spark", "testing", "tools")


def __getattr__(name: str) -> ModuleType:
    if name in _LOADED_ON_USE:
        module = f"{__name__}.{name}"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:  # the module is there, but something that it needs is not
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADED_ON_USE})
