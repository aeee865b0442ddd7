"""Reads the state of a checkpoint as a table, without a backend.

>>> import tempfile
>>> from statebackend.checkpoint import CheckpointStore
>>> from statebackend.state import ListStateDescriptor
>>> from statebackend.operator_state import OperatorStateBackend
>>> operator = OperatorStateBackend()
>>> operator.get_list_state(ListStateDescriptor("offsets", int)).add_all([7, 9])
>>> folder = tempfile.TemporaryDirectory()
>>> with CheckpointStore(folder.name).open_for_writing() as store:
...     _ = store.commit(0, [operator.snapshot(0, store).result()])
>>> read_state(folder.name, "offsets").to_pydict()
{'subtask': [0, 0], 'value': [7, 9]}
>>> folder.cleanup()
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.checkpoint import Checkpoint, StateSnapshot
from statebackend.checkpoint.format import DataFileReader, read_data_file
from statebackend.checkpoint.keyed.merged_rows import applied
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError
from statebackend.keys import MAX_PARALLELISM, KeyGroupRange
from statebackend.operator_state.operator_snapshots import PART as OPERATOR
from statebackend.operator_state.operator_snapshots import type_roles
from statebackend.tools.saved import ambiguous, names_of, no_state, open_saved
from statebackend.tools.savepoint_tables import savepoint_table
from statebackend.tools.tables import (
    KEYED_KINDS,
    empty_table,
    joined,
    stored_type,
    unreadable,
    with_namespaces,
)

__all__ = ["read_state"]

#: Rows, of base and changes together, that are applied at a time.
_SLICE_ROWS = 1 << 22


def read_state(uri: str | os.PathLike[str] | Savepoint, name: str, id: int | None = None) -> pa.Table:
    """The rows of a state in a checkpoint, by default the newest. O(rows of the state).

    ``uri`` belongs to a store, or to a savepoint, which has no ids.

    A keyed state has the columns ``key``; ``namespace``, if there are others than `VOID`; ``map_key`` for map states;
    ``value``; and ``timestamp`` (milliseconds), if there is a time to live. An operator state has ``subtask``, the
    number of the instance; ``map_key`` for broadcast states; and ``value``. Entries of a map and elements of a list
    keep their order; keys have none. The table includes values that have expired and are still stored. Pickles are
    bytes: nothing is executed.
    """
    checkpoint = open_saved(uri, id)
    if isinstance(checkpoint, Savepoint):
        return savepoint_table(checkpoint, name)
    snapshots = [each for each in checkpoint.snapshots if _described(each, name) is not None]
    if not snapshots:
        raise no_state(name, names_of(checkpoint), f"checkpoint {checkpoint.id}")
    operators = [each for each in snapshots if each.extra.get("part") == OPERATOR]
    if operators and len(operators) < len(snapshots):
        raise ambiguous(name, f"checkpoint {checkpoint.id}")
    if operators:
        return _operator_table(checkpoint, operators, name)
    return _keyed_table(checkpoint, snapshots, name)


def _described(snapshot: StateSnapshot, name: str) -> dict[str, Any] | None:
    return next((state for state in snapshot.states if state["name"] == name), None)


# --- operator state ---


def _operator_table(checkpoint: Checkpoint, snapshots: list[StateSnapshot], name: str) -> pa.Table:
    tables = []
    for snapshot in snapshots:
        state = _described(snapshot, name)
        assert state is not None
        with _Files(checkpoint, snapshot, name) as files:
            tables += files.read(None)
        if not files.readers:
            fields = [
                (column, stored_type(state, [role], checkpoint.manifest.name))
                for column, role in type_roles(state["kind"]).items()
            ]
            tables.append(pa.schema(fields).empty_table())
        number = pa.repeat(pa.scalar(snapshot.subtask_index, pa.int32()), tables[-1].num_rows)
        tables[-1] = tables[-1].add_column(0, "subtask", number)
    return joined(tables, name, checkpoint.manifest.name)


# --- keyed state ---


def _keyed_table(checkpoint: Checkpoint, snapshots: list[StateSnapshot], name: str) -> pa.Table:
    tables = []
    for snapshot in snapshots:
        state = _described(snapshot, name)
        assert state is not None
        if state["kind"] not in KEYED_KINDS:
            raise UsageError(
                f"a state of kind {state['kind']!r} cannot be read as a table",
                detail=f"state {name!r}, checkpoint {checkpoint.id}",
            )
        with _Files(checkpoint, snapshot, name) as files:
            for key_groups in files.slices():
                tables.append(_applied(state["kind"], files.read(key_groups), checkpoint, name))
    if not tables:
        state = _described(snapshots[0], name)
        assert state is not None
        key_config = snapshots[0].extra.get("key_type") or checkpoint.metadata.key_type
        return empty_table(state, key_config, checkpoint.manifest.name)
    table = joined(tables, name, checkpoint.manifest.name)
    return with_namespaces(table, name, checkpoint.manifest.name)


def _applied(kind: str, tables: Sequence[pa.Table], checkpoint: Checkpoint, name: str) -> pa.Table:
    try:
        return applied(kind, tables)
    except (pa.ArrowException, KeyError) as error:
        raise unreadable(name, checkpoint.manifest.name) from error


# --- both ---


class _Files:
    """The files of a snapshot that hold a state, open, in the order of applying."""

    def __init__(self, checkpoint: Checkpoint, snapshot: StateSnapshot, name: str) -> None:
        self._name = name
        self._key_groups = snapshot.key_groups
        self._opened = ExitStack()
        self.readers: list[DataFileReader] = []
        with ExitStack() as opened:
            for file in snapshot.files:
                if file.kind not in ("base", "delta", "operator"):
                    raise UsageError(
                        f"the checkpoint has files of kind {file.kind!r}, which are not read as tables",
                        detail=file.name,
                        hint="restore it into the backend that wrote it, and take a savepoint",
                    )
                source = opened.enter_context(checkpoint.open_file(file))
                reader = read_data_file(source, file.name)
                if name in reader.states:
                    self.readers.append(reader)
            self._opened = opened.pop_all()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

    def slices(self) -> Iterator[KeyGroupRange]:
        """Ranges of key groups that together cover all rows; each has few enough rows to be applied at once."""
        rows = np.zeros(MAX_PARALLELISM, np.int64)
        for reader in self.readers:
            groups, counts = reader.rows_of(self._name)
            rows[groups] += counts
        if self._key_groups is not None:
            rows[: self._key_groups.start] = rows[self._key_groups.end + 1 :] = 0
        groups = np.flatnonzero(rows)
        if not len(groups):
            return
        slices = np.cumsum(rows[groups]) // _SLICE_ROWS
        for own in np.split(groups, np.flatnonzero(np.diff(slices)) + 1):
            yield KeyGroupRange(int(own[0]), int(own[-1]))

    def read(self, key_groups: KeyGroupRange | None) -> list[pa.Table]:
        """The rows of each file."""
        return [
            pa.Table.from_batches(
                [rows.batch for rows in reader.read(self._name, key_groups)], reader.schema(self._name)
            )
            for reader in self.readers
        ]
