"""Keyed state in savepoints: from the rows of a moment to Parquet, and back to rows of key groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.checkpoint.format import COLUMNS, GroupedBatch, Section
from statebackend.checkpoint.keyed.compaction import applied
from statebackend.checkpoint.keyed.description import StateDescription, check_key_type
from statebackend.checkpoint.keyed.state_restore import PART, RestoredState, RestoredStates, add_state
from statebackend.checkpoint.store.savepoint_folder import (
    Savepoint,
    SavepointPart,
    SavepointState,
    reading_part,
)
from statebackend.checkpoint.store.sealed import JsonObject, Malformed, groups_json, groups_of, integer
from statebackend.errors import CorruptCheckpointError
from statebackend.keys import (
    MAX_PARALLELISM,
    KeyGroupRange,
    TimeWindow,
    encode_namespace,
    key_encoder,
    readable_namespaces,
)
from statebackend.types import Type


def grouping(key_type: Type, max_parallelism: int) -> Callable[[pa.Array], NDArray[np.uint16]]:
    """Return the function from keys of a type to their key groups, O(n). Loads the core, which the module does not."""
    from statebackend._core.key_groups import HashPlan
    from statebackend.columns.nested_columns import encoded_keys

    encoder = key_encoder(key_type)
    plan = HashPlan(encoder.hash_plan)

    def found(keys: pa.Array) -> NDArray[np.uint16]:
        groups: NDArray[np.uint16] = plan.key_groups(encoded_keys(encoder, keys), max_parallelism)
        return groups

    return found


_BATCH_ROWS = 65_536
#: If namespaces are shown as text, this column holds their bytes.
_EXACT = "namespace_bytes"


# --- writing ---


def write_savepoint(
    savepoint: Savepoint,
    key_type: Type,
    max_parallelism: int,
    key_groups: KeyGroupRange,
    times: Mapping[str, int | None],
    states: Iterable[tuple[StateDescription, Section | None]],
) -> None:
    """Write the keyed state of an instance. Sections may hold changes; only the rows that remain are written.
    Memory: one whole state at a time if the state has namespaces or is not declared.
    """
    with savepoint.write_part(*keyed_part(key_type.config(), max_parallelism, key_groups, times)) as part:
        for description, section in states:
            schema, batches = (None, ()) if section is None else _parquet_rows(description, section)
            part.write_state(description.to_json(), batches, schema)


def keyed_part(
    key_type: JsonObject, max_parallelism: int, key_groups: KeyGroupRange, times: Mapping[str, int | None]
) -> tuple[str, str, JsonObject]:
    """The part of an instance as `Savepoint.write_part` takes it; ``key_type`` is the configuration of the type."""
    described: JsonObject = {
        "key_type": key_type,
        "max_parallelism": max_parallelism,
        "key_groups": groups_json(key_groups),
        **times,
    }
    return PART, f"{key_groups.start}-{key_groups.end}", described


def _parquet_rows(
    description: StateDescription, section: Section
) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    if not {"op", "namespace"} & set(section.schema.names):
        return section.schema, (rows.batch for rows in section.batches)
    table = pa.Table.from_batches([rows.batch for rows in section.batches], section.schema)
    if "op" in table.schema.names:
        table = applied(description.kind, [table])
    if "namespace" in table.schema.names:
        table = _with_columns(table, namespace_columns(table["namespace"]))
    return table.schema, table.to_batches(max_chunksize=_BATCH_ROWS)


def _with_columns(table: pa.Table, namespaces: list[tuple[str, pa.Array]]) -> pa.Table:
    columns = {name: table[name] for name in table.schema.names if name != "namespace"}
    columns |= dict(namespaces)
    order = [name for name in (*COLUMNS[:2], _EXACT, *COLUMNS[2:]) if name in columns]
    return pa.table({name: columns[name] for name in order})


class ShownNamespaces:
    """Shows the namespaces of a state that is written piece by piece: the columns of all pieces have the same types."""

    def __init__(self, distinct: pa.Array) -> None:
        self._distinct = distinct
        self._columns = namespace_columns(distinct)

    def of(self, table: pa.Table) -> pa.Table:
        """A table with these columns in place of encoded namespaces, each of them one of the distinct ones."""
        at = _combined(pc.index_in(table["namespace"], value_set=self._distinct))
        return _with_columns(table, [(name, column.take(at)) for name, column in self._columns])


def namespace_columns(encoded: pa.Array | pa.ChunkedArray) -> list[tuple[str, pa.Array]]:
    """Encoded namespaces as one column. If that is text for several sorts, another column holds their bytes."""
    shown = readable_namespaces(encoded)
    if shown.null_count == len(shown):
        return []
    columns = [("namespace", shown)]
    if encoded_namespaces({"namespace": shown}) != _combined(encoded):
        columns.append((_EXACT, _combined(encoded)))
    return columns


def _combined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def encoded_namespaces(columns: Mapping[str, pa.Array]) -> pa.Array:
    """The encoded namespaces of such columns; encodes each distinct one once."""
    if _EXACT in columns:
        return columns[_EXACT]
    shown = columns["namespace"]
    if pa.types.is_struct(shown.type):
        bounds = [each.cast(pa.string()) for each in shown.flatten()]
        return _encoded(pc.binary_join_element_wise(*bounds, ","), _window_of)
    return _encoded(shown, lambda namespace: namespace)


def _window_of(text: str) -> TimeWindow:
    start, end = text.split(",")
    return TimeWindow(int(start), int(end))


def _encoded(shown: pa.Array, namespace_of: Callable[[str], object]) -> pa.Array:
    numbered = pc.dictionary_encode(shown)
    distinct = [encode_namespace(namespace_of(each)) for each in numbered.dictionary.to_pylist()]
    return pc.fill_null(pa.array(distinct, pa.binary()).take(numbered.indices), b"")


# --- reading ---


def read_savepoint(
    savepoint: Savepoint, key_type: Type, max_parallelism: int, key_groups: KeyGroupRange
) -> RestoredStates:
    """The states of some key groups. The number of key groups may differ from the savepoint's.

    Skips the files of instances that share no key group with these. Checks every other file as a whole; rows are read
    when they are asked for.
    """
    savepoint.check_exists()
    states: dict[str, RestoredState] = {}
    for part, own in keyed_parts(savepoint):
        check_key_type(part.described.get("key_type"), key_type, "savepoint", part.name)
        same_groups = part.described["max_parallelism"] == max_parallelism
        for stored in part.states:
            known = add_state(states, StateDescription.read(stored.described, part.name), "savepoint")
            if stored.rows and (not same_groups or key_groups.intersection(own) is not None):
                with savepoint.open_state(stored):
                    pass  # a damaged file is found before anything is restored
                known.rows.add(partial(_rows_of, savepoint, stored, key_type, max_parallelism, key_groups))
    return RestoredStates(states, savepoint.now, savepoint.watermark)


def keyed_parts(savepoint: Savepoint) -> list[tuple[SavepointPart, KeyGroupRange]]:
    """The part that each instance has written, with its key groups; together they have every key group once."""
    parts = savepoint.parts(PART)
    ranges = [_range_of(part) for part in parts]
    if parts and not are_whole([part.described["max_parallelism"] for part in parts], ranges):
        raise CorruptCheckpointError(
            "the savepoint does not hold the keyed state of every key group once",
            code="CORRUPT_CHECKPOINT.INCOMPLETE",
            detail=savepoint.uri,
            hint="let every instance write its part, at the same moment",
        )
    return list(zip(parts, ranges, strict=True))


def _range_of(part: SavepointPart) -> KeyGroupRange:
    with reading_part(part.name):
        integer(part.described.get("max_parallelism"), "max_parallelism", 1, MAX_PARALLELISM)
        own = groups_of(part.described.get("key_groups"), part.name)
        if own is None:
            raise Malformed("it names no key groups")
        return own


def are_whole(max_parallelisms: Iterable[int], ranges: Iterable[KeyGroupRange]) -> bool:
    """Return True if these instances agree about the number of key groups, and each key group belongs to one."""
    numbers = set(max_parallelisms)
    served = sorted((own.start, own.end) for own in ranges)
    starts = [0, *(end + 1 for _, end in served)]
    return len(numbers) == 1 and [start for start, _ in served] == starts[:-1] and starts[-1] in numbers


def _rows_of(
    savepoint: Savepoint,
    stored: SavepointState,
    key_type: Type,
    max_parallelism: int,
    key_groups: KeyGroupRange,
) -> Iterator[GroupedBatch]:
    groups_of = grouping(key_type, max_parallelism)
    with savepoint.open_state(stored) as file:
        for batch in file.iter_batches(_BATCH_ROWS):
            groups = groups_of(batch["key"])
            own = np.flatnonzero((groups >= key_groups.start) & (groups <= key_groups.end))
            own = own[np.argsort(groups[own], kind="stable")]
            if len(own):
                rows = with_encoded_namespaces(batch).take(pa.array(own))
                yield GroupedBatch.of(rows, groups[own])


def with_encoded_namespaces(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of a savepoint with their namespaces encoded as in checkpoints."""
    if "namespace" not in batch.schema.names:
        return batch
    columns = {name: batch[name] for name in batch.schema.names}
    columns["namespace"] = encoded_namespaces(columns)
    columns.pop(_EXACT, None)
    return pa.record_batch(columns)
