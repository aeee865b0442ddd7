"""Checkpoints: a store of committed snapshots that survives crashes, second writers and damaged files.

>>> from statebackend.checkpoint import CheckpointStore
>>> CheckpointStore("/nowhere").latest() is None
True
"""

from statebackend.checkpoint.data_files import DataFile, DataWriter
from statebackend.checkpoint.json_checks import FORMAT
from statebackend.checkpoint.manifest import Manifest, StateSnapshot, StoredFile
from statebackend.checkpoint.metadata import Metadata
from statebackend.checkpoint.pending import PendingSnapshot
from statebackend.checkpoint.reading import Checkpoint, CheckpointReader
from statebackend.checkpoint.store import CheckpointStore

__all__ = [
    "FORMAT",
    "Checkpoint",
    "CheckpointReader",
    "CheckpointStore",
    "DataFile",
    "DataWriter",
    "Manifest",
    "Metadata",
    "PendingSnapshot",
    "StateSnapshot",
    "StoredFile",
]
