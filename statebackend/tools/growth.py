"""The growth of state: entries and bytes of each checkpoint, the largest keys, and a forecast."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.checkpoint.keyed.compaction import last_of, numbered
from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.checkpoint.keyed.state_source import Selection
from statebackend.errors import UsageError
from statebackend.operator_state.element_columns import to_bytes
from statebackend.state import Size, number_of_bytes
from statebackend.tools.comparison import Pair, distinct, reader_of, touched_keys
from statebackend.tools.sources import CheckpointSource, Stored
from statebackend.tools.state_rows import StateRows
from statebackend.tools.tables import column_value_type

_BATCHES = pa.schema(
    [
        ("batch_id", pa.int64()),
        ("state", pa.string()),
        *((name, pa.int64()) for name in ("entries", "bytes", "inserted", "removed", "expired")),
    ]
)


class _Key(NamedTuple):
    """A key, and the entries and bytes of a state that it has."""

    state: str
    key: str
    entries: int
    bytes: int


_KEYS = pa.schema(
    [("state", pa.string()), ("key", pa.string()), ("entries", pa.int64()), ("bytes", pa.int64())]
)


@dataclass(frozen=True, repr=False)
class Growth:
    """The result of `growth`."""

    #: Of each checkpoint and state: entries (keys with state) and bytes, and the rows of `state` that were inserted,
    #: removed and expired since the checkpoint before. Null: unknown.
    batches: StateRows
    #: The keys with the most bytes, and the keys with the most entries of a list or map.
    largest: StateRows
    longest: StateRows
    #: By state, the share of entries whose keys no retained batch has changed. A state is missing if it is unknown.
    untouched: dict[str, float]
    #: By state with a TTL, the time at which all present entries have expired, in milliseconds since 1970.
    expired_at: dict[str, int]
    #: The memory of all states after the newest batch, and its growth for each batch. None: unknown.
    memory_bytes: int | None
    memory_per_batch: float | None
    #: The batches until memory reaches ``max_bytes``, by a straight line. None: memory does not grow, or is unknown.
    batches_left: int | None
    _lines: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return "\n".join(["Growth", *self._lines, repr(self.largest), repr(self.longest)])


def growth(store: Stored, *, top: int = 10, max_bytes: Size | None = None, expired: bool = False) -> Growth:
    """The growth of each state over the retained checkpoints.

    It reads the changed keys of all retained checkpoints, and scans the newest one. ``expired`` also counts the entries
    that expired, which scans all checkpoints. ``top`` is the number of keys in ``largest`` and ``longest``. For a
    forecast of memory pass ``max_bytes``, the limit of the backend, such as ``"4g"``.
    """
    limit = None if max_bytes is None else number_of_bytes("max_bytes", max_bytes, least=1)
    reader = reader_of(store)
    sources = [CheckpointSource(reader.open(each)) for each in reader.checkpoints()]
    newest = sources[-1] if sources else CheckpointSource(reader.open_latest())
    rows: list[tuple[Any, ...]] = []
    keys: list[_Key] = []
    untouched: dict[str, float] = {}
    expired_at: dict[str, int] = {}
    lines: list[str] = []
    for name, state in newest.states().items():
        if state.is_reserved:
            continue
        touched = _batches(sources, name, expired, rows)
        largest, entries, at = _scan(newest, state, top)
        keys += largest
        if touched is not None and entries:
            changed = newest.read(name, Selection(keys=touched)) if len(touched) else ()
            untouched[name] = 1 - sum(batch.num_rows for batch in changed) / entries
        if at is not None:
            expired_at[name] = at
        own = [row for row in rows if row[1] == name]
        lines.append(f"  {name}: {own[0][2]} to {own[-1][2]} entries in batches {own[0][0]} to {own[-1][0]}")
    largest = sorted(keys, key=lambda each: -each.bytes)[:top]
    longest = sorted((each for each in keys if each.entries > 1), key=lambda each: -each.entries)[:top]
    tables = [pa.Table.from_pylist([each._asdict() for each in given], _KEYS) for given in (largest, longest)]
    batches = pa.Table.from_pylist([dict(zip(_BATCHES.names, row, strict=True)) for row in rows], _BATCHES)
    where = newest.where
    return Growth(
        StateRows.of_table(f"growth, {reader.uri}", batches),
        StateRows.of_table(f"keys with the most bytes, {where}", tables[0]),
        StateRows.of_table(f"keys with the most entries, {where}", tables[1]),
        untouched,
        expired_at,
        *_memory(sources, limit),
        lines,
    )


def _batches(
    sources: list[CheckpointSource], name: str, expired: bool, rows: list[tuple[Any, ...]]
) -> pa.Array | None:
    """Add the rows of a state; returns the keys that any batch has changed, if they are known."""
    keys: list[pa.Array] | None = []
    for before, after in itertools.pairwise([None, *sources]):
        assert after is not None
        if name not in after.states():
            continue
        counts: Counter[str] | None = None if before is None else Counter()
        try:
            if before is not None and counts is not None:
                touched = None if expired else touched_keys(before, after, name)
                for table in Pair(before, after, name).changes(touched, expired=expired):
                    counts.update(table["change_type"].to_pylist())
                    if keys is not None:
                        keys += table["key"].chunks
        except UsageError as error:
            if error.code != "USAGE.NATIVE_FILES":
                raise
            keys, counts = None, None
        known = (after.checkpoint.manifest.progress or {}).get("states", {}).get(name)
        changed: tuple[int | None, ...] = (None, None, None)
        if counts is not None:
            changed = counts["insert"], counts["delete"], counts["expire"] if expired else None
        rows.append((after.checkpoint.id, name, known, after.bytes(name), *changed))
    return None if keys is None else distinct(keys, sources[-1])


def _scan(source: CheckpointSource, state: StateDescription, top: int) -> tuple[list[_Key], int, int | None]:
    """The largest keys of a state, the number of its rows, and the time at which the last one expires."""
    config = column_value_type(state, source.where).config()
    found: list[_Key] = []
    total, newest = 0, None
    groups = source.max_parallelism or 1
    pieces = min(max(source.most_rows(state.name) >> 20, 1), groups)
    for own in np.array_split(np.arange(groups), pieces):
        keys: list[pa.Array] = []
        entries: list[int] = []
        sizes: list[int] = []
        for batch in source.read(
            state.name, Selection(key_groups=own.astype(np.int64) if pieces > 1 else None)
        ):
            values = batch["value"]
            keys.append(batch["key"])
            sizes += [len(each or b"") for each in to_bytes(values, config)]
            lengths = pc.fill_null(pc.list_value_length(values), 0) if state.kind == "list" else None
            entries += [1] * batch.num_rows if lengths is None else lengths.to_pylist()
            if state.lifetime is not None and batch.num_rows:
                stamps = batch["timestamp"].flatten() if state.kind == "list" else batch["timestamp"]
                latest = pc.max(stamps).as_py()
                newest = latest if newest is None else max(newest, latest)
        if not sizes:
            continue
        total += len(sizes)
        column = pa.chunked_array(keys)
        numbers = numbered([column])
        first = last_of(numbers, np.arange(len(numbers)))
        by_key = [np.bincount(numbers, each).astype(np.int64) for each in (entries, sizes)]
        best = {int(at) for each in by_key for at in np.argsort(-each, kind="stable")[:top]}
        found += [
            _Key(state.name, str(column[int(first[at])].as_py()), int(by_key[0][at]), int(by_key[1][at]))
            for at in best
        ]
    return found, total, None if newest is None or state.lifetime is None else newest + state.lifetime.ttl


def _memory(
    sources: list[CheckpointSource], limit: int | None
) -> tuple[int | None, float | None, int | None]:
    """The memory after the newest batch, its growth for each batch, and the batches until it reaches the limit."""
    used = [
        (each.checkpoint.id, (each.checkpoint.manifest.progress or {}).get("memoryUsedBytes"))
        for each in sources
    ]
    known = [(number, each) for number, each in used if each is not None]
    if not known:
        return None, None, None
    (first, before), (last, after) = known[0], known[-1]
    if first == last:
        return after, None, None
    grown = (after - before) / (last - first)
    return after, grown, None if limit is None or grown <= 0 else max(0, int((limit - after) / grown))
