"""What a store asks of the place where its files lie.

Names are relative to the root of the store, with slashes. Errors of the system come as `OSError`; who calls
says what was being done.

>>> from statebackend.checkpoint.files.posix import PosixFiles
>>> issubclass(PosixFiles, StoreFiles)
True
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

__all__ = ["Fenced", "FileSink", "StoreFiles", "Taken"]


class Fenced(Exception):
    """A newer writer holds the store: what was asked for has not happened, and never will.

    >>> issubclass(Fenced, Exception)
    True
    """


class Taken(Exception):
    """The name to publish under exists, with other content.

    >>> issubclass(Taken, Exception)
    True
    """


class FileSink(ABC):
    """A new file being written by one thread at a time. After an error only `abandon` may be called.

    >>> sorted(FileSink.__abstractmethods__)
    ['abandon', 'finish', 'write']
    """

    @abstractmethod
    def write(self, data: Any) -> None:
        """Append all of ``data``, anything with a contiguous buffer."""

    @abstractmethod
    def finish(self) -> None:
        """Make the content durable and close. If this fails the content may be lost: abandon it."""

    @abstractmethod
    def abandon(self) -> None:
        """Close and remove the file, as far as that is possible. Idempotent; raises nothing."""


class StoreFiles(ABC):
    """The files of one store.

    >>> from statebackend.checkpoint.files import open_files
    >>> open_files("/nowhere").names("checkpoints")
    []
    """

    #: The address without anything secret, for messages.
    uri: str

    # --- reading ---

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The whole file; `FileNotFoundError` if it is not there."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is no such file."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if there is no such folder."""

    @abstractmethod
    def open_input(self, name: str) -> Any:
        """The file as a seekable ``pyarrow.NativeFile``; `FileNotFoundError` if it is not there."""

    @abstractmethod
    def address(self, name: str) -> str:
        """The file's path or uri as other programs take it."""

    @abstractmethod
    def below(self, folder: str) -> StoreFiles:
        """The files in a folder, as a place of their own."""

    # --- data files ---

    @abstractmethod
    def create(self, name: str) -> FileSink:
        """A new file; `FileExistsError` if there is one, `FileNotFoundError` if its folder is gone."""

    @abstractmethod
    def make_folder(self, folder: str) -> None:
        """Bring a folder, and those above it, into being, durably."""

    @abstractmethod
    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder durable. After an error they may be lost."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file that no manifest names or can name; nothing if it is gone already."""

    # --- the writer ---

    @abstractmethod
    def take_epoch(self, *, refuse_live: bool) -> int:
        """Take the next epoch, alone, and fence all older ones.

        When it returns, no writer of an older epoch can publish or retire anything any more, and every
        manifest that one of them published is listed and durable. With ``refuse_live``, `BlockingIOError` if
        the writer of an older epoch is known to be alive; nothing is fenced then.
        """

    @abstractmethod
    def holds(self, epoch: int) -> bool:
        """Whether no newer writer has fenced this epoch."""

    @abstractmethod
    def publish(self, name: str, content: bytes, epoch: int) -> None:
        """Bring a complete, durable file into being under a name that must be free.

        `Taken` or `Fenced`: it has not happened. `OSError`: likewise, unless its ``unknown`` is true: then it
        may or may not be there, now or after a crash.
        """

    @abstractmethod
    def retire(self, names: Iterable[str], epoch: int) -> None:
        """Remove files that a manifest names or has named; `Fenced` if a newer writer may count on them.

        Manifests are gone for good only after the next `sync_folder` of theirs.
        """

    @abstractmethod
    def remove_leftovers(self, keep: Collection[str], epoch: int) -> int:
        """Remove the data files of older epochs but for those in ``keep``; how many were removed."""

    @abstractmethod
    def release(self, epoch: int) -> None:
        """Say that the writer of the epoch is no longer alive. Raises nothing."""
