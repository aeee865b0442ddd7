"""State as a data source of Spark, ``spark.read.format("statebackend")``, with the names of Spark's own source.

``spark.readStream`` streams the change feed. Spark makes the source in Python workers of the driver's machine and reads
it in those of the executors, so all need this library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from statebackend import tools
from statebackend.checkpoint import Checkpoint, CheckpointReader, CheckpointStore
from statebackend.checkpoint.keyed.state_source import Selection, selection_of
from statebackend.checkpoint.store.log import LogState
from statebackend.errors import UsageError, usage
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.tools.sources import CheckpointSource, source_of
from statebackend.tools.state_rows import Namespaces, left_rows, namespaces_of
from statebackend.tools.tables import empty_table
from statebackend.types import RowType

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "statebackend"
_OPTIONS = (
    "path",
    "batchId",
    "stateVarName",
    "readRegisteredTimers",
    "flattenCollectionTypes",
    "readChangeFeed",
    "changeStartBatchId",
    "changeEndBatchId",
    "keys",
)
#: Partitions of a scan, each of a range of key groups.
_PARTITIONS = 8
#: Spark's names of the columns of a state, by its kind; the others have ``value``.
_VALUES = {"list": "list_element", "map": "user_map_value"}


class StateDataSource(DataSource):  # type: ignore[misc, unused-ignore]
    """The state of a store, or its changes. See `statebackend.spark.register`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return from_arrow_schema(_Scan(self.options).schema)

    def reader(self, schema: StructType) -> _Reader:
        return _Reader(_Scan(self.options), schema)

    def streamReader(self, schema: StructType) -> _StreamReader:
        if not hasattr(DataSourceStreamReader, "getDefaultReadLimit"):
            raise usage.option("readStream needs Spark 4.2", hint="use spark.read")
        scan = _Scan(self.options)
        if not scan.is_feed:
            raise usage.option(
                "readStream streams the change feed only", hint='write .option("readChangeFeed", "true")'
            )
        return _StreamReader(scan, schema)


class _Reader(DataSourceReader):  # type: ignore[misc, unused-ignore]
    def __init__(self, scan: _Scan, schema: StructType) -> None:
        self._scan = scan
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(each) for each in self._scan.partitions()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        at, groups = partition.value
        yield from _as_batches(self._scan.read(groups), at, self._schema)


def _as_batches(tables: Iterable[pa.Table], partition: int, schema: StructType) -> Iterator[pa.RecordBatch]:
    target = to_arrow_schema(schema, timezone="UTC")
    for table in tables:
        numbers = pa.repeat(pa.scalar(partition, pa.int32()), table.num_rows)
        yield from table.append_column("partition_id", numbers).cast(target).to_batches()


class _StreamReader(DataSourceStreamReader):  # type: ignore[misc, unused-ignore]
    """The change feed as a stream. An offset has the newest batch that was read, and the store's incarnation."""

    def __init__(self, scan: _Scan, schema: StructType) -> None:
        self._scan = scan
        self._schema = schema

    def initialOffset(self) -> dict[str, Any]:
        return {"incarnation": self._scan.log_state().incarnation, "batch": self._scan.since()}

    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, Any]:
        return {**start, "batch": self._scan.retained(start)[-1]}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition((start, end))] if start != end and self._scan.retained(start, end) else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from _as_batches(self._scan.changes_between(*partition.value), 0, self._schema)


class FilteringDataSource(StateDataSource):
    """The same for sessions that push filters down: in others, Spark refuses a reader that takes filters."""

    def reader(self, schema: StructType) -> _FilteringReader:
        return _FilteringReader(_Scan(self.options), schema)


class _FilteringReader(_Reader):
    def pushFilters(self, filters: list[Any]) -> Iterator[Any]:
        """Read only the keys of a filter on the key's one field. Spark applies all filters again."""
        self._scan = self._scan.of_filters(filters)
        yield from filters


class _Scan:
    """What the options ask for. It opens the store where it is used, and pickles as the options."""

    def __init__(self, options: Mapping[str, str], keys: Sequence[Any] | None = None) -> None:
        self._options = {name: options.get(name) for name in _OPTIONS}
        self._keys = json.loads(self._options["keys"]) if self._options["keys"] and keys is None else keys
        if not self._options["path"]:
            raise usage.option(
                "the source of state needs a path",
                hint='write .load("state of the query"), or .option("path", ...)',
            )
        #: Resolved once, so that all partitions read the same checkpoint.
        self._id = self._number("batchId")
        if self._id is None:
            self._id = self._reader.open_latest().id

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_keys": self._keys, "_id": self._id}

    def _number(self, name: str) -> int | None:
        given = self._options[name]
        try:
            return None if given is None else int(given)
        except ValueError:
            raise usage.option(f"unknown {name} {given!r}; expected the number of a batch") from None

    @property
    def is_feed(self) -> bool:
        return self._is_on("readChangeFeed")

    def _is_on(self, name: str, default: bool = False) -> bool:
        given = str(self._options[name] or default).lower()
        if given not in ("true", "false"):
            raise usage.option(f"unknown {name} {given!r}; expected true or false")
        return given == "true"

    @property
    def _reader(self) -> CheckpointReader:
        return CheckpointReader(str(self._options["path"]))

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        assert self._id is not None
        return self._reader.open(self._id)

    @cached_property
    def _source(self) -> CheckpointSource:
        source = source_of(self._checkpoint)
        assert isinstance(source, CheckpointSource)
        return source

    @cached_property
    def _name(self) -> str:
        known = [name for name, each in self._source.states().items() if not each.is_reserved]
        given = self._options["stateVarName"]
        if given is None and len(known) == 1:
            return known[0]
        if given not in known:
            raise UsageError(
                f"unknown stateVarName {given!r}; expected a keyed state",
                code="USAGE.NO_STATE",
                detail=self._source.where,
                hint=f"there are: {', '.join(known) or 'none'}",
            )
        return given

    # --- columns ---

    @property
    def _key_names(self) -> list[str]:
        key_type = self._source.key_type
        if isinstance(key_type, RowType):
            return list(key_type.names)
        return list(BatchRecord.of(self._checkpoint.manifest).key or ("key",))[:1]

    def _key(self, keys: pa.Array) -> pa.Array:
        """Keys as a struct of the key's columns, as Spark shows them."""
        if isinstance(self._source.key_type, RowType):
            return keys
        return pa.StructArray.from_arrays([keys], self._key_names)

    @property
    def schema(self) -> pa.Schema:
        """The columns. Reads no rows, but the namespaces of a state that has them."""
        empty = next(iter(self._empty()))
        return empty.append_column("partition_id", pa.array([], pa.int32())).schema

    def _empty(self) -> Iterator[pa.Table]:
        config = None if self._source.key_type is None else self._source.key_type.config()
        if self._is_on("readRegisteredTimers"):
            yield from self._timers(0)
        elif self.is_feed:
            rows = empty_table(self._source.states()[self._name].to_json(), config, self._source.where)
            yield self._as_feed(rows.append_column("old_value", rows["value"]), [], [])
        else:
            state = self._source.states()[self._name].to_json()
            yield self._as_state(empty_table(state, config, self._source.where))

    # --- rows ---

    def of_filters(self, filters: list[Any]) -> _Scan:
        """The scan of the keys to which filters limit it."""
        names = self._key_names
        if self._keys is not None or len(names) != 1:
            return self
        for each in filters:
            kind = type(each).__name__
            if getattr(each, "attribute", None) == ("key", names[0]) and kind in ("EqualTo", "In"):
                keys = list(each.value) if kind == "In" else [each.value]
                return _Scan({**self._given, "batchId": str(self._id)}, keys)
        return self

    @property
    def _given(self) -> dict[str, str]:
        return {name: value for name, value in self._options.items() if value is not None}

    def partitions(self) -> list[tuple[int, list[int]]]:
        """The number and the key groups of each partition."""
        is_whole = self._is_on("readRegisteredTimers") or self.is_feed
        groups = np.arange(self._source.max_parallelism or 1)
        selected = self._selection().key_groups
        if selected is not None:
            groups = selected
        parts = np.array_split(groups, 1 if is_whole else min(_PARTITIONS, max(len(groups), 1)))
        return [(at, part.tolist()) for at, part in enumerate(parts)]

    def _selection(self) -> Selection:
        source = self._source
        if self._keys is None:
            return Selection()
        return selection_of(self._keys, source.key_type, source.max_parallelism, source.where)

    def read(self, groups: list[int]) -> Iterator[pa.Table]:
        if self._is_on("readRegisteredTimers"):
            yield from self._timers(None)
        elif self.is_feed:
            yield from self._changes()
        else:
            yield from self._rows(groups)

    def _rows(self, groups: list[int]) -> Iterator[pa.Table]:
        state = self._source.states()[self._name]
        bound = state.expired_before(self._source.now, self._source.watermark)
        selection = Selection(keys=self._selection().keys, key_groups=np.array(groups, np.int64))
        for batch in left_rows(self._source, state, selection, bound):
            yield self._as_state(_table(batch))

    def _as_state(self, rows: pa.Table) -> pa.Table:
        kind = self._source.states()[self._name].kind
        value, columns = rows["value"].combine_chunks(), {"key": self._key(rows["key"].combine_chunks())}
        if kind == "map":
            columns["user_map_key"] = _struct(rows["map_key"].combine_chunks(), "key")
        if kind == "list" and not self._is_on("flattenCollectionTypes", True):
            columns["list_value"] = value
        elif kind == "list":
            columns["key"] = columns["key"].take(pc.list_parent_indices(value))
            columns["list_element"] = _struct(pc.list_flatten(value), "value")
        else:
            columns[_VALUES.get(kind, "value")] = _struct(value, "value")
        namespaces = self._namespaces
        if namespaces is not None and not (kind == "list" and "list_element" in columns):
            columns["namespace"] = namespaces.shown(rows)
        return pa.table(columns)

    @cached_property
    def _namespaces(self) -> Namespaces | None:
        return namespaces_of(self._source, [self._name])

    def _timers(self, most: int | None) -> Iterator[pa.Table]:
        rows = tools.timers(self._checkpoint, keys=self._keys)
        names = [each for each in rows.schema.names if each not in ("domain", "namespace", "time")]
        for table in [rows.head(0)] if most == 0 else map(_table, rows.to_batches()):
            fields = [table[name].combine_chunks() for name in names]
            key = pa.StructArray.from_arrays(fields, names if len(names) > 1 else self._key_names)
            yield pa.table({"key": key, "expiration_timestamp_ms": table["time"], "domain": table["domain"]})

    def since(self) -> int:
        """The checkpoint before the first changes of the feed."""
        start, ids = self._number("changeStartBatchId"), self._reader.checkpoints()
        before = [each for each in ids if start is None or each < start]
        if not before:
            raise UsageError(
                f"cannot read the changes of batch {start}: the store has no checkpoint before it",
                code="USAGE.NO_CHECKPOINT",
                detail=self._source.where,
                hint=f"give a changeStartBatchId above {min(ids)}",
            )
        return min(before) if start is None else max(before)

    def _changes(self) -> Iterator[pa.Table]:
        yield self._changes_of(self.since(), self._number("changeEndBatchId"))

    def _changes_of(self, since: int, until: int | None) -> pa.Table:
        rows = tools.changes(self._reader, self._name, since=since, until=until).to_table()
        names = self._key_names if isinstance(self._source.key_type, RowType) else ["key"]
        keys = [rows[name].combine_chunks() for name in names]
        key = keys[0] if names == ["key"] else pa.StructArray.from_arrays(keys, names)
        kept = rows.drop_columns(names).append_column("key", key)
        types = pc.if_else(pc.equal(rows["change_type"], "delete"), "delete", "update")
        return self._as_feed(kept, rows["batch_id"], types)

    def log_state(self) -> LogState:
        state = CheckpointStore(str(self._options["path"])).log_state()
        assert state is not None  # a checkpoint was opened
        return state

    def retained(self, *offsets: dict[str, Any]) -> list[int]:
        """The retained batches, if the stream of these offsets can go on."""
        state = self.log_state()
        ids = [each.checkpoint_id for each in state.kept]
        for each in offsets:
            if each["incarnation"] != state.incarnation:
                raise UsageError(
                    f"the stream is at batch {each['batch']} of a store that was rewound or reset since",
                    code="CHANGES.REWOUND",
                    detail=self._options["path"],
                    hint="start a new stream with another checkpointLocation; the changes of old batches may not hold",
                )
            if each["batch"] not in ids:
                raise UsageError(
                    f"the changes after batch {each['batch']} are no longer retained",
                    code="CHANGES.GONE",
                    detail=f"{self._options['path']}; there are {', '.join(map(str, ids)) or 'none'}",
                    hint="start a new stream with another checkpointLocation, and let the store retain more",
                )
        return ids

    def changes_between(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[pa.Table]:
        """The changes from one offset of a stream to another."""
        self.retained(start, end)
        scan = _Scan({**self._given, "batchId": str(end["batch"])}, self._keys)
        table = scan._changes_of(start["batch"], end["batch"])
        self.retained(start, end)  # no rewind came meanwhile
        yield table

    def _as_feed(self, rows: pa.Table, batches: Any, types: Any) -> pa.Table:
        """Changes with Spark's columns and its two types of change."""
        columns = {
            "batch_id": _array(batches, pa.int64()),
            "change_type": _array(types, pa.string()),
            "key": self._key(rows["key"].combine_chunks()),
        }
        if "map_key" in rows.schema.names:
            columns["user_map_key"] = _struct(rows["map_key"].combine_chunks(), "key")
        kind = self._source.states()[self._name].kind
        value = rows["value"].combine_chunks()
        name = "list_value" if kind == "list" else _VALUES.get(kind, "value")
        columns[name] = value if kind == "list" else _struct(value, "value")
        return pa.table(columns)


def _table(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def _array(values: Any, kind: pa.DataType) -> Any:
    return pa.array(values, kind) if isinstance(values, list) else values


def _struct(column: pa.Array, field: str) -> pa.Array:
    """A column as a struct, as Spark shows it."""
    if pa.types.is_struct(column.type):
        return column
    return pa.StructArray.from_arrays([column], [field], mask=column.is_null())
