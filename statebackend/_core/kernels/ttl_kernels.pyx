"""Reads many keys whose values may expire: removes what is dead, and may renew what is read."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

from statebackend._core.memory.arena cimport Blob
from statebackend._core.tables.cow_map cimport (
    CowMap, Lane, Table, before_operation, entry_at, payload_of, remove, value_of)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.kernels.batch_kernels cimport (
    FAILED_MEMORY, Batch, BatchCall, LaneRun, Reading, RowKey, find_row, stage_block, stamp_of, stamp_on,
    time_of_death)
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.reductions cimport OP_BLOCK_READ, OP_READ
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.values cimport CODE_OBJECT
from statebackend._core.tables.entry_update cimport restamp

from statebackend.errors import UsageError

cdef bint read_block(Batch *batch, LaneRun *run, int64_t at, uint32_t n, CowMap **maps) noexcept nogil:
    cdef RowKey keys[32]
    cdef uint32_t i
    stage_block(batch, at, n, maps, keys)
    for i in range(n):
        if maps[i] != NULL and unlikely(not read_row(batch, run.used, maps[i], &keys[i])):
            run.failure = FAILED_MEMORY
            run.failed_row = keys[i].row
            return False
    return True


cdef bint read_row(Batch *batch, Lane *lane, CowMap *map, RowKey *key) noexcept nogil:
    """Read one row; False without memory."""
    cdef Table *table = batch.table
    cdef const Reading *reading = <const Reading *>batch.extra
    cdef uint32_t slot
    cdef char *value
    cdef int64_t timestamp
    cdef bint gone
    if unlikely(not before_operation(lane, table, map)):
        return False
    slot = find_row(batch, map, key)
    if slot == 0:
        return True
    timestamp = (<int64_t *>payload_of(table, entry_at(lane.core, slot)))[0]
    gone = is_expired(timestamp, batch.ttl, stamp_of(batch, key.row))
    if not gone or reading.shows_expired:
        batch.found[key.row] = 1
        value = value_of(table, entry_at(lane.core, slot))
        if batch.blobs != NULL:
            batch.blobs[key.row] = (<Blob **>value)[0]
            batch.blobs[key.row].refs += 1           # until it is copied
        elif batch.out != NULL:
            memcpy(batch.out + batch.width * key.row, value, batch.width)
    if reading.looks_only:
        return True
    if gone:
        return not is_expired(timestamp, batch.ttl, reading.dead_at) or remove(lane, table, map, slot, key.hash)
    return not reading.renews or restamp(
        lane, table, map, slot, key.hash, stamp_on(batch, key.row, entry_at(lane.core, slot))) != 0


def read_many(StateTable table not None, keys, *, now, int64_t ttl, dead_at=None, bint shows_expired=False,
              bint renews=False, namespace=0, int threads=1):
    """As `kernels.get_many` at a time `now`: removes what has expired and, with `renews`, stamps what has not. Atomic.

    `now` is one for all, or an array. In event time, only what has expired by the time `dead_at` too, is removed, and
    no timestamp becomes older.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> table = StateTable(StateCore(), value="long", timestamps=True)
    >>> table.put(1, 10, timestamp=100); table.put(2, 20, timestamp=200)
    >>> read_many(table, np.array([1, 2]), now=250, ttl=100), len(table)
    ((array([ 0, 20]), array([False,  True])), 1)
    """
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    cdef Reading reading
    if table.value_code >= CODE_OBJECT or not table.table.layout.has_timestamp or ttl <= 0:
        raise UsageError("this table has no timestamps, or does not hold values that are read in batches")
    reading.shows_expired, reading.renews, reading.looks_only = shows_expired, renews, False
    reading.dead_at, call.batch.keeps_latest = time_of_death(dead_at), dead_at is not None
    call.batch.block, call.batch.extra = read_block, &reading
    call.set_timestamps(now)
    call.batch.ttl = ttl
    return call.read(OP_READ, table.value_code, table.table.layout.value_width, True)


def look_many(StateTable table not None, keys, *, now, int64_t ttl, bint shows_expired=False,
              namespace=0, int threads=1):
    """Tell for each key if `read_many` would find it. Changes nothing.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> table = StateTable(StateCore(), value="long", timestamps=True)
    >>> table.put(1, 10, timestamp=100)
    >>> look_many(table, np.array([1, 2]), now=150, ttl=100), look_many(table, np.array([1]), now=200, ttl=100)
    (array([ True, False]), array([False]))
    """
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    cdef Reading reading
    if not table.table.layout.has_timestamp or ttl <= 0:
        raise UsageError("this table has no timestamps")
    found = np.zeros(call.batch.n, dtype=np.uint8)
    call.batch.found = <uint8_t *>call.pointer(found, np.uint8)
    reading.shows_expired, reading.renews, reading.looks_only = shows_expired, False, True
    call.batch.block, call.batch.extra = read_block, &reading
    call.set_timestamps(now)
    call.batch.ttl = ttl
    call.run(OP_BLOCK_READ)
    return found.view(bool)
