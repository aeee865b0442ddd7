"""Batches over map states: rows of key and map key. Both tables of a map are in the key's group, and in its lane.

The lane belongs to the table of keys. Its logs take the records of both tables, in the order of time. The entries of
the table of map entries are counted separately (`LaneRun.inner_entries`).
"""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

from statebackend._core.memory.arena cimport Blob, blob_drop
from statebackend._core.tables.cow_map cimport (
    CoreKey, CowMap, Lane, Table, active_table, before_operation, bucket, entry_at, find, map_new, payload_of, value_of)
from statebackend._core.tables.expiry cimport is_expired, written_at
from statebackend._core.kernels.batch_kernels cimport (
    FAILED_MEMORY, Batch, BatchCall, LaneRun, RowKey, blob_of_row, find_row, map_of_row, stage_block, stamp_of,
    time_of_death)
from statebackend._core.tables.map_table cimport MapTable, anchor_ref, hash_map_key, put_threaded, remove_threaded
from statebackend._core.memory.platform cimport prefetch, unlikely
from statebackend._core.tables.reductions cimport OP_BLOCK_READ, OP_BLOCK_WRITE
from statebackend._core.tables.state_table cimport is_null
from statebackend._core.tables.values cimport CODE_BLOB, CODE_OBJECT, TYPE_LONG
from statebackend._core.tables.entry_update cimport restamp

from statebackend.errors import UsageError

cdef enum MapOperation:
    MAP_GET = 0
    MAP_PUT = 1
    MAP_REMOVE = 2

cdef struct MapRows:
    MapOperation op
    const int64_t *keys                  # map keys by row, or their offsets and data
    const int64_t *offsets
    const char *data
    int64_t dead_at                      # what has expired by then too, is removed
    bint shows_expired
    bint renews


cdef inline void load_map_key(const MapRows *rows, int64_t row, CoreKey *key) noexcept nogil:
    if rows.keys != NULL:
        key.number = rows.keys[row]
    else:
        key.data = rows.data + rows.offsets[row]
        key.length = rows.offsets[row + 1] - rows.offsets[row]


cdef bint map_block(Batch *batch, LaneRun *run, int64_t at, uint32_t n, CowMap **maps) noexcept nogil:
    """Work stage by stage: the keys' entries, then the buckets of the map keys, then their entries; then operate."""
    cdef RowKey keys[32]
    cdef CoreKey inner[32]
    cdef uint32_t *buckets[32]
    cdef Table *table = batch.inner
    cdef CowMap *map
    cdef uint32_t i, slot
    stage_block(batch, at, n, maps, keys)
    memset(inner, 0, n * sizeof(CoreKey))
    for i in range(n):
        buckets[i] = NULL
        load_map_key(<MapRows *>batch.extra, keys[i].row, &inner[i])
        if maps[i] == NULL:
            continue
        map = table.maps[maps[i].group - table.first_group]
        if map == NULL:
            continue
        slot = find_row(batch, maps[i], &keys[i])
        if slot == 0:
            continue
        hash_map_key(table, &inner[i], anchor_ref(batch.table, slot))
        buckets[i] = bucket(table.core, active_table(map, inner[i].hash),
                            inner[i].hash & (active_table(map, inner[i].hash).capacity - 1))
        prefetch(buckets[i])
    for i in range(n):
        if buckets[i] != NULL and buckets[i][0]:
            prefetch(entry_at(table.core, buckets[i][0]))
            prefetch(<char *>entry_at(table.core, buckets[i][0]) + 47)
    for i in range(n):
        if unlikely(not map_row(batch, run, &maps[i], &keys[i], &inner[i])):
            run.failure = FAILED_MEMORY
            run.failed_row = keys[i].row
            return False
    return True


cdef bint map_row(Batch *batch, LaneRun *run, CowMap **where, RowKey *key, CoreKey *inner) noexcept nogil:
    """Do one row; False without memory."""
    cdef Lane *lane = run.used
    cdef const MapRows *rows = <const MapRows *>batch.extra
    cdef Table *heads = batch.table
    cdef Table *table = batch.inner
    cdef CowMap *head_map = where[0]
    cdef CowMap *map
    cdef CoreKey head
    cdef uint32_t head_slot, slot = 0, group
    cdef int64_t timestamp = 0
    cdef bint gone = False
    if head_map == NULL:
        if rows.op != MAP_PUT:
            return True
        head_map = map_of_row(batch, where, key.row)
        if head_map == NULL:
            return False
    group = head_map.group - table.first_group
    map = table.maps[group]
    if map == NULL:
        if rows.op != MAP_PUT:
            return True
        map = map_new(table, head_map.group)
        if map == NULL:
            return False
    if unlikely(not (before_operation(lane, heads, head_map) and before_operation(lane, table, map))):
        return False
    head.number = key.number
    head.data = key.data
    head.length = key.length
    head.namespace = key.ns
    head.hash = key.hash
    head.group = head_map.group
    head_slot = find(heads, head_map, &head)
    if head_slot:
        hash_map_key(table, inner, anchor_ref(heads, head_slot))
        slot = find(table, map, inner)
    if slot and batch.ttl:
        timestamp = (<int64_t *>payload_of(table, entry_at(lane.core, slot)))[0]
        gone = is_expired(timestamp, batch.ttl, stamp_of(batch, key.row))
    if slot == 0 and rows.op != MAP_PUT:
        return True
    if rows.op == MAP_GET:
        if not gone or rows.shows_expired:
            if not is_null(table, entry_at(lane.core, slot)):
                take_value(batch, value_of(table, entry_at(lane.core, slot)), key.row)
        if not gone:
            return not rows.renews or restamp(
                lane, table, map, slot, inner.hash,
                written_at(timestamp, stamp_of(batch, key.row), batch.keeps_latest)) != 0
        if not is_expired(timestamp, batch.ttl, rows.dead_at):
            return True
    if rows.op == MAP_REMOVE or gone:
        # An expired entry does not keep its place in the order either.
        if rows.op == MAP_REMOVE:
            batch.found[key.row] = 1
        if not remove_threaded(lane, heads, head_map, &head, head_slot, lane, table, map, inner, slot):
            return False
        lane.entries += 1
        run.inner_entries -= 1
        if rows.op != MAP_PUT:
            return True
        head_slot = find(heads, head_map, &head)
        slot = 0
    return put_row(batch, run, head_map, &head, head_slot, map, inner, slot, key.row)


cdef inline void take_value(Batch *batch, char *value, int64_t row) noexcept nogil:
    batch.found[row] = 1
    if batch.blobs != NULL:
        batch.blobs[row] = (<Blob **>value)[0]
        batch.blobs[row].refs += 1       # until it is copied
    else:
        memcpy(batch.out + batch.width * row, value, batch.width)


cdef bint put_row(Batch *batch, LaneRun *run, CowMap *head_map, CoreKey *head, uint32_t head_slot, CowMap *map,
                  CoreKey *inner, uint32_t slot, int64_t row) noexcept nogil:
    cdef Lane *lane = run.used
    cdef Blob *blob = NULL
    cdef const char *source = NULL
    if batch.nulls == NULL or not batch.nulls[row]:
        if batch.value_offsets != NULL:
            blob = blob_of_row(batch, lane, row)
            if blob == NULL:
                return False
            source = <const char *>&blob
        else:
            source = batch.values + batch.width * row
    if not put_threaded(lane, batch.table, head_map, head, head_slot, lane, batch.inner, map, inner, slot, source,
                        stamp_of(batch, row)):
        if blob != NULL:
            blob_drop(lane.core.blobs, blob)
        return False
    if slot == 0:
        lane.entries -= 1
        run.inner_entries += 1
    return True


cdef object batch_of(MapTable maps, keys, map_keys, MapRows *rows, namespace, now, int64_t ttl, int threads):
    """Make a call with its keys and map keys in place."""
    cdef BatchCall call = BatchCall(maps.heads, keys, namespace, threads)
    if ttl and not maps.entries.table.layout.has_timestamp:
        raise UsageError("this table has no timestamps")
    call.set_values(map_keys, <int>CODE_BLOB if maps.entries.table.layout.key_is_blob else <int>TYPE_LONG, 8)
    if maps.entries.table.layout.key_is_blob:
        rows.offsets, rows.data = call.batch.value_offsets, call.batch.values
        rows.keys = NULL
    else:
        rows.keys = <const int64_t *>call.batch.values
    call.batch.values, call.batch.value_offsets = NULL, NULL
    call.batch.inner = maps.entries.table
    call.batch.block = map_block
    call.batch.extra = rows
    call.set_timestamps(now)
    call.batch.ttl = ttl
    call.batch.code, call.batch.width = maps.entries.value_code, maps.entries.table.layout.value_width
    return call


def put_many(MapTable maps not None, keys, map_keys, values, *, nulls=None, namespace=0, timestamp=0,
             int64_t ttl=0, int threads=1):
    """Set the value of each row's map key, in order; new ones go to the end of their map. Atomic.

    `nulls` marks the values that are None, if the table takes those. With `ttl`, an entry that has expired at
    `timestamp`, which is one for all or an array, loses its place.

    >>> from statebackend._core.tables.map_table import MapTable
    >>> from statebackend._core.tables.state_core import StateCore
    >>> maps = MapTable(StateCore(), key="int", map_key="int", value="long")
    >>> put_many(maps, np.array([1, 1, 1]), np.array([7, 8, 7]), np.array([10, 20, 30]))
    >>> get_many(maps, np.array([1, 1]), np.array([7, 8]))
    (array([30, 20]), array([ True,  True]))
    """
    cdef MapRows rows
    rows.op, rows.shows_expired, rows.renews = MAP_PUT, False, False
    if maps.entries.value_code >= CODE_OBJECT:
        raise UsageError("objects are not put in batches")
    cdef BatchCall call = batch_of(maps, keys, map_keys, &rows, namespace, timestamp, ttl, threads)
    if nulls is not None and not maps.entries.takes_none:
        raise UsageError("a value of this table is never None")
    call.set_values(values, maps.entries.value_code, maps.entries.table.layout.value_width)
    call.set_nulls(nulls)
    call.run(OP_BLOCK_WRITE)


def get_many(MapTable maps not None, keys, map_keys, *, namespace=0, now=0, int64_t ttl=0,
             dead_at=None, bint shows_expired=False, bint renews=False, int threads=1):
    """The values of each row's map key and a mask of those found, where None does not count; bytes as (offsets, data).

    With `ttl`, it removes what has expired at `now` and, with `renews`, stamps the rest. In event time, only what has
    expired by the time `dead_at` too, is removed, and no timestamp becomes older.

    >>> from statebackend._core.tables.map_table import MapTable
    >>> from statebackend._core.tables.state_core import StateCore
    >>> maps = MapTable(StateCore(), key="int", map_key="int", value="long")
    >>> maps.put(1, 7, 10)
    >>> get_many(maps, np.array([1, 1]), np.array([7, 8]))
    (array([10,  0]), array([ True, False]))
    """
    cdef MapRows rows
    rows.op, rows.shows_expired, rows.renews = MAP_GET, shows_expired, renews and ttl
    if maps.entries.value_code >= CODE_OBJECT:
        raise UsageError("objects are not read in batches")
    rows.dead_at = time_of_death(dead_at)
    cdef BatchCall call = batch_of(maps, keys, map_keys, &rows, namespace, now, ttl, threads)
    call.batch.keeps_latest = dead_at is not None
    return call.read(OP_BLOCK_WRITE if ttl else OP_BLOCK_READ, call.batch.code, call.batch.width, True)


def remove_many(MapTable maps not None, keys, map_keys, *, namespace=0, int threads=1):
    """Remove each row's map key; returns which were present at their turn. The last one removes its key. Atomic.

    >>> from statebackend._core.tables.map_table import MapTable
    >>> from statebackend._core.tables.state_core import StateCore
    >>> maps = MapTable(StateCore(), key="int", map_key="int", value="long")
    >>> maps.put(1, 7, 10)
    >>> remove_many(maps, np.array([1, 1]), np.array([7, 7])), len(maps)
    (array([ True, False]), 0)
    """
    cdef MapRows rows
    rows.op, rows.shows_expired, rows.renews = MAP_REMOVE, False, False
    if maps.entries.value_code == CODE_OBJECT:
        raise UsageError("objects are not removed in batches")
    cdef BatchCall call = batch_of(maps, keys, map_keys, &rows, namespace, 0, 0, threads)
    found = np.zeros(call.batch.n, dtype=np.uint8)
    call.batch.found = <uint8_t *>call.pointer(found, np.uint8)
    call.run(OP_BLOCK_WRITE)
    return found.view(bool)
