"""Operator state in savepoints: a Parquet file for each state of an instance.

>>> import tempfile
>>> from statebackend.operator_state.operator_snapshots import StateView
>>> with tempfile.TemporaryDirectory() as folder:
...     view = StateView("split", {"element": {"type": "string"}}, [b"a", b"b"])
...     write_savepoint(Savepoint(folder), {"buffered": view}, 0, 1)
...     savepoint_contents(Savepoint(folder), 1, 2)["buffered"]["elements"]
[b'b']
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from statebackend.checkpoint.store.savepoint_folder import Savepoint, SavepointPart, StoredState
from statebackend.checkpoint.store.sealed import JsonObject, Malformed, integer
from statebackend.errors import CorruptCheckpointError, SerializationError
from statebackend.operator_state.element_columns import column_type, to_bytes
from statebackend.operator_state.operator_snapshots import PART, StateView, section, type_roles
from statebackend.operator_state.redistribution import (
    BROADCAST,
    SPLIT,
    UNION,
    OperatorContents,
    redistribute,
)

__all__ = ["operator_part", "operator_parts", "savepoint_contents", "write_savepoint"]


def write_savepoint(
    savepoint: Savepoint,
    views: Mapping[str, StateView],
    subtask_index: int,
    parallelism: int,
    now: int | None = None,
) -> None:
    """Write the states of one instance."""
    with savepoint.write_part(*operator_part(subtask_index, parallelism, now)) as part:
        for name in sorted(views):
            view = views[name]
            if view.is_empty:
                part.add_state(view.described(name))
            else:
                rows = section(name, view)
                part.write_state(view.described(name), rows.schema, (each.batch for each in rows.batches))


def operator_part(subtask_index: int, parallelism: int, now: int | None) -> tuple[str, str, JsonObject]:
    """The part of an instance as `Savepoint.write_part` takes it.

    >>> operator_part(0, 2, None)[:2]
    ('operator', '0-of-2')
    """
    described: JsonObject = {"subtask": subtask_index, "parallelism": parallelism, "now": now}
    return PART, f"{subtask_index}-of-{parallelism}", described


def savepoint_contents(savepoint: Savepoint, subtask_index: int, parallelism: int) -> OperatorContents:
    """The share of an instance in the operator state of a savepoint. O(rows)."""
    savepoint.check_exists()
    contents = [
        {state.described["name"]: _read_state(savepoint, part, state) for state in part.states}
        for part in operator_parts(savepoint)
    ]
    return redistribute(contents, parallelism)[subtask_index] if contents else {}


def operator_parts(savepoint: Savepoint) -> list[SavepointPart]:
    """The part that each instance has written, in order of the instances; every instance is there once.

    >>> operator_parts(Savepoint("/nowhere"))
    []
    """
    parts = savepoint.parts(PART)
    in_order = sorted(parts, key=_number_of)
    wanted = [(number, len(parts)) for number in range(len(parts))]
    if [(_number_of(part), part.described.get("parallelism")) for part in in_order] != wanted:
        raise CorruptCheckpointError(
            "the savepoint does not hold the operator state of every instance once",
            code="CORRUPT_CHECKPOINT.INCOMPLETE",
            detail=savepoint.uri,
            hint="let every instance write its part, at the same moment",
        )
    return in_order


def _number_of(part: SavepointPart) -> int:
    try:
        return integer(part.described.get("subtask"), "the number of the instance")
    except Malformed as error:
        raise CorruptCheckpointError(
            f"a part of a savepoint cannot be read: {error}", detail=part.name
        ) from error


def _read_state(savepoint: Savepoint, part: SavepointPart, state: StoredState) -> dict[str, Any]:
    mode, types = state.described.get("kind"), state.described.get("types")
    roles = type_roles(str(mode))
    if (
        mode not in (SPLIT, UNION, BROADCAST)
        or not isinstance(types, dict)
        or set(types) != set(roles.values())
    ):
        raise CorruptCheckpointError("operator state is not described as it should be", detail=part.name)
    config = {"kind": "map" if mode == BROADCAST else "list", "types": types, "ttl": False}
    columns: list[list[bytes | None]] = [[] for _ in roles]
    if state.rows:
        with savepoint.open_state(state) as file:
            try:
                wanted = pa.schema([(name, column_type(types[role]).arrow) for name, role in roles.items()])
                for batch in file.iter_batches():
                    for column, found, role in zip(
                        columns, batch.cast(wanted).columns, roles.values(), strict=True
                    ):
                        column += to_bytes(found, types[role])
            except (SerializationError, OverflowError, ValueError) as error:
                raise CorruptCheckpointError(
                    "what a file holds cannot be read as the declared type", detail=state.file
                ) from error
    if None in columns[0]:
        raise CorruptCheckpointError("a file has a null where there can be none", detail=state.file)
    if mode == BROADCAST:
        return {"mode": mode, "config": config, "entries": list(zip(*columns, strict=True))}
    return {"mode": mode, "config": config, "elements": columns[0]}
