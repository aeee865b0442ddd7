"""The ways of a batch's rows to the state: what driver mode and executors mode differ in.

>>> sorted(Way.__abstractmethods__)
['close', 'execution', 'open', 'rows_of', 'unopened']
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from statebackend.checkpoint import CheckpointReader
from statebackend.runtime import Incoming, Job
from statebackend.runtime.execution import Execution
from statebackend.runtime.origin import Identity
from statebackend.runtime.progress import Figures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["RowsOfBatch", "Way"]


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
