"""Files that a database has made itself, in checkpoints: who reads them.

Only a database of the same kind can read them. Every other backend reads rows out of them: the module
that does so lies above this one, and is loaded when the first of these files is found.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from statebackend.checkpoint.format import GroupedBatch
from statebackend.checkpoint.store.manifest import StateSnapshot
from statebackend.checkpoint.store.reader import Checkpoint
from statebackend.errors import BackendUnavailableError
from statebackend.keys import KeyGroupRange
from statebackend.types import Type

#: The kind of such files.
NATIVE = "sst"
_READER = "statebackend.backends.rocksdb.native_rows"


class NativeRows(NamedTuple):
    """The rows of a state in such files, as often as they are asked for."""

    read: Callable[[], Iterator[GroupedBatch]]
    #: True if they are in the backend's own database.
    is_held: bool = False


#: Gives the rows of each state in a snapshot's files that are a database's, for a type of key and some key groups.
OpenNative: TypeAlias = Callable[[Checkpoint, StateSnapshot, Type, KeyGroupRange], Mapping[str, NativeRows]]


def has_native(snapshot: StateSnapshot) -> bool:
    """Return True if some files of a snapshot are a database's own."""
    return any(file.kind == NATIVE for file in snapshot.files)


def open_native_rows(
    checkpoint: Checkpoint, snapshot: StateSnapshot, key_type: Type, key_groups: KeyGroupRange
) -> Mapping[str, NativeRows]:
    """Read such files as rows, in a separate database that lasts until its last reader is gone."""
    if not has_native(snapshot):
        return {}
    try:
        reader: Any = importlib.import_module(_READER)
    except ImportError as error:
        raise BackendUnavailableError(
            f"the checkpoint has files of RocksDB, and what reads them is not built ({error})",
            code="BACKEND_UNAVAILABLE.IMPORT",
            hint="build it with 'python setup.py build_ext --inplace'",
        ) from error
    found: Mapping[str, NativeRows] = reader.open_native_rows(checkpoint, snapshot, key_type, key_groups)
    return found
