"""Reads a state of a savepoint as a table.

>>> import tempfile
>>> from statebackend.state import ListStateDescriptor
>>> from statebackend.operator_state import OperatorStateBackend
>>> operator = OperatorStateBackend()
>>> operator.get_list_state(ListStateDescriptor("offsets", int)).add_all([7, 9])
>>> with tempfile.TemporaryDirectory() as folder:
...     savepoint_table(operator.savepoint(folder), "offsets").to_pydict()
{'subtask': [0, 0], 'value': [7, 9]}
"""

from __future__ import annotations

import pyarrow as pa

from statebackend.checkpoint.keyed.savepoints import keyed_parts, with_encoded_namespaces
from statebackend.checkpoint.store.savepoint_folder import Savepoint, SavepointPart, StoredState
from statebackend.operator_state.operator_snapshots import type_roles
from statebackend.operator_state.savepoints import operator_parts
from statebackend.runtime.state_names import ambiguous, no_state
from statebackend.tools.tables import empty_table, joined, stored_type, with_namespaces

__all__ = ["savepoint_table"]


def savepoint_table(savepoint: Savepoint, name: str) -> pa.Table:
    """The rows of a state, from all instances. O(rows of the state); checks every file as a whole."""
    savepoint.check_exists()
    keyed = [part for part, _ in keyed_parts(savepoint)]
    operators = operator_parts(savepoint)
    of_keyed, of_operators = _with_state(keyed, name), _with_state(operators, name)
    where = f"savepoint {savepoint.uri}"
    if of_keyed and of_operators:
        raise ambiguous(name, where)
    if of_operators:
        return joined([_operator_rows(savepoint, *each) for each in of_operators], name, where)
    if not of_keyed:
        known = [state.described["name"] for part in (*keyed, *operators) for state in part.states]
        raise no_state(name, known, where)
    tables = [_keyed_rows(savepoint, state) for _, state in of_keyed if state.rows]
    if not tables:
        part, state = of_keyed[0]
        return empty_table(state.described, part.described.get("key_type"), part.name)
    return with_namespaces(joined(tables, name, where), name, where)


def _with_state(parts: list[SavepointPart], name: str) -> list[tuple[SavepointPart, StoredState]]:
    return [(part, state) for part in parts for state in part.states if state.described["name"] == name]


def _keyed_rows(savepoint: Savepoint, state: StoredState) -> pa.Table:
    with savepoint.open_state(state) as file:
        return pa.Table.from_batches([with_encoded_namespaces(batch) for batch in file.iter_batches()])


def _operator_rows(savepoint: Savepoint, part: SavepointPart, state: StoredState) -> pa.Table:
    if state.rows:
        with savepoint.open_state(state) as file:
            table = file.read()
    else:
        roles = type_roles(state.described["kind"])
        fields = [(column, stored_type(state.described, [role], part.name)) for column, role in roles.items()]
        table = pa.schema(fields).empty_table()
    number = pa.repeat(pa.scalar(part.described["subtask"], pa.int32()), table.num_rows)
    return table.add_column(0, "subtask", number)
