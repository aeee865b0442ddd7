"""Rows for Spark's functions, grouped by key, and the rows that such functions give.

Keys come in Spark's ascending order. Rows are made when a function asks for them. They are Spark's ``Row``, of a class
with a descriptor for each column, which is faster to read.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import Row

from statebackend._core.codecs.row_maker import RowMaker
from statebackend.columns.nested_columns import encoded_keys
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.keys import canonical_column, key_encoder
from statebackend.runtime.arrow_rows import OutputSchema, made_column
from statebackend.types import ROW, of

#: Rows are made in parts of this many, and rows out go to Arrow in such parts.
PART = 16_384
#: Rows of a frame without a limit.
ALL = 2**31 - 1
#: Settings of the session: its time zone, and the most rows of a frame.
ZONE = "spark.sql.session.timeZone"
MOST_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def most_rows(settings: Mapping[str, str]) -> int:
    """The number of rows that a frame or a piece of a key has at most."""
    most = int(settings.get(MOST_ROWS, 10_000))
    return most if most > 0 else ALL


@lru_cache(maxsize=256)
def row_class(names: tuple[str, ...]) -> type[Row]:
    """The class of rows with these columns.

    >>> row = row_class(("user", "count"))
    >>> made = tuple.__new__(row, ("ann", 3))
    >>> made, made.user, made["count"], made.asDict()
    (Row(user='ann', count=3), 'ann', 3, {'user': 'ann', 'count': 3})
    """
    fields = namedtuple("Fields", [f"f{at}" for at in range(len(names))])  # type: ignore[misc]
    body: dict[str, Any] = {  # keeps the class: a garbage collection would empty its dict
        name: vars(fields)[f"f{at}"]
        for at, name in enumerate(names)
        if not hasattr(Row, name) and not name.startswith("__")
    }
    body |= {"__slots__": (), "__fields__": list(names), "__module__": __name__}
    return type("Row", (Row,), body)


#: A key as state has it, as a function gets it, and its rows or frames.
KeyRows: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...], Iterator[Any]]


class Grouped(NamedTuple):
    """The rows of a batch, sorted by key, and the end of each key's rows."""

    batch: pa.RecordBatch
    ends: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    def first_rows(self) -> pa.RecordBatch:
        """The first row of each key."""
        return self.batch.take(pa.array(self.starts))


def grouped(
    batch: pa.RecordBatch, names: Sequence[str], *, nan_apart: bool = False, nulls_apart: bool = False
) -> Grouped:
    """Sort the rows of a batch by the columns of its key.

    With ``nan_apart``, each row with NaN is a separate group, as Python compares NaN; with ``nulls_apart``, also
    each row with a number that is null.
    """
    order = sorted_by(batch, names)
    rows = batch if order is None else batch.take(order)
    return Grouped(rows, _ends([rows.column(name) for name in names], nan_apart, nulls_apart))


def rows_by_key(
    batch: pa.RecordBatch, names: Sequence[str], timezone: str, most: int | None = None
) -> Iterator[KeyRows]:
    """Each key, twice, with an iterator over its rows, which ends when the next key is asked for.

    With ``most``, a key comes once for each so many rows.
    """
    found = grouped(batch, names, nan_apart=True)
    if most is not None:
        cuts = [range(start + most, end, most) for start, end in zip(found.starts, found.ends, strict=True)]
        ends = np.union1d(found.ends, np.array(list(chain.from_iterable(cuts)), np.int64))
        found = found._replace(ends=ends)
    first = pa.array(found.starts)
    keys = [python_values(found.batch.column(name).take(first), timezone) for name in names]
    each_row = chain.from_iterable(_row_makers(found.batch, timezone))
    for key, count in zip(zip(*keys, strict=True), np.diff(found.ends, prepend=0).tolist(), strict=True):
        of_key = islice(each_row, count)
        yield key, key, of_key
        for _ in of_key:  # a function may leave rows unread
            pass


def _row_makers(rows: pa.RecordBatch, timezone: str) -> Iterator[RowMaker]:
    made = row_class(tuple(rows.schema.names))
    values = partial(python_values, timezone=timezone)
    for start in range(0, rows.num_rows, PART):
        part = rows.slice(start, PART)
        yield RowMaker(
            part.num_rows, made, [made_column(column, values) for column in part.columns], _unreadable
        )


def _unreadable(at: int) -> SerializationError:
    return SerializationError("a value cannot be read from Arrow", detail=f"column {at}")


def python_values(column: pa.Array, timezone: str) -> list[Any]:
    """The values of a column as Spark's workers give them: dicts for structs, pairs for maps, times in a zone."""
    kind = in_zone(column.type, timezone)
    if kind != column.type:
        column = column.cast(kind)
    if pa.types.is_integer(kind) and not column.null_count:
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    return column.to_pylist()  # type: ignore[no-any-return]


def in_zone(kind: pa.DataType, timezone: str) -> pa.DataType:
    """The type with all its zone-aware times in this zone.

    >>> in_zone(pa.list_(pa.timestamp("us", "UTC")), "Asia/Tokyo")
    ListType(list<item: timestamp[us, tz=Asia/Tokyo]>)
    """
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, timezone)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(in_zone(kind.value_type, timezone)))
    if pa.types.is_map(kind):
        return pa.map_(in_zone(kind.key_type, timezone), in_zone(kind.item_type, timezone))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(in_zone(field.type, timezone)) for field in kind])
    return kind


def sorted_by(batch: pa.RecordBatch, names: Sequence[str]) -> pa.Array | None:
    """The rows in Spark's ascending order of these columns: nulls first, NaN last; None if they are sorted."""
    columns = [batch.column(name) for name in names]
    if len(columns) == 1 and pa.types.is_integer(columns[0].type) and not columns[0].null_count:
        values = columns[0].to_numpy()
        if len(values) < 2 or bool((values[1:] >= values[:-1]).all()):
            return None
        return pa.array(np.argsort(values, kind="stable"))
    if batch.num_rows < 2:
        return None
    by: dict[str, pa.Array] = {}
    for at, column in enumerate(columns):
        if not _is_sorted_by_arrow(column.type):
            encoded = encoded_keys(key_encoder(ROW(key=of(column.type))), _as_struct(column))
            by[f"by{at}"] = canonical_column(encoded)
            continue
        if column.null_count:
            by[f"valid{at}"] = column.is_valid()
        if pa.types.is_floating(column.type):
            by[f"nan{at}"] = pc.is_nan(column)
        by[f"by{at}"] = column
    return pc.sort_indices(pa.table(by), sort_keys=[(name, "ascending") for name in by])


def _is_sorted_by_arrow(kind: pa.DataType) -> bool:
    is_a = pa.types
    return bool(
        is_a.is_primitive(kind)
        or is_a.is_decimal(kind)
        or is_a.is_string(kind)
        or is_a.is_binary(kind)
        or is_a.is_large_string(kind)
    )


def _is_object(kind: pa.DataType) -> bool:
    """True if pandas has Python's None for a null of a type, and not a number or its own time."""
    return not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_timestamp(kind))


def _as_struct(column: pa.Array) -> pa.StructArray:
    return pa.StructArray.from_arrays([column], names=["key"])


def _ends(keys: Sequence[pa.Array], nan_apart: bool, nulls_apart: bool) -> NDArray[np.int64]:
    """Where the rows of each key end, among rows that are sorted by key."""
    count = len(keys[0])
    if not count:
        return np.zeros(0, np.int64)
    differs = np.zeros(count - 1, np.bool_)
    for column in keys:
        if pa.types.is_integer(column.type) and not column.null_count:
            values = column.to_numpy()
            differs |= values[1:] != values[:-1]
        elif pa.types.is_floating(column.type) or not _is_sorted_by_arrow(column.type):
            encoded = encoded_keys(key_encoder(ROW(key=of(column.type))), _as_struct(column))
            numbers = canonical_column(encoded).dictionary_encode().indices.to_numpy()
            differs |= numbers[1:] != numbers[:-1]
            if nan_apart and pa.types.is_floating(column.type):
                differs |= pc.fill_null(pc.is_nan(column), nulls_apart).to_numpy(zero_copy_only=False)[1:]
        else:
            other = pc.not_equal(column.slice(1), column.slice(0, count - 1))
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            if nulls_apart and not _is_object(column.type):
                differs |= ~valid[1:]
            differs |= pc.fill_null(other, False).to_numpy(zero_copy_only=False) | (valid[1:] != valid[:-1])
    return np.append(np.flatnonzero(differs) + 1, count)


class RowsOut:
    """Takes the rows of a function, and makes Arrow of them as Spark's workers do: by name, missing ones null.

    Rows soon become columns of values, so that Python's garbage collector finds few objects.
    """

    #: `settled` is to be called when so many rows are pending: each has three objects that the collector counts, and
    #: it starts at 700.
    few = 128

    def __init__(self, schema: OutputSchema) -> None:
        self._schema = schema.arrow
        self._is_flat = not any(map(pa.types.is_nested, self._schema.types))
        #: The names and the columns of the rows that are no longer pending.
        self._fields: list[str] = []
        self._columns: list[list[Any]] = []
        self.pending: list[Any] = []
        #: Takes the rows of a call; a generator runs to its end here.
        self.take = self.pending.extend

    def settled(self) -> Iterator[pa.RecordBatch]:
        """Put pending rows into columns, which are given when they are long."""
        yield from self._settled()
        if self._columns and len(self._columns[0]) >= PART:
            yield from self._held()

    def taken(self) -> Iterator[pa.RecordBatch]:
        """All rows that have come, which are then gone."""
        yield from self._settled()
        yield from self._held()

    def _settled(self) -> Iterator[pa.RecordBatch]:
        rows = self.pending
        fields = _shared_fields(rows) if self._is_flat else None
        if fields is None:
            if rows:
                yield from self._held()
                yield self._of_dicts(rows)
        else:
            if self._fields != fields:
                yield from self._held()
                self._fields, self._columns = fields, [[] for _ in fields]
            for column, values in zip(self._columns, zip(*rows, strict=True), strict=True):
                column.extend(values)
        rows.clear()

    def _held(self) -> Iterator[pa.RecordBatch]:
        columns = dict(zip(self._fields, self._columns, strict=True))
        self._fields, self._columns = [], []
        if columns:
            count = len(next(iter(columns.values())))
            yield pa.RecordBatch.from_arrays(
                [self._array(field, columns.get(field.name), count) for field in self._schema],
                schema=self._schema,
            )

    def _of_dicts(self, rows: list[Any]) -> pa.RecordBatch:
        dicts = [row.asDict(True) for row in rows]
        return pa.RecordBatch.from_arrays(
            [self._array(field, [row.get(field.name) for row in dicts], len(rows)) for field in self._schema],
            schema=self._schema,
        )

    @staticmethod
    def _array(field: pa.Field, values: list[Any] | None, count: int) -> pa.Array:
        if values is None:
            return pa.nulls(count, field.type)
        try:
            return pa.array(values, field.type)
        except (pa.ArrowException, OverflowError) as error:
            made = SerializationTypeError if isinstance(error, pa.ArrowTypeError) else SerializationError
            raise made(
                "a value of the output does not fit its column",
                code="SERIALIZATION.OUTPUT",
                detail=f"output column {field.name!r} of type {field.type}",
                hint="give values of the type that output_schema has",
            ) from error


def _shared_fields(rows: Sequence[Any]) -> list[str] | None:
    """The names that all rows have; None if they differ, or are not plain rows."""
    if not rows or set(map(type, rows)) != {Row}:
        return None
    try:
        fields: list[str] = rows[0].__fields__
        if set(map(len, rows)) != {len(fields)} or not all(
            map(fields.__eq__, map(attrgetter("__fields__"), rows))
        ):
            return None
    except AttributeError:
        return None
    return fields
