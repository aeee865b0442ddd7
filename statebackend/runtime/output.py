"""The output of a batch as a file of its checkpoint: written once, and verified before anybody gets it.

>>> encodings(pa.schema([("n", pa.int64()), ("s", pa.struct({"x": pa.int64()})), ("s.x", pa.int64())]))
(['n'], ['s.x'])
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from statebackend.checkpoint import Checkpoint, DataWriter, StoredFile
from statebackend.errors import CorruptCheckpointError, UsageError
from statebackend.runtime.progress import Figures
from statebackend.runtime.row_writer import OutputSchema

__all__ = ["Committed", "check_deliverable", "encodings", "write_output"]

#: Rows in a row group of the output, which Spark's tasks divide among themselves.
_ROW_GROUP = 262_144


class Committed(NamedTuple):
    """A committed batch: its checkpoint, which names its output, and the facts to report about it."""

    checkpoint: Checkpoint
    progress: Figures
    #: True if it was committed before, and has not run now.
    is_replay: bool
    #: The incarnation of its store when it was committed: see `CheckpointStore.incarnation`.
    incarnation: str

    @property
    def output(self) -> list[StoredFile]:
        """The files of its output, in order."""
        return [file for files in self.checkpoint.manifest.outputs.values() for file in files]

    def verify_output(self) -> None:
        """Raise `CorruptCheckpointError` unless the output is as it was written; O(bytes)."""
        try:
            self.checkpoint.verify(self.output)
        except CorruptCheckpointError as error:
            error.hint = (
                "bring the file back from a copy of the store; or take the batch back with sb.tools.rewind, so that it "
                "runs anew"
            )
            raise

    def read_output(self, file: StoredFile) -> pa.Table:
        """Read the rows of a file of the output; `CorruptCheckpointError` if they are not as they were written."""
        with self.checkpoint.open_file(file) as source:
            try:
                return pq.ParquetFile(source, page_checksum_verification=True).read()
            except (pa.ArrowException, OSError) as error:
                raise CorruptCheckpointError("the output cannot be read", detail=file.name) from error


def write_output(writer: DataWriter, table: pa.Table) -> StoredFile:
    """Write the rows of a batch as one file, durably.

    Pages carry their own checksums, so that later readers can still find a flipped bit.
    """
    numbers, others = encodings(table.schema)
    with writer.create("output", suffix=".parquet") as file:
        pq.write_table(
            table,
            file,
            row_group_size=_ROW_GROUP,
            compression="snappy",
            use_dictionary=others,
            column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
            write_page_checksum=True,
        )
        return file.finish()


def check_deliverable(committed: Committed, schema: OutputSchema | None, has_sink: bool) -> None:
    """Raise unless a job with this schema, and perhaps a sink, can deliver what was committed before.

    Reads the whole output: the file names the schema it was written with, and is checked before that is believed.
    """
    if not committed.output:
        return
    if not committed.checkpoint.has_outputs:
        batch_id = committed.checkpoint.id
        raise UsageError(
            "the newest batch has output that is still to be delivered, and that has been dropped",
            code="USAGE.NO_CHECKPOINT",
            detail=f"batch {batch_id}: outputs go earlier than states",
            hint=f"take the batch back with sb.tools.rewind(store, to={batch_id - 1}), so that it runs anew",
        )
    batch = f"batch {committed.checkpoint.id}, {committed.progress.get('numOutputRows')} rows"
    if schema is None or not has_sink:
        raise UsageError(
            "the newest batch has output that is still to be delivered, and there is no sink for it",
            code="USAGE.NO_SINK",
            detail=batch,
            hint="run the query with its sink until this batch is done, then take the sink away",
        )
    committed.verify_output()
    for file in committed.output:
        with committed.checkpoint.open_file(file) as source:
            try:
                written = pq.read_schema(source)
            except (pa.ArrowException, OSError) as error:
                raise CorruptCheckpointError(
                    "the output cannot be read, although its checksum is right", detail=file.name
                ) from error
        if not written.equals(schema.arrow):
            raise UsageError(
                "the newest batch was committed with another schema, and is still to be delivered",
                code="USAGE.OTHER_SCHEMA",
                detail=f"{batch}; committed as {', '.join(map(str, written))}; "
                f"now {', '.join(map(str, schema.arrow))}",
                hint="run the query with the old schema until this batch is done, then change it; or take the batch "
                "back with sb.tools.rewind, so that it runs anew",
            )


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
