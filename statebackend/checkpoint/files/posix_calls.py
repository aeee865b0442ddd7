"""All system calls that a store on a POSIX path makes, and nothing else.

Tests replace this layer with one that fails, dies or forgets at any call.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
from typing import NamedTuple

import pyarrow as pa

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCL = 4


class Status(NamedTuple):
    """The facts about a file that the store needs."""

    is_folder: bool
    size: int
    device: int
    #: When the content was last written, in seconds since 1970.
    modified: float = 0.0


class PosixCalls:
    """One method per call. Each raises `OSError` as the system does."""

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of ``data``; return how many bytes."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Make the content durable, on the medium itself; on macOS, fsync alone stops at the drive's cache."""
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                    raise
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_file(self, path: str) -> None:
        """Make the content of a written and closed file durable."""
        self._sync_path(path, os.O_RDONLY | os.O_CLOEXEC)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._sync_path(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _sync_path(self, path: str, flags: int) -> None:
        descriptor = os.open(path, flags)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def lock_folder(self, path: str) -> int:
        """Take the lock that shows that a writer is alive; `BlockingIOError` if it is taken. Returns a descriptor."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def make_folder(self, path: str) -> None:
        """Make a folder; it must not exist."""
        os.mkdir(path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, which must be free."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def rename_exclusive(self, source: str, target: str) -> None:
        """Give a file another name, which must be free, where the file system lacks links."""
        library = ctypes.CDLL(None, use_errno=True)
        old, new = os.fsencode(source), os.fsencode(target)
        try:
            if sys.platform == "darwin":
                failed = library.renamex_np(old, new, ctypes.c_uint(_RENAME_EXCL))
            else:
                failed = library.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, ctypes.c_uint(_RENAME_NOREPLACE))
        except AttributeError:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source) from None
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), source, None, target)

    def names(self, path: str) -> list[str]:
        """The names in a folder, in any order."""
        return os.listdir(path)

    def status(self, path: str) -> Status:
        """Return if it is a folder, its size, its device, and when it was written."""
        found = os.stat(path)
        return Status(stat.S_ISDIR(found.st_mode), found.st_size, found.st_dev, found.st_mtime)

    def free_space(self, path: str) -> int:
        """The bytes that this user may still write to the file system of a path."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for reading by Arrow. Not mapped: truncating a mapped file kills the process."""
        return pa.OSFile(path, "rb")
