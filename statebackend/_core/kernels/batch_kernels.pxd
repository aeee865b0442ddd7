"""Batch calls, for the other modules of kernels, which bring their own last stage.

A `BlockFunction` applies up to 32 rows in their order. It gets the maps of their groups, NULL where a map was never
needed. If a row fails, it sets `run.failure` and `run.failed_row` and returns False.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport Blob, blob_new
from statebackend._core.tables.cow_map cimport CowMap, Entry, Lane, Table, find_blob, find_int, hash_int_key, payload_of
from statebackend._core.tables.expiry cimport written_at
from statebackend._core.key_groups cimport HashProgram
from statebackend._core.memory.platform cimport prefetch_write
from statebackend._core.tables.reductions cimport Operation
from statebackend._core.tables.state_table cimport StateTable

cdef enum FastPath:
    FAST_NONE = 0
    FAST_GET = 1
    FAST_UPDATE = 2
    FAST_SUM = 3                         # of LONG
    FAST_REDUCE = 4
    FAST_READ = 5
    FAST_WIDE = 6                        # values of other widths, and of bytes

cdef enum Failure:
    FAILED_NOT = 0
    FAILED_MEMORY = 1
    FAILED_OVERFLOW = 2
    FAILED_GROUP = 3                     # a key of a key group that the table does not have

cdef struct Batch
cdef struct LaneRun

ctypedef bint (*BlockFunction)(Batch *batch, LaneRun *run, int64_t at, uint32_t n, CowMap **maps) noexcept nogil

cdef struct Touch:
    # The first row of a key in a call, and the key's slot.
    uint32_t row
    uint32_t slot

cdef struct Batch:
    Table *table
    const HashProgram *program
    int32_t max_parallelism
    Operation op
    FastPath fast
    int code
    uint32_t width
    uint32_t ns
    const uint32_t *namespaces           # by row; NULL: `ns` for all
    int64_t timestamp
    const int64_t *timestamps            # by row; NULL: `timestamp` for all
    # The batch, by row. Byte keys and values have offsets.
    int64_t n
    const int64_t *keys
    const int64_t *key_offsets
    const char *key_data
    const char *values
    const int64_t *value_offsets
    # Results, by row; NULL where not wanted.
    char *out
    uint8_t *found
    uint32_t *slots
    Blob **blobs
    # The keys that the call touches; NULL if the caller does not want them. Each lane fills its part of `touched`, and
    # `join_touched` closes the gaps between the parts.
    Touch *touched
    int64_t n_touched
    uint32_t untouched_below             # the version of the call: the call has not written older entries
    uint16_t *touched_groups             # the key groups of `touched`; NULL if the lanes leave them in order
    Touch *in_order                      # the touched keys by key group; `touched` itself if that is in order
    int64_t *touched_keys                # NULL: keys of bytes
    char *touched_values                 # stored values, of bytes their addresses
    # The chunk in work: rows first..first+size, sorted by key group.
    int64_t first
    int64_t size
    bint sorted
    uint16_t *groups                     # by row of the chunk
    uint32_t *hashes                     # by row of the chunk: bucket hashes of byte keys
    int64_t *sorted_keys                 # integer keys, or where the bytes of a key begin
    uint32_t *sorted_rows
    uint32_t *sorted_namespaces          # if there are `namespaces`
    uint32_t *sorted_hashes              # of byte keys
    uint32_t *sorted_lengths
    char *short_keys                     # the bytes of keys, by sorted position
    uint32_t *starts                     # first sorted position of each group, and the end
    uint32_t *counts                     # lane by lane: rows of each group, then next position
    int n_lanes
    # What another module of kernels adds: `block`, which replaces the general last stage, and its needs.
    BlockFunction block
    const uint8_t *nulls                 # by row: whether the value is null; NULL where none is
    int64_t ttl                          # 0: none
    bint keeps_latest                    # values build on what is there, whose timestamps they keep if those are later
    Table *inner                         # of map states: the table of the entries
    void *extra

cdef struct Reading:
    # The `extra` of reads where values expire.
    int64_t dead_at                      # what has expired by then too, is removed
    bint shows_expired
    bint renews
    bint looks_only                      # only reports what exists, and changes nothing

cdef inline int64_t stamp_of(const Batch *batch, int64_t row) noexcept nogil:
    return batch.timestamp if batch.timestamps == NULL else batch.timestamps[row]

cdef inline int64_t stamp_on(const Batch *batch, int64_t row, Entry *entry) noexcept nogil:
    """The timestamp of a row that overwrites an entry."""
    cdef int64_t stamp = stamp_of(batch, row)
    return written_at((<int64_t *>payload_of(batch.table, entry))[0], stamp, True) if batch.keeps_latest else stamp

cdef inline int64_t time_of_death(dead_at) except? -1:
    """None: everything that a call does not see is dead."""
    return INT64_MAX if dead_at is None else dead_at

cdef inline uint32_t namespace_of_row(const Batch *batch, int64_t row) noexcept nogil:
    return batch.ns if batch.namespaces == NULL else batch.namespaces[row]

cdef inline uint32_t namespace_at(const Batch *batch, int64_t at) noexcept nogil:
    """The namespace of the row at a position of a sorted chunk."""
    return batch.ns if batch.namespaces == NULL else batch.sorted_namespaces[at]

cdef inline Blob *blob_of_row(const Batch *batch, Lane *lane, int64_t row) noexcept nogil:
    """Make a blob of a row's bytes; NULL without memory."""
    return blob_new(lane.blobs, batch.values + batch.value_offsets[row],
                    batch.value_offsets[row + 1] - batch.value_offsets[row])

cdef struct LaneRun:
    Lane lane
    Lane *used                           # &lane, or the table's own for lane 0
    int failure
    int64_t failed_row
    int64_t first_row
    int64_t last_row
    uint32_t first_group
    uint32_t last_group
    int64_t paid_until                   # position up to which the rows' share of a rehash is done
    uint64_t journal_records             # of lane 0's segment when the call began
    uint64_t copied_before               # entries that the lane had copied when the call began
    int64_t inner_entries                # inserted minus removed, of `Batch.inner`
    int64_t first_touched                # in `Batch.touched`, of the chunk in work
    int64_t last_touched

cdef struct RowKey:
    # One row of a block, wherever its key came from.
    int64_t row
    int64_t number
    const char *data
    uint64_t length
    uint32_t ns
    uint32_t hash


cdef inline void load_key(Batch *batch, int64_t at, RowKey *key) noexcept nogil:
    """The row at a position of the chunk, sorted or not."""
    if batch.sorted:
        key.row = batch.first + batch.sorted_rows[at]
        key.ns = namespace_at(batch, at)
        if batch.keys != NULL:
            key.number = batch.sorted_keys[at]
            key.hash = hash_int_key(batch.table, key.number, key.ns)
        else:
            key.data = batch.key_data + batch.sorted_keys[at]
            key.length = batch.sorted_lengths[at]
            key.hash = batch.sorted_hashes[at]
    else:
        key.row = batch.first + at
        key.ns = namespace_of_row(batch, key.row)
        if batch.keys != NULL:
            key.number = batch.keys[key.row]
            key.hash = hash_int_key(batch.table, key.number, key.ns)
        else:
            key.data = batch.key_data + batch.key_offsets[key.row]
            key.length = batch.key_offsets[key.row + 1] - batch.key_offsets[key.row]
            key.hash = batch.hashes[at]

cdef inline bint is_untouched(const Batch *batch, const Entry *entry) noexcept nogil:
    """Return True if a call that wants its touched keys has not written this entry, or without an entry (NULL)."""
    return entry == NULL or entry.version < batch.untouched_below

cdef inline void note_touched(Batch *batch, LaneRun *run, bint is_first, int64_t row, uint32_t slot) noexcept nogil:
    """Note the row if it is the first one of its key. It always writes: a processor guesses such a branch badly."""
    cdef Touch *place = batch.touched + run.last_touched
    if batch.touched != NULL:
        prefetch_write(place + 64)       # a store that misses the cache delays all later ones
        place.row, place.slot = <uint32_t>row, slot
        run.last_touched += is_first

cdef inline uint32_t find_row(Batch *batch, CowMap *map, const RowKey *key) noexcept nogil:
    """`find` for a row."""
    if batch.keys != NULL:
        return find_int(batch.table, map, key.number, key.ns, key.hash)
    return find_blob(batch.table, map, key.data, key.length, key.ns, key.hash)

cdef CowMap *map_of_row(Batch *batch, CowMap **where, int64_t row) noexcept nogil
cdef void stage_block(Batch *batch, int64_t at, uint32_t n, CowMap **maps, RowKey *keys) noexcept nogil

cdef struct Crew:
    # What the threads of a call share. Only who has claimed a lane uses batch and runs, and the call waits for those.
    Batch *batch
    LaneRun *runs
    int n_lanes
    uint32_t turn                        # counts phases
    uint32_t phase                       # of this turn
    uint32_t claimed[16]                 # by lane: the newest turn that is in work
    uint32_t done[16]                    # by lane: the newest turn that is done
    uint32_t is_over
    int64_t came                         # threads so far

cdef class LaneWork:
    cdef Crew crew

cdef class BatchCall:
    cdef StateTable table
    cdef Batch batch
    cdef LaneRun runs[16]
    cdef LaneWork work
    cdef object keep                     # arrays that the pointers point into
    cdef object rows                     # what errors call the rows, or None: as they are numbered here
    cdef void *pointer(self, array, dtype) except NULL
    cdef int set_values(self, values, int code, uint32_t width) except -1
    cdef int set_nulls(self, nulls) except -1
    cdef int set_namespaces(self, namespaces) except -1
    cdef int set_timestamps(self, timestamps) except -1
    cdef int enter(self) except -1
    cdef int leave(self) except -1
    cdef int hold(self) except -1
    cdef int let_go(self) except -1
    cdef int run(self, Operation op, bint is_inside=*) except -1
    cdef tuple run_touching(self, Operation op)
    cdef tuple read(self, Operation op, int code, uint32_t width, bint counted)
    cdef bint _is_sorted(self) noexcept
    cdef int _prepare(self) except -1
    cdef int _call_crew(self) except -1
    cdef int _begin(self, bint writes) except -1
    cdef bint _is_short(self) noexcept
    cdef FastPath _fast_path(self) noexcept
    cdef int _make_scratch(self) except -1
    cdef int _end(self, bint failed, bint writes) except -1
    cdef void _settle_lane(self, int i) noexcept
    cdef int _raise(self, Failure failure) except -1
