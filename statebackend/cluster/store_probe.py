"""Whether driver and host see one store: each writes a small file there, and the other reads it.

A folder that is not mounted, or mounted elsewhere, or without the right to write would else be found out by the first
commit, or by the restart after it.

>>> from statebackend.checkpoint import CheckpointStore
>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> store = CheckpointStore(folder.name).open_for_writing(key_type=int, max_parallelism=128)
>>> token = leave_token(store.data_writer())
>>> check_token(store.data_writer(), token, "the driver")
>>> try:
...     check_token(store.data_writer(), {**token, "text": "another"}, "the driver")
... except UsageError as error:
...     print(error.message)
a file of the driver in the checkpoint is another one here
>>> remove_token(store.data_writer(), token)
>>> store.close()
>>> folder.cleanup()
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Mapping
from typing import Any, TypeAlias

from statebackend.checkpoint import DataWriter, StoredFile
from statebackend.errors import StateBackendError, UsageError

_log = logging.getLogger(__name__)

#: What a process needs to find the file of another, and to know it: JSON.
Token: TypeAlias = Mapping[str, Any]


def leave_token(writer: DataWriter) -> Token:
    """Write a file into the store that another process can look for."""
    text = secrets.token_hex(16)
    try:
        with writer.create("output", suffix=".token") as file:
            file.write(text.encode())
            stored = file.finish()
        writer.sync()
    except StateBackendError as error:
        if getattr(error.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise  # the error says so
        raise _unreachable("the checkpoint cannot be written here", str(error)) from error
    return {"file": stored.to_json(), "text": text}


def check_token(writer: DataWriter, token: Token, whose: str) -> None:
    """Raise `UsageError` unless the file of another process can be read here."""
    stored = StoredFile.from_json(token["file"])
    try:
        with writer.read_back(stored) as source:
            text = source.read()
    except (StateBackendError, OSError) as error:
        raise _unreachable(f"a file of {whose} in the checkpoint cannot be read here", str(error)) from error
    if text != token["text"].encode():
        raise _unreachable(f"a file of {whose} in the checkpoint is another one here", stored.name)


def remove_token(writer: DataWriter, token: Token) -> None:
    """Remove the file, as far as that is possible; else the next opening of the store does."""
    try:
        writer.discard(StoredFile.from_json(token["file"]))
    except StateBackendError as error:
        _log.warning("a file stays in the store until it is next opened: %s", error)


def _unreachable(what: str, detail: str) -> UsageError:
    return UsageError(
        what,
        code="USAGE.LOCAL_CHECKPOINT",
        detail=detail,
        hint="use s3://, or file:///path for a folder that every machine mounts under this path, to read and to write",
    )
