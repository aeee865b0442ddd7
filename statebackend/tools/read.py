"""Reads the state of a checkpoint or savepoint as a table, without a backend."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointReader, StateSnapshot
from statebackend.checkpoint.format import DataFileReader, key_group_slices, read_data_file
from statebackend.checkpoint.keyed.compaction import applied
from statebackend.checkpoint.keyed.savepoint_rows import keyed_parts, with_encoded_namespaces
from statebackend.checkpoint.store.savepoint_folder import Savepoint, SavepointPart, SavepointState
from statebackend.errors import StoreError, usage
from statebackend.keys import KeyGroupRange
from statebackend.operator_state.operator_snapshots import PART as OPERATOR, operator_parts, type_roles
from statebackend.runtime.start_checks import ambiguous, names_of, no_state
from statebackend.tools.tables import (
    KEYED_KINDS,
    OWN_FORMAT,
    empty_table,
    joined,
    stored_type,
    unreadable,
    with_namespaces,
)

_log = logging.getLogger(__name__)


class SnapshotFiles:
    """The files of a snapshot, open, in the order of applying."""

    def __init__(self, checkpoint: Checkpoint, snapshot: StateSnapshot) -> None:
        self._where = checkpoint.manifest.name
        self._key_groups = snapshot.key_groups
        self._opened = ExitStack()
        self._readers: list[DataFileReader] = []
        with ExitStack() as opened:
            for file in snapshot.files:
                if file.kind not in OWN_FORMAT:
                    raise usage.native_files(
                        f"the checkpoint has files of kind {file.kind!r}, which only the backend that wrote them reads",
                        detail=file.name,
                        hint="restore it into the backend that wrote it, and take a savepoint",
                    )
                source = opened.enter_context(checkpoint.open_file(file))
                self._readers.append(read_data_file(source, file.name))
            self._opened = opened.pop_all()

    def __enter__(self) -> SnapshotFiles:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

    @property
    def states(self) -> list[str]:
        """The names of the states that the files hold, sorted."""
        return sorted({name for reader in self._readers for name in reader.states})

    def rows(self, name: str) -> int:
        """The number of rows of a state, of base and changes together."""
        return sum(int(reader.rows_of(name)[1].sum()) for reader in self._of(name))

    def slices(self, name: str, most_rows: int) -> Iterator[KeyGroupRange]:
        """Ranges of key groups that together cover all rows of a state, each with about ``most_rows`` at most, or one
        key group.
        """
        return key_group_slices(self._of(name), name, most_rows, within=self._key_groups)

    def read(self, name: str, key_groups: KeyGroupRange | None = None) -> list[pa.Table]:
        """The rows of a state in each file that has it."""
        return [
            pa.Table.from_batches([rows.batch for rows in reader.read(name, key_groups)], reader.schema(name))
            for reader in self._of(name)
        ]

    def remaining(self, name: str, kind: str, key_groups: KeyGroupRange) -> pa.Table:
        """The rows that remain of a keyed state when all changes have been applied."""
        tables = self.read(name, key_groups)
        try:
            return applied(kind, tables)
        except (pa.ArrowException, KeyError) as error:
            raise unreadable(name, self._where) from error

    def _of(self, name: str) -> list[DataFileReader]:
        return [reader for reader in self._readers if name in reader.states]


def open_checkpoint(uri: str | os.PathLike[str] | CheckpointReader, checkpoint_id: int | None) -> Checkpoint:
    """Open the checkpoint of an id, or for None the newest, of a store or the one at an address."""
    store = uri if isinstance(uri, CheckpointReader) else CheckpointReader(uri)
    return store.open_latest() if checkpoint_id is None else store.open(checkpoint_id)


@contextmanager
def pinned_checkpoint(
    uri: str | os.PathLike[str] | CheckpointReader, checkpoint_id: int | None
) -> Iterator[tuple[Checkpoint, Callable[[], None]]]:
    """Open the same checkpoint and pin it while it is read, with a function to call now and then meanwhile.

    A store that may only be read is read without a pin.
    """
    store = uri if isinstance(uri, CheckpointReader) else CheckpointReader(uri)
    try:
        pin = store.pin(checkpoint_id)
    except StoreError as error:
        _log.info("reading without a pin: %s", error)
        yield open_checkpoint(store, checkpoint_id), lambda: None
        return
    with pin:
        yield pin.checkpoint, pin.keep


def open_saved(uri: Any, checkpoint_id: int | None) -> Checkpoint | Savepoint:
    """The same, or the savepoint at the address, which has no ids; a store may be given, too."""
    if isinstance(uri, Savepoint):
        if checkpoint_id is not None:
            raise usage.checkpoint_id(
                "a savepoint has no ids", detail=uri.uri, hint="leave id out, or give the uri of a store"
            )
        return uri
    if (
        checkpoint_id is None
        and not isinstance(uri, CheckpointReader)
        and CheckpointReader(uri).latest() is None
    ):
        savepoint = Savepoint(uri)
        if savepoint.parts("keyed") or savepoint.parts("operator"):
            return savepoint
    return open_checkpoint(uri, checkpoint_id)


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


def _with_state(parts: list[SavepointPart], name: str) -> list[tuple[SavepointPart, SavepointState]]:
    return [(part, state) for part in parts for state in part.states if state.described["name"] == name]


def _keyed_rows(savepoint: Savepoint, state: SavepointState) -> pa.Table:
    with savepoint.open_state(state) as file:
        return pa.Table.from_batches([with_encoded_namespaces(batch) for batch in file.iter_batches()])


def _operator_rows(savepoint: Savepoint, part: SavepointPart, state: SavepointState) -> pa.Table:
    table = None
    if state.rows:
        with savepoint.open_state(state) as file:
            table = file.read()
    return _of_instance(table, state.described, part.described["subtask"], part.name)


def _of_instance(table: pa.Table | None, state: dict[str, Any], subtask: Any, where: str) -> pa.Table:
    """The rows of an operator state with the number of their instance; None: it has none."""
    if table is None:
        roles = type_roles(state["kind"])
        fields = [(column, stored_type(state, [role], where)) for column, role in roles.items()]
        table = pa.schema(fields).empty_table()
    return table.add_column(0, "subtask", pa.repeat(pa.scalar(subtask, pa.int32()), table.num_rows))


#: Rows, of base and changes together, that are applied at a time.
_SLICE_ROWS = 1 << 22


def read_state(
    store: str | os.PathLike[str] | CheckpointReader | Savepoint, name: str, *, id: int | None = None
) -> pa.Table:
    """The rows of a state in a checkpoint, by default the newest. O(rows of the state).

    ``store`` is a store or a savepoint, or the path of either. A savepoint has no ids.

    A keyed state has the columns ``key``; ``namespace``, if there are others than `VOID`; ``map_key`` for map states;
    ``value``; and ``timestamp`` (milliseconds), if there is a time to live. An operator state has ``subtask``, the
    number of the instance; ``map_key`` for broadcast states; and ``value``. Entries of a map and elements of a list
    keep their order; keys have none. The table includes values that have expired and are still stored. Pickles are
    bytes: nothing is executed.
    """
    checkpoint = open_saved(store, id)
    if isinstance(checkpoint, Savepoint):
        return savepoint_table(checkpoint, name)
    found = [(each, state) for each in checkpoint.snapshots for state in each.states if state["name"] == name]
    if not found:
        raise no_state(name, names_of(checkpoint), f"checkpoint {checkpoint.id}")
    operators = [each for each in found if each[0].extra.get("part") == OPERATOR]
    if operators and len(operators) < len(found):
        raise ambiguous(name, f"checkpoint {checkpoint.id}")
    return (_operator_table if operators else _keyed_table)(checkpoint, found, name)


def _operator_table(
    checkpoint: Checkpoint, found: list[tuple[StateSnapshot, dict[str, Any]]], name: str
) -> pa.Table:
    where = checkpoint.manifest.name
    tables = []
    for snapshot, state in found:
        with SnapshotFiles(checkpoint, snapshot) as files:
            table = next(iter(files.read(name)), None)
        tables.append(_of_instance(table, state, snapshot.subtask_index, where))
    return joined(tables, name, where)


def _keyed_table(
    checkpoint: Checkpoint, found: list[tuple[StateSnapshot, dict[str, Any]]], name: str
) -> pa.Table:
    where = checkpoint.manifest.name
    tables = []
    for snapshot, state in found:
        if state["kind"] not in KEYED_KINDS:
            raise usage.state_kind(
                f"a state of kind {state['kind']!r} cannot be read as a table",
                detail=f"state {name!r}, checkpoint {checkpoint.id}",
            )
        with SnapshotFiles(checkpoint, snapshot) as files:
            for key_groups in files.slices(name, _SLICE_ROWS):
                tables.append(files.remaining(name, state["kind"], key_groups))
    if not tables:
        snapshot, state = found[0]
        return empty_table(state, snapshot.extra.get("key_type") or checkpoint.metadata.key_type, where)
    return with_namespaces(joined(tables, name, where), name, where)
