"""A store on a POSIX path, local or shared: exclusive, durable commits and a fence against older writers.

Every writer has an epoch and holds the folder ``checkpoints/epoch-<epoch>/``. Steps that must not happen once a newer
writer exists go *through* that folder: a writer writes an entry in it and then links it up; it moves a file that
is no longer needed into it and then removes it. A newer writer empties and removes the folder. From then on both
steps fail atomically, even if the older writer looked before.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import pyarrow as pa

from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    DATA,
    METADATA,
    data_epoch,
    data_folder,
    epoch_folder,
    is_data_file,
    newest_epoch,
    parse_epoch_folder,
    split,
)
from statebackend.checkpoint.files.posix_calls import PosixCalls
from statebackend.checkpoint.files.store_files import (
    BytesLike,
    FencedError,
    FileSink,
    NameConflictError,
    StoreFiles,
)
from statebackend.errors import UsageError

_log = logging.getLogger(__name__)

#: The errors of `link` on a file system without links; 95 and 45 are ENOTSUP and EOPNOTSUPP on different systems.
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES}
#: The errors of an exclusive rename on a system without it.
_NO_EXCLUSIVE_RENAME = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
#: The errors of `flock` on a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
#: Held while a lock is taken or given up, and while the process forks.
_forking = threading.RLock()
_lockers: weakref.WeakSet[PosixFiles] = weakref.WeakSet()
#: A writer that loses this many races in a row has another problem.
_ATTEMPTS = 1000


class PosixSink(FileSink):
    """A new file on a POSIX path."""

    def __init__(self, calls: PosixCalls, path: str) -> None:
        self._calls = calls
        self._path = path
        self._there = True
        self._descriptor: int | None = calls.create(path)

    def write(self, data: BytesLike) -> None:
        assert self._descriptor is not None
        left = memoryview(data).cast("B")
        while left:
            written = self._calls.write(self._descriptor, left)
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written")
            left = left[written:]

    def sync_written(self) -> None:
        assert self._descriptor is not None
        self._calls.sync(self._descriptor)

    def finish(self) -> None:
        assert self._descriptor is not None
        # Sync only once: pages that a failed sync did not write count as clean, so a second one would report success.
        self._calls.sync(self._descriptor)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            # The descriptor is closed even if the call fails: another file may already have its number.
            descriptor, self._descriptor = self._descriptor, None
            self._calls.close(descriptor)

    def abandon(self) -> None:
        with suppress(OSError):  # its content no longer matters
            self._close()
        if self._there:
            self._there = False
            try:
                with suppress(FileNotFoundError):
                    self._calls.remove(self._path)
            except OSError as error:
                _log.warning("an abandoned file stays until the store is next opened: %s", error)


class PosixFiles(StoreFiles):
    """The files of a store below a folder.

    ``single_writer`` says that the user vouches for there being one writer, so that a file system may be used that can
    create nothing exclusively.
    """

    def __init__(self, root: str, calls: PosixCalls | None = None, single_writer: bool = False) -> None:
        self.uri = root
        self._root = root
        #: The path of a name. A method of str, because a commit asks it for thirty paths.
        self._path: Callable[[str], str] = f"{root}/".__add__
        self._calls = PosixCalls() if calls is None else calls
        self._single_writer = single_writer
        self._locks: dict[int, int] = {}
        self._asides = itertools.count()
        _lockers.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        return PosixFiles, (self._root, self._calls, self._single_writer)

    # --- reading ---

    def read(self, name: str) -> bytes:
        return self._calls.read(self._path(name))

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            status = self._calls.status(self._path(name))
            return None if status.is_folder else status.size
        return None

    def modified(self, name: str) -> float:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._calls.status(self._path(name)).modified
        return 0.0

    def names(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(self._calls.names(self._path(folder)))
        return []

    def open_input(self, name: str, size: int | None = None) -> pa.NativeFile:
        return self._calls.open_input(self._path(name))

    def address(self, name: str) -> str:
        return self._path(name)

    def below(self, folder: str) -> StoreFiles:
        return PosixFiles(self._path(folder), self._calls, self._single_writer)

    # --- data files ---

    def create(self, name: str) -> FileSink:
        return PosixSink(self._calls, self._path(name))

    def room(self) -> int | None:
        with suppress(OSError):
            return self._calls.free_space(self._root)
        return None

    def make_folder(self, folder: str, *, durably: bool = True) -> None:
        path = self._path(folder) if folder else self._root
        self._make_folders(path)
        if durably:
            self._sync_outwards(path)  # also if it exists already: its maker may have failed to sync it

    def sync_folder(self, folder: str) -> None:
        self._calls.sync_folder(self._path(folder) if folder else self._root)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._calls.remove(self._path(name))

    # --- the writer ---

    def take_epoch(self, *, refuse_live: bool) -> int:
        self._make_root()
        epoch = self._make_epoch()
        try:
            if refuse_live:
                self._refuse_live(epoch)
            self._lock(epoch)
            self.sync_folder(CHECKPOINTS)
            # It is taken exclusively, like the epoch, so it is empty. It has to be durable before a file in it counts.
            self._calls.make_folder(self._path(data_folder(epoch)))
            self.sync_folder(DATA)
            for older in self._epochs():
                if older < epoch:
                    self._fence(older)
            # From here on, manifests that older writers linked but may not have synced are durable.
            self.sync_folder(CHECKPOINTS)
        except BaseException:
            self.release(epoch)
            for folder in (data_folder(epoch), epoch_folder(epoch)):
                with suppress(OSError):  # the next writer removes it
                    self._calls.remove_folder(self._path(folder))
            raise
        return epoch

    def _make_root(self) -> None:
        """Make the folders. Until there is metadata, their names may not be durable yet: sync them all."""
        if self.size(METADATA) is not None:
            return
        self._make_folders(self._root)
        for folder in (CHECKPOINTS, DATA):
            self._make_folders(self._path(folder))
        self._sync_outwards(self._root)

    def _sync_outwards(self, path: str) -> None:
        """Make the names in a folder durable, and the names of the folder and of all its parents."""
        self._calls.sync_folder(path)
        device, inner = self._calls.status(path).device, path
        while (outer := os.path.dirname(inner)) != inner and self._calls.status(outer).device == device:
            try:
                self._calls.sync_folder(outer)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                    raise
                break  # we may not read it, so we did not make it either
            inner = outer

    def _make_folders(self, path: str) -> None:
        outer = os.path.dirname(path)
        try:
            self._calls.make_folder(path)
        except FileExistsError:
            if not self._calls.status(path).is_folder:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        except FileNotFoundError:
            if outer == path:
                raise
            self._make_folders(outer)
            self._make_folders(path)

    def _make_epoch(self) -> int:
        """Make the folder of a new epoch, larger than all others.

        A second look closes the gap between looking and making. A writer that was slow in between could otherwise take
        a number that others have taken, lost and removed meanwhile. Either it sees the newer epoch now, or the newer
        epoch's writer, which comes later, sees this one and fences it.
        """
        for _ in range(_ATTEMPTS):
            epoch = self._newest_epoch() + 1
            folder = self._path(epoch_folder(epoch))
            try:
                self._calls.make_folder(folder)
            except FileExistsError:
                continue
            if self._newest_epoch() == epoch:
                return epoch
            with suppress(FileNotFoundError):  # the newer writer may have fenced it already
                self._calls.remove_folder(folder)
        raise OSError(errno.EBUSY, "no epoch can be taken: others take each one first")

    def _newest_epoch(self) -> int:
        return newest_epoch(self.names(CHECKPOINTS), self.names(DATA))

    def _epochs(self) -> list[int]:
        return [e for e in map(parse_epoch_folder, self.names(CHECKPOINTS)) if e is not None]

    def _refuse_live(self, epoch: int) -> None:
        for older in self._epochs():
            if older != epoch:
                try:
                    with _forking, suppress(FileNotFoundError):
                        self._calls.close(self._calls.lock_folder(self._path(epoch_folder(older))))
                except BlockingIOError:
                    raise
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise

    def _lock(self, epoch: int) -> None:
        try:
            with _forking:
                self._locks[epoch] = self._calls.lock_folder(self._path(epoch_folder(epoch)))
        except (BlockingIOError, FileNotFoundError):
            # Anyone else who looks at this folder is a newer writer, which has found us not alive yet.
            raise FencedError from None
        except OSError as error:
            # Without locks on this file system: another live writer is fenced instead of refused.
            _log.info("no lock can be taken here: %s", error)

    def _fence(self, epoch: int) -> None:
        folder = epoch_folder(epoch)
        for _ in range(_ATTEMPTS):
            for name in self.names(folder):
                self.remove(f"{folder}/{name}")
            try:
                with suppress(FileNotFoundError):
                    self._calls.remove_folder(self._path(folder))
                return
            except OSError as error:
                # Some file systems answer EEXIST: the older writer is alive and has just begun another file.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        raise OSError(errno.EBUSY, f"the writer of epoch {epoch} cannot be fenced: it goes on writing")

    def holds(self, epoch: int, next_sequence: int) -> bool:
        return self._is_there(epoch)

    def _is_there(self, epoch: int) -> bool:
        with suppress(FileNotFoundError):
            return self._calls.status(self._path(epoch_folder(epoch))).is_folder
        return False

    def publish(self, name: str, content: bytes, epoch: int) -> None:
        folder, base_name = split(name)
        aside = self._write_aside(base_name, content, epoch)
        try:
            self._link(aside, name)
        except OSError as error:
            self._after_failed_link(error, aside, name, content)
        except UsageError:
            self.remove(aside)
            raise
        try:
            self.sync_folder(folder)
        except OSError as error:
            error.unknown = True  # type: ignore[attr-defined]
            raise
        try:
            self.remove(aside)
        except OSError as error:
            _log.warning("a manifest's first name stays until the store is next opened: %s", error)

    def _write_aside(self, base_name: str, content: bytes, epoch: int) -> str:
        """Write a durable file in the folder of the epoch, and return its name."""
        # Use a new name each time: a failed attempt may have left anything behind, or nothing.
        aside = f"{epoch_folder(epoch)}/{next(self._asides)}-{base_name}"
        try:
            self.write(aside, content)
        except FileNotFoundError:
            raise FencedError from None
        return aside

    def _link(self, aside: str, name: str) -> None:
        try:
            self._calls.link(self._path(aside), self._path(name))
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                self._calls.rename_exclusive(self._path(aside), self._path(name))
            except OSError as second:
                if second.errno not in _NO_EXCLUSIVE_RENAME:
                    raise
                self._rename_unguarded(aside, name, error)

    def _rename_unguarded(self, aside: str, name: str, error: OSError) -> None:
        """Rename where the system can do nothing exclusively, if this is the only writer."""
        if not self._single_writer:
            raise UsageError(
                "this file system cannot keep a second writer out",
                code="USAGE.SINGLE_WRITER",
                detail=f"{self.uri} lacks hard links, and a rename that replaces nothing: {error.strerror}",
                hint="use a local disk or an NFS path; or pass CheckpointStore(..., single_writer=True) if you "
                "vouch that no second one writes there",
            ) from error
        if self.size(name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._path(name))
        self._calls.rename(self._path(aside), self._path(name))

    def _after_failed_link(self, error: OSError, aside: str, name: str, content: bytes) -> None:
        """Return if the link was made after all. Over NFS an answer can be lost, or belong to a repeated request."""
        try:
            # Do this first: a request that is still under way then finds nothing to link.
            self.remove(aside)
            found = self._calls.read(self._path(name))
        except FileNotFoundError:
            pass
        except OSError as second:
            second.unknown = True  # type: ignore[attr-defined]
            raise second from error
        else:
            if found == content:
                return
            raise NameConflictError from error
        if isinstance(error, FileNotFoundError):
            # Only a newer writer removes the first name. It may still be busy, with our folder still there.
            raise FencedError from error
        raise error

    def retire(self, names: Iterable[str], epoch: int) -> None:
        own = epoch_folder(epoch)
        for name in names:
            moved = f"{own}/{next(self._asides)}-retired"
            try:
                self._calls.rename(self._path(name), self._path(moved))
            except FileNotFoundError:
                if not self._is_there(epoch):
                    raise FencedError from None
                continue  # it is gone already
            self.remove(moved)

    def remove_leftovers(self, is_kept: Callable[[str], bool], epoch: int) -> int:
        removed = 0
        for number in self.names(DATA):
            folder = f"{DATA}/{number}"
            if not 0 < data_epoch(folder) < epoch:
                continue
            for base_name in self.names(folder):
                name = f"{folder}/{base_name}"
                if is_data_file(name) and not is_kept(name):
                    self.remove(name)
                    removed += 1
            try:
                with suppress(FileNotFoundError):
                    self._calls.remove_folder(self._path(folder))
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        return removed

    def release(self, epoch: int) -> None:
        with _forking:
            descriptor = self._locks.pop(epoch, None)
            if descriptor is not None:
                try:
                    self._calls.close(descriptor)
                except OSError as error:
                    _log.info("closing a lock: %s", error)

    def _forked(self) -> None:
        """Close, in a child process, the copies of the parent's locks, which would outlive the parent."""
        locks, self._locks = self._locks, {}
        for descriptor in locks.values():
            with suppress(OSError):
                os.close(descriptor)


def _in_child() -> None:
    for files in list(_lockers):
        files._forked()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_in_child)
