"""Sinks that take the committed files of an output, where other sinks take a frame over them.

Such a sink knows which batches it has, so that a batch that comes again changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import pyarrow as pa

from statebackend.checkpoint import StoredFile
from statebackend.runtime import Committed
from statebackend.runtime.progress import Figures
from statebackend.spark.sinks.calling import SinkContext

__all__ = ["CommittedSink", "Delivery"]


class Delivery(NamedTuple):
    """The output of a committed batch on its way to a sink. Its files are verified already."""

    #: The name of the output.
    output: str
    files: tuple[StoredFile, ...]
    #: Of the rows, as the job declares it.
    schema: pa.Schema
    committed: Committed
    context: SinkContext


class CommittedSink(ABC):
    """A sink of `sb.spark.sinks`. Picklable: it opens what it writes to where it is used.

    >>> sorted(CommittedSink.__abstractmethods__)
    ['check', 'deliver', 'description', 'prepare', 'take_back', 'target']
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is and where it writes, without secrets, as progress shows it."""

    @abstractmethod
    def check(self, output: str, schema: pa.Schema, most_files: int = 1) -> None:
        """Raise if it cannot take rows of this schema, or so many files of a batch.

        Called when a job is made, so it asks nothing from outside.
        """

    @abstractmethod
    def prepare(self, schema: pa.Schema) -> None:
        """Get ready for the batches of a run of the query: raise what can be known before the first, make what is
        missing."""

    @abstractmethod
    def target(self, output: str, batch_id: int, incarnation: str) -> str:
        """What a batch becomes there, for somebody who looks for it. The manifest of the batch keeps it."""

    @abstractmethod
    def deliver(self, delivery: Delivery) -> Figures:
        """Write the output of a batch if it is not there yet; return figures for progress."""

    @abstractmethod
    def take_back(self, batch_id: int, incarnation: str) -> list[str]:
        """Remove what came of a batch; return what was removed. Called newest batch first, and may be called again."""

    def __repr__(self) -> str:
        return f"<sink {self.description}>"
