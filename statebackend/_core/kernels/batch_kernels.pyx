"""Operations on whole batches of keys, without the GIL and without a Python object per row.

A batch goes through these phases. Only values of bytes need `drop`, and only calls that return keys need `gather`:

    count      key groups of all rows, and how many rows each group has   (each thread a range of rows)
    scatter    keys and row numbers, ordered by key group, order kept     (each thread a range of rows)
    apply      group by group, in blocks of rows: hash and prefetch the buckets, prefetch the entries,
               then operate                                                (each thread a range of groups)
    drop       the bytes of values that were overwritten, once nothing can fail any more  (each thread its own)
    gather     keys that the call has touched, and their values, if wanted                (each thread its share)

Rows of one group touch one map, whose pages then stay in the cache; groups of different threads share nothing
but the arena. Short batches skip the first two phases. Rows of the same key are applied in their order.

A call is atomic. It checks its arguments first. Each lane keeps what it overwrites, adds or removes in its undo log or
in the journal until the call has succeeded.

From the first phase to the end, undoing included, a call makes no Python object: a collection could run finalisers,
which may use the table. A finaliser that a collection on another thread runs meanwhile waits (`StateCore.occupy`). The
call asks for threads before the first phase. Whichever come in time work along: they claim each phase lane by lane.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

cimport cython
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.math cimport exp, sqrt
from libc.stdlib cimport qsort
from libc.string cimport memcpy, memmove, memset

from statebackend._core.memory.arena cimport MAX_LANES, Blob, address, blob_data, blob_drop, unit_at
from statebackend._core.tables.cow_map cimport (
    PAGE_BUCKETS, PAGE_SHIFT, RECORD_INSERT, RECORD_REPLACED, RECORD_WRITE, VALUE_BLOB, VALUE_FIXED, BucketTable, Core,
    CoreKey, CowMap, Entry, Journal, Lane, PageRef, Table, active_table, before_operation, begin_rehash, blob_hash,
    bucket, capacity_for, count_namespace, drop_written, entry_at, find_blob, find_int, forget_moves, hash_blob_key,
    hash_int_key, keep_payload, let_die, map_new, namespace_of, note_filled, own_entry, presize, record_log,
    rehash_some, remove, see_snapshots, segment_for_writing, slot_alloc, value_of)
from statebackend._core.memory.journal cimport Log, log_append, log_reserve, log_take
from statebackend._core.key_groups cimport key_groups_of_byte_runs, key_groups_of_ints
from statebackend._core.memory.platform cimport (
    add_i64, claim, copy_bytes, hash_int, likely, load_u32, prefetch, prefetch_write, store_u32, unlikely)
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.values cimport (
    CODE_ANCHOR, CODE_BLOB, CODE_LIST, CODE_OBJECT, CODE_RAW, TYPE_BOOL, TYPE_LONG)
from statebackend._core.tables.entry_update cimport put_value, write_bytes, write_value
from statebackend._core.tables.reductions cimport (
    OP_ALL, OP_APPEND, OP_FIND, OP_GET, OP_READ, OP_REDUCE, OP_REMOVE, OP_SUM, OP_UPDATE,
    Operation, add_overflow, is_write, reduce_into)
from statebackend._core.tables.expiry cimport is_expired, written_at
from statebackend._core.tables.state_core cimport StateCore, discard_log
from statebackend._core.tables.lists cimport list_append

from statebackend._core.kernels.prefetch_stages cimport BlockStages, come_to, is_key, stage_rows

from statebackend._core.kernels.gather_kernels import lists_at
from statebackend._core.memory.blob_columns import blobs_of
from statebackend._core.tables.state_table import DTYPES
from statebackend.errors import KeyGroupError, UsageError

cdef extern from "unistd.h":
    int usleep(unsigned int microseconds) noexcept nogil

cdef enum:
    BLOCK = 32                           # rows whose cache misses overlap
    SHORT_BATCH = 4096                   # rows below which sorting by key group does not pay
    CHUNK = 1 << 21                      # rows that go through the phases together
    RECLAIM_PER_ROW = 2                  # before a call, and again after it: more than a row leaves behind
    RECLAIM_PER_BATCH = 64
    AT_ONCE = 4                          # rows in advance whose share of a rehash a row pays, without a snapshot
    SAMPLE = 256                         # rows at least that tell how many keys a group of a batch has
    LARGEST_SAMPLE = 2048                # the same, of a large group
    LOOKS = 32                           # of those, how many are looked up
    SHORT_KEY = 32                       # bytes of a key, from 8 on, up to which the second phase moves them too
    HASHED_AT_ONCE = 512                 # byte keys
    AHEAD = 24                           # touched keys whose entries are asked for in advance
    MOST_FEW = 64                        # touched keys that are compared, not counted by key group
    IDLE_LOOKS = 2000                    # before a thread sleeps: as a rule, the next phase begins at once

cdef enum Lengths:
    FITTING = 0
    FALLING = 1                          # some offset is below the one before it
    TOO_LONG = 2

cdef uint32_t nowhere = 0                # an empty bucket, for pages that do not exist


# --- phases --------------------------------------------------------------------------------------------

cdef void count_rows(Batch *batch, LaneRun *run, uint32_t *counts) noexcept nogil:
    cdef int64_t i, n = run.last_row - run.first_row, row = batch.first + run.first_row, at = 0, end
    cdef uint16_t *groups = batch.groups + run.first_row
    cdef const int64_t *offsets = batch.key_offsets + row
    cdef uint32_t *hashes = batch.hashes + run.first_row
    cdef uint32_t first = batch.table.first_group, n_maps = batch.table.n_maps
    cdef uint16_t group
    memset(counts, 0, n_maps * sizeof(uint32_t))
    if n <= 0:
        return
    if batch.keys != NULL:
        key_groups_of_ints(batch.program, batch.keys + row, n, batch.max_parallelism, groups)
    else:
        # This reads the bytes of the keys in order, and hashes them twice while they are in the cache. Nothing reads
        # them again before they are compared.
        while at < n:
            end = min(at + HASHED_AT_ONCE, n)
            key_groups_of_byte_runs(batch.program, offsets + at, <const uint8_t *>batch.key_data, end - at,
                                    batch.max_parallelism, groups + at)
            for i in range(at, end):
                hashes[i] = hash_blob_key(batch.table, batch.key_data + offsets[i], offsets[i + 1] - offsets[i],
                                          namespace_of_row(batch, row + i))
            at = end
    if n_maps == <uint32_t>batch.max_parallelism:
        for i in range(n):
            counts[groups[i]] += 1
        return
    for i in range(n):
        group = <uint16_t>(groups[i] - first)
        if unlikely(group >= n_maps):
            run.failed_row = row + i
            return
        groups[i] = group
        counts[group] += 1


cdef void scatter_rows(Batch *batch, LaneRun *run, uint32_t *positions) noexcept nogil:
    cdef int64_t i
    cdef uint32_t at
    cdef const uint16_t *groups = batch.groups
    cdef const int64_t *keys = batch.keys + batch.first
    cdef const int64_t *offsets = batch.key_offsets + batch.first
    cdef int64_t *sorted_keys = batch.sorted_keys, length
    cdef uint32_t *sorted_rows = batch.sorted_rows
    cdef const uint32_t *namespaces = NULL if batch.namespaces == NULL else batch.namespaces + batch.first
    cdef const char *data
    cdef char *place
    if batch.keys != NULL:
        for i in range(run.first_row, run.last_row):
            at = positions[groups[i]]
            positions[groups[i]] = at + 1
            sorted_rows[at] = <uint32_t>i
            sorted_keys[at] = keys[i]
            if namespaces != NULL:
                batch.sorted_namespaces[at] = namespaces[i]
        return
    for i in range(run.first_row, run.last_row):
        at = positions[groups[i]]
        positions[groups[i]] = at + 1
        sorted_rows[at] = <uint32_t>i
        length = offsets[i + 1] - offsets[i]
        sorted_keys[at] = offsets[i]
        if 8 <= length <= SHORT_KEY:
            data, place = batch.key_data + offsets[i], batch.short_keys + <uint64_t>at * SHORT_KEY
            memcpy(place, data, 8)                        # of a known size: one instruction each, at any address
            if length > 16:
                memcpy(place + 8, data + 8, 8)
                if length > 24:
                    memcpy(place + 16, data + 16, 8)
            memcpy(place + length - 8, data + length - 8, 8)
            sorted_keys[at] = <int64_t>(<uintptr_t>place - <uintptr_t>batch.key_data)
        batch.sorted_hashes[at] = batch.hashes[i]
        if namespaces != NULL:
            batch.sorted_namespaces[at] = namespaces[i]
        batch.sorted_lengths[at] = <uint32_t>length


cdef void prepare_group(Batch *batch, uint32_t group) noexcept nogil:
    """Give a map the buckets that the batch's rows need. Without memory, it grows as it goes."""
    cdef Table *table = batch.table
    cdef CowMap *map = table.maps[group]
    cdef uint32_t rows = batch.starts[group + 1] - batch.starts[group]
    cdef uint64_t new
    if map == NULL:
        map = map_new(table, group + table.first_group)
    if map == NULL:
        return
    if map.used == 0:
        presize(table, map, count_new(batch, NULL, group))
    elif map.secondary.capacity == 0 and map.primary.size + rows > map.threshold:
        new = count_new(batch, map, group)
        if map.primary.size + new > map.threshold and see_snapshots(table.core, map):
            begin_rehash(table.core, map, max(2 * map.primary.capacity, capacity_for(table, map.primary.size + new)))


cdef bint pay_rehash(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n) noexcept nogil:
    """Do the share of some rows in a rehash of their map; False if the lane failed."""
    if not see_snapshots(batch.table.core, map):
        run.failure = FAILED_MEMORY
        run.failed_row = batch.first + batch.sorted_rows[at]
        return False
    # Entries that move together share cache lines. Clones would make the batch too long.
    rehash_some(run.used, batch.table, map, n if batch.table.core.newest != NULL else AT_ONCE * n)
    return True


cdef uint64_t count_new(Batch *batch, CowMap *map, uint32_t group) noexcept nogil:
    """Estimate, by a sample of its rows, how many new keys the batch has for a group.

    If all keys of the group come equally often, a sample of s rows has D * (1 - exp(-s / D)) of its D keys.
    """
    cdef Table *table = batch.table
    cdef int64_t first = batch.starts[group], rows = batch.starts[group + 1] - first
    cdef int64_t chunks = (batch.n + batch.size - 1) // batch.size       # the others are probably like this one
    # So many that they repeat if the rows have a small part of them as keys: n rows without a repetition speak for no
    # more than n * n / 2 keys.
    cdef int _halving
    cdef int64_t wanted = <int64_t>(2 * sqrt(<double>(rows * chunks))), i, at
    cdef int64_t n = min(rows, max(<int64_t>SAMPLE, min(wanted, <int64_t>LARGEST_SAMPLE)))
    cdef uint32_t seen[4096], hash, place, distinct = 0, looked = 0, absent = 0, slot, ns
    cdef double low, high, keys, all_rows = <double>rows * chunks
    memset(seen, 0, sizeof(seen))
    for i in range(n):
        at = first + i * rows // n
        ns = namespace_at(batch, at)
        hash = batch.sorted_hashes[at] if batch.keys == NULL else hash_int(batch.sorted_keys[at], ns, table.seed)
        place = hash & 4095
        while seen[place] != 0 and seen[place] != (hash | 1):
            place = (place + 1) & 4095
        if seen[place] != 0:
            continue
        seen[place] = hash | 1
        distinct += 1
        if map == NULL or looked == LOOKS:
            continue
        looked += 1
        if batch.keys == NULL:
            slot = find_blob(table, map, batch.key_data + batch.sorted_keys[at], batch.sorted_lengths[at], ns, hash)
        else:
            slot = find_int(table, map, batch.sorted_keys[at], ns, hash_int_key(table, batch.sorted_keys[at], ns))
        absent += slot == 0
    keys = min(all_rows, 0.5 * n * n)
    if distinct < n:
        low, high = distinct, all_rows
        for _halving in range(32):
            keys = (low + high) / 2
            if keys * (1 - exp(-n / keys)) < distinct:
                low = keys
            else:
                high = keys
        keys *= 1 - exp(-all_rows / keys)
        keys = min(keys * 1.1, all_rows)
    return <uint64_t>(keys * absent / looked if looked else keys)


cdef void apply_rows(Batch *batch, LaneRun *run) noexcept nogil:
    """Operate on the groups of a lane, or on all rows of an unsorted chunk."""
    cdef CowMap *maps[32]
    cdef int64_t at = 0, end = batch.size, i
    cdef uint32_t group = run.first_group, n
    cdef CowMap *map
    cdef bint inserts = batch.values != NULL and is_write(batch.op)
    run.paid_until = 0
    if batch.sorted:
        at = batch.starts[run.first_group]
        end = batch.starts[run.last_group]
    run.first_touched = run.last_touched = batch.first + at
    while at < end:
        n = <uint32_t>min(<int64_t>BLOCK, end - at)
        if batch.sorted:
            while batch.starts[group + 1] <= at:
                group += 1
            if batch.starts[group + 1] - batch.starts[group] >= BLOCK:
                # The end of a large group is its own block, so that the next group begins with its own map.
                n = <uint32_t>min(<int64_t>n, batch.starts[group + 1] - at)
                if at == batch.starts[group]:
                    if inserts:
                        prepare_group(batch, group)
                    map = batch.table.maps[group]
                    if batch.fast and map != NULL and map.secondary.capacity != 0:
                        if not pay_rehash(batch, run, map, at, batch.starts[group + 1] - batch.starts[group]):
                            return
                        run.paid_until = batch.starts[group + 1]
            if batch.fast and at + n <= batch.starts[group + 1] and batch.table.maps[group] != NULL:
                if not fast_block(batch, run, batch.table.maps[group], at, n):
                    return
                at += n
                continue
            i = 0
            while i < n:
                while batch.starts[group + 1] <= at + i:
                    group += 1
                if i and at + i == batch.starts[group] and batch.starts[group + 1] - batch.starts[group] >= BLOCK:
                    n = <uint32_t>i      # a large group begins with its own block
                    break
                maps[i] = batch.table.maps[group]
                i += 1
        else:
            for i in range(n):
                maps[i] = batch.table.maps[batch.groups[at + i]]
        if not apply_block(batch, run, at, n, maps):
            return
        at += n


cdef bint apply_block(Batch *batch, LaneRun *run, int64_t at, uint32_t n, CowMap **maps) noexcept nogil:
    """Apply up to BLOCK rows of any operation. False if the lane failed."""
    cdef RowKey keys[32]
    cdef uint32_t i
    if batch.block != NULL:
        return batch.block(batch, run, at, n, maps)
    stage_block(batch, at, n, maps, keys)
    for i in range(n):
        if not apply_row(batch, run, batch.table, &maps[i], &keys[i]):
            run.failed_row = keys[i].row
            return False
    return True


cdef void stage_block(Batch *batch, int64_t at, uint32_t n, CowMap **maps, RowKey *keys) noexcept nogil:
    """Load and hash the keys of a block, stage by stage, so that the cache misses of its rows overlap."""
    cdef Table *table = batch.table
    cdef Core *core = table.core
    cdef uint32_t *buckets[32]
    cdef uint32_t i, slot
    cdef CowMap *map
    cdef Entry *entry
    memset(keys, 0, n * sizeof(RowKey))
    for i in range(n):
        load_key(batch, at + i, &keys[i])
        map = maps[i]
        buckets[i] = &nowhere
        if map != NULL:
            buckets[i] = bucket(core, active_table(map, keys[i].hash),
                                keys[i].hash & (active_table(map, keys[i].hash).capacity - 1))
            if buckets[i] == NULL:
                buckets[i] = &nowhere
            prefetch(buckets[i])
        if batch.keys == NULL:
            prefetch(keys[i].data)
            prefetch(keys[i].data + keys[i].length - 1)
        if batch.value_offsets != NULL:
            prefetch(batch.value_offsets + keys[i].row)
        elif batch.values != NULL:
            prefetch(batch.values + batch.width * keys[i].row)
    for i in range(n):
        slot = buckets[i][0]
        if slot:
            prefetch(entry_at(core, slot))
            prefetch(<char *>entry_at(core, slot) + 31)
        if batch.value_offsets != NULL:
            prefetch(batch.values + batch.value_offsets[keys[i].row])
            prefetch(batch.values + batch.value_offsets[keys[i].row + 1] - 1)
    for i in range(n):
        # One row in three finds another key at the head of its chain: ask for the next entry.
        if buckets[i][0] == 0:
            continue
        entry = entry_at(core, buckets[i][0])
        if batch.keys == NULL and blob_hash(entry)[0] == keys[i].hash:
            prefetch(<char *>entry.key)
        elif (batch.keys == NULL or entry.key != keys[i].number) and entry.next:
            prefetch(entry_at(core, entry.next))
            prefetch(<char *>entry_at(core, entry.next) + 31)


cdef CowMap *map_of_row(Batch *batch, CowMap **where, int64_t row) noexcept nogil:
    """The map of a row's group, made here if need be; NULL without memory."""
    cdef uint32_t group
    if likely(where[0] != NULL):
        return where[0]
    group = batch.groups[row - batch.first]
    where[0] = batch.table.maps[group]
    if where[0] == NULL:
        where[0] = map_new(batch.table, group + batch.table.first_group)
    return where[0]


# --- values of eight and four bytes ---------------------------------------------------------------------

cdef bint fast_block(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n) noexcept nogil:
    """Apply rows of one map. Those that need more than `fast_rows` does go to `slow_row`, one by one."""
    if batch.fast == FAST_WIDE:
        return wide_block(batch, run, map, at, n)
    if batch.width == 8:
        return fast_rows_of(batch, run, map, at, n, 8)
    return fast_rows_of(batch, run, map, at, n, 4)


cdef inline bint fast_rows_of(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n,
                              uint32_t width) noexcept nogil:
    """The loop for each operation: with OP_REDUCE it asks what the batch's is."""
    if batch.fast == FAST_GET:
        return fast_rows_by(batch, run, map, at, n, OP_GET, width, False)
    if batch.fast == FAST_READ:
        return fast_rows_by(batch, run, map, at, n, OP_READ, width, True)
    if batch.table.layout.has_timestamp:
        return fast_writes(batch, run, map, at, n, width, True)
    return fast_writes(batch, run, map, at, n, width, False)


cdef inline bint fast_writes(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n, uint32_t width,
                             bint is_stamped) noexcept nogil:
    if batch.fast == FAST_UPDATE:
        return fast_rows_by(batch, run, map, at, n, OP_UPDATE, width, is_stamped)
    if batch.fast == FAST_SUM and width == 8:
        return fast_rows_by(batch, run, map, at, n, OP_SUM, width, is_stamped)
    return fast_rows_by(batch, run, map, at, n, OP_REDUCE, width, is_stamped)


cdef inline bint fast_rows_by(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n, Operation op,
                              uint32_t width, bint is_stamped) noexcept nogil:
    if batch.keys == NULL:
        return fast_rows(batch, run, map, at, n, op, width, True, is_stamped)
    return fast_rows(batch, run, map, at, n, op, width, False, is_stamped)


cdef inline bint may_write_bucket(Core *core, CowMap *map, uint32_t *head, uint32_t hash) noexcept nogil:
    """Return True if a bucket found earlier is still the live one of a hash, in a page that the live map owns.

    Rows in between may have moved entries, more than once, and pages come back at addresses of old ones.
    """
    cdef BucketTable *buckets = active_table(map, hash)
    cdef uint32_t index = hash & (buckets.capacity - 1)
    cdef PageRef *page = &buckets.pages[index >> PAGE_SHIFT]
    return (page.version >= core.highest_required_snapshot_version
            and map.seen_version >= core.highest_required_snapshot_version
            and page.ref != 0
            and head == <uint32_t *>address(core.arena, page.ref) + (index & (PAGE_BUCKETS - 1)))


cdef inline bint may_write_head(Lane *lane, Table *table, CowMap *map, BlockStages *staged, uint32_t i,
                                Log **log) noexcept nogil:
    """Return True if a row's bucket still may be written, and `log` has room for the record of it."""
    if map.primary.capacity != staged.primary_capacity or map.secondary.capacity != staged.secondary_capacity:
        return False                     # a page may be where another one was, with the same head in another order
    return (may_write_bucket(lane.core, map, staged.buckets[i], staged.hashes[i])
            and record_log(lane, table, log) and log_reserve(lane.core.arena, log[0], 16))


cdef inline bint is_in_chain(Core *core, uint32_t slot, uint32_t wanted) noexcept nogil:
    while slot and slot != wanted:
        slot = entry_at(core, slot).next
    return slot != 0


cdef inline uint32_t insert_at_head(Lane *lane, Table *table, CowMap *map, uint32_t *head, int64_t key, uint32_t ns,
                                    uint32_t hash, Log *log) noexcept nogil:
    """`insert` where nothing is in the way: room in the log, a bucket to write. 0 without memory."""
    cdef uint32_t slot = slot_alloc(table, map)
    cdef Entry *entry
    if unlikely(slot == 0):
        return 0
    entry = entry_at(lane.core, slot)
    entry.next = head[0]
    entry.version = lane.core.state_version
    entry.key = key
    if table.layout.off_namespace:
        (<uint32_t *>(<char *>entry + table.layout.off_namespace))[0] = ns
        count_namespace(table, ns, 1)
    head[0] = slot
    active_table(map, hash).size += 1
    map.modifications += 1
    lane.entries += 1
    (<uint64_t *>log_take(log, 8))[0] = (<uint64_t>RECORD_INSERT << 56) | (<uint64_t>map.group << 32) | slot
    return slot


cdef inline uint32_t clone_head(Lane *lane, Table *table, CowMap *map, uint32_t *head, bint is_blob,
                                Log *log) noexcept nogil:
    """`slot_for_write` for the old first entry of a chain, where nothing is in the way. 0 without memory."""
    cdef uint32_t slot = slot_alloc(table, map), old = head[0]
    cdef Entry *entry
    cdef char *room
    if unlikely(slot == 0):
        return 0
    entry = entry_at(lane.core, slot)
    if table.layout.stride == 24:
        memcpy(entry, entry_at(lane.core, old), 24)
    elif table.layout.stride == 32:
        memcpy(entry, entry_at(lane.core, old), 32)
    else:
        memcpy(entry, entry_at(lane.core, old), table.layout.stride)
    entry.version = lane.core.state_version
    if is_blob:
        (<Blob *>entry.key).refs += 1
    if table.layout.off_namespace:
        count_namespace(table, namespace_of(table, entry), 1)
    head[0] = slot
    room = log_take(log, 16)
    log.held += 1
    (<uint64_t *>room)[0] = slot
    (<uint64_t *>(room + 8))[0] = (<uint64_t>RECORD_REPLACED << 56) | (<uint64_t>map.group << 32) | old
    lane.copied_entries += 1
    return slot


cdef inline uint32_t own_slot(Lane *lane, Table *table, CowMap *map, BlockStages *staged, uint32_t i, int64_t key,
                              uint32_t ns, bint is_blob, Log **log, bint *is_logged) noexcept nogil:
    """Make a slot for a new key, or one that replaces an entry of a snapshot; 0 if `apply_row` has to do it."""
    cdef Core *core = lane.core
    cdef uint32_t *head = staged.buckets[i]
    if not may_write_head(lane, table, map, staged, i, log):
        return 0
    if staged.entries[i] == NULL:
        if (not is_blob and head[0] == staged.heads[i]
                and (map.secondary.capacity != 0 or map.primary.size <= map.threshold)):
            return insert_at_head(lane, table, map, head, key, ns, staged.hashes[i], log[0])
        return 0
    if head[0] == staged.refs[i]:
        is_logged[0] = True
        return clone_head(lane, table, map, head, is_blob, log[0])
    if is_in_chain(core, head[0], staged.refs[i]):
        return own_entry(lane, table, map, staged.refs[i], staged.hashes[i])
    return 0


cdef inline int64_t load_bits(const char *value, uint32_t width) noexcept nogil:
    return (<const int64_t *>value)[0] if width == 8 else (<const uint32_t *>value)[0]


cdef inline void store_bits(char *value, int64_t bits, uint32_t width) noexcept nogil:
    if width == 8:
        (<int64_t *>value)[0] = bits
    else:
        (<uint32_t *>value)[0] = <uint32_t>bits


cdef inline bint add_bits(Batch *batch, int64_t old, int64_t *bits, Operation op) noexcept nogil:
    """Add an old value to a new one; False on overflow."""
    if op == OP_SUM:
        return not add_overflow(old, bits[0], bits)
    return reduce_into(batch.op, batch.code, <char *>&old, <char *>bits, <char *>bits)


cdef inline int write_in_place(Batch *batch, Entry *entry, uint32_t ref, uint32_t off_value, int64_t bits,
                               int64_t stamp, Operation op, uint32_t width, bint is_stamped, Log *log,
                               bint is_logged, uint64_t group_bits) noexcept nogil:
    """Log a payload that the live map owns alone, then overwrite it or add to it. Returns a Failure."""
    cdef Core *core = batch.table.core
    cdef char *value = <char *>entry + off_value
    cdef int64_t old, old_stamp = 0
    cdef uint32_t record = 24 if is_stamped else 16
    cdef char *room
    if unlikely(log == NULL or not log_reserve(core.arena, log, record)):
        return FAILED_MEMORY
    old = load_bits(value, width)
    if is_stamped:
        old_stamp = (<int64_t *>(value - 8))[0]
        stamp = written_at(old_stamp, stamp, batch.keeps_latest)
    if op == OP_SUM or op == OP_REDUCE:
        if is_stamped and batch.ttl and is_expired(old_stamp, batch.ttl, stamp):
            begin_with(batch, &bits, op)
        elif unlikely(not add_bits(batch, old, &bits, op)):
            return FAILED_OVERFLOW
    if not is_logged:
        room = log_take(log, record)
        if is_stamped:
            (<int64_t *>room)[0] = old_stamp
        (<int64_t *>(room + record - 16))[0] = old
        # The table's index in the journal is 0: tables below an anchor do not come here.
        (<uint64_t *>(room + record - 8))[0] = (<uint64_t>RECORD_WRITE << 56) | group_bits | ref
    entry.version = core.state_version
    if is_stamped:
        (<int64_t *>(value - 8))[0] = stamp
    if op != OP_READ:
        store_bits(value, bits, width)
    return FAILED_NOT


cdef inline void begin_with(Batch *batch, int64_t *bits, Operation op) noexcept nogil:
    """Make of a value what a reduction of nothing else gives."""
    if op == OP_REDUCE:
        reduce_into(batch.op, batch.code, NULL, <char *>bits, <char *>bits)


cdef bint clear_row(Batch *batch, LaneRun *run, CowMap *map, int64_t at) noexcept nogil:
    """Remove the entry of a row, if there is one, and move none: the block's other rows have found theirs."""
    cdef RowKey key
    cdef uint32_t slot
    memset(&key, 0, sizeof(RowKey))
    load_key(batch, at, &key)
    if likely(see_snapshots(batch.table.core, map)):
        slot = find_row(batch, map, &key)
        if slot == 0 or remove(run.used, batch.table, map, slot, key.hash):
            return True
    run.failure = FAILED_MEMORY
    run.failed_row = key.row
    return False


cdef uint32_t find_again(Batch *batch, CowMap *map, int64_t at) noexcept nogil:
    cdef RowKey key
    memset(&key, 0, sizeof(RowKey))
    load_key(batch, at, &key)
    return find_row(batch, map, &key)


cdef bint slow_row(Batch *batch, LaneRun *run, CowMap *map, int64_t at) noexcept nogil:
    """Apply one row of a map in the general way of the call."""
    cdef RowKey key
    if batch.block != NULL:
        return batch.block(batch, run, at, 1, &map)
    memset(&key, 0, sizeof(RowKey))
    load_key(batch, at, &key)
    if not apply_row(batch, run, batch.table, &map, &key):
        run.failed_row = key.row
        return False
    return True


cdef inline bint stage_map(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n, Operation op,
                           uint32_t width, bint is_blob, BlockStages *staged) noexcept nogil:
    """Stage the rows of a block, after their share of a rehash: entries that the stages find stay in place."""
    if unlikely(map.secondary.capacity != 0 and at >= run.paid_until) and not pay_rehash(batch, run, map, at, n):
        return False
    stage_rows(batch, map, at, n, op, is_blob, width, staged)
    return True


cdef inline Entry *entry_of(Batch *batch, CowMap *map, int64_t at, int64_t key, BlockStages *staged, uint32_t i,
                            uint64_t look_again, bint is_blob) noexcept nogil:
    """The entry of a row of a block, NULL if it has none; `look_again` tells if it was staged before others moved."""
    cdef char **extents = batch.table.core.arena.extents
    cdef uint32_t off_ns = batch.table.layout.off_namespace, ns = namespace_at(batch, at + i), length = 0
    cdef const char *data = NULL
    if is_blob:
        data = batch.key_data + key
        length = batch.sorted_lengths[at + i]
    if unlikely(look_again & bit_of(staged.hashes[i]) != 0):
        come_to(staged, i, extents, find_again(batch, map, at + i))
    while staged.entries[i] != NULL and not is_key(staged.entries[i], key, data, length, staged.hashes[i], off_ns, ns,
                                                   is_blob):
        come_to(staged, i, extents, staged.entries[i].next)
    return staged.entries[i]


cdef inline bint fast_rows(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n, Operation op,
                           uint32_t width, bint is_blob, bint is_stamped) noexcept nogil:
    """`fast_block` for one operation, one width, one kind of key and entries with or without a timestamp, which the
    compiler knows: stage all rows, then apply each.

    A row in between may have cloned an entry that an early stage found. Then the version of that entry says that it
    belongs to a snapshot. Or it may have inserted an entry that no stage found: `slow_row` looks again. Or it has
    removed the entry, as a null does, and a read of an expired entry: then rows whose key may be the same look again.
    """
    cdef Table *table = batch.table
    cdef Core *core = table.core
    cdef Lane *lane = run.used
    cdef const int64_t *keys = batch.sorted_keys + at
    cdef const uint32_t *rows = batch.sorted_rows + at
    cdef const char *values = batch.values + width * batch.first
    cdef const uint8_t *nulls = NULL if batch.nulls == NULL else batch.nulls + batch.first
    cdef const Reading *reading = <const Reading *>batch.extra
    cdef char *out = batch.out + width * batch.first
    cdef uint8_t *found = batch.found + batch.first
    cdef uint32_t required = core.highest_required_snapshot_version, journal_version = core.journal_version
    cdef uint32_t off_value = table.layout.off_value
    cdef uint64_t group_bits = <uint64_t>map.group << 32
    cdef uint64_t look_again = 0         # by the last bits of a hash: whether such a row must look for its entry again
    cdef BlockStages staged
    cdef uint32_t i, ref
    cdef Entry *entry
    cdef Log *log
    cdef int64_t bits = 0, stamp = 0
    cdef bint is_logged, is_gone, is_first
    cdef int failure
    if not stage_map(batch, run, map, at, n, op, width, is_blob, &staged):
        return False
    for i in range(n):
        if op != OP_GET and op != OP_READ and nulls != NULL and nulls[rows[i]]:
            if not clear_row(batch, run, map, at + i):
                return False
            look_again |= bit_of(staged.hashes[i])
            continue
        entry = entry_of(batch, map, at, keys[i], &staged, i, look_again, is_blob)
        if op == OP_GET:
            if likely(entry != NULL):
                store_bits(out + width * rows[i], load_bits(<char *>entry + off_value, width), width)
                found[rows[i]] = 1
            continue
        if op == OP_READ:
            if entry == NULL:
                continue
            is_gone = is_expired((<int64_t *>(<char *>entry + off_value - 8))[0], batch.ttl,
                                 stamp_of(batch, batch.first + rows[i]))
            if not is_gone or reading.shows_expired:
                store_bits(out + width * rows[i], load_bits(<char *>entry + off_value, width), width)
                found[rows[i]] = 1
            if is_gone and not is_expired((<int64_t *>(<char *>entry + off_value - 8))[0], batch.ttl, reading.dead_at):
                continue
            if is_gone:
                if not clear_row(batch, run, map, at + i):
                    return False
                look_again |= bit_of(staged.hashes[i])
                continue
            if not reading.renews:
                continue
        else:
            bits = load_bits(values + width * rows[i], width)
        if is_stamped:
            stamp = stamp_of(batch, batch.first + rows[i])
        log = &lane.undo
        is_logged = False
        ref = staged.refs[i]
        is_first = is_untouched(batch, entry)
        if entry == NULL or entry.version < required:
            ref = own_slot(lane, table, map, &staged, i, keys[i], namespace_at(batch, at + i), is_blob, &log,
                           &is_logged)
            if unlikely(ref == 0):
                if not slow_row(batch, run, map, at + i):
                    return False
                if op == OP_READ:
                    look_again = ~<uint64_t>0        # it may have moved entries; `own_slot` sees that, a read does not
                continue
            if entry != NULL:
                entry = entry_at(core, ref)
        elif entry.version < journal_version:
            record_log(lane, table, &log)
        if entry == NULL:
            begin_with(batch, &bits, op)
            if is_stamped:
                (<int64_t *>(<char *>entry_at(core, ref) + off_value - 8))[0] = stamp
            store_bits(<char *>entry_at(core, ref) + off_value, bits, width)
        else:
            failure = write_in_place(batch, entry, ref, off_value, bits, stamp, op, width, is_stamped, log, is_logged,
                                     group_bits)
            if unlikely(failure != FAILED_NOT):
                run.failure = failure
                run.failed_row = batch.first + rows[i]
                return False
        note_touched(batch, run, is_first, batch.first + rows[i], ref)
    return True


cdef inline uint64_t bit_of(uint32_t hash) noexcept nogil:
    return <uint64_t>1 << (hash & 63)


# --- values of other widths, and of bytes ---------------------------------------------------------------

cdef bint wide_block(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n) noexcept nogil:
    if batch.op == OP_GET:
        if batch.keys == NULL:
            return wide_rows(batch, run, map, at, n, OP_GET, True)
        return wide_rows(batch, run, map, at, n, OP_GET, False)
    if batch.keys == NULL:
        return wide_rows(batch, run, map, at, n, OP_UPDATE, True)
    return wide_rows(batch, run, map, at, n, OP_UPDATE, False)


cdef inline bint wide_rows(Batch *batch, LaneRun *run, CowMap *map, int64_t at, uint32_t n, Operation op,
                           bint is_blob) noexcept nogil:
    """As `fast_rows`: reads, and updates of existing entries; new keys go to `slow_row`. Bytes are overwritten in place
    too, where they can be.
    """
    cdef Table *table = batch.table
    cdef Core *core = table.core
    cdef char **extents = core.arena.extents
    cdef const int64_t *keys = batch.sorted_keys + at
    cdef const uint32_t *rows = batch.sorted_rows + at
    cdef uint32_t off_value = table.layout.off_value
    cdef uint32_t required = core.highest_required_snapshot_version, width = table.layout.value_width
    cdef uint64_t look_again = 0         # as in `fast_rows`
    cdef BlockStages staged
    cdef uint32_t i, ref
    cdef int64_t row
    cdef Entry *entry
    cdef bint is_first
    if not stage_map(batch, run, map, at, n, op, width, is_blob, &staged):
        return False
    if op == OP_UPDATE and batch.value_offsets != NULL:
        for i in range(n):
            row = batch.first + rows[i]
            prefetch(batch.values + batch.value_offsets[row])
            prefetch(batch.values + batch.value_offsets[row + 1] - 1)
            if staged.entries[i] == NULL:
                continue
            if required == 0 or staged.entries[i].version >= required:
                prefetch_bytes((<Blob **>(<char *>staged.entries[i] + off_value))[0],
                               batch.value_offsets[row + 1] - batch.value_offsets[row])
            elif staged.refs[i] != staged.heads[i]:      # a clone of the one before it will share its bytes
                prefetch_write((<Blob **>(<char *>unit_at(extents, staged.heads[i]) + off_value))[0])
    for i in range(n):
        row = batch.first + rows[i]
        if op == OP_UPDATE and batch.nulls != NULL and batch.nulls[row]:
            if not clear_row(batch, run, map, at + i):
                return False
            look_again |= bit_of(staged.hashes[i])
            continue
        entry = entry_of(batch, map, at, keys[i], &staged, i, look_again, is_blob)
        if op == OP_GET:
            if likely(entry != NULL):
                batch.found[row] = 1
                if batch.blobs != NULL:
                    batch.blobs[row] = (<Blob **>(<char *>entry + off_value))[0]
                else:
                    copy_bytes(batch.out + width * row, <char *>entry + off_value, width)
            continue
        is_first = is_untouched(batch, entry)
        if entry == NULL:
            ref = 0
        elif entry.version < required:
            ref = replace(batch, run.used, map, &staged, i, is_blob, row)
        else:
            ref = overwrite(batch, run.used, map, staged.refs[i], entry, row)
        if ref == 0:
            if not slow_row(batch, run, map, at + i):
                return False
        else:
            note_touched(batch, run, is_first, row, ref)
    return True


cdef inline void prefetch_bytes(Blob *blob, int64_t length) noexcept nogil:
    """Ask for a blob that probably has so many bytes; they may be on two cache lines."""
    prefetch_write(blob)
    prefetch_write(blob_data(blob) + length - 1)


cdef inline uint32_t overwrite(Batch *batch, Lane *lane, CowMap *map, uint32_t slot, Entry *entry,
                               int64_t row) noexcept nogil:
    """Log the value of an entry that the live map owns alone, and overwrite it. 0 if it takes more than that."""
    cdef Table *table = batch.table
    cdef bint kept = False
    cdef const char *value
    cdef uint64_t length
    cdef int64_t stamp
    if batch.value_offsets != NULL:
        value = batch.values + batch.value_offsets[row]
        length = batch.value_offsets[row + 1] - batch.value_offsets[row]
        return slot if write_bytes(lane, table, map, slot, value, length, stamp_on(batch, row, entry)) else 0
    stamp = stamp_on(batch, row, entry)
    if not keep_payload(lane, table, map, slot, RECORD_WRITE, &kept):
        return 0
    entry.version = lane.core.state_version
    put_value(table, slot, kept, batch.values + table.layout.value_width * row, stamp)
    return slot


cdef inline uint32_t replace(Batch *batch, Lane *lane, CowMap *map, BlockStages *staged, uint32_t i, bint is_blob,
                             int64_t row) noexcept nogil:
    """Put an entry with a new value in place of a snapshot's at the head of its chain. 0 if it takes more than that.

    The old value stays where it is, with the snapshot's entry: its bytes stay untouched.
    """
    cdef Table *table = batch.table
    cdef Log *log = NULL
    cdef Blob *blob = NULL
    cdef const char *value = batch.values + table.layout.value_width * row
    cdef int64_t stamp = stamp_on(batch, row, staged.entries[i])
    cdef uint32_t slot
    if not may_write_head(lane, table, map, staged, i, &log) or staged.buckets[i][0] != staged.refs[i]:
        return 0
    if batch.value_offsets != NULL:
        blob = blob_of_row(batch, lane, row)
        if blob == NULL:
            return 0
        value = <const char *>&blob
    slot = clone_head(lane, table, map, staged.buckets[i], is_blob, log)
    if slot != 0:
        put_value(table, slot, True, value, stamp)
    elif blob != NULL:
        blob_drop(lane.core.blobs, blob)
    return slot


# --- any operation on any layout --------------------------------------------------------------------------

cdef bint apply_row(Batch *batch, LaneRun *run, Table *table, CowMap **where, RowKey *key) noexcept nogil:
    """Apply one row; `where` is the map of its group, made here if need be. False if it failed: see `run.failure`."""
    cdef Lane *lane = run.used
    cdef CowMap *map = where[0]
    cdef uint32_t slot
    cdef char *value
    cdef CoreKey k
    if unlikely(map == NULL):
        if batch.op == OP_GET or batch.op == OP_REMOVE or batch.op == OP_FIND:
            return True                  # results were prepared as "absent"
        map = map_of_row(batch, where, key.row)
        if map == NULL:
            run.failure = FAILED_MEMORY
            return False
    if unlikely(not before_operation(lane, table, map)):
        run.failure = FAILED_MEMORY
        return False
    slot = find_row(batch, map, key)

    if batch.op == OP_GET:
        if slot:
            value = value_of(table, entry_at(lane.core, slot))
            batch.found[key.row] = 1
            if batch.blobs != NULL:
                batch.blobs[key.row] = (<Blob **>value)[0]
            else:
                memcpy(batch.out + batch.width * key.row, value, batch.width)
        return True
    if batch.op == OP_FIND:
        batch.slots[key.row] = slot
        return True
    if batch.op == OP_REMOVE:
        if slot:
            batch.found[key.row] = 1
            if not remove(lane, table, map, slot, key.hash):
                run.failure = FAILED_MEMORY
                return False
        return True
    k.number = key.number
    k.data = key.data
    k.length = key.length
    k.namespace = key.ns
    k.hash = key.hash
    if batch.op != OP_APPEND:
        run.failure = write_row(batch, run, table, map, slot, &k, key.row)
    elif not append_row(batch, lane, table, map, slot, &k, key.row):
        run.failure = FAILED_MEMORY
    return run.failure == FAILED_NOT


cdef bint append_row(Batch *batch, Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k,
                     int64_t row) noexcept nogil:
    cdef Blob *blob
    if batch.value_offsets == NULL:
        return list_append(lane, table, map, slot, k, <char *>batch.values + batch.width * row,
                           stamp_of(batch, row))
    blob = blob_of_row(batch, lane, row)
    if blob == NULL:
        return False
    if not list_append(lane, table, map, slot, k, <char *>&blob, stamp_of(batch, row)):
        blob_drop(lane.core.blobs, blob)
        return False
    return True


cdef inline int write_row(Batch *batch, LaneRun *run, Table *table, CowMap *map, uint32_t slot, const CoreKey *k,
                          int64_t row) noexcept nogil:
    """Insert, overwrite or reduce one row. Returns a Failure."""
    cdef Lane *lane = run.used
    cdef bint is_first = is_untouched(batch, NULL if slot == 0 else entry_at(lane.core, slot))
    cdef const char *source
    cdef char reduced[8]
    cdef Blob *blob = NULL
    if batch.value_offsets != NULL:
        blob = blob_of_row(batch, lane, row)
        if blob == NULL:
            return FAILED_MEMORY
        source = <const char *>&blob
    else:
        source = batch.values + batch.width * row
    if batch.op != OP_UPDATE:
        if not reduce_into(batch.op, batch.code, NULL if slot == 0 else value_of(table, entry_at(lane.core, slot)),
                           source, reduced):
            return FAILED_OVERFLOW
        source = reduced
    slot = write_value(lane, table, map, k, slot, source, stamp_of(batch, row))
    if unlikely(slot == 0):
        if blob != NULL:
            blob_drop(lane.core.blobs, blob)
        return FAILED_MEMORY
    note_touched(batch, run, is_first, row, slot)
    return FAILED_NOT


# --- calls ---------------------------------------------------------------------------------------------

_pool = None
_pool_lock = threading.Lock()


def _thread_pool():
    """Return the threads besides the caller's own. The first use makes them; a forked child forgets them."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=MAX_LANES - 1, thread_name_prefix="statebackend")
        return _pool


def _forget_pool():
    global _pool, _pool_lock
    _pool = None
    _pool_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


cdef void work_on(Batch *batch, LaneRun *run, int phase, int lane) noexcept nogil:
    cdef uint32_t *counts = batch.counts + lane * <int64_t>batch.table.n_maps
    if phase == 0:
        count_rows(batch, run, counts)
    elif phase == 1:
        scatter_rows(batch, run, counts)
    elif phase == 2:
        apply_rows(batch, run)
    elif phase == 4:
        gather_touched(batch, lane)
    else:
        drop_written(batch.table.core, batch.table.journal, &run.used.undo)


cdef void run_phase(Crew *crew, uint32_t phase) noexcept nogil:
    """Run all lanes of one phase. When this returns, no lane is at work any more."""
    cdef int lane
    cdef uint32_t turn = crew.turn + 1
    crew.phase = phase
    store_u32(&crew.turn, turn)
    work_on(crew.batch, &crew.runs[0], phase, 0)
    for lane in range(1, crew.n_lanes):
        if claim(&crew.claimed[lane], turn):
            work_on(crew.batch, &crew.runs[lane], phase, lane)       # it was not begun
            store_u32(&crew.done[lane], turn)
    for lane in range(1, crew.n_lanes):
        while load_u32(&crew.done[lane]) != turn:
            usleep(5)


cdef void work_along(Crew *crew) noexcept nogil:
    """Do the lanes of each phase that were not begun, until the call is over."""
    cdef uint32_t seen = 0, turn
    cdef int i, lane, others = crew.n_lanes - 1, idle = 0
    cdef int64_t first = add_i64(&crew.came, 1)
    while not load_u32(&crew.is_over):
        turn = load_u32(&crew.turn)
        if turn == seen:
            idle += 1
            if idle > IDLE_LOOKS:
                usleep(5)
            continue
        seen = turn
        idle = 0
        for i in range(others):
            lane = 1 + <int>((first + i) % others)
            if claim(&crew.claimed[lane], turn):
                work_on(crew.batch, &crew.runs[lane], crew.phase, lane)
                store_u32(&crew.done[lane], turn)


cdef void assign_groups(Crew *crew) noexcept nogil:
    """Turn counts into positions; give each lane a range of groups with its share of the first chunk's rows.

    A group keeps its lane for the whole call: the undo logs of lanes are in order only group by group.
    """
    cdef Batch *batch = crew.batch
    cdef LaneRun *runs = crew.runs
    cdef uint32_t group, groups = batch.table.n_maps, at = 0, amount
    cdef int lane, lanes = crew.n_lanes, filling = 0
    cdef int64_t share = (batch.size + lanes - 1) // lanes
    cdef bint divide = batch.first == 0
    runs[0].first_group = 0
    for group in range(groups):
        batch.starts[group] = at
        for lane in range(lanes):
            amount = batch.counts[lane * groups + group]
            batch.counts[lane * groups + group] = at
            at += amount
        if divide and filling + 1 < lanes and at >= (filling + 1) * share:
            runs[filling].last_group = group + 1
            filling += 1
            runs[filling].first_group = group + 1
    batch.starts[groups] = at
    if not divide:
        return
    runs[filling].last_group = groups
    for lane in range(filling + 1, lanes):
        runs[lane].first_group = runs[lane].last_group = groups


cdef Failure run_chunk(Crew *crew) noexcept nogil:
    cdef Batch *batch = crew.batch
    cdef LaneRun *runs = crew.runs
    cdef int lane, lanes = crew.n_lanes
    cdef int64_t share = (batch.size + lanes - 1) // lanes
    cdef Failure failure = FAILED_NOT
    for lane in range(lanes):
        runs[lane].first_row = min(lane * share, batch.size)
        runs[lane].last_row = min((lane + 1) * share, batch.size)
    run_phase(crew, 0)
    for lane in range(lanes):
        if runs[lane].failed_row >= 0:
            return FAILED_GROUP
    if batch.sorted:
        assign_groups(crew)
        run_phase(crew, 1)
    run_phase(crew, 2)
    if batch.touched != NULL:
        for lane in range(lanes):
            join_touched(batch, &runs[lane])
    for lane in range(lanes):
        if runs[lane].failure == FAILED_MEMORY:
            return FAILED_MEMORY
        if runs[lane].failure != FAILED_NOT:
            failure = FAILED_OVERFLOW
    return failure


cdef void join_touched(Batch *batch, LaneRun *run) noexcept nogil:
    """Move the keys that a lane has touched behind the keys of the lanes and chunks before it."""
    cdef int64_t n = run.last_touched - run.first_touched, i
    cdef Touch *place = batch.touched + batch.n_touched
    memmove(place, batch.touched + run.first_touched, n * sizeof(Touch))
    if batch.touched_groups != NULL:
        for i in range(n):
            batch.touched_groups[batch.n_touched + i] = batch.groups[place[i].row - batch.first]
    batch.n_touched += n


cdef int compare_touches(const void *a, const void *b) noexcept nogil:
    cdef uint64_t mine = (<const uint64_t *>a)[0], other = (<const uint64_t *>b)[0]
    return (mine > other) - (mine < other)


cdef void order_touched(Batch *batch) noexcept nogil:
    """Order the touched keys by key group; keys of one group keep their order."""
    cdef uint32_t *positions = batch.starts          # no chunk needs it any more
    cdef uint64_t few[MOST_FEW]
    cdef int64_t i, n = batch.n_touched
    cdef uint32_t group, at = 0, amount
    if n <= MOST_FEW:
        # A short call does not look at each key group.
        for i in range(n):
            few[i] = <uint64_t>batch.touched_groups[i] << 32 | <uint64_t>i
        qsort(few, n, sizeof(uint64_t), compare_touches)
        for i in range(n):
            batch.in_order[i] = batch.touched[<uint32_t>few[i]]
        return
    memset(positions, 0, batch.table.n_maps * sizeof(uint32_t))
    for i in range(n):
        positions[batch.touched_groups[i]] += 1
    for group in range(batch.table.n_maps):
        amount = positions[group]
        positions[group] = at
        at += amount
    for i in range(n):
        group = batch.touched_groups[i]
        batch.in_order[positions[group]] = batch.touched[i]
        positions[group] += 1


cdef void gather_touched(Batch *batch, int lane) noexcept nogil:
    """Copy a lane's share of the touched keys, and the values that they have now."""
    cdef Table *table = batch.table
    cdef int64_t share = (batch.n_touched + batch.n_lanes - 1) // batch.n_lanes, i
    cdef int64_t end = min((lane + 1) * share, batch.n_touched)
    cdef uint32_t width = table.layout.value_width
    cdef Entry *entry
    for i in range(lane * share, end):
        if i + AHEAD < end:
            prefetch(value_of(table, entry_at(table.core, batch.in_order[i + AHEAD].slot)))
        entry = entry_at(table.core, batch.in_order[i].slot)
        if batch.touched_keys != NULL:
            batch.touched_keys[i] = entry.key
        if width == 8:
            (<uint64_t *>batch.touched_values)[i] = (<uint64_t *>value_of(table, entry))[0]
        else:
            memcpy(batch.touched_values + width * i, value_of(table, entry), width)


cdef Failure run_chunks(Crew *crew) noexcept nogil:
    """Run the chunks, until one fails."""
    cdef Batch *batch = crew.batch
    cdef Failure failure = FAILED_NOT
    while batch.first < batch.n and failure == FAILED_NOT:
        batch.size = min(<int64_t>CHUNK, batch.n - batch.first)
        failure = run_chunk(crew)
        batch.first += batch.size
    if failure == FAILED_NOT and batch.value_offsets != NULL and is_write(batch.op):
        run_phase(crew, 3)
    if failure == FAILED_NOT and batch.touched != NULL:
        if batch.touched_groups != NULL:
            order_touched(batch)
        run_phase(crew, 4)
    store_u32(&crew.is_over, 1)
    return failure


@cython.final
cdef class LaneWork:
    """The work of the pool's threads for a call: mainly one lane of each phase.

    A thread may come to this object when the call is long over. So the object holds no reference to the call: that
    would keep the memory of a closed backend. It also uses no pointer into the call once the call is over.
    """

    def __call__(self):
        cdef Crew *crew = &self.crew
        with nogil:
            work_along(crew)


@cython.final
cdef class BatchCall:
    """One vectorised call on a table; made and run by the functions below."""

    def __cinit__(self, StateTable table not None, keys, namespaces, int threads):
        table.usable()
        if table.anchors is not None:
            raise UsageError("the entries of a map state are reached through their MapTable only")
        memset(&self.batch, 0, sizeof(Batch))
        memset(self.runs, 0, sizeof(self.runs))
        self.work = LaneWork.__new__(LaneWork)
        memset(&self.work.crew, 0, sizeof(Crew))
        self.work.crew.batch = &self.batch
        self.work.crew.runs = self.runs
        self.table = table
        self.keep = []
        self.batch.table = table.table
        self.batch.program = &table.plan.program
        self.batch.max_parallelism = table.max_parallelism
        self.batch.n_lanes = max(1, min(threads, MAX_LANES))
        self.batch.code = table.value_code
        self.batch.width = table.table.layout.value_width
        if table.table.layout.key_is_blob:
            offsets, data = _pair(keys, "keys")
            self.batch.n = len(offsets) - 1
            self.batch.key_offsets = <const int64_t *>self.pointer(_checked_offsets(offsets, data), np.int64)
            self.batch.key_data = <const char *>self.pointer(data, np.uint8)
        else:
            self.batch.keys = <const int64_t *>self.pointer(keys, np.int64)
            self.batch.n = len(keys)
        self.set_namespaces(namespaces)

    cdef void *pointer(self, array, dtype) except NULL:
        _require_array(array, dtype, 1)
        array = np.ascontiguousarray(array)
        if len(array) == 0:
            array = np.zeros(1, dtype=dtype)
        self.keep.append(array)
        return <void *><uintptr_t>array.__array_interface__["data"][0]

    cdef int set_values(self, values, int code, uint32_t width) except -1:
        """Values by row: an array of the right width, or (offsets, data)."""
        self.batch.code = code
        self.batch.width = width
        if code == CODE_BLOB:
            offsets, data = _pair(values, "values")
            if len(offsets) - 1 != self.batch.n:
                raise UsageError("keys and values differ in length",
                                 detail=f"{self.batch.n} keys, {len(offsets) - 1} values")
            self.batch.value_offsets = <const int64_t *>self.pointer(_checked_offsets(offsets, data), np.int64)
            self.batch.values = <const char *>self.pointer(data, np.uint8)
            self.batch.width = 8
            return 0
        if code == CODE_RAW:
            _require_array(values, np.uint8, 2)
            if values.shape[1] != width:
                raise UsageError(f"values of this table are an array of uint8 with {width} columns")
            flat = np.ascontiguousarray(values).reshape(-1)
        else:
            _require_array(values, DTYPES[code], 1)
            flat = values
        if len(values) != self.batch.n:
            raise UsageError("keys and values differ in length", detail=f"{self.batch.n} keys, {len(values)} values")
        self.batch.values = <const char *>self.pointer(flat, flat.dtype)
        return 0

    cdef int set_nulls(self, nulls) except -1:
        """Set the mask of null values, by row; None if there are none."""
        if nulls is None:
            return 0
        if len(nulls) != self.batch.n:
            raise UsageError("keys and nulls differ in length", detail=f"{self.batch.n} keys, {len(nulls)} nulls")
        self.batch.nulls = <const uint8_t *>self.pointer(nulls, np.bool_)
        return 0

    cdef int set_namespaces(self, namespaces) except -1:
        """Set the number of one namespace for all rows, or an array with one for each."""
        if not isinstance(namespaces, np.ndarray):
            self.batch.ns = namespaces
        elif len(namespaces) != self.batch.n:
            raise UsageError("keys and namespaces differ in length",
                             detail=f"{self.batch.n} keys, {len(namespaces)} namespaces")
        else:
            self.batch.namespaces = <const uint32_t *>self.pointer(namespaces, np.uint32)
        if (self.batch.ns or self.batch.namespaces != NULL) and not self.batch.table.layout.off_namespace:
            raise UsageError("this table has no namespaces")
        return 0

    cdef int set_timestamps(self, timestamps) except -1:
        """Set one timestamp for all rows, or an array with one for each."""
        if not isinstance(timestamps, np.ndarray):
            self.batch.timestamp = timestamps
            return 0
        if len(timestamps) != self.batch.n:
            raise UsageError("keys and timestamps differ in length",
                             detail=f"{self.batch.n} keys, {len(timestamps)} timestamps")
        self.batch.timestamps = <const int64_t *>self.pointer(timestamps, np.int64)
        return 0

    cdef int enter(self) except -1:
        cdef StateCore owner = self.table.owner
        owner._check_call()
        owner.reclaim(RECLAIM_PER_ROW * self.batch.n + RECLAIM_PER_BATCH)
        return owner.enter()

    cdef int leave(self) except -1:
        self.table.owner.leave()
        return 0

    cdef int hold(self) except -1:
        """Keep everything else out until `let_go`: the entries that this call has found stay in place."""
        self.enter()
        return self.table.owner.occupy()

    cdef int let_go(self) except -1:
        self.table.owner.vacate()
        return self.leave()

    cdef int run(self, Operation op, bint is_inside=False) except -1:
        """Run all chunks of the batch, or none of them. `is_inside` tells that the caller holds it."""
        cdef StateCore owner = self.table.owner
        cdef Core *core = &owner.core
        cdef bint writes = is_write(op)
        cdef int64_t limit
        cdef Failure failure = FAILED_NOT
        cdef Crew *crew = &self.work.crew
        self.batch.op = op
        self._prepare()
        try:
            self._call_crew()
            if not is_inside:
                self.enter()
            try:
                if self.batch.n:
                    limit = owner.arena.budget.limit
                    self._begin(writes)
                    try:
                        with nogil:
                            failure = run_chunks(crew)
                        self._end(failure != FAILED_NOT, writes)
                    finally:
                        owner.arena.budget.limit = limit
                        core.is_touching = False
                        owner.vacate()
                    if core.pending and self.batch.slots == NULL and self.batch.touched == NULL:
                        # What the call itself has left.
                        owner.reclaim(RECLAIM_PER_ROW * self.batch.n + RECLAIM_PER_BATCH)
                    if failure != FAILED_NOT and limit and owner.arena.budget.used > limit:
                        # Undoing went beyond the limit. Without this, the limit would refuse the next call too.
                        owner.reclaim(2 * RECLAIM_PER_ROW * self.batch.n)
                        owner.arena.trim()
                    self._raise(failure)
            finally:
                if not is_inside:
                    self.leave()
        finally:
            store_u32(&crew.is_over, 1)
        return 0

    cdef tuple run_touching(self, Operation op):
        """Run a write. Return three columns of the keys that it wrote: the first row, the key, and the value then.

        For keys of bytes, the second column is None. The keys are in ascending order of key groups, and in a group in
        the order of their first rows. No row may remove a key.
        """
        cdef uint32_t width = self.batch.table.layout.value_width
        cdef int64_t n = self.batch.n
        cdef bint is_ordered = self._is_sorted() and n <= CHUNK
        if n > UINT32_MAX:
            raise UsageError("a call that returns the changed keys cannot take so many rows",
                             detail=f"{n} rows; up to {UINT32_MAX} are possible")
        room, keys = np.empty(n if is_ordered else n * 2 + (n + 3) // 4, dtype=np.uint64), None
        self.batch.in_order = self.batch.touched = <Touch *>self.pointer(room, np.uint64)
        if not is_ordered:
            self.batch.touched += n
            self.batch.touched_groups = <uint16_t *>(self.batch.touched + n)
        if not self.batch.table.layout.key_is_blob:
            keys = np.empty(n, dtype=np.int64)
            self.batch.touched_keys = <int64_t *>self.pointer(keys, np.int64)
        values = np.empty(n * width, dtype=np.uint8)
        self.batch.touched_values = <char *>self.pointer(values, np.uint8)
        self.hold()
        try:
            self.run(op, True)
            if self.table.value_code == CODE_BLOB:
                values = blobs_of(values[:self.batch.n_touched * width].view(np.uint64))
        finally:
            self.let_go()
        rows = room.view(np.uint32)[:2 * self.batch.n_touched:2]
        keys = None if keys is None else keys[:self.batch.n_touched]
        if self.table.value_code != CODE_BLOB:
            values = values[:self.batch.n_touched * width]
            values = values.reshape(-1, width) if self.table.value_code == CODE_RAW else values.view(
                DTYPES[self.table.value_code])
        if 2 * self.batch.n_touched >= n:
            return rows, keys, values
        # Few keys do not keep the memory for all rows.
        return rows.copy(), None if keys is None else keys.copy(), (
            values if self.table.value_code == CODE_BLOB else values.copy())

    cdef tuple read(self, Operation op, int code, uint32_t width, bint counted):
        """Run a read. Returns the values by row, bytes as (offsets, data), and a mask of the rows found.

        `counted` tells that the read takes a reference to each blob, because what it reads may go.
        """
        cdef StateCore owner = self.table.owner
        cdef int64_t n = self.batch.n, i
        cdef Blob **pointers
        found = np.zeros(n, dtype=np.uint8)
        self.batch.found = <uint8_t *>self.pointer(found, np.uint8)
        if code == CODE_BLOB:
            blobs = np.zeros(max(n, 1), dtype=np.uint64)
            pointers = self.batch.blobs = <Blob **>self.pointer(blobs, np.uint64)
            self.hold()
            try:
                self.run(op, True)
                return blobs_of(blobs[:n]), found.view(bool)
            finally:
                if counted:
                    for i in range(n):
                        if pointers[i] != NULL:
                            blob_drop(owner.core.blobs, pointers[i])
                self.let_go()
        out = np.zeros((n, width), dtype=np.uint8)
        self.batch.out = <char *>self.pointer(out.reshape(-1), np.uint8)
        self.run(op)
        return out if code == CODE_RAW else out.view(DTYPES[code]).reshape(-1), found.view(bool)

    cdef bint _is_sorted(self) noexcept:
        """Return True if it pays to sort the rows by key group, which costs time for each key group."""
        return self.batch.n >= SHORT_BATCH and self.batch.n >= 4 * <int64_t>self.batch.table.n_maps

    cdef int _prepare(self) except -1:
        """Do everything that runs Python."""
        # A lane costs time for each key group, and for its thread.
        self.batch.sorted = self._is_sorted()
        if not self.batch.sorted:
            self.batch.n_lanes = 1
        self.batch.n_lanes = <int>min(<int64_t>self.batch.n_lanes, 1 + self.batch.n // SHORT_BATCH)
        self._make_scratch()
        return 0

    cdef int _call_crew(self) except -1:
        """Ask the pool for a thread for each other lane. If this raises, nothing has begun."""
        cdef int _lane
        self.work.crew.n_lanes = self.batch.n_lanes
        if self.batch.n_lanes == 1:
            return 0
        try:
            pool = _thread_pool()
            for _lane in range(1, self.batch.n_lanes):
                pool.submit(self.work)
        except RuntimeError:             # without more threads, the caller's own does everything
            pass
        return 0

    cdef int _begin(self, bint writes) except -1:
        cdef Table *table = self.batch.table
        cdef Core *core = table.core
        cdef StateCore owner = self.table.owner
        cdef int lane
        cdef Log *log
        if self.batch.touched != NULL:
            owner.bump_version()
        self.batch.fast = self._fast_path()
        for lane in range(self.batch.n_lanes):
            self.runs[lane].lane.core = core
            self.runs[lane].lane.blobs = &core.blobs[lane]
            self.runs[lane].lane.is_worker = 1
            self.runs[lane].used = &self.runs[lane].lane
            self.runs[lane].failed_row = -1
        self.runs[0].used = &table.lane
        if core.journal_version:
            # Reads can move entries too, and a lane's journal needs a place to go afterwards.
            if not segment_for_writing(core, table.journal, &log):
                owner.out_of_memory()
            self.runs[0].journal_records = log.records
        for lane in range(self.batch.n_lanes):
            self.runs[lane].lane.retired.until = core.highest_required_snapshot_version
            self.runs[lane].lane.own_journal.until = core.highest_required_snapshot_version
            self.runs[lane].used.undo.until = core.highest_required_snapshot_version
            self.runs[lane].used.keep_undo = writes
            self.runs[lane].copied_before = self.runs[lane].used.copied_entries
        core.arena.is_shared = self.batch.n_lanes > 1
        owner.occupy()
        if self.batch.touched != NULL:
            # From here on no Python runs that could raise the version.
            self.batch.untouched_below, core.is_touching = core.state_version, True
        return 0

    cdef bint _is_short(self) noexcept:
        """Return True for values of eight or four bytes with nothing next to them but a timestamp."""
        cdef uint32_t width = self.batch.width
        return (width == 8 or width == 4) and (
            self.batch.table.layout.payload_width == width + 8 * self.batch.table.layout.has_timestamp)

    cdef FastPath _fast_path(self) noexcept:
        cdef Table *table = self.batch.table
        if table.anchors != NULL or table.layout.off_value_version or table.layout.off_null:
            return FAST_NONE
        if table.layout.value_kind != VALUE_BLOB and (
                table.layout.value_kind != VALUE_FIXED or self.batch.width != table.layout.value_width):
            return FAST_NONE
        if table.layout.value_kind == VALUE_BLOB or not self._is_short():
            return FAST_WIDE if self.batch.op == OP_UPDATE or self.batch.op == OP_GET else FAST_NONE
        if self.batch.op == OP_READ:
            return FAST_READ
        if self.batch.op == OP_GET:
            return FAST_GET
        if self.batch.op == OP_UPDATE:
            return FAST_UPDATE
        if self.batch.op == OP_SUM and self.batch.code == TYPE_LONG:
            return FAST_SUM
        if OP_SUM <= self.batch.op <= OP_ALL and self.batch.code < TYPE_BOOL:
            return FAST_REDUCE
        return FAST_NONE

    cdef int _make_scratch(self) except -1:
        cdef int64_t size = min(self.batch.n, <int64_t>CHUNK)
        cdef uint32_t groups = self.batch.table.n_maps
        cdef char *base
        needed = size * (26 + SHORT_KEY if self.batch.keys == NULL else 14)
        if self.batch.namespaces != NULL:
            needed += size * 4
        needed += (groups + 1) * 4 * (self.batch.n_lanes + 1) + 64
        scratch = self.table.owner.arena.scratch(needed)
        self.keep.append(scratch)
        base = <char *><uintptr_t>scratch.__array_interface__["data"][0]
        if self.batch.keys == NULL:
            self.batch.short_keys = base     # first: none of them is on two cache lines
            base += size * SHORT_KEY
        self.batch.sorted_keys = <int64_t *>base
        self.batch.sorted_rows = <uint32_t *>(base + size * 8)
        base += size * 12
        if self.batch.keys == NULL:
            self.batch.hashes = <uint32_t *>base
            self.batch.sorted_hashes = <uint32_t *>(base + size * 4)
            self.batch.sorted_lengths = <uint32_t *>(base + size * 8)
            base += size * 12
        if self.batch.namespaces != NULL:
            self.batch.sorted_namespaces = <uint32_t *>base
            base += size * 4
        self.batch.groups = <uint16_t *>base
        base += (size * 2 + 7) & ~7
        self.batch.starts = <uint32_t *>base
        self.batch.counts = <uint32_t *>(base + (groups + 1) * 4)
        return 0

    cdef int _raise(self, Failure failure) except -1:
        """Raise the error of a call that has failed and was undone."""
        cdef int lane
        if failure == FAILED_NOT:
            return 0
        if failure == FAILED_MEMORY:
            self.table.owner.out_of_memory()
        rows = [self.runs[lane].failed_row for lane in range(self.batch.n_lanes)
                if failure == FAILED_GROUP or self.runs[lane].failure]
        first = min([row for row in rows if row >= 0])
        if self.rows is not None:
            first = self.rows[first]
        if failure == FAILED_GROUP:
            raise KeyGroupError("a key belongs to a key group that this backend does not own",
                                detail=f"position {first}")
        raise OverflowError(f"a reduced value does not fit its type, at position {first}")

    cdef int _end(self, bint failed, bint writes) except -1:
        """Undo what a failed call did, or settle what a good one leaves: journals, retired entries, counts."""
        cdef Table *table = self.batch.table
        cdef Core *core = table.core
        cdef Journal *journal = table.journal
        cdef StateCore owner = self.table.owner
        cdef Lane *lane
        cdef Log *log
        cdef Log carried
        cdef int i
        core.arena.is_shared = 0
        for i in range(self.batch.n_lanes):
            if self.batch.inner != NULL:
                self.batch.inner.lane.entries += self.runs[i].inner_entries
            self.runs[i].used.keep_undo = 0
            if i:
                self._settle_lane(i)
        if failed and writes:
            owner.arena.budget.limit = 0       # undoing may need a little; restored by `run`
            memset(&carried, 0, sizeof(Log))
            carried.until = core.highest_required_snapshot_version
            forget_moves(core)
            try:
                for i in range(self.batch.n_lanes):
                    owner.undo_failed(journal, &self.runs[i].used.undo, 0, &carried)
                for i in range(1, self.batch.n_lanes):
                    owner.undo_failed(journal, &self.runs[i].lane.own_journal, 0, &carried)
                if core.journal_version and segment_for_writing(core, journal, &log):
                    owner.undo_failed(journal, log, self.runs[0].journal_records, &carried)
                owner.settle_undone(journal, &carried)
            except MemoryError:
                for i in range(self.batch.n_lanes):      # the backend is closed; the logs' contents go with it
                    let_die(core, journal, &self.runs[i].used.undo)
                    let_die(core, journal, &self.runs[i].lane.own_journal)
                raise
            finally:
                forget_moves(core)
            return 0
        for i in range(self.batch.n_lanes):
            lane = self.runs[i].used
            if core.newest != NULL and 2 * (lane.copied_entries - self.runs[i].copied_before) >= lane.undo.records:
                # Most of these are slots that clones replaced, because of a snapshot that is still there: no snapshot
                # ever keeps more of them than it has entries.
                note_filled(core, journal)
                log_append(core.arena, &journal.waiting, &lane.undo)
            else:
                discard_log(core, journal, &lane.undo)
            if i and lane.own_journal.records and segment_for_writing(core, journal, &log):
                log_append(core.arena, log, &lane.own_journal)
        return 0

    cdef void _settle_lane(self, int i) noexcept:
        """Join what a worker lane retired and counted with the table's."""
        cdef Lane *lane = &self.runs[i].lane
        cdef Table *table = self.batch.table
        if table.core.newest != NULL:
            log_append(table.core.arena, &table.core.newest.retired, &lane.retired)
        else:
            log_append(table.core.arena, &table.core.garbage, &lane.retired)
            table.core.pending = 1
        table.lane.entries += lane.entries
        table.lane.copied_entries += lane.copied_entries
        table.lane.copied_pages += lane.copied_pages
        table.lane.moved_entries += lane.moved_entries


def _require_array(array, dtype, dimensions):
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dimensions:
        found = type(array).__name__
        if isinstance(array, np.ndarray):
            found = f"{array.dtype.name}, {array.ndim} dimensions"
        raise UsageError(f"an array of {np.dtype(dtype).name} with {dimensions} dimension(s) is needed",
                         detail=f"got {found}")


def _pair(columns, what):
    if not isinstance(columns, tuple) or len(columns) != 2:
        raise UsageError(f"{what} of this table are (offsets, data)", detail=f"got {type(columns).__name__}")
    return columns


def _checked_offsets(offsets, data):
    """Return the offsets, once they are known to rise and to lie within the data."""
    _require_array(offsets, np.int64, 1)
    _require_array(data, np.uint8, 1)
    if len(offsets) == 0:
        raise UsageError("offsets have one element more than there are rows")
    lengths = _lengths_of(np.ascontiguousarray(offsets))
    if offsets[0] < 0 or offsets[len(offsets) - 1] > len(data) or lengths == FALLING:
        raise UsageError("offsets must rise and lie within the data")
    if lengths == TOO_LONG:
        raise OverflowError("a key or value is larger than 2 GB")
    return offsets


cdef Lengths _lengths_of(const int64_t[::1] offsets):
    cdef int64_t i
    cdef bint falling = False, too_long = False
    with nogil:
        for i in range(offsets.shape[0] - 1):
            falling |= offsets[i + 1] < offsets[i]
            too_long |= <uint64_t>offsets[i + 1] - <uint64_t>offsets[i] > <uint64_t>0x7FFFFFFF
    return FALLING if falling else TOO_LONG if too_long else FITTING


def update_many(StateTable table not None, keys, values, *, namespace=0, timestamp=0, int threads=1):
    """Set the values of many keys, in order. `timestamp` is one for all, or an array. Atomic.

    >>> import numpy as np
    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> table = StateTable(StateCore(), value="long")
    >>> update_many(table, np.array([1, 2, 1]), np.array([10, 20, 30]))
    >>> get_many(table, np.array([1]))
    (array([30]), array([ True]))
    """
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    if table.value_code >= CODE_OBJECT:
        raise UsageError("objects, lists and anchors are not updated in batches")
    call.set_values(values, table.value_code, table.table.layout.value_width)
    call.set_timestamps(timestamp)
    call.run(OP_UPDATE)


def get_many(StateTable table not None, keys, *, namespace=0, int threads=1):
    """Return the values of many keys and which were found, by row. Where nothing was found, the value is zero.

    Byte values come as (offsets, data).

    >>> import numpy as np
    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> table = StateTable(StateCore(), value="long")
    >>> table.put(1, 10)
    >>> get_many(table, np.array([1, 2]))
    (array([10,  0]), array([ True, False]))
    """
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    if table.value_code >= CODE_OBJECT:
        raise UsageError("objects, lists and anchors are not read in batches")
    return call.read(OP_GET, table.value_code, table.table.layout.value_width, False)


def find_many(StateTable table not None, keys, *, namespace=0, int threads=1):
    """Return the entry slots of many keys, by row; 0 where there is none."""
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    slots = np.zeros(call.batch.n, dtype=np.uint32)
    call.batch.slots = <uint32_t *>call.pointer(slots, np.uint32)
    call.run(OP_FIND)
    return slots


def remove_many(StateTable table not None, keys, *, namespace=0, int threads=1):
    """Remove many keys and return, by row, whether the key was there at its turn. Atomic."""
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    if table.anchors is not None or table.value_code == CODE_ANCHOR:
        raise UsageError("map states are not removed from in this way")
    found = np.zeros(call.batch.n, dtype=np.uint8)
    call.batch.found = <uint8_t *>call.pointer(found, np.uint8)
    if table.value_code == CODE_OBJECT:
        raise UsageError("objects are not removed in batches")
    call.run(OP_REMOVE)
    return found.view(bool)


def append_many(StateTable table not None, keys, values, *, namespace=0, timestamp=0, int threads=1):
    """Append each value to its key's list, in order. `timestamp` is one for all, or an array. Atomic."""
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    if table.value_code != CODE_LIST:
        raise UsageError("this table does not hold lists")
    if table.element_code == CODE_OBJECT:
        raise UsageError("objects are not appended in batches")
    call.set_values(values, table.element_code, table.table.element_value_width)
    call.set_timestamps(timestamp)
    call.run(OP_APPEND)


def lists_of(StateTable table not None, keys, *, namespace=0, int threads=1):
    """Return the lists of many keys, in the form of `lists_at`.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> table = StateTable(StateCore(), value=("list", "long"))
    >>> table.append(5, 1); table.append(5, 2)
    >>> lists_of(table, np.array([4, 5]))
    (array([0, 0, 2]), array([1, 2]))
    """
    cdef BatchCall call = BatchCall(table, keys, namespace, threads)
    slots = np.zeros(call.batch.n, dtype=np.uint32)
    call.batch.slots = <uint32_t *>call.pointer(slots, np.uint32)
    call.hold()
    try:
        call.run(OP_FIND, True)
        return lists_at(table, slots)
    finally:
        call.let_go()
