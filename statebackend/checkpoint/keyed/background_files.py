"""Writes files in the background that replace others: checked, paced, and put off while the disk has no room.

>>> patience = Patience()
>>> patience.failed()
>>> [patience.may_try() for _ in range(3)]
[False, False, True]
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from statebackend.checkpoint.format import read_data_file
from statebackend.checkpoint.keyed.native_files import NATIVE
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StoredFile

__all__ = ["Patience", "has_room", "written_and_read_back"]

_log = logging.getLogger(__name__)

#: After so many failures in a row, the time to the next attempt does not grow any more.
_MOST_DOUBLINGS = 10
#: Room that is left for batches, beside a large file; beside a small one, four times what that takes.
_SPARE = 64 << 20
#: Snapshots until the disk is asked again for room.
_PAUSE = 16


class Patience:
    """Waits after a failure. After each further failure in a row it waits for twice as many snapshots, at most 1,024.

    >>> Patience().may_try()
    True
    """

    def __init__(self) -> None:
        self._failures = 0
        self._to_wait = 0

    def may_try(self) -> bool:
        """Return True if it is time for another attempt; asked once for each snapshot."""
        self._to_wait = max(self._to_wait - 1, -1)
        return self._to_wait < 0

    def failed(self) -> None:
        """An attempt has failed, or could not be made."""
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS)
        self._to_wait = 2**self._failures

    def wait(self) -> None:
        """There was no room for an attempt: wait a little."""
        self._to_wait = _PAUSE

    def succeeded(self) -> None:
        """An attempt has succeeded."""
        self._failures = self._to_wait = 0


def has_room(writer: DataWriter, expected: int) -> bool:
    """Return True if the disk can take a file of about this size, and batches beside it, as far as can be told."""
    room = writer.room()
    return room is None or room >= expected + expected // 4 + min(_SPARE, 4 * expected)


def _read_back(writer: DataWriter, file: StoredFile) -> None:
    if file.kind == NATIVE:
        writer.verify(file)
        return
    with writer.read_back(file) as source:
        read_data_file(source, file.name).verify()


def written_and_read_back(
    writer: DataWriter, write: Callable[[DataWriter], tuple[StoredFile, ...]]
) -> tuple[StoredFile, ...] | None:
    """Return what ``write`` has written, once it has been read again. If that fails, remove it and return None."""
    try:
        files = write(writer)
        made = set(writer.unsettled)
        for file in files:
            if file.name in made:
                _read_back(writer, file)
    except Exception as error:  # noqa: BLE001 - the deltas are there, and another attempt will be made
        if not writer.is_aborted:
            _log.warning("files could not be merged, deltas go on: %s", str(error))
        writer.abort()
        return None
    return files
