"""How the rows of a batch come to this process: at once, or through files that Spark writes, a piece at a time.

>>> Reading("files", memory=256 << 20)
<rows through files, in pieces of 64 MiB>

A `Way` brings the rows to the state; driver mode and executors mode have one each.

>>> sorted(Way.__abstractmethods__)
['close', 'execution', 'open', 'rows_of', 'unopened']
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from statebackend.checkpoint import CheckpointReader
from statebackend.checkpoint.files import local_path
from statebackend.errors import UsageError
from statebackend.runtime import Incoming, Job
from statebackend.runtime.execution import Execution, LocalExecution
from statebackend.runtime.origin import Identity
from statebackend.runtime.progress import Figures
from statebackend.spark.batch_files import BatchFiles, write_batch
from statebackend.spark.session import arrow_of, runs_here
from statebackend.spark.ticks import without_heartbeats

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["FOLDER", "IncomingRows", "Reading", "RowsOfBatch", "Way"]


class RowsOfBatch(ABC):
    """The rows of one batch on their way."""

    @abstractmethod
    def incoming(self, planned: Identity | None, execute: Callable[[], None]) -> Incoming:
        """What a runner takes; `Incoming` says what ``planned`` and ``execute`` are."""

    @abstractmethod
    def figures(self) -> Figures:
        """What there is to say of the way in the progress of the batch, once it has run."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what is left of them on the way. Idempotent."""


class Way(ABC):
    """Decides where state is, and how rows get there. Picklable until it is opened."""

    #: How many files the output of a batch may have.
    most_files: int = 1

    def check(self, store: CheckpointReader) -> None:  # noqa: B027 - most ways take any store
        """Raise if rows cannot come this way to a store like this; it is not open yet."""

    @abstractmethod
    def unopened(self) -> Way:
        """One for another run of a query."""

    @abstractmethod
    def execution(self, frame: DataFrame, job: Job) -> Callable[..., Execution]:
        """What makes the execution of the job for the query of this frame."""

    @abstractmethod
    def open(self, store: CheckpointReader, frame: DataFrame) -> None:
        """Get ready for a run of a query, which holds the store."""

    @abstractmethod
    def rows_of(self, frame: DataFrame, job: Job) -> RowsOfBatch:
        """The rows of a batch, not yet read."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what `open` has made. Idempotent."""


_log = logging.getLogger("statebackend.spark")

MEMORY, FILES = "memory", "files"
#: The folder of a store in which Spark writes the rows of batches, each run of a query into a folder of its own.
FOLDER = "statebackend-input"
_RUN = re.compile(r"run-[0-9a-f]{16}")
#: What rows may take in memory, unless the user says it.
_DEFAULT = 256 << 20
#: A piece, copies of it while it is sorted or joined, and rows out share what rows may take.
_SHARES = 4
_ENCRYPTED = "the store is encrypted, and these files are not"


class Reading(Way):
    """Decides the way of each batch. Once one was too large for memory, those after it go through files at once.

    ``memory`` is what rows of a batch may take in this process, in bytes, about. With ``"memory"``, batches come at
    once until one is larger than that, or than what Spark brings to the driver. Picklable until it is opened.
    """

    def __init__(self, way: str = MEMORY, memory: int | None = None) -> None:
        if way not in (MEMORY, FILES):
            raise UsageError("input is 'memory' or 'files'")
        if memory is not None and (type(memory) is not int or memory < 1):
            raise UsageError("memory is a number of bytes, at least 1")
        self._way = way
        #: None: as much as Spark brings to the driver.
        self._memory = memory
        self._through_files = way == FILES
        #: Where files lie; None if they may lie nowhere, for a reason.
        self._folder: str | None = None
        self._why_not = ""
        self._is_temporary = False

    def __repr__(self) -> str:
        if not self._through_files:
            return "<rows at once>"
        return f"<rows through files, in pieces of {self._piece_bytes / (1 << 20):,.0f} MiB>"

    @property
    def _piece_bytes(self) -> int:
        return max(1, (self._memory or _DEFAULT) // _SHARES)

    def unopened(self) -> Reading:
        return Reading(self._way, self._memory)

    def check(self, store: CheckpointReader) -> None:
        if self._way == FILES and store.encryption is not None:
            raise _no_files(store, _ENCRYPTED)

    def execution(self, frame: DataFrame, job: Job) -> Callable[..., Execution]:
        return LocalExecution

    def open(self, store: CheckpointReader, frame: DataFrame) -> None:
        """Get ready for a run of a query, which holds the store: remove what earlier runs have left."""
        path = local_path(store.address)
        if store.encryption is not None:
            self._why_not = _ENCRYPTED
        elif path is not None:
            above = os.path.join(os.path.abspath(path), FOLDER)
            with suppress(FileNotFoundError):
                for left in filter(_RUN.fullmatch, os.listdir(above)):
                    shutil.rmtree(os.path.join(above, left), ignore_errors=True)
            self._folder = os.path.join(above, f"run-{secrets.token_hex(8)}")
        elif runs_here(frame):
            self._folder, self._is_temporary = tempfile.mkdtemp(prefix="statebackend-input-"), True
        else:
            self._why_not = "the store is no folder, and executors may be on other machines"
        if self._through_files and self._folder is None:
            raise _no_files(store, self._why_not)
        if self._memory is not None and self._folder is None:
            _log.warning("memory= has no effect, batches come at once: %s", self._why_not)

    def rows_of(self, frame: DataFrame, job: Job) -> IncomingRows:
        return IncomingRows(self, frame, job)

    def read(self, frame: DataFrame, job: Job) -> pa.Table | BatchFiles:
        """Bring the rows of a batch here, or make Spark write them."""
        if not self._through_files:
            try:
                table = arrow_of(frame)
            except UsageError as error:
                if error.code != "USAGE.BATCH_TOO_LARGE" or self._folder is None:
                    raise
                self._overflowed("what Spark brings to the driver (spark.driver.maxResultSize)")
            else:
                if self._memory is not None and table.nbytes > self._memory and self._folder is not None:
                    self._overflowed(f"memory= ({table.nbytes:,} bytes)")
                return table
        assert self._folder is not None
        folder = os.path.join(self._folder, secrets.token_hex(8))
        return write_batch(frame, job, folder, self._piece_bytes)

    def _overflowed(self, than: str) -> None:
        self._through_files = True
        _log.warning("a batch is larger than %s: from now on, batches go through files", than)

    def close(self) -> None:
        """Remove the folder of this run, if there is one. Idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self._is_temporary:
                with suppress(OSError):  # another run may have begun
                    os.rmdir(os.path.dirname(self._folder))
            self._folder = None


def _no_files(store: CheckpointReader, why: str) -> UsageError:
    return UsageError(
        "batches cannot go through files here",
        code="USAGE.NOT_AVAILABLE",
        detail=f"{store.address}: {why}",
        hint="leave input='files' out, and keep batches small: maxFilesPerTrigger, maxOffsetsPerTrigger",
    )


class IncomingRows(RowsOfBatch):
    """The rows of one batch, without the ticks among them, which are counted when they are read."""

    def __init__(self, reading: Reading, frame: DataFrame, job: Job) -> None:
        self._reading, self._frame, self._job = reading, frame, job
        self._files: BatchFiles | None = None
        self._heartbeats = 0

    def incoming(self, planned: Identity | None, execute: Callable[[], None]) -> Incoming:
        return Incoming(self.read, planned, execute)

    def figures(self) -> Figures:
        """The number of ticks, and how the rows came: in memory, or through files."""
        if self._files is None:
            return {"numHeartbeats": self._heartbeats, "input": MEMORY}
        return {"numHeartbeats": self._files.heartbeats, "input": FILES}

    def read(self) -> pa.Table | BatchFiles:
        """Read them, or make Spark write them."""
        read = self._reading.read(self._frame, self._job)
        if isinstance(read, BatchFiles):
            self._files = read
            return read
        rows, self._heartbeats = without_heartbeats(read)
        return rows

    def discard(self) -> None:
        if self._files is not None:
            self._files.remove()
