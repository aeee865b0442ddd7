"""Checkpoints of keyed state: taking them, whole or incrementally, and restoring from them.

>>> from statebackend.checkpoint.keyed import StateDescription
>>> from statebackend.descriptors import ValueStateDescriptor
>>> StateDescription.of(ValueStateDescriptor("count", int)).types
{'value': {'type': 'long'}}
"""

from statebackend.checkpoint.keyed.backend import CheckpointedKeyedBackend
from statebackend.checkpoint.keyed.description import StateDescription, state_schema
from statebackend.checkpoint.keyed.rows import RowSource

__all__ = ["CheckpointedKeyedBackend", "RowSource", "StateDescription", "state_schema"]
