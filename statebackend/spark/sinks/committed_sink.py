"""Sinks: calling a function that takes a frame, and the interface of sinks that take the committed files of an output.

A sink of committed files knows which batches it has, so that a batch that comes again changes nothing.

>>> def sink(df, batch_id, context):
...     print(batch_id, context.is_replay)
>>> call(sink, None, 3, SinkContext(3, 1, "0" * 32, False))
3 False
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pyarrow as pa

from statebackend.checkpoint import StoredFile
from statebackend.errors import UsageError, usage
from statebackend.runtime import CommittedBatch
from statebackend.runtime.batch_progress import Figures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class SinkContext:
    """The context for a sink with a parameter called ``context``, to pass on to systems that can fence older writers.

    A pair of ``incarnation`` and ``batch_id`` always names the same rows. A larger ``epoch`` belongs to a newer
    writer: a system that has seen it refuses smaller ones.

    >>> SinkContext(3, 1, "0" * 32, True).is_replay
    True
    """

    #: The batch that is delivered.
    batch_id: int
    #: Increases with every opening of the store.
    epoch: int
    #: New after the store was restarted from empty or rewound: other batches then come under the same numbers.
    incarnation: str
    #: True if the batch was committed before, and is delivered again.
    is_replay: bool


def check(sink: object) -> None:
    """Raise unless the object can be called as a sink: now, and not when a batch is committed."""
    if not callable(sink):
        raise usage.sink("sink is a function (DataFrame, batch id)")
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(each) for kind in kinds for each in (sink, getattr(sink, "__call__", None))):  # noqa: B004
        raise usage.sink(
            "a sink that is async, or that yields, would write nothing: nothing runs what it returns",
            hint="write it with def and without yield; run coroutines in it with asyncio.run",
        )
    try:
        signature = inspect.signature(sink, follow_wrapped=False)
    except (TypeError, ValueError):  # a built-in, which does not reveal its parameters
        return
    named = {"context": None} if asks_for_context(sink) else {}
    try:
        signature.bind(None, 0, **named)
    except TypeError:
        raise usage.sink(
            "a sink is called with (df, batch_id), and this one cannot be",
            hint="write def sink(df, batch_id)",
        ) from None


def call(sink: Callable[..., object], frame: DataFrame, batch_id: int, context: SinkContext) -> None:
    """Call a sink with its frame and its batch, and with the context if it asks for it by name."""
    if asks_for_context(sink):
        sink(frame, batch_id, context=context)
    else:
        sink(frame, batch_id)


def asks_for_context(sink: Callable[..., object]) -> bool:
    """Return True if a sink has an unbound parameter ``context`` that can be passed by name."""
    if isinstance(sink, partial) and "context" in sink.keywords:
        return False
    try:
        parameters = list(inspect.signature(sink, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(each.name == "context" and each.kind in named for each in parameters[2:]) or any(
        each.name == "context" and each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters[:2]
    )


class Delivery(NamedTuple):
    """The output of a committed batch on its way to a sink. Its files are verified already."""

    #: The name of the output.
    output: str
    files: tuple[StoredFile, ...]
    #: Of the rows, as the job declares it.
    schema: pa.Schema
    committed: CommittedBatch
    context: SinkContext


class CommittedSink(ABC):
    """A sink of `sb.spark.sinks`. Picklable: it opens what it writes to where it is used."""

    #: The columns by which an output is cut into files, one for each of their values, before it is committed.
    partition_by: tuple[str, ...] = ()

    @property
    @abstractmethod
    def address(self) -> str:
        """The path or address that it writes to."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is and where it writes, without secrets, as progress shows it."""

    @abstractmethod
    def check(self, output: str, schema: pa.Schema, most_files: int = 1) -> None:
        """Raise if it cannot take rows of this schema; take note of how many files a batch may have.

        Called when a job is made, so it asks nothing from outside.
        """

    @abstractmethod
    def prepare(self, schema: pa.Schema) -> None:
        """Get ready for the batches of a run of the query: raise what can be known before the first, make what is
        missing."""

    @abstractmethod
    def target(self, output: str, batch_id: int, incarnation: str) -> str:
        """The result of a batch there: the description, then the name to look for. The manifest keeps it."""

    @abstractmethod
    def deliver(self, delivery: Delivery) -> Figures:
        """Write the output of a batch if it is not there yet; return figures for progress."""

    @abstractmethod
    def take_back(self, batch_id: int, incarnation: str) -> list[str]:
        """Remove what came of a batch; return what was removed. Called newest batch first, and may be called again."""

    def __repr__(self) -> str:
        return f"<sink {self.description}>"


def other_types(ours: Mapping[str, pa.DataType], there: Mapping[str, pa.DataType], where: str) -> list[str]:
    """The columns of both that have different types, each as a text for an error.

    >>> other_types({"n": pa.string(), "user": pa.string()}, {"n": pa.int64(), "day": pa.date32()}, "the file")
    ['n is int64 in the file and string in the output']
    """
    return [
        f"{name} is {there[name]} in {where} and {kind} in the output"
        for name, kind in ours.items()
        if there.get(name, kind) != kind
    ]


def check_partition_by(
    what: str, output: str, schema: pa.Schema, names: Sequence[str], fits: Callable[[pa.DataType], bool]
) -> None:
    """Raise unless the rows of an output can be partitioned by these columns, whose types have to fit."""
    for name in names:
        if name not in schema.names:
            raise UsageError(
                f"the output has no column {name!r} to partition by",
                code="USAGE.NO_COLUMN",
                detail=f"{what}, output {output!r}, columns {', '.join(schema.names)}",
            )
        if not fits(schema.field(name).type):
            raise UsageError(
                f"the output cannot be partitioned by column {name!r}",
                code="USAGE.NOT_AVAILABLE",
                detail=f"{what}, output {output!r}: it is {schema.field(name).type}",
                hint="partition by an integer, a text, a boolean or a date; the page of the sinks names the types",
            )
    if names and (len(set(names)) < len(names) or set(schema.names) == set(names)):
        raise usage.option(
            "partition_by names a column twice, or all columns of the output",
            detail=f"{what}, output {output!r}, partition_by {', '.join(names)}",
            hint="name each column once, and leave at least one for the files",
        )


#: A sink of an output: a callable, or one of `sb.spark.sinks`.
Sink: TypeAlias = Callable[..., object] | CommittedSink
