"""Finds the checkpoint that a tool works on.

>>> open_checkpoint("/nowhere", None)
Traceback (most recent call last):
statebackend.errors.UsageError: there is no checkpoint (/nowhere). Hint: give the uri of a store [USAGE.NO_CHECKPOINT]
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from statebackend.checkpoint import Checkpoint, CheckpointReader
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import StoreError, UsageError

__all__ = ["open_checkpoint", "open_saved", "pinned_checkpoint"]

_log = logging.getLogger(__name__)


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
    """The same, or the savepoint at the address, which has no ids; a store may be given, too.

    >>> open_saved(Savepoint("/data/savepoint"), None)
    Savepoint('/data/savepoint')
    """
    if isinstance(uri, Savepoint):
        if checkpoint_id is not None:
            raise UsageError(
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
