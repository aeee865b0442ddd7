"""The rows that a function gives out in a batch, for each of its outputs: as they are, or in Arrow.

>>> given = Given({"main": None})
>>> given.add([(1,), (2,)])
>>> given.result()
{'main': [(1,), (2,)]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from statebackend._core.handles.row_loop import Output
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.functions.context import no_output
from statebackend.runtime.output import OutputFiles
from statebackend.runtime.row_reader import rows_of
from statebackend.runtime.row_writer import OutputSchema

__all__ = ["Given", "Result"]

#: What a batch gave to each output: a table if the job has a schema, else rows as the function gave them.
Result: TypeAlias = dict[str, pa.Table | list[object]]

#: Rows go to Arrow in pieces of at least this many.
_PIECE = 65_536


class _Collected:
    """What has come for one output; in Arrow as soon as there is much, if it has a schema."""

    __slots__ = ("_parts", "_where", "_writer", "output", "schema")

    def __init__(self, where: str | None, schema: OutputSchema | None) -> None:
        #: What an error says of the place; None if there is no other output.
        self._where = where
        self.schema = schema
        self._writer = None if schema is None else schema.writer()
        #: Takes what a call gave.
        self.output = Output(self._writer, _checked_iterable)
        self._parts: list[pa.Table] = []

    def settle(self) -> None:
        """Bring what has come to Arrow, if it is much."""
        if self._writer is not None and self._writer.count >= _PIECE:
            self._finish_part()

    def taken(self) -> list[pa.Table]:
        """Take away what is in Arrow."""
        parts, self._parts = self._parts, []
        return parts

    def _finish_part(self) -> None:
        assert self.schema is not None
        assert self._writer is not None
        try:
            self._parts.append(self.schema.table_of_written(self._writer))
        except SerializationError as error:
            raise (error if self._where is None else error.at(self._where)) from None

    def add_table(self, table: pa.Table) -> None:
        """Add rows that are in Arrow."""
        if self.schema is None:
            self.output.take(rows_of(table))
            return
        if self._writer is not None and self._writer.count:  # they came before
            self._finish_part()
        try:
            self._parts.append(self.schema.conformed(table))
        except SerializationError as error:
            raise (error if self._where is None else error.at(self._where)) from None

    def result(self) -> pa.Table | list[object]:
        """All that was added."""
        if self._writer is None:
            return self.output.rows
        if self._writer.count or not self._parts:
            self._finish_part()
        return pa.concat_tables(self._parts)


class Given:
    """Rows that a function returned, or gave to an output by its name. The first output is the main one.

    >>> given = Given({"totals": OutputSchema("n int"), "late": OutputSchema("user string")})
    >>> given.add([(1,)])
    >>> given.outputs["late"].add(("ann",))
    >>> given.result()["late"].to_pylist()
    [{'user': 'ann'}]
    """

    __slots__ = ("_all", "_files", "output", "outputs")

    def __init__(self, schemas: Mapping[str, OutputSchema | None], files: OutputFiles | None = None) -> None:
        #: Where rows go as they come; None: they stay here.
        self._files = files
        self._all = {
            name: _Collected(f"output {name!r}" if len(schemas) > 1 else None, schema)
            for name, schema in schemas.items()
        }
        #: What takes the rows of each output.
        self.outputs = {name: collected.output for name, collected in self._all.items()}
        #: That of the main output.
        self.output: Output = next(iter(self.outputs.values()))

    def add(self, rows: Iterable[object] | None) -> None:
        """Add what a call gave; a generator runs to its end here."""
        self.output.take(None if rows is None else _checked_iterable(rows))
        self.settle()

    def settle(self) -> None:
        """Bring what has come to Arrow, if it is much."""
        for name, collected in self._all.items():
            collected.settle()
            if self._files is not None:
                self._files.write(name, collected.taken())

    def add_batches(self, given: object) -> None:
        """Add the result of a call over columns; a generator may still run to its end here."""
        self.output.take(None)  # counts the call
        if isinstance(given, Mapping):
            for name, each in given.items():
                self._add_to(self._named(name), each)
        elif given is not None and not isinstance(given, (pa.RecordBatch, pa.Table)):
            for each in _iterated(given):
                self.add_batches(each)
        else:
            self._add_to(next(iter(self._all.values())), given)
        self.settle()

    def _named(self, name: object) -> _Collected:
        collected = self._all.get(name) if isinstance(name, str) else None
        if collected is None:
            raise no_output(name, self._all)
        return collected

    def add_rows_as_they_are(self, name: str, rows: pa.Table) -> None:
        """Give rows that came in to an output, which takes the columns that its schema names."""
        collected = self._named(name)
        collected.add_table(rows if collected.schema is None else rows.select(collected.schema.arrow.names))

    def add_row_as_it_is(self, name: str, row: object, more: Mapping[str, object]) -> None:
        """The same for a single row, with more columns; a plain tuple is taken by position."""
        collected = self._named(name)
        own: Any = getattr(row, "_fields", None)
        if collected.schema is None or own is None:
            assert isinstance(row, tuple)
            self.outputs[name].add((*row, *more.values()))
        else:
            by_name = {**dict(zip(own, row, strict=True)), **more}  # type: ignore[call-overload]
            self.outputs[name].add({column: by_name[column] for column in collected.schema.arrow.names})

    def _add_to(self, collected: _Collected, given: object) -> None:
        if isinstance(given, pa.RecordBatch):
            collected.add_table(pa.Table.from_batches([given]))
        elif isinstance(given, pa.Table):
            collected.add_table(given)
        elif given is not None:
            for each in _iterated(given):
                self._add_to(collected, each)

    def result(self) -> Result:
        """All that was added, for each output."""
        return {name: collected.result() for name, collected in self._all.items()}


def _checked_iterable(produced: object) -> Iterable[object]:
    if isinstance(produced, (str, bytes, dict)) or not isinstance(produced, Iterable):
        raise SerializationTypeError(
            f"the function gave a {type(produced).__name__}",
            code="SERIALIZATION.OUTPUT",
            hint="yield rows, or return a list of them",
        )
    return produced


def _iterated(given: object) -> Iterable[object]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise SerializationTypeError(
            f"the function gave a {type(given).__name__}",
            code="SERIALIZATION.OUTPUT",
            hint="return a pyarrow RecordBatch, several of them, a dict of them by output, or None",
        )
    return given
