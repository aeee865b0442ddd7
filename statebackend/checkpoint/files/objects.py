"""A store in an object store, through ``pyarrow.fs``: objects appear whole, but nothing can be made exclusive.

So the user guarantees that there is only one writer. An epoch is a marker object. A writer stops if its marker is gone
or a newer one is there. Another writer may still slip in between that check and the write. The store then finds what
both have written when it is next opened.

>>> ObjectFiles("s3://key:secret@bucket/state?region=eu-west-1").uri
's3://bucket/state'
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable

import pyarrow as pa
from pyarrow import fs

from statebackend.checkpoint.files.addresses import without_secrets
from statebackend.checkpoint.files.interface import Buffer, Fenced, FileSink, StoreFiles, Taken
from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    DATA,
    data_epoch,
    epoch_folder,
    is_data_file,
    newest_epoch,
    parse_epoch_folder,
    parse_manifest_name,
    split,
)
from statebackend.errors import UsageError

__all__ = ["ObjectFiles", "ObjectSink"]

_log = logging.getLogger(__name__)
_ATTEMPTS = 100
_OWNER = "owner.json"


class ObjectSink(FileSink):
    """A new object; it appears when it is finished.

    >>> from pyarrow import fs
    >>> memory = fs._MockFileSystem()
    >>> sink = ObjectSink(memory, "a")
    >>> sink.write(b"abc")
    >>> sink.finish()
    >>> memory.open_input_stream("a").read()
    b'abc'
    """

    def __init__(self, filesystem: fs.FileSystem, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._there = True
        self._stream = filesystem.open_output_stream(path)

    def write(self, data: Buffer) -> None:
        self._stream.write(data)

    def sync_written(self) -> None:
        pass  # an object appears when it is finished

    def finish(self) -> None:
        self._stream.close()

    def abandon(self) -> None:
        if not self._there:
            return
        self._there = False
        # An upload cannot be given up: closing may create the object, which is then removed.
        try:
            self._stream.close()
        except OSError:
            pass
        try:
            self._filesystem.delete_file(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("an abandoned object stays until the store is next opened: %s", type(error).__name__)


class ObjectFiles(StoreFiles):
    """The files of a store below a prefix of a bucket. ``filesystem`` and ``root`` override those of the uri.

    >>> from pyarrow import fs
    >>> ObjectFiles("s3://bucket/state", fs._MockFileSystem(), "state").names("checkpoints")
    []
    """

    def __init__(self, uri: str, filesystem: fs.FileSystem | None = None, root: str | None = None) -> None:
        self._uri = uri
        self.uri = without_secrets(uri).rstrip("/")
        self._opened = None if filesystem is None or root is None else (filesystem, root)

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectFiles, (self._uri,)

    @property
    def _filesystem(self) -> fs.FileSystem:
        return self._open()[0]

    def _open(self) -> tuple[fs.FileSystem, str]:
        if self._opened is None:
            try:
                filesystem, root = fs.FileSystem.from_uri(self._uri)
            except (ValueError, NotImplementedError) as error:
                # Arrow repeats the uri, which may hold a secret.
                reason = re.sub(r"'[^']*'|\S*://\S*", "...", str(error))
                raise UsageError(f"the address of the store cannot be used: {reason}") from None
            self._opened = filesystem, root.rstrip("/")
        return self._opened

    def _path(self, name: str) -> str:
        return f"{self._open()[1]}/{name}"

    # --- reading ---

    def read(self, name: str) -> bytes:
        with self.open_input(name) as file:
            return bytes(file.read())

    def size(self, name: str) -> int | None:
        info = self._filesystem.get_file_info(self._path(name))
        return info.size if info.type == fs.FileType.File else None

    def modified(self, name: str) -> float:
        written = self._filesystem.get_file_info(self._path(name)).mtime_ns
        return 0.0 if written is None else written / 1e9

    def names(self, folder: str) -> list[str]:
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        return sorted(info.base_name for info in self._filesystem.get_file_info(selector))

    def open_input(self, name: str) -> pa.NativeFile:
        return self._filesystem.open_input_file(self._path(name))

    def address(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def below(self, folder: str) -> StoreFiles:
        filesystem, root = self._open()
        return ObjectFiles(f"{self.uri}/{folder}", filesystem, f"{root}/{folder}")

    # --- data files ---

    def create(self, name: str) -> FileSink:
        return ObjectSink(self._filesystem, self._path(name))

    def make_folder(self, folder: str) -> None:
        pass  # object names need no folders

    def sync_folder(self, folder: str) -> None:
        pass  # an object and its name are durable once its upload is acknowledged

    def remove(self, name: str) -> None:
        try:
            self._filesystem.delete_file(self._path(name))
        except FileNotFoundError:
            pass

    # --- the writer ---

    def take_epoch(self, *, refuse_live: bool) -> int:
        # Nothing tells if the writer of an older epoch is alive.
        for _ in range(_ATTEMPTS):
            epoch = self._newest_epoch() + 1
            token = secrets.token_hex(16)
            self._write(self._marker(epoch), json.dumps({"writer": token}).encode())
            if self._newest_epoch() == epoch and token.encode() in self.read(self._marker(epoch)):
                break
        else:
            raise OSError("no epoch can be taken: others take each one first")
        for name in self.names(CHECKPOINTS):
            older = parse_epoch_folder(name)
            if older is not None and older < epoch:
                self._filesystem.delete_dir(self._path(epoch_folder(older)))
        return epoch

    def _marker(self, epoch: int) -> str:
        return f"{epoch_folder(epoch)}/{_OWNER}"

    def _newest_epoch(self) -> int:
        return newest_epoch(self.names(CHECKPOINTS), self.names(DATA))

    def _write(self, name: str, content: bytes) -> None:
        sink = self.create(name)
        try:
            sink.write(content)
            sink.finish()
        except BaseException:
            sink.abandon()
            raise

    def holds(self, epoch: int) -> bool:
        return self.size(self._marker(epoch)) is not None and self._newest_epoch() == epoch

    def publish(self, name: str, content: bytes, epoch: int) -> None:
        if not self.holds(epoch):
            raise Fenced
        if self.size(name) is not None or self._is_committed(name):
            raise Taken
        sink = self.create(name)
        try:
            sink.write(content)
            sink.finish()
        except OSError as error:
            # A lost answer may have been a success. If the object exists, it must be complete.
            if not self._is_there(sink, name, content, error):
                raise
        except BaseException:
            sink.abandon()
            raise

    def _is_committed(self, name: str) -> bool:
        """Return True if a manifest of the same id, of any epoch, exists."""
        folder, base_name = split(name)
        mine = parse_manifest_name(base_name)
        if folder != CHECKPOINTS or mine is None:
            return False
        found = map(parse_manifest_name, self.names(CHECKPOINTS))
        return any(each is not None and each[0] == mine[0] for each in found)

    def _is_there(self, sink: FileSink, name: str, content: bytes, error: OSError) -> bool:
        """Return True if the object exists although writing it failed with ``error``."""
        try:
            if self.size(name) is not None and self.read(name) == content:
                return True
            sink.abandon()
            error.unknown = self.size(name) is not None  # type: ignore[attr-defined]
        except OSError:
            error.unknown = True  # type: ignore[attr-defined]
        return False

    def retire(self, names: Iterable[str], epoch: int) -> None:
        waiting = list(names)
        if waiting and not self.holds(epoch):
            raise Fenced
        for name in waiting:
            self.remove(name)

    def remove_leftovers(self, is_kept: Callable[[str], bool], epoch: int) -> int:
        removed = 0
        for number in self.names(DATA):
            folder = f"{DATA}/{number}"
            if not 0 < data_epoch(folder) < epoch:
                continue
            kept = False
            for base_name in self.names(folder):
                name = f"{folder}/{base_name}"
                if is_data_file(name) and not is_kept(name):
                    self.remove(name)
                    removed += 1
                else:
                    kept = True
            if not kept:
                self._filesystem.delete_dir(self._path(folder))
        return removed

    def release(self, epoch: int) -> None:
        pass
