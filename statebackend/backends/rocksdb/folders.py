"""The folder of one database: locked while its process lives, and removed by the next one if that was killed.

The lock is one of the system's on a file in the folder (`flock`): it ends with the process, however that ends, and
knows no process ids, which come again. So a folder whose lock can be had belongs to nobody. Whoever begins removes such
folders first, beside its own, if they are this user's.

>>> folder = LockedFolder(None)
>>> Path(folder.path, "lock").exists(), folder.remove(), Path(folder.path).exists()
(True, None, False)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path

from statebackend.errors import StoreError

__all__ = ["LockedFolder", "remove_left_folders"]

_log = logging.getLogger(__name__)

_PREFIX = "statebackend-rocksdb-"
_LOCK = "lock"
#: The errors of `flock` on a file system without locks.
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
#: An empty folder without a lock is one that is being made, or, after so long, one whose maker was killed.
_STALE_SECONDS = 3600
_ATTEMPTS = 10

_cleaned: set[tuple[int, str]] = set()
_cleaning = threading.Lock()


class LockedFolder:
    """A new folder in ``parent``, by default that for temporary files, which this process has locked.

    >>> folder = LockedFolder(None)
    >>> os.path.basename(folder.path).startswith("statebackend-rocksdb-")
    True
    >>> folder.remove()
    """

    def __init__(self, parent: str | None) -> None:
        parent = tempfile.gettempdir() if parent is None else parent
        with _cleaning:
            if (os.getpid(), parent) not in _cleaned:
                _cleaned.add((os.getpid(), parent))
                remove_left_folders(parent)
        try:
            self.path, self._lock = _made(parent)
        except OSError as error:
            raise StoreError.of(
                error,
                f"making a folder for the database in {parent}",
                code="STORE.DATABASE",
                hint="give local_dir= a folder that exists and can be written",
            ) from error

    def remove(self) -> None:
        """Remove the folder with all that is in it, and let go of the lock. Errors are passed over."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _made(parent: str) -> tuple[str, int | None]:
    """A new folder, and the open file that is locked; None where the file system has no locks."""
    for _ in range(_ATTEMPTS):
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        try:
            lock = _locked(path, os.O_CREAT)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(path, _LOCK))
                return path, None
            if error.errno in (errno.EWOULDBLOCK, errno.ENOENT):
                continue  # somebody has taken it for one that was left
            shutil.rmtree(path, ignore_errors=True)
            raise
        return path, lock
    raise OSError(errno.EAGAIN, "every new folder was removed by other processes", parent)


def _locked(folder: str, flags: int = 0) -> int:
    """Open the lock of a folder, and lock it; raises `OSError` if another process has, or if the folder has gone."""
    path = os.path.join(folder, _LOCK)
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "the lock was removed", path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def remove_left_folders(parent: str | os.PathLike[str]) -> list[str]:
    """Remove the folders of this user's processes that were killed; returns their paths. O(what is in ``parent``).

    >>> with tempfile.TemporaryDirectory() as parent:
    ...     remove_left_folders(parent)
    []
    """
    removed: list[str] = []
    try:
        found = sorted(Path(parent).glob(f"{_PREFIX}*"))
    except OSError:  # making a folder there will tell why
        return removed
    for folder in found:
        with contextlib.suppress(
            OSError
        ):  # it is in use, another process is at it, too, or it cannot be removed
            about = os.lstat(folder)
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            try:
                lock = _locked(str(folder))
            except FileNotFoundError:
                if time.time() - about.st_mtime > _STALE_SECONDS:
                    os.rmdir(folder)  # only if it is empty: it may be an older version's, which has no locks
                    removed.append(str(folder))
                continue
            try:
                _remove(str(folder))
            finally:
                os.close(lock)
            removed.append(str(folder))
            _log.info("removed %s, which a process that was killed has left", folder)
    return removed


def _remove(folder: str) -> None:
    """Remove a folder, the lock last: if this is broken off, the next one goes on."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name != _LOCK:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, _LOCK))
        os.rmdir(folder)
