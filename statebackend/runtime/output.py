"""The output of a batch: the function's rows, and files of the checkpoint, verified before use.

Rows may be in partitions: one for each of the values of some columns, named as the folders of a partitioned table are.
Spark, Hive, Arrow and DuckDB take the columns from the names of the folders, so the files do not have them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from statebackend._core.handles.row_loop import Output
from statebackend.checkpoint import Checkpoint, DataFile, DataWriter, StoredFile
from statebackend.errors import CorruptCheckpointError, SerializationError, SerializationTypeError, UsageError
from statebackend.functions.context import no_output
from statebackend.runtime.arrow_rows import OutputSchema, rows_of
from statebackend.runtime.batch_progress import Figures

#: Rows in a row group of the output, which Spark's tasks divide among themselves.
_ROW_GROUP = 262_144
#: Bytes in Arrow of a row group that has more than one row: Arrow reads no nested column of 2 GiB at once.
_ROW_GROUP_BYTES = 512 << 20


class CommittedBatch(NamedTuple):
    """A committed batch: its checkpoint, which names its output, and the facts to report about it."""

    checkpoint: Checkpoint
    progress: Figures
    #: True if it was committed before, and has not run now.
    is_replay: bool
    #: The incarnation of its store when it was committed: see `CheckpointStore.incarnation`.
    incarnation: str

    @property
    def outputs(self) -> Mapping[str, Sequence[StoredFile]]:
        """The files of each output that has rows, in order."""
        return self.checkpoint.manifest.outputs

    @property
    def output(self) -> list[StoredFile]:
        """The files of all its outputs."""
        return [file for files in self.outputs.values() for file in files]

    def verify_output(self) -> None:
        """Raise `CorruptCheckpointError` unless the output is as it was written; O(bytes)."""
        try:
            self.checkpoint.verify(self.output)
        except CorruptCheckpointError as error:
            error.hint = (
                "bring the file back from a copy of the store; or take the batch back with sb.tools.rewind, so that it "
                "runs again"
            )
            raise

    def read_output(self, file: StoredFile) -> pa.Table:
        """Read the rows of a file of the output; `CorruptCheckpointError` if they are not as they were written."""
        with self.checkpoint.open_file(file) as source:
            try:
                opened = pq.ParquetFile(source, page_checksum_verification=True)
                return pa.Table.from_batches(read_batches(opened), opened.schema_arrow)
            except pa.ArrowNotImplementedError:
                self.checkpoint.verify([file])
                raise  # of a file as it was written, Arrow's own error says what it lacks
            except (pa.ArrowException, OSError) as error:
                raise CorruptCheckpointError("the output cannot be read", detail=file.name) from error


def read_batches(file: pq.ParquetFile, rows: int = _ROW_GROUP) -> Iterator[pa.RecordBatch]:
    """The rows of an output, up to so many at a time, and never more than a row group, which Arrow can read at once."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(rows, row_groups=[group])


class OutputFiles:
    """The output files of a batch that runs: one for each output, or for each of its partitions.

    Rows come a table at a time, and go to the file as soon as they fill a row group, which is all that memory holds: of
    an output in partitions, of all of them together. ``partition_by`` has the columns of each output.
    """

    def __init__(
        self, begin: Callable[[], DataWriter], partition_by: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._begin = begin
        self._writer: DataWriter | None = None
        self._partition_by = partition_by or {}
        #: By output, and then by partition.
        self._files: dict[str, dict[str, _OutputFile]] = {}

    def write(self, name: str, tables: Sequence[pa.Table]) -> None:
        """Add rows to an output. O(bytes)."""
        columns = self._partition_by.get(name, ())
        for table in tables:
            if table.num_rows:
                for piece in _pieces(table):
                    self._write(self._files.setdefault(name, {}), piece, columns)

    def _write(self, files: dict[str, _OutputFile], table: pa.Table, columns: Sequence[str]) -> None:
        for partition, rows in partitioned(table, columns) if columns else [("", table)]:
            if partition not in files:
                files[partition] = _OutputFile(self._created, rows.schema)
            files[partition].write(rows)
        while columns and (
            sum(file.num_held for file in files.values()) > _ROW_GROUP
            or sum(file.bytes_held for file in files.values()) > _ROW_GROUP_BYTES
        ):
            max(files.values(), key=lambda file: file.num_held).flush()

    def _created(self) -> DataFile:
        if self._writer is None:
            self._writer = self._begin()
        return self._writer.create("output", suffix=".parquet")

    def count(self, name: str) -> int:
        """The number of rows that an output has got."""
        return sum(file.rows for file in self._files.get(name, {}).values())

    def finish(self) -> dict[str, list[StoredFile]]:
        """Write what is left, durably; the files of each output that has rows."""
        return {name: [files[each].finish() for each in sorted(files)] for name, files in self._files.items()}

    def abandon(self) -> None:
        """Write no more; the maker of the writer removes the files."""
        for files in self._files.values():
            for file in files.values():
                file.abandon()


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    """The rows in tables that each fit in a row group by their bytes, or have one row."""
    if table.num_rows <= 1 or table.nbytes <= _ROW_GROUP_BYTES:
        yield table
        return
    half = table.num_rows // 2
    yield from _pieces(table.slice(0, half))
    yield from _pieces(table.slice(half))


class _OutputFile:
    """A file of an output, which is made when a row group is full, or at the end.

    Pages carry their own checksums, so that later readers can still find a flipped bit.
    """

    def __init__(self, create: Callable[[], DataFile], schema: pa.Schema) -> None:
        self._create = create
        self._schema = schema
        self._file: DataFile | None = None
        self._parquet: pq.ParquetWriter | None = None
        #: Rows that do not fill a row group yet.
        self._held: list[pa.Table] = []
        self.num_held = self.bytes_held = self.rows = 0

    def _opened(self) -> tuple[DataFile, pq.ParquetWriter]:
        if self._file is None or self._parquet is None:
            numbers, others = encodings(self._schema)
            self._file = self._create()
            self._parquet = pq.ParquetWriter(
                self._file,
                self._schema,
                compression="snappy",
                use_dictionary=others,
                column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
                write_page_checksum=True,
            )
        return self._file, self._parquet

    def write(self, table: pa.Table) -> None:
        size = table.nbytes
        if self.bytes_held + size > _ROW_GROUP_BYTES:
            self.flush()
        self._held.append(table)
        self.num_held += table.num_rows
        self.bytes_held += size
        self.rows += table.num_rows
        self._write_held(self.num_held // _ROW_GROUP * _ROW_GROUP)

    def flush(self) -> None:
        """Have no rows in memory."""
        self._write_held(self.num_held)

    def _write_held(self, count: int) -> None:
        if count:
            held = pa.concat_tables(self._held)
            self._opened()[1].write_table(held.slice(0, count), row_group_size=_ROW_GROUP)
            rest = held.slice(count)
            self._held = [rest] if rest.num_rows else []
            self.num_held = rest.num_rows
            self.bytes_held = sum(table.nbytes for table in self._held)

    def finish(self) -> StoredFile:
        file, parquet = self._opened()
        with file:
            self.flush()
            self._held = []
            parquet.close()
            return file.finish()

    def abandon(self) -> None:
        self._held = []
        with suppress(Exception):  # a file that is broken, or closed: it is given up
            if self._parquet is not None:
                self._parquet.close()


def check_deliverable(
    committed: CommittedBatch,
    schemas: Mapping[str, OutputSchema | None],
    delivered: Mapping[str, Sequence[str]],
) -> None:
    """Raise unless a job with these outputs, some with a sink, can deliver what was committed before.

    Reads all of it: a file names the schema that it was written with, and is checked before that is believed.
    """
    if not committed.output:
        return
    if not committed.checkpoint.has_outputs:
        batch_id = committed.checkpoint.id
        raise UsageError(
            "the newest batch has output that is still to be delivered, and that has been dropped",
            code="USAGE.NO_CHECKPOINT",
            detail=f"batch {batch_id}: outputs go earlier than states",
            hint=f"take the batch back with sb.tools.rewind(store, to={batch_id - 1}, checkpoint_location=None); "
            "it then runs again",
        )
    for name in committed.outputs:
        if name in schemas and (schemas[name] is None or name not in delivered):
            raise UsageError(
                "the newest batch has output that is still to be delivered, but its sink is missing",
                code="USAGE.NO_SINK",
                detail=_which(committed, name),
                hint="run the query with its sink until this batch is done, then take the sink and its output away",
            )
    committed.verify_output()
    for name, files in committed.outputs.items():
        schema = schemas.get(name)
        for file in files:
            written = _written_schema(committed, file)
            wanted = None if schema is None else _without(schema.arrow, delivered[name])
            if wanted is None or not written.equals(wanted):
                now = "no such output" if wanted is None else f"now {', '.join(map(str, wanted))}"
                raise UsageError(
                    "the newest batch was committed with another schema, and is still to be delivered",
                    code="USAGE.OTHER_SCHEMA",
                    detail=f"{_which(committed, name)}; committed as {', '.join(map(str, written))}; {now}",
                    hint="run the query with the old schema until this batch is done, then change it; or take the "
                    "batch back with sb.tools.rewind, so that it runs again",
                )


def _without(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in names])


def _which(committed: CommittedBatch, name: str) -> str:
    rows = committed.progress.get("outputs", {}).get(name, committed.progress.get("numOutputRows"))
    return f"batch {committed.checkpoint.id}, output {name!r}, {rows} rows"


def _written_schema(committed: CommittedBatch, file: StoredFile) -> pa.Schema:
    with committed.checkpoint.open_file(file) as source:
        try:
            return pq.read_schema(source)
        except (pa.ArrowException, OSError) as error:
            raise CorruptCheckpointError(
                "the output cannot be read, although its checksum is right", detail=file.name
            ) from error


def encodings(schema: pa.Schema) -> tuple[list[str], list[str]]:
    """The columns to delta-encode, and those to dictionary-encode; nested columns have their Parquet names.

    Delta-encoded integers take half the space of a dictionary if most of them occur once.

    >>> encodings(pa.schema([("n", pa.int64()), ("t", pa.string())]))
    (['n'], ['t'])
    """
    numbers = [field.name for field in schema if pa.types.is_integer(field.type)]
    nested = [
        leaf for field in schema if field.name not in numbers for leaf in _leaves(field.name, field.type)
    ]
    return [name for name in numbers if name not in nested], nested


def _leaves(path: str, kind: pa.DataType) -> list[str]:
    """The Parquet columns for a column: structs, lists and maps become one for each leaf.

    >>> _leaves("a", pa.list_(pa.struct({"x": pa.string(), "y": pa.map_(pa.string(), pa.int64())})))
    ['a.list.element.x', 'a.list.element.y.key_value.key', 'a.list.element.y.key_value.value']
    """
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(f"{path}.{field.name}", field.type)]
    if pa.types.is_map(kind):
        within = {"key_value.key": kind.key_type, "key_value.value": kind.item_type}
    elif pa.types.is_list(kind):
        within = {"list.element": kind.value_type}
    else:
        return [path]
    return [leaf for name, each in within.items() for leaf in _leaves(f"{path}.{name}", each)]


#: The rows of each output of a batch: a table if the job has a schema, else rows as the function gave them.
Result: TypeAlias = dict[str, pa.Table | list[object]]

#: Rows go to Arrow in pieces of at least this many.
_PIECE = 65_536


class _OutputRows:
    """What has come for one output; in Arrow as soon as there is much, if it has a schema."""

    __slots__ = ("_parts", "_where", "_writer", "output", "schema")

    def __init__(self, where: str | None, schema: OutputSchema | None) -> None:
        #: The place in errors; None for a single output.
        self._where = where
        self.schema = schema
        self._writer = None if schema is None else schema.writer()
        self.output = Output(self._writer, _checked_iterable)
        self._parts: list[pa.Table] = []

    def settle(self) -> None:
        """Convert waiting rows to Arrow, if they are many."""
        if self._writer is not None and self._writer.count >= _PIECE:
            self._finish_part()

    def taken(self) -> list[pa.Table]:
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
        if self._writer is None:
            return self.output.rows
        if self._writer.count or not self._parts:
            self._finish_part()
        return pa.concat_tables(self._parts)


class BatchOutput:
    """Rows that a function returned, or gave to an output by its name. The first output is the main one."""

    __slots__ = ("_all", "_files", "output", "outputs")

    def __init__(self, schemas: Mapping[str, OutputSchema | None], files: OutputFiles | None = None) -> None:
        #: Where rows go as they come; None: they stay here.
        self._files = files
        self._all = {
            name: _OutputRows(f"output {name!r}" if len(schemas) > 1 else None, schema)
            for name, schema in schemas.items()
        }
        self.outputs = {name: collected.output for name, collected in self._all.items()}
        #: That of the main output.
        self.output: Output = next(iter(self.outputs.values()))

    def add(self, rows: Iterable[object] | None) -> None:
        """Add what a call gave; a generator runs to its end here."""
        self.output.take(None if rows is None else _checked_iterable(rows))
        self.settle()

    def settle(self) -> None:
        """Convert waiting rows to Arrow, if they are many."""
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

    def _named(self, name: object) -> _OutputRows:
        collected = self._all.get(name) if isinstance(name, str) else None
        if collected is None:
            raise no_output(name, self._all)
        return collected

    def add_rows_as_they_are(self, name: str, rows: pa.Table) -> None:
        """Give rows that came in to an output, which takes the columns that its schema names."""
        collected = self._named(name)
        collected.add_table(rows if collected.schema is None else rows.select(collected.schema.arrow.names))

    def _add_to(self, collected: _OutputRows, given: object) -> None:
        if isinstance(given, pa.RecordBatch):
            collected.add_table(pa.Table.from_batches([given]))
        elif isinstance(given, pa.Table):
            collected.add_table(given)
        elif given is not None:
            for each in _iterated(given):
                self._add_to(collected, each)

    def result(self) -> Result:
        return {name: collected.result() for name, collected in self._all.items()}


def _checked_iterable(given: object) -> Iterable[object]:
    return _iterable(given, dict, "yield rows, or return a list of them")


def _iterated(given: object) -> Iterable[object]:
    hint = "return a pyarrow RecordBatch, several of them, a dict of them by output, or None"
    return _iterable(given, Mapping, hint)


def _iterable(given: object, refused: type, hint: str) -> Iterable[object]:
    if isinstance(given, (str, bytes, refused)) or not isinstance(given, Iterable):
        raise SerializationTypeError(
            f"the function gave a {type(given).__name__}", code="SERIALIZATION.OUTPUT", hint=hint
        )
    return given


#: Where the schema of a file says which partition it is.
_MEMBER = b"statebackend.partition"
#: And which types the columns have that name it, which readers guess.
_TYPES = b"statebackend.partition_types"
#: Hive's name for null; and the empty text, which a folder cannot be named after.
_NULL = "__HIVE_DEFAULT_PARTITION__"
#: Characters that a folder's name must escape, for Spark.
_ESCAPED = {chr(code) for code in range(0x20)} | set("\"#%'*/:=?\\\x7f{[]^")


def names_partitions(kind: pa.DataType) -> bool:
    """Return True if the values of a type have one name each, which readers take for the same value.

    >>> names_partitions(pa.date32()), names_partitions(pa.float64())
    (True, False)
    """
    checks = (pa.types.is_integer, pa.types.is_string, pa.types.is_boolean, pa.types.is_date32)
    return any(check(kind) for check in checks)


def partitioned(table: pa.Table, columns: Sequence[str]) -> list[tuple[str, pa.Table]]:
    """The partitions of a table, each with its rows in their order, without the columns. O(bytes), and a sort.

    The schema of each says which partition it is, see `partition_in`. A column is joined into one array, so a table of
    more than one row has to be smaller than 2 GiB.
    """
    numbers = np.zeros(table.num_rows, np.int64)
    for name in columns:
        encoded = pc.dictionary_encode(pa.concat_arrays(table[name].chunks), null_encoding="encode")
        # Both are less than the number of rows, so the products fit.
        joined = numbers * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        numbers = np.unique(joined, return_inverse=True)[1]
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    ends = [*starts[1:].tolist(), table.num_rows]
    rows = table.drop_columns(list(columns)).take(order)
    heads = [table[name].take(order[starts]).to_pylist() for name in columns]
    types = json.dumps({name: str(table.schema.field(name).type) for name in columns}).encode()
    made: dict[str, list[pa.Table]] = {}
    for at, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
        folders = (_named(name, head[at]) for name, head in zip(columns, heads, strict=True))
        # An empty text and null are one folder.
        made.setdefault("/".join(folders), []).append(rows.slice(start, end - start))
    return [
        (name, pa.concat_tables(parts).replace_schema_metadata({_MEMBER: name.encode(), _TYPES: types}))
        for name, parts in sorted(made.items())
    ]


def partition_in(schema: pa.Schema) -> str:
    """The partition that the schema of a file names: folders with slashes; empty if there is none."""
    return str((schema.metadata or {}).get(_MEMBER, b""), "utf-8")


def columns_in(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The types of the columns of a file by their names, with those that name its partition.

    >>> [(_, rows)] = partitioned(pa.table({"day": ["mon"], "n": [1]}), ["day"])
    >>> columns_in(rows.schema)
    {'n': DataType(int64), 'day': DataType(string)}
    """
    types = json.loads((schema.metadata or {}).get(_TYPES, b"{}"))
    named = {name: pa.type_for_alias(kind) for name, kind in types.items()}
    return {**{field.name: field.type for field in schema}, **named}


def _named(name: str, value: object) -> str:
    """
    >>> _named("a b", "x/y"), _named("ok", True), _named("day", None)
    ('a b=x%2Fy', 'ok=true', 'day=__HIVE_DEFAULT_PARTITION__')
    """
    if value is None or value == "":
        text = _NULL
    else:
        text = folder_of(str(value).lower() if isinstance(value, bool) else str(value))
    return f"{folder_of(name)}={text}"


def folder_of(text: str) -> str:
    """A text as the name of a folder has it.

    >>> folder_of("50%")
    '50%25'
    """
    return "".join(f"%{ord(each):02X}" if each in _ESCAPED else each for each in text)
