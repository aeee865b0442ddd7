"""State as a table: `state` and its relatives return an object that Arrow, DuckDB, Polars and others can scan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.checkpoint.keyed.row_source import without_expired
from statebackend.checkpoint.keyed.state_source import Selection, StateSource, selection_of
from statebackend.errors import SerializationError, StateBackendError, UsageError, usage
from statebackend.keys import readable_namespaces
from statebackend.operator_state.operator_snapshots import type_roles
from statebackend.runtime.start_checks import ambiguous, no_state
from statebackend.state import RESERVED
from statebackend.tools.sources import Stored, source_of
from statebackend.tools.tables import check_readable, empty_table, stored_type, unreadable, value_type
from statebackend.types import RowType
from statebackend.types.serializers import describe

_SHOWN_ROWS = 10
_SHOWN_WIDTH = 40
#: The states that hold timers, and the domain of each; their map keys are times.
_TIMERS = {f"{RESERVED}timers.{domain}": domain for domain in ("event", "processing")}
_TIMER_NAMES = {"map_key": "time"}


class StateRows:
    """Rows of state, read in batches whenever they are scanned. Making the object reads no rows.

    It has the Arrow stream interface, ``__arrow_c_stream__``: DuckDB, Polars and pyarrow scan it. Each scan
    opens the files again and pins the checkpoint meanwhile. Any thread may scan.
    """

    def __init__(
        self,
        title: str,
        schema: Callable[[], pa.Schema],
        batches: Callable[[], Iterator[pa.RecordBatch]],
        count: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._title = title
        self._make_schema = schema
        self._batches = batches
        self._count = count

    @classmethod
    def of_table(cls, title: str, table: pa.Table) -> StateRows:
        """Wrap rows that are in memory."""
        return cls(title, lambda: table.schema, lambda: iter(table.to_batches()), lambda: int(table.num_rows))

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns. Reads the namespaces of the state, if it has any, because they decide the column's type."""
        return self._make_schema()

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, batch by batch. Memory: one batch, and the changes since the base of some key groups."""
        self.schema  # noqa: B018 - an error in it comes before the first batch
        return self._batches()

    def to_table(self) -> pa.Table:
        """All rows in memory."""
        return pa.Table.from_batches(self.to_batches(), self.schema)

    def to_pandas(self) -> Any:
        """All rows as a pandas frame."""
        return self.to_table().to_pandas()

    def head(self, n: int = _SHOWN_ROWS) -> pa.Table:
        """The first ``n`` rows. Keys have no order, so these may be any rows."""
        found: list[pa.RecordBatch] = []
        left = n
        batches = self.to_batches()
        while left > 0 and (batch := next(batches, None)) is not None:
            found.append(batch.slice(0, left))
            left -= found[-1].num_rows
        return pa.Table.from_batches(found, self.schema)

    def __len__(self) -> int:
        """The number of rows. O(1) for a state without TTL and changes since its base, else it scans the keys."""
        count = self._count()
        return sum(batch.num_rows for batch in self.to_batches()) if count is None else count

    def __bool__(self) -> bool:
        return bool(self.head(1).num_rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        stream = pa.RecordBatchReader.from_batches(self.schema, self.to_batches())
        return stream.__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        try:
            return f"{self._title}\n{shown(self.head(_SHOWN_ROWS + 1))}"
        except StateBackendError as error:
            return f"{self._title}: {error}"


def shown(table: pa.Table) -> str:
    """The first ten rows as text, in columns."""
    names = table.schema.names
    rows = [[_cell(row[name]) for name in names] for row in table.slice(0, _SHOWN_ROWS).to_pylist()]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (names, *rows)]
    return "\n".join([*lines, "..."] if table.num_rows > _SHOWN_ROWS else lines)


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _SHOWN_WIDTH else f"{text[: _SHOWN_WIDTH - 3]}..."


class _Column(NamedTuple):
    """A column of the result: the column of data files, and the number of the field of a struct in it."""

    name: str
    role: str
    field: int | None = None


class Namespaces(NamedTuple):
    """The distinct namespaces of a state, encoded and readable."""

    distinct: pa.Array
    readable: pa.Array

    def shown(self, rows: pa.RecordBatch | pa.Table) -> Any:
        """The readable namespace of each row."""
        if "namespace" not in rows.schema.names:
            return pa.nulls(rows.num_rows, self.readable.type)
        return self.readable.take(pc.index_in(rows["namespace"], value_set=self.distinct))


def namespaces_of(source: StateSource, names: Sequence[str]) -> Namespaces | None:
    """The namespaces of these states; None if all are `VOID`."""
    each_distinct = [source.namespaces(name) for name in names]
    found = [each for each in each_distinct if each is not None]
    if not found:
        return None
    distinct = pc.unique(pa.concat_arrays(found))
    try:
        readable = readable_namespaces(distinct)
    except SerializationError as error:
        raise unreadable(names[0], source.where) from error
    return None if readable.null_count == len(readable) else Namespaces(distinct, readable)


def left_rows(
    source: StateSource, state: StateDescription, selection: Selection, expired_before: int | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a state in batches, none of them empty, without rows that have expired."""
    for batch in source.read(state.name, selection):
        left = batch if expired_before is None else without_expired(batch, expired_before)[0]
        if left.num_rows:
            yield left


class _KeyedRows:
    """The rows of a keyed state as users see them."""

    def __init__(
        self,
        source: StateSource,
        state: StateDescription,
        selection: Selection,
        columns: Sequence[str] | None = None,
        *,
        expired: bool = False,
        alike: Sequence[str] = (),
    ) -> None:
        self._source = source
        self._state = state
        self._selection = selection
        self._wanted = columns
        #: The states whose namespaces are shown in the same way.
        self._alike = alike or (state.name,)
        self._expired_before = None if expired else state.expired_before(source.now, source.watermark)

    @cached_property
    def _stored(self) -> pa.Schema:
        """The columns of data files, without namespaces."""
        key_type = self._source.key_type
        config = None if key_type is None else key_type.config()
        schema = empty_table(self._state.to_json(), config, self._source.where).schema
        if key_type is None:  # the rows tell it
            for batch in itertools.islice(self._source.read(self._state.name, Selection(frozenset())), 1):
                schema = schema.set(0, pa.field("key", batch["key"].type))
        return schema

    @cached_property
    def _namespaces(self) -> Namespaces | None:
        return namespaces_of(self._source, self._alike)

    @cached_property
    def _columns(self) -> list[_Column]:
        key_type = self._source.key_type
        is_list = self._state.kind == "list"
        stored = None if is_list else value_type(self._state.to_json(), self._source.where)
        key, value = [_Column("key", "key")], [_Column("value", "value")]
        own = {"namespace", *self._stored.names} - {"key", "value"}
        if isinstance(key_type, RowType) and not set(key_type.names) & {*own, "value"}:
            key = [_Column(name, "key", at) for at, name in enumerate(key_type.names)]
        if isinstance(stored, RowType) and not set(stored.names) & (own | {each.name for each in key}):
            value = [_Column(name, "value", at) for at, name in enumerate(stored.names)]
        columns = key + ([] if self._namespaces is None else [_Column("namespace", "namespace")])
        for role in self._stored.names[1:]:
            columns += value if role == "value" else [_Column(role, role)]
        if self._wanted is None:
            return columns
        by_name = {each.name: each for each in columns}
        unknown = [each for each in self._wanted if each not in by_name]
        if unknown:
            raise _no_column(self._state.name, unknown[0], by_name)
        return [by_name[name] for name in self._wanted]

    def schema(self) -> pa.Schema:
        return pa.schema([(each.name, self._type(each)) for each in self._columns])

    def _type(self, column: _Column) -> pa.DataType:
        if column.role == "namespace":
            assert self._namespaces is not None
            return self._namespaces.readable.type
        stored = self._stored.field(column.role).type
        return stored if column.field is None else stored.field(column.field).type

    def _read(self, roles: set[str]) -> Iterator[pa.RecordBatch]:
        if self._expired_before is not None:
            roles = roles | {"timestamp"} | ({"value"} if self._state.kind == "list" else set())
        selection = Selection(frozenset(roles), self._selection.keys, self._selection.key_groups)
        yield from left_rows(self._source, self._state, selection, self._expired_before)

    def batches(self) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        for batch in self._read({each.role for each in self._columns}):
            try:
                arrays = [self._array(batch, each) for each in self._columns]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            except (pa.ArrowException, TypeError, KeyError) as error:
                raise unreadable(self._state.name, self._source.where) from error

    def _array(self, batch: pa.RecordBatch, column: _Column) -> pa.Array:
        if column.role == "namespace":
            assert self._namespaces is not None
            return self._namespaces.shown(batch)
        array = batch[column.role]
        return array if column.field is None else pc.struct_field(array, column.field)

    def count(self) -> int | None:
        if self._selection.keys is None and self._expired_before is None:
            known = self._source.rows(self._state.name)
            if known is not None:
                return known
        return int(sum(batch.num_rows for batch in self._read({"key"})))


def state(
    store: Stored,
    name: str,
    *,
    id: int | None = None,
    keys: Any = None,
    columns: Sequence[str] | None = None,
    expired: bool = False,
) -> StateRows:
    """The entries of a state, one row for each, as a table that is read in batches when it is scanned.

    ``store`` is a store, a savepoint or the path of either; or a running query, a view of it or a `Harness`. ``id``
    chooses a checkpoint of a store, by default the newest.

    ``keys`` selects entries by key: a list of keys, an Arrow column, or a `range` of integers. The scan then reads only
    the parts of files that can hold these keys. ``columns`` limits the columns. Expired entries are left out, by the
    time of the checkpoint, unless ``expired`` is true.

    The columns of a keyed state are ``key`` or the key's fields; ``namespace``, if there are others than `VOID`;
    ``map_key`` for map states; ``value`` or its fields; and ``timestamp`` (milliseconds) with a TTL. An operator state
    has ``subtask``, the number of the instance; ``map_key`` for broadcast states; and ``value``. Entries of a map and
    elements of a list keep their order; keys have none. Pickles are bytes: nothing is executed.
    """
    source = source_of(store, id)
    keyed, operators = source.states(), source.operator_states()
    if name in operators:
        if name in keyed:
            raise ambiguous(name, source.where)
        return _operator_rows(source, operators[name], keys, columns)
    if name not in keyed:
        raise no_state(name, [*keyed, *operators], source.where)
    return _keyed_rows(source, keyed[name], keys, columns, expired)


def _keyed_rows(
    source: StateSource,
    described: StateDescription,
    keys: Any = None,
    columns: Sequence[str] | None = None,
    expired: bool = False,
) -> StateRows:
    check_readable(described, source.where)
    rows = _KeyedRows(source, described, _selection(source, keys), columns, expired=expired)
    return StateRows(f"state {described.name!r}, {source.where}", rows.schema, rows.batches, rows.count)


def _no_column(name: str, column: str, known: Iterable[str]) -> UsageError:
    return usage.column(f"state {name!r} has no column {column!r}", hint=f"there are: {', '.join(known)}")


def _selection(source: StateSource, keys: Any) -> Selection:
    if keys is None:
        return Selection()
    return selection_of(keys, source.key_type, source.max_parallelism, source.where)


def _operator_rows(
    source: StateSource, described: dict[str, Any], keys: Any = None, columns: Sequence[str] | None = None
) -> StateRows:
    name = described["name"]
    if keys is not None:
        raise usage.argument(f"cannot select keys of the operator state {name!r}", hint="leave keys out")
    roles = type_roles(described["kind"])
    fields = [(column, stored_type(described, [role], source.where)) for column, role in roles.items()]
    schema = pa.schema([("subtask", pa.int32()), *fields])
    for each in columns or ():
        if each not in schema.names:
            raise _no_column(name, each, schema.names)
    chosen = pa.schema([schema.field(each) for each in columns]) if columns is not None else schema

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in source.read_operator(name):
            try:
                yield pa.RecordBatch.from_arrays([batch[each] for each in chosen.names], schema=chosen)
            except (pa.ArrowException, TypeError, KeyError) as error:
                raise unreadable(name, source.where) from error

    return StateRows(f"operator state {name!r}, {source.where}", lambda: chosen, batches)


def operator_state(store: Stored, *, id: int | None = None) -> dict[str, StateRows]:
    """The operator states by name, each as `state` returns it."""
    source = source_of(store, id)
    return {name: _operator_rows(source, each) for name, each in sorted(source.operator_states().items())}


def timers(store: Stored, *, id: int | None = None, keys: Any = None) -> StateRows:
    """The pending timers: ``domain`` (event or processing), the key, ``namespace`` and ``time`` in milliseconds."""
    return _timer_rows(source_of(store, id), keys)


def _timer_rows(source: StateSource, keys: Any = None) -> StateRows:
    known = [name for name in _TIMERS if name in source.states()]
    selection = _selection(source, keys)
    parts = {
        _TIMERS[name]: _KeyedRows(source, source.states()[name], selection, expired=True, alike=known)
        for name in known
    }

    def schema() -> pa.Schema:
        found = [pa.field("domain", pa.string())]
        for rows in itertools.islice(parts.values(), 1):
            found += [each.with_name(_TIMER_NAMES.get(each.name, each.name)) for each in rows.schema()]
        return pa.schema([each for each in found if each.name != "value"])

    def batches() -> Iterator[pa.RecordBatch]:
        for domain, rows in parts.items():
            for batch in rows.batches():
                columns = [batch[name] for name in batch.schema.names if name != "value"]
                domains = pa.array([domain] * batch.num_rows, pa.string())
                yield pa.RecordBatch.from_arrays([domains, *columns], schema=schema())

    return StateRows(f"timers, {source.where}", schema, batches)


def states(store: Stored, *, id: int | None = None) -> StateRows:
    """The states except timers, one row for each.

    ``entries`` counts the rows that `state` gives with ``expired=True``; it scans the keys of states with changes since
    their base. ``bytes`` is about the share of the data files, and null if that is unknown. ``ttl`` is in milliseconds.
    ``declared`` is false for a state that the running program has not requested: it is kept, and written again.
    """
    source = source_of(store, id)
    size = getattr(source, "bytes", lambda name: None)
    rows = []
    for name, each in source.states().items():
        if each.is_reserved:
            continue
        types = ", ".join(describe(config) for config in each.types.values())
        entries = len(_keyed_rows(source, each, expired=True))
        ttl = None if each.lifetime is None else each.lifetime.ttl
        rows.append((name, each.kind, types, entries, size(name), ttl, each.is_declared))
    for name, described in source.operator_states().items():
        types = ", ".join(describe(config) for config in described["types"].values())
        entries = len(_operator_rows(source, described))
        rows.append((name, described["kind"], types, entries, size(name), None, True))
    table = pa.Table.from_pylist(
        [dict(zip(_STATES.names, row, strict=True)) for row in sorted(rows)], _STATES
    )
    return StateRows.of_table(f"states, {source.where}", table)


_STATES = pa.schema(
    {
        "name": pa.string(),
        "kind": pa.string(),
        "types": pa.string(),
        "entries": pa.int64(),
        "bytes": pa.int64(),
        "ttl": pa.int64(),
        "declared": pa.bool_(),
    }
)


def sql(store: Stored, query: str, *, id: int | None = None, expired: bool = False) -> pa.Table:
    """The result of a query in DuckDB's SQL, in which each state is a table, and ``timers`` too.

    Tables have the columns of `state`. DuckDB reads them in batches. It needs the extra ``[sql]``.
    """
    try:
        import duckdb
    except ImportError as error:
        raise usage.package("SQL over state needs DuckDB", hint="pip install duckdb") from error
    source = source_of(store, id)
    keyed, operators = source.states(), source.operator_states()
    errors: list[StateBackendError] = []
    # Variables of the caller are not tables.
    with duckdb.connect(config={"python_enable_replacements": False}) as connection:
        try:
            for name in {**keyed, **operators, "timers": None}:
                if name.lower() not in query.lower():
                    continue  # its columns need not be known
                if name in operators:
                    rows = _operator_rows(source, operators[name])
                elif name in keyed:
                    rows = _keyed_rows(source, keyed[name], expired=expired)
                else:
                    rows = _timer_rows(source)
                connection.register(name, _noting(rows, errors))
            return connection.sql(query).to_arrow_table()
        except duckdb.Error as error:
            if errors:  # DuckDB has made another error of it
                raise errors[0] from None
            raise UsageError(
                "DuckDB cannot run the query",
                code="USAGE.SQL",
                detail=str(error).split("\n")[0],
                hint="each state is a table: sb.tools.states lists them",
            ) from error


def _noting(rows: StateRows, errors: list[StateBackendError]) -> StateRows:
    """The same rows, which keep the error of a scan."""

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except StateBackendError as error:
            errors.append(error)
            raise

    def batches() -> Iterator[pa.RecordBatch]:
        with noting():
            yield from rows.to_batches()

    return StateRows(rows._title, noting()(lambda: rows.schema), batches)
