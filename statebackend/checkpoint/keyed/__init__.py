"""Checkpoints of keyed state: taking them, whole or incrementally, and restoring from them."""

from statebackend.checkpoint.keyed.checkpointed_backend import CheckpointedKeyedBackend
from statebackend.checkpoint.keyed.description import StateDescription, state_schema
from statebackend.checkpoint.keyed.row_source import ExpiredAt, Source

__all__ = [
    "CheckpointedKeyedBackend",
    "ExpiredAt",
    "Source",
    "StateDescription",
    "state_schema",
]
