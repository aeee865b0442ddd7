"""Checkpoints: a store of committed snapshots that survives crashes, second writers and damaged files."""

from statebackend.checkpoint.store.checkpoint_reader import Checkpoint, CheckpointReader
from statebackend.checkpoint.store.data_files import DataFile, DataWriter
from statebackend.checkpoint.store.encryption import BlockCipher
from statebackend.checkpoint.store.manifest import Manifest, StateSnapshot, StoredFile
from statebackend.checkpoint.store.metadata import Metadata
from statebackend.checkpoint.store.pending import Snapshot
from statebackend.checkpoint.store.sealed import FORMAT
from statebackend.checkpoint.store.store import CheckpointStore

__all__ = [
    "FORMAT",
    "BlockCipher",
    "Checkpoint",
    "CheckpointReader",
    "CheckpointStore",
    "DataFile",
    "DataWriter",
    "Manifest",
    "Metadata",
    "Snapshot",
    "StateSnapshot",
    "StoredFile",
]
