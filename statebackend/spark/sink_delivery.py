"""The outputs of a batch on their way to their sinks: frames for functions of users, files for `sb.spark.sinks`.

Spark reads the files of a committed output, or this process reads them for Spark.

Spark cannot read the files of an encrypted store, nor those at an address for which it lacks a connector. This process
can. The way of outputs is found out when a query starts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.checkpoint import CheckpointReader
from statebackend.checkpoint.files import scheme_of
from statebackend.errors import UsageError, usage
from statebackend.runtime import CommittedBatch
from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.runtime.batch_progress import Figures
from statebackend.runtime.output import columns_in
from statebackend.spark.session import output_frame, reading_error, settings
from statebackend.spark.sinks.committed_sink import (
    CommittedSink,
    Delivery,
    SinkContext,
    call,
    check,
    other_types,
)
from statebackend.types import DecimalType, ListType, MapType, RowType, TupleType, Type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType


def spark_schema(row_type: RowType) -> StructType:
    """The ``StructType`` of rows of this type; every field may be null."""
    return _struct(row_type.names, row_type.types)


def _struct(names: tuple[str, ...], kinds: tuple[Type, ...]) -> StructType:
    from pyspark.sql import types

    fields = zip(names, kinds, strict=True)
    return types.StructType([types.StructField(name, _spark_type(kind)) for name, kind in fields])


def _spark_type(kind: Type) -> DataType:
    from pyspark.sql import types

    if isinstance(kind, RowType):
        return _struct(kind.names, kind.types)
    if isinstance(kind, TupleType):
        return _struct(tuple(field.name for field in kind.arrow), kind.types)
    if isinstance(kind, ListType):
        return types.ArrayType(_spark_type(kind.element))
    if isinstance(kind, MapType):
        return types.MapType(_spark_type(kind.key), _spark_type(kind.value))
    if isinstance(kind, DecimalType):
        return types.DecimalType(kind.precision, kind.scale)
    made: DataType = getattr(types, kind.layout.spark)()
    return made


_log = logging.getLogger("statebackend.spark")

#: Rows in a partition of a frame. The session may say "no limit", which PySpark does not take here.
_SETTINGS = {"spark.sql.execution.arrow.maxRecordsPerBatch": "10000"}


class OutputFrames:
    """Makes the frames for a sink. ``why_not_spark`` is the reason why Spark does not read the files; None: it does."""

    def __init__(self, why_not_spark: str | None) -> None:
        self._why_not_spark = why_not_spark

    def __repr__(self) -> str:
        reason = self._why_not_spark
        way = "as files that Spark reads" if reason is None else f"through the driver: {reason}"
        return f"<outputs {way}>"

    @classmethod
    def of(cls, store: CheckpointReader, frame: DataFrame) -> OutputFrames:
        """Find out if Spark can read the store, and say so in the log. At other addresses than paths, runs a small job.

        That executors can read a path is checked elsewhere.
        """
        why_not_spark = None
        if store.encryption is not None:
            why_not_spark = "the store is encrypted"
        elif scheme_of(store.address) not in (None, "file"):
            error = reading_error(frame, store.address_of_metadata())
            if error is not None:
                _log.debug("Spark cannot read %s", store.address, exc_info=error)
                why_not_spark = f"Spark cannot read {scheme_of(store.address)}:// ({type(error).__name__})"
        made = cls(why_not_spark)
        _log.info("%s: %r", store.address, made)
        return made

    def frame(self, frame: DataFrame, row_type: RowType, committed: CommittedBatch, name: str) -> DataFrame:
        """A frame over the committed output of this name, in the session of another frame.

        Rows and order are the same either way. Memory, through the driver: the output, in this process and in Spark's
        driver.
        """
        files, schema = committed.outputs.get(name, ()), spark_schema(row_type)
        if self._why_not_spark is None:
            return output_frame(frame, schema, [committed.checkpoint.address(file) for file in files])
        tables = [committed.read_output(file) for file in files]
        session = frame.sparkSession
        with settings(session, _SETTINGS):
            return session.createDataFrame(pa.concat_tables(tables) if tables else [], schema)


class SinkDeliveries:
    """The outputs of a job that have a sink, in the order of the schema, and how each is served."""

    def __init__(
        self, sinks: Mapping[str, Any], schemas: Mapping[str, OutputSchema], most_files: int = 1
    ) -> None:
        self._sinks = sinks
        self._schemas = schemas
        for output, sink in sinks.items():
            if isinstance(sink, CommittedSink):
                sink.check(output, schemas[output].arrow, most_files)
            else:
                check(sink)
        self._check_shared()

    @classmethod
    def of(
        cls, sink: object, schemas: Mapping[str, OutputSchema | None], most_files: int = 1
    ) -> SinkDeliveries:
        """The deliveries of a job with these outputs, given one sink, or a dict of output to sink, or None.

        The output of a batch may have ``most_files`` files.
        """
        given = _by_output(sink, schemas)
        known = {name: schemas[name] for name in given}
        if None in known.values():
            raise usage.sink("a sink needs to know the schema", hint='write for example schema="user bigint"')
        schemas_given = {name: schema for name, schema in known.items() if schema is not None}
        return cls(given, schemas_given, most_files)

    def _check_shared(self) -> None:
        """Raise if outputs that go to one place have columns of one name and of different types."""
        there: dict[str, dict[str, pa.DataType]] = {}
        for output, address in self.addresses().items():
            ours = columns_in(self._schemas[output].arrow)
            differing = other_types(ours, there.get(address, {}), "another output")
            if differing:
                raise UsageError(
                    "two outputs write columns of different types to one place",
                    code="USAGE.OTHER_SCHEMA",
                    detail=f"output {output!r}: {'; '.join(differing)}; {self.describe(output)}",
                    hint="give each output a place of its own",
                )
            there[address] = {**there.get(address, {}), **ours}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sinks)

    def __len__(self) -> int:
        return len(self._sinks)

    def schema(self, output: str) -> OutputSchema:
        return self._schemas[output]

    def partitions(self) -> dict[str, tuple[str, ...]]:
        """The columns by which each output is cut into files before it is committed."""
        return {
            output: sink.partition_by if isinstance(sink, CommittedSink) else ()
            for output, sink in self._sinks.items()
        }

    def addresses(self) -> dict[str, str]:
        """Where the sinks that know it write to, by the names of the outputs."""
        return {name: sink.address for name, sink in self._sinks.items() if isinstance(sink, CommittedSink)}

    @property
    def reads_frames(self) -> bool:
        """True if a sink is a function, which gets a frame."""
        return not all(isinstance(sink, CommittedSink) for sink in self._sinks.values())

    def prepare(self) -> None:
        """Get ready for a run of the query."""
        for output, sink in self._sinks.items():
            if isinstance(sink, CommittedSink):
                sink.prepare(self._schemas[output].arrow)

    def describe(self, output: str) -> str:
        """What the sink of an output is, as progress shows it."""
        sink = self._sinks[output]
        if isinstance(sink, CommittedSink):
            return sink.description
        return str(getattr(sink, "__qualname__", type(sink).__qualname__))

    def target(self, output: str, batch_id: int, incarnation: str) -> str:
        """What a batch becomes in the sink of an output, as far as that is known."""
        sink = self._sinks[output]
        if isinstance(sink, CommittedSink):
            return sink.target(output, batch_id, incarnation)
        return self.describe(output)

    def deliver(
        self, committed: CommittedBatch, context: SinkContext, frame_of: Callable[[str], DataFrame]
    ) -> list[Figures]:
        """Serve each sink in turn; return what each did, for progress. An error leaves the rest to the next try."""
        done: list[Figures] = []
        for output, sink in self._sinks.items():
            began = time.perf_counter()
            figures: Figures = {"output": output, "description": self.describe(output)}
            if isinstance(sink, CommittedSink):
                files = tuple(committed.outputs.get(output, ()))
                schema = self._schemas[output].arrow
                figures |= sink.deliver(Delivery(output, files, schema, committed, context))
            else:
                call(sink, frame_of(output), context.batch_id, context)
            figures["durationMs"] = round((time.perf_counter() - began) * 1000, 1)
            done.append(figures)
        return done


def _by_output(sink: object, schemas: Mapping[str, object]) -> dict[str, Any]:
    """The sinks by the names of the outputs, in the order of the schema."""
    if sink is None:
        sink = {}  # right for a function without output and schema
        schemas = {name: schema for name, schema in schemas.items() if schema is not None}
    if isinstance(sink, Mapping):
        unknown = [repr(name) for name in sink if name not in schemas]
        if unknown:
            raise UsageError(
                "sink names an output that schema does not",
                code="USAGE.NO_OUTPUT",
                detail=f"{', '.join(unknown)}; outputs {', '.join(schemas)}",
            )
        missing = [repr(name) for name in schemas if name not in sink]
        if missing:
            raise UsageError(
                "sink has none for an output of schema",
                code="USAGE.NO_SINK",
                detail=f"output {', '.join(missing)}",
                hint="give each output a sink, or leave the output out of schema=",
            )
        return {name: sink[name] for name in schemas}
    if len(schemas) > 1:
        raise usage.sink(
            "there are several outputs, and one sink",
            detail=f"outputs {', '.join(schemas)}",
            hint="pass a dict of output to sink",
        )
    return dict.fromkeys(schemas, sink)
