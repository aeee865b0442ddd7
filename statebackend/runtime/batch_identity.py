"""The origin of a committed batch. A number is not an identity, so the manifest also records which rows the batch had.

The manifest stores it as its ``batch``. Where the engine's plan does not tell the rows, a digest does: two batches with
the same digest have the same rows, in any order. Each row has two hashes of 64 bits, and the digest is the sum of each
over all rows, modulo 2**64. A row's content is its columns, each with its name, place and type:

* The layout in Arrow plays no part: chunks, slices, dictionaries, large and view types, bytes under a null.
* A null is not a value: neither 0 nor an empty string. A struct of nulls is not a null.
* Floats are the same if their bits are: -0.0 is not 0.0. Every NaN is the same.
* A timestamp with a time zone is its instant, in any zone. One without a zone has another type.
* Lists have an order; the entries of a map have none. Decimals of one scale are the same at any precision.
* Types matter: an int of 32 bits is not one of 64. Names matter, also in struct fields. The names of list
  elements, nullability and metadata do not.

Manifests store digests, so the algorithm never changes. Digests tell batches apart; they do not resist a search
for two batches with the same one. A batch without rows has a digest of zeros, with any columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend._core import row_digest
from statebackend.checkpoint import Manifest
from statebackend.errors import CorruptCheckpointError, usage
from statebackend.functions import PlannedTimes
from statebackend.runtime.batch_progress import Json
from statebackend.runtime.batch_rows import ChunkedRows

T = TypeVar("T", bound=np.generic)
_Lanes = NDArray[np.uint64]
_Offsets = NDArray[np.signedinteger]
#: The path to a column in a table: names, places and types, from the outside in.
_Path = tuple[tuple[int, str, str], ...]

_MASK = 2**64 - 1
#: Rows are hashed in pieces of this many, whose lanes stay in the processor's cache.
_PIECE = 16_384
_NOTHING = np.empty(0, np.uint8)


def rows_digest(table: pa.Table) -> str:
    """The digest of all rows, 32 hexadecimal digits. O(bytes); needs a few hundred kilobytes next to the table."""
    columns = _Columns()
    first = second = 0
    for batch in table.to_batches(max_chunksize=_PIECE):
        lanes = _zeros(batch.num_rows)
        for place, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
            columns.add(column, (), (place, name), lanes)
        sums = row_digest.total(lanes)
        first, second = (first + sums[0]) & _MASK, (second + sums[1]) & _MASK
    return f"{first:016x}{second:016x}"


def merged_digest(digests: Iterable[str]) -> str:
    """The digest of all rows of several tables, given each digest."""
    lanes = [0, 0]
    for digest in digests:
        lanes = [(lanes[0] + int(digest[:16], 16)) & _MASK, (lanes[1] + int(digest[16:], 16)) & _MASK]
    return f"{lanes[0]:016x}{lanes[1]:016x}"


class _Columns:
    """Adds columns to the lanes of rows. Caches the hashes of each dictionary, which many pieces share."""

    def __init__(self) -> None:
        self._dictionaries: dict[_Path, tuple[pa.Array, _Lanes]] = {}

    def add(self, column: pa.Array, parents: _Path, at: tuple[int, str], lanes: _Lanes) -> None:
        """Add a column that lies below ``parents``, with its place and name."""
        if not len(column):
            return
        column = _readable(column)
        kind = column.type
        if pa.types.is_dictionary(kind):
            self._add_dictionary(column, parents, at, lanes)
            return
        tag = _tag(kind)
        path: _Path = (*parents, (*at, tag))
        if tag == "null":
            row_digest.add_nulls(*_seeds(path), lanes)
        elif tag == "struct":
            fields = _zeros(len(column))
            for place, field in enumerate(column.type):
                self.add(column.field(place), path, (place, field.name), fields)
            row_digest.add_records(fields, *_validity(column), *_seeds(path), lanes)
        elif tag in ("list", "map"):
            self._add_lists(column, path, lanes)
        elif tag in ("string", "binary") or tag.startswith(_LONG):
            _add_bytes(column, path, lanes)
        else:
            _add_numbers(column, path, lanes)

    def _add_lists(self, column: pa.Array, path: _Path, lanes: _Lanes) -> None:
        is_map = pa.types.is_map(column.type)
        offsets, held = _elements(column)
        count = len(held)
        elements = _zeros(count)
        if is_map:
            # Hash entries as records: a sum over keys and one over values would not tell which key has which value.
            entries = _zeros(count)
            for place, name in enumerate(("key", "value")):
                self.add(held.field(place), path, (place, name), entries)
            row_digest.add_records(entries, None, 0, *_seeds((*path, (2, "", "entry"))), elements)
        else:
            self.add(held, path, (0, "element"), elements)
        row_digest.add_lists(elements, offsets, not is_map, *_validity(column), *_seeds(path), lanes)

    def _add_dictionary(
        self, column: pa.DictionaryArray, parents: _Path, at: tuple[int, str], lanes: _Lanes
    ) -> None:
        dictionary, indices = column.dictionary, column.indices
        path: _Path = (*parents, (*at, _tag(_readable(dictionary).type)))
        known, distinct = self._dictionaries.get(path, (None, _zeros(0)))
        # The known one is held, so nothing else can be stored in its memory.
        if known is None or _place_of(known) != _place_of(dictionary):
            distinct = _zeros(len(dictionary))
            self.add(dictionary, parents, at, distinct)
            self._dictionaries[path] = dictionary, distinct
        places = _items(indices, 1, indices.type.to_pandas_dtype(), len(indices))
        row_digest.add_taken(
            distinct, np.ascontiguousarray(places, np.int64), *_validity(indices), *_seeds(path), lanes
        )


def _add_numbers(column: pa.Array, path: _Path, lanes: _Lanes) -> None:
    is_float = pa.types.is_floating(column.type)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    width = column.type.bit_width // 8
    data = _items(column, 1, np.dtype(f"V{width}"), len(column)).view(np.uint8)
    row_digest.add_numbers(data, width, is_float, *_validity(column), *_seeds(path), lanes)


def _add_bytes(column: pa.Array, path: _Path, lanes: _Lanes) -> None:
    kind, count = column.type, len(column)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        offsets: _Offsets = _items(column, 1, np.int32, count + 1)
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        offsets = _items(column, 1, np.int64, count + 1)
    else:
        width = kind.bit_width // 8
        offsets = (column.offset + np.arange(count + 1, dtype=np.int64)) * width
    data = column.buffers()[-1]
    held = _NOTHING if data is None else np.frombuffer(data, np.uint8)
    row_digest.add_bytes(held, offsets, *_validity(column), *_seeds(path), lanes)


# --- layouts ---


def _readable(column: pa.Array) -> pa.Array:
    """Convert a column to a layout that this module reads; most columns already have one."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _readable(column.storage)
    if pa.types.is_run_end_encoded(kind):
        return _readable(pc.run_end_decode(column))
    if kind == pa.string_view():
        return column.cast(pa.large_string())
    if kind == pa.binary_view():
        return column.cast(pa.large_binary())
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return column.cast(pa.decimal128(kind.precision, kind.scale))
    return column


def _items(column: pa.Array, which: int, kind: type[T] | np.dtype[T], count: int) -> NDArray[T]:
    """The first ``count`` items of a buffer, counted from the column's first item."""
    data = column.buffers()[which]
    if data is None or not data.size:  # all its strings are empty, or null
        return np.zeros(count, kind)
    items: NDArray[T] = np.frombuffer(data, kind, column.offset + count)
    return items[int(column.offset) :]


def _elements(column: pa.Array) -> tuple[_Offsets, pa.Array]:
    """The elements from the first list's on, and the start and end of each list, counted from any origin."""
    kind, count = column.type, len(column)
    if _is_list_view(kind):  # its lists may be in any order
        lengths = pc.fill_null(column.value_lengths(), 0).to_numpy()
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]), column.flatten()
    if pa.types.is_fixed_size_list(kind):
        offsets: _Offsets = np.arange(count + 1, dtype=np.int64) * kind.list_size
        return offsets, column.values.slice(column.offset * kind.list_size, count * kind.list_size)
    offsets = _items(column, 1, np.int64 if pa.types.is_large_list(kind) else np.int32, count + 1)
    return offsets, column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _validity(column: pa.Array) -> tuple[NDArray[np.uint8] | None, int]:
    """The validity bits (None if no value is null), and the position of the first."""
    bits = column.buffers()[0] if column.null_count else None
    return (None if bits is None else np.frombuffer(bits, np.uint8)), column.offset


def _place_of(column: pa.Array) -> tuple[int, int, list[int | None]]:
    buffers = [None if each is None else each.address for each in column.buffers()]
    return len(column), column.offset, buffers


def _zeros(rows: int) -> _Lanes:
    return np.zeros((rows, 2), np.uint64)


# --- what columns are called ---

#: Values longer than a number.
_LONG = ("decimal", "interval")


def _tag(kind: pa.DataType) -> str:
    """The type of a column as the hash uses it; all layouts of one type have the same."""
    types = pa.types
    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind):
        return f"{'int' if types.is_signed_integer(kind) else 'uint'}{kind.bit_width}"
    if types.is_floating(kind):
        return f"float{kind.bit_width}"
    if types.is_string(kind) or types.is_large_string(kind):
        return "string"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "binary"
    if types.is_timestamp(kind):
        return f"timestamp.{kind.unit}" if kind.tz is None else f"instant.{kind.unit}"
    if types.is_date(kind):
        return f"date{kind.bit_width}"
    if types.is_time(kind):
        return f"time{kind.bit_width}.{kind.unit}"
    if types.is_duration(kind):
        return f"duration.{kind.unit}"
    if types.is_interval(kind):
        return "interval"
    if types.is_decimal128(kind):
        return f"decimal.{kind.scale}"
    if types.is_decimal256(kind):
        return f"decimal256.{kind.scale}"
    if types.is_null(kind):
        return "null"
    if types.is_struct(kind):
        return "struct"
    if types.is_map(kind):
        return "map"
    if (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or _is_list_view(kind)
    ):
        return "list"
    raise usage.column(f"rows with a column of type {kind} have no digest")


@lru_cache(maxsize=4096)
def _seeds(path: _Path) -> tuple[int, int]:
    """The seeds that make the values of a column hash differently from equal values of any other column."""
    digest = hashlib.blake2b(json.dumps(path).encode("ascii"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


#: The identity of the rows of a batch, as `plan_identity` or `rows_identity` gives it.
Identity: TypeAlias = dict[str, Json]

_TEXTS = ("incarnation", "stream", "location", "time")
#: The members of an identity of each kind.
_MEMBERS = {"plan": {"kind", "time", "offsets"}, "rows": {"kind", "rows", "digest"}}


class BatchSource(NamedTuple):
    """A batch to come: how to get its rows, and the facts known before."""

    #: All at once, or a piece at a time.
    read: Callable[[], pa.Table | ChunkedRows]
    #: The engine's plan for it, as `plan_identity` gives it; None if the plan cannot be read.
    planned: Identity | None = None
    #: Makes the engine compute the batch and throw the rows away, so that state in the engine's own plan moves on;
    #: `read` does so too.
    execute: Callable[[], None] | None = None
    #: Where an execution that does not bring the rows here takes them from: the engine's batch.
    source: Any = None
    #: Finds the identity of the batch by its rows without bringing them here; None: by those that `read` gives.
    identify: Callable[[], Identity] | None = None
    #: Waits until the engine's plan is durable, before the commit; None: nothing to wait for.
    synced: Callable[[], None] | None = None
    #: The times that the engine has planned for it, if the function uses them.
    times: PlannedTimes | None = None

    def identity_by_rows(self) -> Identity:
        """The identity of the batch by its rows; the engine computes it for that. O(bytes)."""
        return rows_identity(self.read()) if self.identify is None else self.identify()


class BatchRecord(NamedTuple):
    """The rows of a batch, the columns that keyed them, and the incarnation of the store."""

    identity: Identity | None = None
    key: tuple[str, ...] | None = None
    incarnation: str | None = None
    #: The engine's own id of the stream that planned it, which ``uid=`` does not change.
    stream: str | None = None
    #: The folder in which the engine keeps its place in the stream: Spark's checkpointLocation.
    location: str | None = None
    #: The origin of the time: ``"clock"``, or ``"rows"`` as well.
    time: str | None = None
    #: The target of the batch in the sink of each output, by the name of the output, for later searches.
    targets: dict[str, str] | None = None
    #: When rows with a time last came, by the clock, in milliseconds; None if the job does not ask.
    rows_at: int | None = None
    #: The entries of the engine's log from which it goes on after the batch, so that `rewind` can write them again.
    log: dict[str, Json] | None = None
    #: The settings of the function that a restart must not change.
    fixed: dict[str, str] | None = None

    def to_json(self) -> dict[str, object]:
        return self._asdict()

    @classmethod
    def of(cls, manifest: Manifest) -> BatchRecord:
        """Read the origin from a manifest; a commit that is not a query's has none."""
        found = manifest.batch
        if not _is_understood(found):
            raise CorruptCheckpointError(
                "what a manifest says of its batch is of a version that this one does not know",
                code="CORRUPT_CHECKPOINT.VERSION",
                detail="batch",
                hint="use the version of the library that wrote it",
            )
        known = {name: found[name] for name in cls._fields if found.get(name) is not None}
        if "key" in known:
            known["key"] = tuple(known["key"])
        return cls(**{"incarnation": manifest.incarnation, **known})


def _is_understood(found: object) -> bool:
    if not isinstance(found, dict):
        return False
    key, identity = found.get("key"), found.get("identity")
    return (
        all(isinstance(found.get(name), (str, type(None))) for name in _TEXTS)
        and all(isinstance(found.get(name), (dict, type(None))) for name in ("targets", "log", "fixed"))
        and type(found.get("rows_at")) in (int, type(None))
        and (key is None or (isinstance(key, (list, tuple)) and all(isinstance(each, str) for each in key)))
        and (
            identity is None
            or (isinstance(identity, dict) and _MEMBERS.get(str(identity.get("kind"))) == identity.keys())
        )
    )


def plan_identity(time: int, offsets: list[Json]) -> Identity:
    """The identity of a batch by its engine's plan: the end of each source, and the time of that decision.

    The time distinguishes plans with equal offsets: Spark's file source only numbers its own entries log.
    """
    return {"kind": "plan", "time": time, "offsets": offsets}


def rows_identity(rows: pa.Table | ChunkedRows) -> Identity:
    """The identity of a batch by its rows, in any order and in any pieces; O(bytes)."""
    count, digests = 0, []
    for piece in [rows] if isinstance(rows, pa.Table) else rows.pieces():
        count += piece.num_rows
        digests.append(rows_digest(piece))
    return {"kind": "rows", "rows": count, "digest": merged_digest(digests)}
