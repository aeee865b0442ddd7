"""Brings a file of a checkpoint to a local path, compared with its checksum.

>>> import tempfile
>>> from pathlib import Path
>>> from statebackend.checkpoint import CheckpointStore
>>> with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder).open_for_writing() as store:
...     file = store.begin_snapshot(0).create("sst")
...     _ = file.write(b"content")
...     stored = file.finish()
...     from statebackend.checkpoint.store.manifest import StateSnapshot
...     checkpoint = store.commit(0, [StateSnapshot(0, store.epoch, files=(stored,))])
...     fetch(checkpoint, stored, folder + "/here", may_link=True)
...     Path(folder, "here").read_bytes()
b'content'
"""

from __future__ import annotations

import os

from statebackend.checkpoint.store.checksums import crc32c
from statebackend.checkpoint.store.data_files import storing
from statebackend.checkpoint.store.manifest import StoredFile
from statebackend.checkpoint.store.reader import Checkpoint
from statebackend.errors import CorruptCheckpointError

__all__ = ["fetch"]

_CHUNK = 4 << 20


def fetch(checkpoint: Checkpoint, file: StoredFile, path: str, *, may_link: bool = False) -> None:
    """Put the content of a file under a new local path, in plain text. O(bytes).

    With ``may_link`` it is a hard link where that can be: then nobody may write into it.
    """
    if may_link and _linked(checkpoint, file, path):
        checkpoint.verify([file])
        return
    checksum = 0
    with (
        checkpoint.open_file(file) as source,
        storing(f"copying {file.name} to {path}"),
        open(path, "xb") as target,
    ):
        while chunk := source.read(_CHUNK):
            checksum = crc32c(chunk, checksum)
            target.write(chunk)
    if checkpoint.encryption is not None:
        checkpoint.verify([file])  # its checksum is one of what is stored
    elif checksum != file.checksum:
        raise CorruptCheckpointError(
            "a file does not match its checksum",
            detail=f"{file.name}, checkpoint {checkpoint.id}",
            hint="latest(intact=True) finds the newest checkpoint that is whole",
        )


def _linked(checkpoint: Checkpoint, file: StoredFile, path: str) -> bool:
    """Make a hard link, if the store is a folder of this file system, and not encrypted."""
    address = checkpoint.address(file)
    if checkpoint.encryption is not None or not os.path.isabs(address):
        return False
    try:
        os.link(address, path)
    except OSError:  # another file system, or not allowed, or not there: reading it says what is wrong
        return False
    return True
