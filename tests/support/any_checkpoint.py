"""State in the newest checkpoint of a store, whoever wrote it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

import statebackend as sb


def read_rows(store: Path, name: str, key_type: Any = "string") -> pa.Table:
    """The rows of a state; from files of a database by way of a savepoint, as the tools advise."""
    try:
        return sb.tools.state(store, name).to_table()
    except sb.UsageError as error:
        if "files of kind 'sst'" not in str(error):
            raise
    checkpoint = sb.CheckpointStore(store, single_writer=True).open_latest()
    backend = sb.create_backend("rocksdb", checkpoints="native")
    with (
        tempfile.TemporaryDirectory() as folder,
        backend.create_keyed_backend(key_type, restore=checkpoint) as keyed,
    ):
        keyed.savepoint(f"{folder}/savepoint")
        return sb.tools.state(f"{folder}/savepoint", name).to_table()
