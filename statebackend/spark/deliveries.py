"""The outputs of a batch on their way to their sinks: frames for functions of users, files for `sb.spark.sinks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.errors import UsageError
from statebackend.runtime import Committed
from statebackend.runtime.partitions import columns_in
from statebackend.runtime.progress import Figures
from statebackend.runtime.row_writer import OutputSchema
from statebackend.spark.sinks import calling
from statebackend.spark.sinks.calling import SinkContext
from statebackend.spark.sinks.committed import CommittedSink, Delivery, other_types

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Deliveries"]


class Deliveries:
    """The outputs of a job that have a sink, in the order of the schema, and how each is served.

    >>> deliveries = Deliveries.of(print, {"main": OutputSchema("n int")})
    >>> [(name, deliveries.describe(name)) for name in deliveries]
    [('main', 'print')]
    """

    def __init__(
        self, sinks: Mapping[str, Any], schemas: Mapping[str, OutputSchema], most_files: int = 1
    ) -> None:
        self._sinks = sinks
        self._schemas = schemas
        for output, sink in sinks.items():
            if isinstance(sink, CommittedSink):
                sink.check(output, schemas[output].arrow, most_files)
            else:
                calling.check(sink)
        self._check_shared()

    @classmethod
    def of(cls, sink: object, schemas: Mapping[str, OutputSchema | None], most_files: int = 1) -> Deliveries:
        """The deliveries of a job with these outputs, given one sink, or a dict of output to sink, or None.

        The output of a batch may have ``most_files`` files.
        """
        given = _by_output(sink, schemas)
        known = {name: schemas[name] for name in given}
        if None in known.values():
            raise UsageError("a sink needs to know the schema", hint='write for example schema="user bigint"')
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
        """The schema of an output."""
        return self._schemas[output]

    def partitions(self) -> dict[str, tuple[str, ...]]:
        """The columns by which each output is cut into files before it is committed.

        >>> Deliveries.of(print, {"main": OutputSchema("n int")}).partitions()
        {'main': ()}
        """
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
        self, committed: Committed, context: SinkContext, frame_of: Callable[[str], DataFrame]
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
                calling.call(sink, frame_of(output), context.batch_id, context)
            figures["durationMs"] = round((time.perf_counter() - began) * 1000, 1)
            done.append(figures)
        return done


def _by_output(sink: object, schemas: Mapping[str, object]) -> dict[str, Any]:
    """The sinks by the names of the outputs, in the order of the schema.

    >>> _by_output({"late": print, "totals": print}, {"totals": "n int", "late": "n int"}).keys()
    dict_keys(['totals', 'late'])
    """
    if sink is None:
        sink = {}  # right for a function without output, which has no schema
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
        raise UsageError(
            "there are several outputs, and one sink",
            detail=f"outputs {', '.join(schemas)}",
            hint="pass a dict of output to sink",
        )
    return dict.fromkeys(schemas, sink)
