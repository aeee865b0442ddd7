"""The sink that appends to a Delta Lake table, each batch in one transaction that says which batch it is.

The transaction has an application id, made of the incarnation of the store and the name of the output, and the number
of the batch as its version. The table keeps the newest version of each id, and of two writers that commit one version
at once refuses the second. So a batch that comes again is known, and one that is under way twice is written once.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from statebackend.checkpoint.files import PosixCalls, PosixFiles, local_path, scheme_of, without_secrets
from statebackend.errors import StateBackendError, StoreError, UsageError, usage
from statebackend.runtime.batch_progress import Figures
from statebackend.runtime.output import read_batches
from statebackend.spark.sinks.committed_sink import CommittedSink, Delivery, check_partition_by

#: The members of a commit's information that say what it wrote, ``incarnation/batch/output``, or which batch it took
#: back, ``incarnation/batch``: all outputs of it that are in the table.
_WROTE, _TOOK_BACK = "statebackend.batch", "statebackend.takenBack"
#: The member that has the sizes and checksums of the committed files, which tell two batches of one number apart.
_CONTENT = "statebackend.content"


def delta(
    table: str | os.PathLike[str],
    *,
    partition_by: str | Sequence[str] = (),
    storage_options: Mapping[str, str] | None = None,
) -> CommittedSink:
    """A sink that appends the output of each batch to a Delta Lake table, exactly once over kills and replays.

    Pass it as ``sink=``; it needs the package ``deltalake`` (``pip install deltalake``), and no Spark. The
    table is a path or an address that deltalake takes, with its ``storage_options``. If it is not there, it is made,
    with the columns of the output, partitioned by these columns. A batch without rows makes no commit. O(bytes).

    >>> delta("/data/totals", partition_by="day")
    <sink delta[/data/totals]>
    """
    return DeltaSink(table, partition_by, storage_options)


class DeltaSink(CommittedSink):
    """See `delta`."""

    def __init__(
        self,
        table: str | os.PathLike[str],
        partition_by: str | Sequence[str],
        storage_options: Mapping[str, str] | None,
    ) -> None:
        uri: object = os.fspath(table)
        if not isinstance(uri, str) or not uri:
            raise usage.address("a Delta table is given by its path or address, a str")
        self._uri = os.path.abspath(uri) if scheme_of(uri) is None else uri
        #: None in an object store, which acknowledges what is durable.
        self._path = local_path(uri)
        self._partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self._options = dict(storage_options or {}) or None

    @property
    def address(self) -> str:
        return self._uri

    @property
    def description(self) -> str:
        return f"delta[{without_secrets(self._uri)}]"

    def check(self, output: str, schema: pa.Schema, most_files: int = 1) -> None:
        _deltalake()
        check_partition_by(self.description, output, schema, self._partition_by, _names_folders)

    def prepare(self, schema: pa.Schema) -> None:
        lake = _deltalake()
        with self._asking("opening"):
            if not lake.DeltaTable.is_deltatable(self._uri, self._options):
                if self._path is not None:
                    PosixFiles(self._path).make_folder("")
                lake.DeltaTable.create(
                    self._uri,
                    schema,
                    mode="ignore",
                    partition_by=self._partition_by or None,
                    storage_options=self._options,
                )
            table = self._opened()
            if table.version() == 0:
                # Also if it existed: its maker may have been killed before it was durable.
                self._sync(0)
            self._check_columns(table, schema)
            parts = table.metadata().partition_columns
        if self._partition_by and parts != self._partition_by:
            raise UsageError(
                "the Delta table is partitioned by other columns",
                code="USAGE.OTHER_SCHEMA",
                detail=f"{self.description}; the table by {', '.join(parts) or 'none'}",
                hint="leave partition_by= out for a table that is there",
            )

    def target(self, output: str, batch_id: int, incarnation: str) -> str:
        return f"{self.description}, transaction {_application(output, incarnation)} {batch_id}"

    def deliver(self, delivery: Delivery) -> Figures:
        batch_id, incarnation = delivery.context.batch_id, delivery.context.incarnation
        lake = _deltalake()
        if not delivery.files:
            return {"numFiles": 0, "numBytes": 0, "how": "nothing"}
        with self._asking("writing to", has_rows=True):
            table = self._opened()
            if self._is_there(table, delivery):
                return {"numFiles": 0, "numBytes": 0, "how": "there"}
            self._check_columns(table, delivery.schema)  # they may have changed since the start
            properties = lake.CommitProperties(
                custom_metadata={
                    _WROTE: f"{_which(incarnation, batch_id)}/{delivery.output}",
                    _CONTENT: _content(delivery),
                },
                app_transactions=[lake.Transaction(_application(delivery.output, incarnation), batch_id)],
            )
            try:
                # By this object, so that it conflicts with any commit of the same transaction since it was opened.
                lake.write_deltalake(table, _batches(delivery), mode="append", commit_properties=properties)
            except lake.exceptions.CommitFailedError:
                if self._is_there(self._opened(), delivery):
                    return {"numFiles": 0, "numBytes": 0, "how": "there"}
                raise
            sizes = self._sync(table.version())
        figures: Figures = {"how": "written", "version": table.version()}
        return figures if sizes is None else {"numFiles": len(sizes), "numBytes": sum(sizes), **figures}

    def take_back(self, batch_id: int, incarnation: str) -> list[str]:
        lake = _deltalake()
        wanted = _which(incarnation, batch_id)
        with self._asking("taking a batch back from"):
            if not lake.DeltaTable.is_deltatable(self._uri, self._options):
                return []
            table = self._opened()
            first: int | None = None
            others: list[int] = []
            foreign: list[int] = []
            for commit, (batch, _), is_undone in _newest_first(table):
                if commit.get(_TOOK_BACK) == wanted:
                    # Older entries of it are gone; the process that undid it may have been killed before that was
                    # durable.
                    self._sync(commit["version"])
                    break
                if batch == wanted:
                    first, foreign = commit["version"], others[:]
                elif not is_undone and _TOOK_BACK not in commit:
                    others.append(commit["version"])
            if first is None:
                return []
            if foreign:
                raise UsageError(
                    "the Delta table has been written to since the batch that is to be taken back",
                    code="USAGE.TAKEN_BACK",
                    detail=f"{self.description}; the batch is version {first}; since then "
                    f"{foreign[-1]} to {foreign[0]}",
                    hint="remove its rows with DELETE, then rewind without sink=",
                )
            properties = lake.CommitProperties(custom_metadata={_TOOK_BACK: wanted})
            table.restore(first - 1, commit_properties=properties)
            self._sync(table.version())
        return [f"{self.description}, version {first}"]

    def _check_columns(self, table: Any, schema: pa.Schema) -> None:
        """Raise unless table and output have the same columns, in any order: deltalake would cast, or refuse later."""
        there = pa.schema(table.schema().to_arrow())
        ours = pa.schema(_deltalake().Schema.from_arrow(schema).to_arrow())
        differing = [
            f"{name} is {_type(there, name)} in the table and {_type(ours, name)} in the output"
            for name in dict.fromkeys([*ours.names, *there.names])
            if _type(there, name) != _type(ours, name)
        ]
        if differing:
            raise UsageError(
                "the Delta table has other columns than the output",
                code="USAGE.OTHER_SCHEMA",
                detail=f"{self.description}; {'; '.join(differing)}",
                hint="give both the same columns and types, by schema= or by altering the table; to write some of a "
                "table's columns, use a function that writes with Spark",
            )

    def _is_there(self, table: Any, delivery: Delivery) -> bool:
        """Return True if the table has the output of a batch, durably: its writer may have been killed before."""
        batch_id, incarnation = delivery.context.batch_id, delivery.context.incarnation
        if not _has(table, _application(delivery.output, incarnation), batch_id):
            return False
        wanted = _which(incarnation, batch_id)
        newest = table.version()
        for commit, (batch, output), _ in _newest_first(table):
            if commit.get(_TOOK_BACK) == wanted:
                return False  # a restored table keeps its transactions
            if batch == wanted and output in ("", delivery.output):
                if commit["version"] > newest:
                    return False
                if commit.get(_CONTENT) not in (None, _content(delivery)):
                    raise self._has_another(commit["version"])
                self._sync(commit["version"])
                return True
            if commit.get("operation") == "RESTORE" and commit["version"] <= newest:
                newest = int(commit.get("operationParameters", {}).get("version") or newest)
        return True  # in a part of the history that the table has dropped

    def _has_another(self, version: int) -> UsageError:
        return UsageError(
            "the Delta table has this batch with other rows",
            code="USAGE.PUBLISHED",
            detail=f"{self.description}, version {version}",
            hint="the store was brought back from an older copy, and the table was not: restore the table to version "
            f"{version - 1}, and start the query again",
        )

    def _opened(self) -> Any:
        return _deltalake().DeltaTable(self._uri, storage_options=self._options)

    def _sync(self, version: int) -> list[int] | None:
        """Make a commit durable, files first, where they are on a local path; return the sizes of the files."""
        if self._path is None:
            return None
        calls, log = PosixCalls(), f"{self._path}/_delta_log"
        entry = f"{log}/{version:020}.json"
        sizes, folders = [], {log, self._path}
        for line in calls.read(entry).splitlines():
            added = json.loads(line).get("add")
            if added is not None:
                path = f"{self._path}/{unquote(added['path'])}"
                with suppress(FileNotFoundError):  # another commit has replaced it, and it is gone
                    calls.sync_file(path)
                while (path := os.path.dirname(path)) not in folders:
                    folders.add(path)
                sizes.append(added["size"])
        calls.sync_file(entry)
        for folder in sorted(folders, reverse=True):
            with suppress(FileNotFoundError):
                calls.sync_folder(folder)
        return sizes

    @contextmanager
    def _asking(self, doing: str, *, has_rows: bool = False) -> Iterator[None]:
        lake = _deltalake()
        try:
            yield
        except StateBackendError:
            raise
        except Exception as error:  # noqa: BLE001 - deltalake raises some errors as Exception itself
            # An error without its own class may quote rows; where there are rows, it goes no further.
            is_named = isinstance(error, (lake.exceptions.DeltaError, OSError))
            is_shown = not has_rows or (is_named and type(error) is not lake.exceptions.DeltaError)
            more = (
                "the error that this one came from says more"
                if is_shown
                else "its text may quote rows, and is not shown: see if the rows keep the table's constraints, and "
                "have no null where the table allows none"
            )
            raise StoreError(
                f"{doing} the Delta table failed: {type(error).__name__}",
                code="STORE.DELTA",
                detail=self.description,
                hint=f"{more}; a batch that is committed is delivered when the query is started again",
            ) from (error if is_shown else None)


def _names_folders(kind: pa.DataType) -> bool:
    """Return True if values of this type come back from the name of a partition; deltalake changes others."""
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind))


def _application(output: str, incarnation: str) -> str:
    return f"statebackend/{incarnation}/{output}"


def _type(schema: pa.Schema, name: str) -> str:
    return str(schema.field(name).type) if name in schema.names else "missing"


def _content(delivery: Delivery) -> str:
    return " ".join(f"{file.size}-{file.checksum:08x}" for file in delivery.files)


def _which(incarnation: str, batch_id: int) -> str:
    return f"{incarnation}/{batch_id}"


def _has(table: Any, application: str, batch_id: int) -> bool:
    version = table.transaction_version(application)
    return version is not None and version >= batch_id


def _newest_first(table: Any) -> Iterator[tuple[dict[str, Any], tuple[str, str], bool]]:
    """Each commit with the batch and the output that it wrote, if any, and if the batch was undone since."""
    taken_back: set[str] = set()
    for commit in table.history():
        if _TOOK_BACK in commit:
            taken_back.add(commit[_TOOK_BACK])
        incarnation, _, rest = commit.get(_WROTE, "").partition("/")
        batch_id, _, output = rest.partition("/")
        batch = f"{incarnation}/{batch_id}"
        yield commit, (batch, output), batch in taken_back


def _batches(delivery: Delivery) -> pa.RecordBatchReader:
    """The rows, a row group at a time, in their order."""
    checkpoint, schema = delivery.committed.checkpoint, delivery.schema

    def parts() -> Iterator[pa.RecordBatch]:
        for file in delivery.files:
            with checkpoint.open_file(file) as source:
                read = pq.ParquetFile(source, page_checksum_verification=True)
                for batch in read_batches(read):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    return pa.RecordBatchReader.from_batches(schema, parts())


def _deltalake() -> Any:
    try:
        importlib.import_module("deltalake.exceptions")
        return importlib.import_module("deltalake")
    except ImportError:
        raise usage.package(
            "the Delta sink needs the package deltalake", hint="pip install deltalake"
        ) from None
