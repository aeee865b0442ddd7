"""Adds to the values of many keys: reductions and aggregates, with nulls that clear and values that expire."""

import numpy as np

from libc.stdint cimport int64_t, uint32_t

from statebackend._core.tables.accumulators cimport (
    ADD_BYTES, ADD_NUMBER, ADD_WHOLE, Adding, AddPlan, add_fixed, keeps_old_bytes)
from statebackend._core.memory.arena cimport Blob, blob_drop
from statebackend._core.tables.cow_map cimport (
    CoreKey, CowMap, Lane, Table, before_operation, entry_at, payload_of, remove, value_of)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.kernels.batch_kernels cimport (
    FAILED_MEMORY, FAILED_NOT, FAILED_OVERFLOW, Batch, BatchCall, LaneRun, RowKey, blob_of_row, find_row,
    is_untouched, map_of_row, note_touched, stage_block, stamp_of, stamp_on)
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.reductions cimport OP_BLOCK_WRITE, OP_FIRST, OP_LAST, OP_UPDATE, Operation
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.values cimport CODE_BLOB, CODE_RAW
from statebackend._core.tables.entry_update cimport write_value

from statebackend._core.tables.accumulators import OPERATIONS
from statebackend.errors import UsageError


cdef bint add_block(Batch *batch, LaneRun *run, int64_t at, uint32_t n, CowMap **maps) noexcept nogil:
    cdef RowKey keys[32]
    cdef uint32_t i
    stage_block(batch, at, n, maps, keys)
    for i in range(n):
        run.failure = add_row(batch, run, &maps[i], &keys[i])
        if unlikely(run.failure != FAILED_NOT):
            run.failed_row = keys[i].row
            return False
    return True


cdef int add_row(Batch *batch, LaneRun *run, CowMap **where, RowKey *key) noexcept nogil:
    """Add one row; returns a Failure."""
    cdef Lane *lane = run.used
    cdef Table *table = batch.table
    cdef const Adding *adding = <const Adding *>batch.extra
    cdef bint is_null = batch.nulls != NULL and batch.nulls[key.row]
    cdef CowMap *map = where[0]
    cdef char computed[32]
    cdef const char *source
    cdef const char *old = NULL
    cdef uint32_t slot
    cdef int64_t stamp
    cdef Blob *blob = NULL
    cdef bint is_first
    cdef CoreKey k
    if map == NULL:
        # Another row of the block may have made it.
        if is_null and table.maps[batch.groups[key.row - batch.first]] == NULL:
            return FAILED_NOT
        map = map_of_row(batch, where, key.row)
        if map == NULL:
            return FAILED_MEMORY
    if unlikely(not before_operation(lane, table, map)):
        return FAILED_MEMORY
    slot = find_row(batch, map, key)
    if is_null:
        if slot and not remove(lane, table, map, slot, key.hash):
            return FAILED_MEMORY
        return FAILED_NOT
    if slot and not (batch.ttl and is_expired(
            (<int64_t *>payload_of(table, entry_at(lane.core, slot)))[0], batch.ttl, stamp_of(batch, key.row))):
        old = value_of(table, entry_at(lane.core, slot))
    if adding.kind == ADD_BYTES:
        source = batch.values + batch.value_offsets[key.row]
        if old != NULL and keeps_old_bytes(adding.op, (<Blob **>old)[0], source,
                                           batch.value_offsets[key.row + 1] - batch.value_offsets[key.row]):
            blob = (<Blob **>old)[0]
            blob.refs += 1
        else:
            blob = blob_of_row(batch, lane, key.row)
            if blob == NULL:
                return FAILED_MEMORY
        source = <const char *>&blob
    else:
        source = batch.values + batch.width * key.row
        if adding.kind == ADD_WHOLE:
            if old != NULL and adding.op == OP_FIRST:
                source = old
        elif not add_fixed(adding, old, source, computed):
            return FAILED_OVERFLOW
        else:
            source = computed
    k.number = key.number
    k.data = key.data
    k.length = key.length
    k.namespace = key.ns
    k.hash = key.hash
    stamp = stamp_on(batch, key.row, entry_at(lane.core, slot)) if slot else stamp_of(batch, key.row)
    is_first = is_untouched(batch, entry_at(lane.core, slot) if slot else NULL)
    slot = write_value(lane, table, map, &k, slot, source, stamp)
    if unlikely(slot == 0):
        if blob != NULL:
            blob_drop(lane.core.blobs, blob)
        return FAILED_MEMORY
    note_touched(batch, run, is_first, key.row, slot)
    return FAILED_NOT


def add_many(StateTable table not None, keys, values, AddPlan plan not None, *, nulls=None, namespace=0, timestamp=0,
             int64_t ttl=0, bint in_event_time=False, int threads=1, rows=None, return_touched=False):
    """Add each value to the value of its key, in order; a null clears. Atomic; overflow raises.

    With `ttl`, a value that has expired at `timestamp` counts as absent; `in_event_time`, a later timestamp than that
    stays. `values` is an array of the plan's numbers,
    (offsets, data), or an array of bytes by row. With `return_touched`, and without nulls, it returns three columns of
    the distinct keys: the first row, the key (None if keys are bytes) and the new value. They are in the order of key
    groups, and in a group of first rows. Errors give a row the number that `rows` has for it.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> table = StateTable(StateCore(), value=17)
    >>> from statebackend._core.tables.accumulators import AddPlan
    >>> plan = AddPlan("average")
    >>> add_many(table, np.array([1, 2, 1]), np.array([1.0, 5.0, 2.0]), plan)
    >>> from statebackend._core.kernels.batch_kernels import get_many
    >>> values, _ = get_many(table, np.array([1]))
    >>> np.frombuffer(values, dtype=[("nulls", "u1"), ("sum", "<f8"), ("count", "<i8")])["sum"]
    array([3.])
    """
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    cdef Operation op = OP_BLOCK_WRITE
    plan.fits(table.value_code, table.table.layout.value_width)
    if ttl and not table.table.layout.has_timestamp:
        raise UsageError("this table has no timestamps")
    if plan.operation == "count":
        values = np.ones(call.batch.n, dtype=np.int64)
    # Where the other kernels' fast stage has the operation, `add_block` gets the rows that it hands on.
    if plan.adding.kind == ADD_NUMBER:
        op = OPERATIONS["sum" if plan.operation == "count" else plan.operation]
    elif (plan.adding.kind == ADD_WHOLE or plan.adding.kind == ADD_BYTES) and plan.adding.op == OP_LAST:
        op = OP_UPDATE
    if plan.adding.kind == ADD_BYTES:
        call.set_values(values, CODE_BLOB, 8)
    elif plan.adding.kind == ADD_NUMBER:
        call.set_values(values, plan.adding.code, plan.value_width)
    elif isinstance(values, np.ndarray) and values.ndim == 1:
        if values.dtype.itemsize != plan.value_width:
            raise UsageError("the values are not those of the plan", detail=values.dtype.name)
        call.set_values(values.reshape(-1, 1).view(np.uint8), CODE_RAW, plan.value_width)
    else:
        call.set_values(values, CODE_RAW, plan.value_width)
    call.rows = rows
    call.set_nulls(nulls)
    call.set_timestamps(timestamp)
    call.batch.ttl = ttl
    call.batch.keeps_latest = in_event_time and ttl
    if op == OP_BLOCK_WRITE or nulls is not None or ttl:
        call.batch.block = add_block
        call.batch.extra = &plan.adding
    if return_touched:
        return call.run_touching(op)
    call.run(op)
    return None
