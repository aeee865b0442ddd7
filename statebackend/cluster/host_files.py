"""A host's half of the store: it writes files for the writer of the epoch, which is in the driver and commits them.

Bases are kept on a local disk too, so that a process that takes the place of another finds them near. A base is a file
of rows, or files of a database. A copy counts while it has the length and the checksum of the written bytes. Names
never come again, so a copy is of the file of its name or of none. An error of a copy costs the way to the place
itself, and nothing else.

Driver and host also see if they have one store: each writes a small file there, a token, and the other reads it. A
folder that is not mounted, or mounted elsewhere, or without the right to write would else be found out by the first
commit, or by the restart after it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from statebackend.checkpoint import DataWriter, StoredFile
from statebackend.checkpoint.files.store_files import BytesLike, FileSink, StoreFiles
from statebackend.checkpoint.keyed.row_source import NATIVE
from statebackend.checkpoint.store.sealed import crc32c
from statebackend.cluster.shuffle_staging import is_alive
from statebackend.errors import StateBackendError, UsageError

_log = logging.getLogger(__name__)


class HostFiles:
    """Makes the writers of a host's snapshots and outputs, from one that the driver's store has made."""

    def __init__(self, template: DataWriter, builds_on: Iterable[StoredFile] = ()) -> None:
        self._template = template
        #: The files that snapshots may name again: the files of this host in the newest checkpoint.
        self.builds_on = frozenset(file.name for file in builds_on)
        self._made: list[DataWriter] = []

    def begin_snapshot(self, checkpoint_id: int) -> DataWriter:
        writer = self._template.for_checkpoint(checkpoint_id, self.builds_on)
        self._made.append(writer)
        return writer

    def sync(self, named: Iterable[StoredFile]) -> None:
        """Make the names of the new ones among these files durable: the driver may commit them then.

        Some are of no writer here: a base that was written in the background is in the same folder.
        """
        if any(file.name not in self.builds_on for file in named):
            self._made[0].sync()

    def abort(self, checkpoint_id: int) -> None:
        made, self._made = self._made, []
        for writer in made:
            writer.abort()

    def committed(self, of_state: Iterable[StoredFile], of_outputs: Iterable[StoredFile]) -> None:
        """Note that a checkpoint names these files of this host. Snapshots build on its state's files."""
        self.builds_on = frozenset(file.name for file in of_state)
        named = {*self.builds_on, *(file.name for file in of_outputs)}
        made, self._made = self._made, []
        for writer in made:
            writer.settle(named)
            writer.committed()


_CHUNK = 4 << 20
_FOLDER = "statebackend-copies-"


def folder_of_copies(parent: str, run: str, number: int) -> str:
    """The folder of this process for the copies of a range, with the remains of a killed process.

    What is left of other runs of queries, whose processes are gone, is removed.
    """
    mine = f"{_FOLDER}{run}-{number}-"
    path = os.path.join(parent, f"{mine}{os.getpid()}")
    for name in os.listdir(parent):
        if not name.startswith(_FOLDER) or is_alive(name.rpartition("-")[2]):
            continue
        there = os.path.join(parent, name)
        try:
            if name.startswith(mine) and not os.path.exists(path):
                os.rename(there, path)
            elif not name.startswith(f"{_FOLDER}{run}-"):  # the next host of this run may want its own
                shutil.rmtree(there, ignore_errors=True)
        except OSError as error:
            _log.info("local copies are left alone: %s", error)
    return path


def _passed_on(name: str) -> Callable[..., Any]:
    """A method that calls the inner files' method."""

    def method(files: FilesWithCopies, *arguments: Any, **options: Any) -> Any:
        return getattr(files._inner, name)(*arguments, **options)

    return method


class FilesWithCopies(StoreFiles):
    """The files of ``inner``, with copies of bases in ``folder``, which one process at a time uses.

    Copies are read unless ``reads_copies`` is False: a file that is read back for verification must be in the place.
    """

    def __init__(self, inner: StoreFiles, folder: str, *, reads_copies: bool = True) -> None:
        self._inner, self._folder = inner, folder
        self._reads_copies = reads_copies
        self.uri = inner.uri

    # --- copies ---

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove the copies of other files than these, also what is being written."""
        kept = {_flat(name) for name in names}
        for found in self._copies():
            if found.partition("~")[0] not in kept or found.endswith("~"):
                self._drop(os.path.join(self._folder, found))

    def forget(self, names: Iterable[str]) -> None:
        gone = {_flat(name) for name in names if _is_kept(name)}
        for found in self._copies() if gone else ():
            if found.partition("~")[0] in gone:
                self._drop(os.path.join(self._folder, found))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copies(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except OSError:
            return []

    def _copy_of(self, name: str) -> str | None:
        """The path of the copy of a file; None if there is none that is whole."""
        prefix = f"{_flat(name)}~"
        for found in self._copies():
            if found.startswith(prefix) and not found.endswith("~"):
                path = os.path.join(self._folder, found)
                if _is_whole(path, found.removeprefix(prefix)):
                    return path
                _log.warning("a local copy is damaged, and not used: %s", path)
                self._drop(path)
        return None

    def _drop(self, path: str) -> None:
        try:
            os.unlink(path)
        except OSError as error:
            _log.info("a local copy stays: %s", error)

    # --- what copies change ---

    def create(self, name: str) -> FileSink:
        sink = self._inner.create(name)
        return _Copying(sink, self._folder, _flat(name)) if _is_kept(name) else sink

    def open_input(self, name: str, size: int | None = None) -> pa.NativeFile:
        path = self._copy_of(name) if self._reads_copies and _is_kept(name) else None
        if path is not None:
            try:
                return pa.OSFile(path)
            except OSError as error:
                _log.warning("a local copy cannot be read: %s", error)
        return self._inner.open_input(name, size)

    def remove(self, name: str) -> None:
        self._inner.remove(name)
        self.forget((name,))

    # --- all else ---

    read = _passed_on("read")
    size = _passed_on("size")
    modified = _passed_on("modified")
    names = _passed_on("names")
    address = _passed_on("address")
    below = _passed_on("below")
    room = _passed_on("room")
    make_folder = _passed_on("make_folder")
    sync_folder = _passed_on("sync_folder")
    take_epoch = _passed_on("take_epoch")
    holds = _passed_on("holds")
    publish = _passed_on("publish")
    retire = _passed_on("retire")
    remove_leftovers = _passed_on("remove_leftovers")
    release = _passed_on("release")


class _Copying(FileSink):
    """Writes a file to its place, and a copy next to, which is given up at the first error."""

    def __init__(self, sink: FileSink, folder: str, flat: str) -> None:
        self._sink = sink
        self._path = os.path.join(folder, f"{flat}~")
        self._size = self._checksum = 0
        self._file: int | None = None
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
        except OSError as error:
            self._give_up(error)

    def write(self, data: BytesLike) -> None:
        self._sink.write(data)
        if self._file is None:
            return
        view = memoryview(data).cast("B")
        self._size += len(view)
        self._checksum = crc32c(view, self._checksum)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._give_up(error)

    def sync_written(self) -> None:
        self._sink.sync_written()

    def finish(self) -> None:
        self._sink.finish()
        file, self._file = self._file, None
        if file is None:
            return
        try:
            os.close(file)
            os.rename(self._path, f"{self._path}{self._size}~{self._checksum}")
        except OSError as error:
            self._give_up(error)

    def abandon(self) -> None:
        self._sink.abandon()
        self._give_up(None)

    def _give_up(self, error: OSError | None) -> None:
        if error is not None:
            _log.warning("a base lacks a local copy: %s", error)
        file, self._file = self._file, None
        try:
            if file is not None:
                os.close(file)
            os.unlink(self._path)
        except OSError:
            pass  # there is none


def _is_kept(name: str) -> bool:
    return "-base-" in name or f"-{NATIVE}-" in name


def _flat(name: str) -> str:
    return name.replace("/", "_")


def _is_whole(path: str, told: str) -> bool:
    """Whether a copy has the length and the checksum that its name says."""
    size, checksum = 0, 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                checksum = crc32c(chunk, checksum)
    except OSError:
        return False
    return told == f"{size}~{checksum}"


#: The data by which a process finds and recognises the file of another: JSON.
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
