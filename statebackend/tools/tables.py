"""The tables that tools return, for checkpoints and savepoints alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.errors import CorruptCheckpointError, SerializationError, usage
from statebackend.operator_state.element_columns import column_type
from statebackend.types import ListType, Type

#: The kinds of files whose content this library wrote in its own format.
OWN_FORMAT = ("base", "delta", "operator")
#: The kinds of keyed states whose rows are read as tables.
KEYED_KINDS = ("value", "list", "map", "reducing", "aggregating", "folding")
_VALUE_ROLES = ("value", "element", "accumulator")


def empty_table(state: dict[str, Any], key_config: Any, where: str) -> pa.Table:
    """The columns of a keyed state without rows, according to its description."""
    is_list = state["kind"] == "list"
    value = stored_type(state, _VALUE_ROLES, where)
    fields = [("key", pa.null() if key_config is None else column_type(key_config).arrow)]
    if state["kind"] == "map":
        fields.append(("map_key", stored_type(state, ["key"], where)))
    fields.append(("value", pa.list_(value) if is_list else value))
    if state.get("ttl"):
        fields.append(("timestamp", pa.list_(pa.int64()) if is_list else pa.int64()))
    return pa.schema(fields).empty_table()


def stored_type(state: dict[str, Any], roles: Sequence[str], where: str) -> pa.DataType:
    """The Arrow type of the first of these roles that a state has."""
    return value_type(state, where, roles).arrow


def value_type(state: dict[str, Any], where: str, roles: Sequence[str] = _VALUE_ROLES) -> Type:
    """The type in files of the first of these roles that a state has; by default of its values or elements."""
    types = state.get("types")
    try:
        found = [types[role] for role in roles if role in types]  # type: ignore[index,operator]
        return column_type(found[0])
    except (TypeError, IndexError, SerializationError) as error:
        raise unreadable(state["name"], where) from error


def column_value_type(state: StateDescription, where: str) -> Type:
    """The type in files of the column of values, which has lists for a list state."""
    own = value_type(state.to_json(), where)
    return ListType(own) if state.kind == "list" else own


def check_readable(state: StateDescription, where: str) -> None:
    """Raise unless the rows of a keyed state of this kind are read as a table."""
    if state.kind not in KEYED_KINDS:
        raise usage.state_kind(
            f"a state of kind {state.kind!r} cannot be read as a table",
            detail=f"state {state.name!r}, {where}",
        )


def unreadable(name: str, where: str) -> CorruptCheckpointError:
    """The error for files whose content contradicts their description."""
    return CorruptCheckpointError(
        "the files of a state are not as its snapshot describes it", detail=f"state {name!r}, {where}"
    )


def map_entries(maps: pa.Array) -> tuple[NDArray[Any], pa.Array, pa.Array]:
    """The entries of a column of maps, without null in it: of each its row in the column, its key, and its value.

    >>> rows, keys, values = map_entries(pa.array([[("a", 1), ("b", 2)], [], [("c", 3)]], pa.map_("string", "int8")))
    >>> rows.tolist(), keys.to_pylist(), values.to_pylist()
    ([0, 0, 2], ['a', 'b', 'c'], [1, 2, 3])
    """
    offsets = maps.offsets.to_numpy()
    own = slice(int(offsets[0]), int(offsets[-1]))
    return np.repeat(np.arange(len(maps)), np.diff(offsets)), maps.keys[own], maps.items[own]
