"""The interface between a store and the place where its files lie.

Names are relative to the root of the store, with slashes. System errors are `OSError`; with `storing`, the caller adds
the action that failed.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import pyarrow as pa

from statebackend.errors import StoreError

T = TypeVar("T")
R = TypeVar("R")

#: Up to this number, calls run one after the other: a thread costs more than a request to a local disk.
_FEW = 8
_THREADS = 32


@contextmanager
def storing(
    doing: str, *, hint: str | None = None, missing: Callable[[], Exception] | None = None
) -> Iterator[None]:
    """Turn an `OSError` of the system into a `StoreError` that names the action that failed.

    ``missing`` makes the error for a file that does not exist.

    >>> with storing("writing data/3/a.arrow"):
    ...     raise OSError("gone")
    Traceback (most recent call last):
    statebackend.errors.StoreError: the store cannot go on: gone (writing data/3/a.arrow) [STORE]
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if missing is not None and isinstance(error, FileNotFoundError):
            raise missing() from error
        raise StoreError.of(error, doing, hint=hint) from error


def map_in_threads(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call a function for each item, from several threads if there are many; return the results in order.

    If calls raise, the first error is raised here, when all others have ended.
    """
    if len(items) <= _FEW:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        return list(pool.map(call, items))


class BytesLike(Protocol):
    """An object whose bytes are in one place, such as bytes, memoryviews and Arrow's buffers."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SeekableFile(io.RawIOBase):
    """A file of ``size`` bytes that Arrow reads from any position. A subclass reads at `_at`, and moves it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError("there is nothing before the start of a file")
        self._at = start + offset
        return self._at


class FencedError(Exception):
    """A newer writer holds the store: the request was not carried out, and never will be."""


class NameConflictError(Exception):
    """The name to publish under exists with other content."""


class FileSink(ABC):
    """A new file being written by one thread at a time. After an error only `abandon` may be called."""

    @abstractmethod
    def write(self, data: BytesLike) -> None:
        """Append all of ``data``, anything with a contiguous buffer."""

    @abstractmethod
    def sync_written(self) -> None:
        """Make the bytes written so far durable, as far as possible, so that `finish` has less to do."""

    @abstractmethod
    def finish(self) -> None:
        """Make the content durable and close. If this fails, the content may be lost: call `abandon`."""

    @abstractmethod
    def abandon(self) -> None:
        """Close and remove the file, as far as that is possible. Idempotent; raises nothing."""


class StoreFiles(ABC):
    """The files of one store."""

    #: The address without secrets, for messages.
    uri: str

    # --- reading ---

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read the whole file; `FileNotFoundError` if it is not there."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """The file's size in bytes; None if it does not exist."""

    @abstractmethod
    def modified(self, name: str) -> float:
        """When the file was written, in seconds since 1970; 0 if it is not there."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if it does not exist."""

    @abstractmethod
    def open_input(self, name: str, size: int | None = None) -> pa.NativeFile:
        """The file as a seekable ``pyarrow.NativeFile``; `FileNotFoundError` if it is not there.

        A ``size`` that is known saves looking for it; then the error may come with the first read.
        """

    @abstractmethod
    def address(self, name: str) -> str:
        """The file's path or uri in the form that other programs take."""

    @abstractmethod
    def below(self, folder: str) -> StoreFiles:
        """The files in a folder, as their own place."""

    # --- data files ---

    @abstractmethod
    def create(self, name: str) -> FileSink:
        """Create a file; `FileExistsError` if it exists, `FileNotFoundError` if its folder is gone."""

    def write(self, name: str, content: bytes) -> None:
        """Create a small file as a whole, durably. Raises as `create` does; after an error nothing is left behind."""
        sink = self.create(name)
        try:
            sink.write(content)
            sink.finish()
        except BaseException:
            sink.abandon()
            raise

    def room(self) -> int | None:
        """The bytes that can still be written; None without a limit, or if it is unknown."""
        return None

    @abstractmethod
    def make_folder(self, folder: str, *, durably: bool = True) -> None:
        """Create a folder, and its missing parents; without ``durably``, its own name and theirs may still be lost."""

    @abstractmethod
    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder durable. If this fails, they may be lost."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file that no manifest names or can name; do nothing if it is gone already."""

    # --- the writer ---

    @abstractmethod
    def take_epoch(self, *, refuse_live: bool) -> int:
        """Take a number for a new writer: larger than every number in the names of entries, manifests and records.

        Where names can be made exclusive by folders and links, it is taken alone, and all older writers are fenced:
        when it returns, none of them can publish or retire anything any more, and every entry that one of them
        published is listed and durable. Elsewhere two writers may get one number, which is then also the number of the
        next entry of the log: publishing this entry shows who has won, and fences the others.

        With ``refuse_live``, it raises `BlockingIOError` and fences nothing if an older writer is known to be alive.
        """

    @abstractmethod
    def holds(self, epoch: int, next_sequence: int) -> bool:
        """Return True if no newer writer has fenced this epoch, whose own next entry would have this sequence."""

    @abstractmethod
    def publish(self, name: str, content: bytes, epoch: int) -> None:
        """Create a complete, durable file under a name that must be free. No two contents are ever the same.

        After `NameConflictError` or `FencedError` the file was not published. After `OSError` likewise, unless the
        error's ``unknown`` is true: then the file may or may not be there, now or after a crash.
        """

    @abstractmethod
    def retire(self, names: Iterable[str], epoch: int) -> None:
        """Remove files that a manifest names or has named; `FencedError` if a newer writer may rely on them.

        A removed manifest is gone for good only after the next `sync_folder` of its folder.
        """

    @abstractmethod
    def remove_leftovers(self, is_kept: Callable[[str], bool], epoch: int) -> int:
        """Remove the data files of older epochs except those that are kept; return how many."""

    @abstractmethod
    def release(self, epoch: int) -> None:
        """Note that the writer of the epoch is no longer alive. Raises nothing."""
