"""Places where other programs read: a file appears there whole and durable, under a name that is never taken twice.

A place is not part of a store: it has neither epochs nor a log, and its files belong to its readers.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress

import pyarrow as pa

from statebackend.checkpoint.files.addresses import local_path, parse_object_address, scheme_of
from statebackend.checkpoint.files.object_calls import ObjectCalls
from statebackend.checkpoint.files.object_store import ObjectFiles, ObjectSink
from statebackend.checkpoint.files.posix import NO_LINKS, PosixFiles, PosixSink
from statebackend.checkpoint.files.posix_calls import PosixCalls
from statebackend.checkpoint.files.store_files import BytesLike, StoreFiles
from statebackend.errors import UsageError, usage

#: The errors of `link` for two files that cannot be one, and of a system without links.
_NOT_HERE = {errno.EXDEV, *NO_LINKS}
#: Random bytes in the name of a file while it is written.
_TOKEN = 8


class TargetFolder(ABC):
    """A folder, or a path in a bucket. Names are relative to it, with slashes. System errors come as `OSError`."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        #: The address without secrets, for messages.
        self.uri = files.uri

    def prepare(self, folder: str = "") -> None:
        """Make the folder, durably, if there are folders here and it does not exist."""
        self._files.make_folder(folder)

    def size(self, name: str) -> int | None:
        return self._files.size(name)

    def names(self, folder: str = "") -> list[str]:
        return self._files.names(folder)

    def open_input(self, name: str) -> pa.NativeFile:
        return self._files.open_input(name)

    def address(self, name: str) -> str:
        return self._files.address(name)

    @abstractmethod
    def adopt(self, name: str, source: StoreFiles, source_name: str) -> str | None:
        """Make a complete file of a store appear here too, without its bytes coming to this process; return how.

        Returns None, and has done nothing, if that is not possible between the two. `FileExistsError` if the name is
        taken, as far as that can be told.
        """

    @abstractmethod
    def write(self, name: str, chunks: Iterable[BytesLike]) -> None:
        """Make a file with this content appear, durably; `FileExistsError` if the name is taken, as far as is known."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Make a small file that must not exist, durably, or raise `FileExistsError`: of two writers, one succeeds.

        In an object store, the second of two that write the same content succeeds too.
        """

    def remove(self, name: str) -> None:
        """Remove a file, durably; do nothing if it is gone already."""
        self._files.remove(name)

    def tidy(self, name: str) -> None:  # noqa: B027 - where nothing can be left, there is nothing to do
        """Remove the files that a process may have left in this folder when it was killed while making this name."""

    def settle(self, name: str) -> None:  # noqa: B027 - an object that can be seen is durable
        """Make an existing file durable: its maker may have been killed, or failed, before that."""


class PosixTargetFolder(TargetFolder):
    """A folder. Programs that list it skip names with a dot in front, which files have while they are written."""

    def __init__(self, root: str, calls: PosixCalls | None = None) -> None:
        self._calls = PosixCalls() if calls is None else calls
        super().__init__(PosixFiles(root, self._calls))
        self._has_tidied = False

    def __reduce__(self) -> tuple[object, ...]:
        return PosixTargetFolder, (self.uri, self._calls)

    def names(self, folder: str = "") -> list[str]:
        return [name for name in self._files.names(folder) if not name.startswith(".")]

    def adopt(self, name: str, source: StoreFiles, source_name: str) -> str | None:
        if not isinstance(source, PosixFiles):
            return None
        try:
            self._calls.link(source.address(source_name), self.address(name))
        except OSError as error:
            if error.errno in _NOT_HERE:
                return None
            raise
        self._sync_around(name)
        return "linked"

    def write(self, name: str, chunks: Iterable[BytesLike]) -> None:
        folder, _, base_name = name.rpartition("/")
        if not self._has_tidied:
            self.tidy(name)  # the process before, if it was killed here, was about to make this same name
            self._has_tidied = True
        aside = self.address(_joined(folder, f".{base_name}.{secrets.token_hex(_TOKEN)}"))
        sink = PosixSink(self._calls, aside)
        try:
            for chunk in chunks:
                sink.write(chunk)
            sink.finish()
            self._appear(aside, self.address(name))
        finally:
            sink.abandon()  # what has appeared has another name by now
        self._sync_around(name)

    def create(self, name: str, content: bytes) -> None:
        self.write(name, [content])

    def tidy(self, name: str) -> None:
        folder, _, base_name = name.rpartition("/")
        # Not ".name.other.<token>": that is of the name "name.other", which may be written now.
        unfinished = re.compile(rf"\.{re.escape(base_name)}\.[0-9a-f]{{{2 * _TOKEN}}}")
        for left in self._files.names(folder):
            if unfinished.fullmatch(left):
                self._files.remove(_joined(folder, left))

    def settle(self, name: str) -> None:
        self._calls.sync_file(self.address(name))
        self._sync_around(name)

    def _appear(self, aside: str, path: str) -> None:
        try:
            self._calls.link(aside, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                self._calls.rename_exclusive(aside, path)
            except OSError as second:
                if isinstance(second, FileExistsError):
                    raise
                # A mount without either: only the writer of the store makes these names, and it is alone.
                self._calls.rename(aside, path)

    def _sync_around(self, name: str) -> None:
        self._calls.sync_folder(os.path.dirname(self.address(name)))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._calls.remove(self.address(name))
        with suppress(FileNotFoundError):
            self._sync_around(name)


class ObjectTargetFolder(TargetFolder):
    """A path in a bucket; objects appear whole. Two writers of one name are not kept apart."""

    def __init__(
        self, uri: str, calls: ObjectCalls | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self._address = (uri, dict(options or {}))
        self._calls = ObjectCalls(uri, options) if calls is None else calls
        super().__init__(ObjectFiles(uri, self._calls, single_writer=True))

    def __reduce__(self) -> tuple[object, ...]:
        uri, options = self._address
        return ObjectTargetFolder, (uri, self._calls, options)

    def _path(self, name: str) -> str:
        return "/".join(filter(None, (parse_object_address(self._address[0]).root, name)))

    def adopt(self, name: str, source: StoreFiles, source_name: str) -> str | None:
        if not isinstance(source, ObjectFiles):
            return None
        mine, its = parse_object_address(self.uri), parse_object_address(source.address(source_name))
        if mine.bucket != its.bucket:
            return None
        try:
            self._calls.copy(its.root, self._path(name))
            # A service that does not know the request's header has put an empty object.
            is_whole = self.size(name) == self._calls.head(its.root).size
        except OSError:  # too large for one request, or not allowed: then it comes here and goes there
            return None
        return "copied by the service" if is_whole else None

    def write(self, name: str, chunks: Iterable[BytesLike]) -> None:
        sink = ObjectSink(self._calls, self._path(name))
        try:
            for chunk in chunks:
                sink.write(chunk)
            sink.finish()
        except BaseException:
            sink.abandon()
            raise

    def create(self, name: str, content: bytes) -> None:
        path = self._path(name)
        try:
            self._calls.create(path, content)
        except OSError as error:
            if error.errno == errno.ENOTSUP and self.size(name) is None:
                self._calls.put(path, content)  # a service without conditions, for one writer alone
                return
            try:
                found = self._calls.get(path)
            except OSError:
                raise error from None
            if found != content:  # else it is the answer to a repeated request that succeeded
                raise FileExistsError(errno.EEXIST, "an object of this name exists", path) from None


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def open_target_folder(uri: str | os.PathLike[str], options: Mapping[str, str] | None = None) -> TargetFolder:
    """The place at a path, ``file://``, ``s3://``, ``gs://`` or ``abfss://`` address. Asks nothing yet."""
    text: object = os.fspath(uri) if isinstance(uri, os.PathLike) else uri
    if not isinstance(text, str) or not text:
        raise usage.address("a place is given by its path or uri, a str")
    scheme = scheme_of(text)
    if scheme in ("s3", "gs", "abfss") and "://" in text:
        return ObjectTargetFolder(text, options=options)
    if options:
        raise usage.option("only an object store takes options", hint="leave options= out for a path")
    if (path := local_path(text)) is not None:
        return PosixTargetFolder(path)
    raise UsageError(
        f"files cannot be published at a {scheme}: address",
        code="USAGE.ADDRESS",
        hint="use a path, file:///path, s3://bucket/path, gs://bucket/path or "
        "abfss://container@account.dfs.core.windows.net/path; for other places, write with Spark: a sink is any "
        "function (df, batch_id)",
    )
