"""Finding the checkpoint that a tool is to work on.

>>> open_checkpoint("/nowhere", None)
Traceback (most recent call last):
statebackend.errors.UsageError: there is no checkpoint (/nowhere). Hint: give the uri of a store [USAGE.NO_CHECKPOINT]
"""

from __future__ import annotations

import os

from statebackend.checkpoint import Checkpoint, CheckpointReader
from statebackend.errors import UsageError

__all__ = ["no_state", "open_checkpoint"]


def open_checkpoint(uri: str | os.PathLike[str], checkpoint_id: int | None) -> Checkpoint:
    """The checkpoint of an id, or for None the newest."""
    store = CheckpointReader(uri)
    chosen = store.latest() if checkpoint_id is None else checkpoint_id
    if chosen is None:
        raise UsageError(
            "there is no checkpoint",
            code="USAGE.NO_CHECKPOINT",
            detail=store.uri,
            hint="give the uri of a store",
        )
    return store.open(chosen)


def no_state(checkpoint: Checkpoint, name: str) -> UsageError:
    """The error for a state that a checkpoint does not have."""
    known = sorted({state["name"] for each in checkpoint.snapshots for state in each.states})
    return UsageError(
        f"there is no state {name!r}",
        code="USAGE.NO_STATE",
        detail=f"checkpoint {checkpoint.id}",
        hint=f"there are: {', '.join(map(repr, known)) or 'none'}",
    )
