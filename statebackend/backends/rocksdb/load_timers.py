"""Loads timers of a checkpoint into the two column families of a domain, by whole columns.

>>> import pyarrow as pa
>>> from statebackend.backends.rocksdb import RocksDbBackend
>>> with RocksDbBackend().create_keyed_backend(int) as keyed:
...     queue = keyed.timers._queue("event")
...     rows = pa.record_batch({"key": [1, 2], "map_key": [20, 10], "value": [False, False]})
...     load_timers(keyed, "event", queue, [GroupedBatch.of(rows, [0, 0])])
...     [(at, keyed.current_key) for at in keyed.timers.due(20)]
[(10, 2), (20, 1)]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from statebackend._core.rocksdb.batches import WriteBatch
from statebackend._core.rocksdb.composite_keys import by_time_many
from statebackend._core.rocksdb.store import Table
from statebackend.backends.rocksdb.load_rows import Gathered, apply, composed_keys
from statebackend.backends.rocksdb.written_states import Runs
from statebackend.checkpoint.format import GroupedBatch, Op
from statebackend.checkpoint.keyed.rows import phases
from statebackend.keys import canonical_list, runs_of_list
from statebackend.state import StateDescriptor, timer_state

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed import RocksDbKeyedBackend
    from statebackend.backends.rocksdb.timers import Queue

__all__ = ["load_timers"]


class _Timers(NamedTuple):
    """The timers of a domain by key, as a state."""

    descriptor: StateDescriptor
    table: Table


def load_timers(
    backend: RocksDbKeyedBackend, domain: str, queue: Queue, rows: Iterable[GroupedBatch]
) -> None:
    """Apply rows in order to a domain that has no timer. O(timers), and a sort of them.

    If some rows are changes, timers are counted at the end: O(timers).
    """
    timers, may_repeat = _Timers(timer_state(domain), queue.by_key), False
    with Gathered(backend, queue.by_key) as by_key, Gathered(backend, queue.by_time) as by_time:
        for grouped in rows:
            may_repeat = may_repeat or "op" in grouped.batch.schema.names
            for op, batch in phases(grouped):
                keys = composed_keys(backend, timers, op, batch)
                if op is Op.PUT:
                    firing, groups = by_time_many(*keys)
                    by_key.add(keys, _same(queue.value, batch.num_rows))
                    by_time.add(firing, groups)
                    queue.count += batch.num_rows
                    continue
                by_key.write()
                by_time.write()
                _remove_by_time(backend, queue, op, keys)
                apply(backend, timers, op, keys, batch)
        by_key.write()
        by_time.write()
    if may_repeat:
        queue.count = backend.store.count(queue.by_key, backend.has_int_keys, False, False, 2**62)


def _remove_by_time(backend: RocksDbKeyedBackend, queue: Queue, op: Op, keys: Runs) -> None:
    """Take timers out of the order of firing that are still there by key."""
    if op is Op.CLEAR:
        places = canonical_list(keys)
        keys = runs_of_list([key for place in places for key, _ in backend.store.rows(queue.by_key, place)])
    batch = WriteBatch(backend.scratch.database)
    batch.delete_many(queue.by_time.family, *by_time_many(*keys)[0])
    batch.write(wal=False)


def _same(value: bytes, rows: int) -> Runs:
    data = np.tile(np.frombuffer(value, np.uint8), rows)
    return np.arange(rows + 1, dtype=np.int64) * len(value), data
