"""Reads the rows of a database's own files in a checkpoint, of some key groups.

The files become a database in a folder of its own, which lasts as long as somebody may read rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from statebackend._core.rocksdb.overlay.composite_keys import group_prefix
from statebackend._core.rocksdb.overlay.merging_iterator import MergingIterator
from statebackend.backends.rocksdb.family_reader import FamilyReader, groups_of
from statebackend.backends.rocksdb.library_location import load_library
from statebackend.backends.rocksdb.native_families import NativeFamily, UndeclaredTable, stand_in_descriptor
from statebackend.backends.rocksdb.native_snapshot import NativeSnapshot
from statebackend.backends.rocksdb.scratch import Scratch
from statebackend.backends.rocksdb.settings import Settings
from statebackend.checkpoint import Checkpoint, StateSnapshot
from statebackend.checkpoint.format import GroupedBatch
from statebackend.checkpoint.keyed import StateDescription
from statebackend.checkpoint.keyed import compiled_backend as compiled
from statebackend.checkpoint.keyed.row_source import NativeRows
from statebackend.errors import BackendUnavailableError
from statebackend.keys import KeyEncoder, KeyGroupRange, key_encoder
from statebackend.types import Type


class _Encoding(NamedTuple):
    """What `FamilyReader` asks of a backend."""

    encoder: KeyEncoder


def open_native_rows(
    checkpoint: Checkpoint,
    snapshot: StateSnapshot,
    key_type: Type,
    key_groups: KeyGroupRange,
    settings: Settings | None = None,
) -> Mapping[str, NativeRows]:
    """Open the files of a snapshot as a database; the rows of each state in it. Every byte has been checked then."""
    try:
        load_library()
    except BackendUnavailableError as error:
        raise BackendUnavailableError(
            f"the checkpoint has files of RocksDB, whose library is not available: {error.message}",
            code=error.code,
            detail=error.detail,
            hint=error.hint or "install pyspark, or set STATEBACKEND_ROCKSDB_LIB",
        ) from error
    native = NativeSnapshot(checkpoint, snapshot)
    scratch = Scratch(settings or Settings(), native, is_read_only=True)
    encoder = key_encoder(key_type)
    found = {}
    for family in native.families:
        description = native.description_of(family)
        if description is not None:
            read = partial(_rows, scratch, encoder, description, family, key_groups)
            found[family.table] = NativeRows(read)
    return found


def _rows(
    scratch: Scratch,
    encoder: KeyEncoder,
    description: StateDescription,
    family: NativeFamily,
    key_groups: KeyGroupRange,
) -> Iterator[GroupedBatch]:
    """As `rows_of_family`; whoever may still call it keeps the database."""
    table = UndeclaredTable(scratch.database.column_family(family.family), family.has_namespaces)
    yield from rows_of_family(encoder, description, family, table, key_groups)


def rows_of_family(
    encoder: KeyEncoder,
    description: StateDescription,
    family: NativeFamily,
    table: UndeclaredTable,
    key_groups: KeyGroupRange,
) -> Iterator[GroupedBatch]:
    """The rows of some key groups, in order. O(rows of these), and a batch of memory."""
    stored: Any = stand_in_descriptor(description, family)
    backend: Any = _Encoding(encoder)
    held: Any = table
    state = FamilyReader(backend, stored, held)
    with MergingIterator(table.family, None, b"", group_prefix(key_groups.start), fill_cache=False) as walk:
        is_more = True
        while is_more:
            ends, keys, value_ends, values = walk.read_many(compiled.BATCH_ROWS, compiled.BATCH_BYTES)
            groups = groups_of((ends, keys))
            own = int(np.searchsorted(groups, key_groups.end, side="right"))
            is_more = 0 < own == len(groups)
            if not own:
                return
            batch, groups = state.batch((ends[: own + 1], keys), (value_ends[: own + 1], values), None)
            if batch.num_rows:
                yield GroupedBatch.of(batch, groups)
