"""Finds the checkpoint that a tool works on.

>>> open_checkpoint("/nowhere", None)
Traceback (most recent call last):
statebackend.errors.UsageError: there is no checkpoint (/nowhere). Hint: give the uri of a store [USAGE.NO_CHECKPOINT]
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from statebackend.checkpoint import Checkpoint, CheckpointReader
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError

__all__ = ["ambiguous", "names_of", "no_state", "open_checkpoint", "open_saved"]


def open_checkpoint(uri: str | os.PathLike[str] | CheckpointReader, checkpoint_id: int | None) -> Checkpoint:
    """Open the checkpoint of an id, or for None the newest, of a store or the one at an address."""
    store = uri if isinstance(uri, CheckpointReader) else CheckpointReader(uri)
    return store.open_latest() if checkpoint_id is None else store.open(checkpoint_id)


def open_saved(uri: Any, checkpoint_id: int | None) -> Checkpoint | Savepoint:
    """The same, or the savepoint at the address, which has no ids.

    >>> open_saved(Savepoint("/data/savepoint"), None)
    Savepoint('/data/savepoint')
    """
    if isinstance(uri, Savepoint):
        if checkpoint_id is not None:
            raise UsageError(
                "a savepoint has no ids", detail=uri.uri, hint="leave id out, or give the uri of a store"
            )
        return uri
    if checkpoint_id is None and CheckpointReader(uri).latest() is None:
        savepoint = Savepoint(uri)
        if savepoint.parts("keyed") or savepoint.parts("operator"):
            return savepoint
    return open_checkpoint(uri, checkpoint_id)


def no_state(name: str, known: Iterable[str], where: str) -> UsageError:
    """The error for a state that a checkpoint or savepoint does not have."""
    return UsageError(
        f"there is no state {name!r}",
        code="USAGE.NO_STATE",
        detail=where,
        hint=f"there are: {', '.join(map(repr, sorted(set(known)))) or 'none'}",
    )


def names_of(checkpoint: Checkpoint) -> list[str]:
    """The names of all states of a checkpoint."""
    return [state["name"] for each in checkpoint.snapshots for state in each.states]


def ambiguous(name: str, where: str) -> UsageError:
    """The error for a name that two states share."""
    return UsageError(
        f"both a keyed state and an operator state are called {name!r}",
        detail=where,
        hint="give one of them another name",
    )
