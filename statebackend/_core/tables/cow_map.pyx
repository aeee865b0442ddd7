"""Operations on copy-on-write maps. Data layout, versions and invariants are described in `cow_map.pxd`.

An operation always works in this order: first everything that can run out of memory, in steps that each leave a valid
map (clones, page copies, room in logs), then the change itself, which cannot fail.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy, memmove, memset

cdef extern from "unistd.h":
    int usleep(unsigned int microseconds) noexcept nogil

from statebackend._core.memory.arena cimport (
    EXTENT_UNITS_SHIFT, LIVE_DIRECTORIES, LIVE_ENTRIES, LIVE_SNAPSHOTS, MAX_ORDER, MIN_ORDER, UNIT_SHIFT, Blob,
    address, ask_for_block, blob_data, blob_drop, blob_new, blob_set, blob_takes, block_alloc, block_free, block_ref,
    count, raw_alloc, raw_free, run_alloc, run_free, unit_at)
from statebackend._core.memory.interpreter cimport PyThread_get_thread_ident
from statebackend._core.memory.journal cimport (
    Log, LogChunk, chunk_data, log_append, log_drop_last_chunk, log_empty, log_last_trailer, log_pop, log_reserve,
    log_take)
from statebackend._core.memory.platform cimport (
    clz64, copy_bytes, likely, load_u32, prefetch_write, same_bytes, spin_lock, spin_unlock, store_ptr, store_u32,
    unlikely)
from statebackend._core.tables.objects cimport share_object
from statebackend._core.tables.values cimport drop_value


cdef enum:
    PRESIZE_LIMIT = 1 << 24
    PREFETCH_BUCKETS = 24                # how far a rehash asks for the first entries of buckets ahead
    PREFETCH_CHAINS = 12                 # how far for the second ones
    STRETCH = 64                         # buckets that move together, where several operations pay for them
    SHORT_STRETCH = 32                   # the same, where one operation does
    SHORT_STRETCHES_FROM = 512           # buckets of a map in which that pays
    MAX_SPLIT = 16                       # buckets that one of those may become
    RECLAIM_AHEAD = 16                   # how far reclaiming does
    SMALL_RUNS = 1024                    # bytes of entries with which no map is too large
    SLOTS_PER_STEP = 8                   # of old runs: slots that a step visits
    STEPS_OF_A_MOVE = 4                  # the weight of moving an entry to another slot in the counts as
    CHUNKS_AT_ONCE = 2                   # of a list that dies


cdef inline int order_for(uint64_t size) noexcept nogil:
    cdef int order = 64 - clz64(size - 1)
    return order if order > MIN_ORDER else MIN_ORDER


# --- payloads: who owns what an entry refers to ----------------------------------------------------

cdef void payload_ref(Table *table, char *payload) noexcept nogil:
    """Take references for a copy of a payload."""
    cdef char *value = payload + (table.layout.off_value - table.layout.off_payload)
    cdef int kind = table.layout.value_kind
    if kind == VALUE_BLOB:
        if (<Blob **>value)[0] != NULL:
            (<Blob **>value)[0].refs += 1
    elif kind == VALUE_LIST:
        if (<ListHead *>value).tail != NULL:
            (<ListHead *>value).tail.refs += 1
    elif kind == VALUE_ANCHOR:
        (<Anchor *>address(table.core.arena, (<uint32_t *>value)[0])).refs += 1
    elif kind == VALUE_OBJECT:
        share_object(&table.core.objects, value)


cdef void payload_drop(Table *table, char *payload) noexcept nogil:
    """Drop the references of a payload that is about to be forgotten."""
    cdef char *value = payload + (table.layout.off_value - table.layout.off_payload)
    cdef int kind = table.layout.value_kind
    if kind == VALUE_LIST:
        drop_list(table, (<ListHead *>value).tail)
    elif kind == VALUE_ANCHOR:
        drop_anchor(table, (<uint32_t *>value)[0])
    elif kind != VALUE_FIXED:
        drop_value(table.core, kind, value)


cdef void drop_list(Table *table, ListChunk *chunk) noexcept nogil:
    """Drop a list's reference to its newest chunk. If the list dies, all but a few chunks wait for `drain`."""
    cdef ListChunk *older
    cdef uint32_t i, offset = 8 if table.element_has_timestamp else 0
    cdef int freed = 0
    while chunk != NULL:
        chunk.refs -= 1
        if chunk.refs:
            return
        if freed == CHUNKS_AT_ONCE:
            if table.dead_chunks == NULL:
                table.next_dead_lists = table.core.dead_lists
                table.core.dead_lists = table
            next_dead(chunk)[0] = table.dead_chunks
            table.dead_chunks = chunk
            table.core.pending = 1
            return
        if table.element_kind != VALUE_FIXED:
            for i in range(chunk.used):
                drop_value(table.core, table.element_kind,
                           elements_of(table, chunk) + <uint64_t>i * table.element_width + offset)
        older = chunk.prev
        block_free(table.core.blobs, chunk, chunk_bytes(table, chunk))
        chunk = older
        freed += 1


cdef void drop_anchor(Table *table, uint32_t ref) noexcept nogil:
    cdef Anchor *anchor = <Anchor *>address(table.core.arena, ref)
    anchor.refs -= 1
    if anchor.refs == 0:
        if table.layout.key_is_blob:
            blob_drop(table.core.blobs, <Blob *>anchor.key)
        count_namespace(table, anchor.namespace, -1)
        block_free(table.core.blobs, anchor, sizeof(Anchor))


cdef void name_anchor(Table *table, CowMap *map, uint32_t head_slot, uint32_t ref) noexcept nogil:
    """Give its head a new anchor, and tell the anchor whose it is."""
    cdef Entry *head = entry_at(table.core, head_slot)
    cdef Anchor *anchor = <Anchor *>address(table.core.arena, ref)
    (<uint32_t *>value_of(table, head))[0] = ref
    anchor.key = head.key
    if table.layout.key_is_blob:
        (<Blob *>head.key).refs += 1
    anchor.namespace = namespace_of(table, head)
    count_namespace(table, anchor.namespace, 1)
    anchor.group = map.group


cdef uint32_t anchor_new(Lane *lane) noexcept nogil:
    """An anchor with one reference and an empty thread; 0 without memory."""
    cdef Anchor *anchor = <Anchor *>block_alloc(lane.blobs, sizeof(Anchor))
    if anchor == NULL:
        return 0
    memset(anchor, 0, sizeof(Anchor))
    anchor.refs = 1
    anchor.next_sequence = <uint64_t>new_stamp(lane.core) << 32
    return block_ref(anchor)


cdef void append_thread(Table *table, uint32_t slot) noexcept nogil:
    """Link a fresh entry in as the last of its key's thread."""
    cdef Core *core = table.core
    cdef Entry *entry = entry_at(core, slot)
    cdef Thread *thread = thread_of(table, entry)
    cdef Anchor *anchor = <Anchor *>address(core.arena, namespace_of(table, entry))
    thread.sequence = anchor.next_sequence
    anchor.next_sequence += 1
    thread.prev = anchor.last
    thread.next = 0
    if anchor.last:
        thread_of(table, entry_at(core, anchor.last)).next = slot
    else:
        anchor.first = slot
    anchor.last = slot
    anchor.modifications += 1


# --- slots -------------------------------------------------------------------------------------------

cdef bint add_run(Table *table, CowMap *map) noexcept nogil:
    """Add a stretch of entries, a small part of the map: little stays unused, and maps of the same size, which
    need one at about the same time, do not ask for much at once."""
    cdef uint64_t want = (map.run_bytes - map.old_bytes) >> 5, smallest = 4 * <uint64_t>table.layout.stride
    cdef uint64_t *runs
    cdef uint32_t ref, capacity
    cdef int order
    if want < smallest:
        want = smallest
    order = order_for(want)
    if order > MAX_ORDER - 1:
        order = MAX_ORDER - 1
    if map.n_runs == map.runs_capacity:
        capacity = map.runs_capacity * 2 if map.runs_capacity else 4
        runs = <uint64_t *>raw_alloc(table.core.arena.budget, capacity * sizeof(uint64_t))
        if runs == NULL:
            return False
        if map.runs != NULL:
            memcpy(runs, map.runs, map.n_runs * sizeof(uint64_t))
        raw_free(table.core.arena.budget, map.runs, map.runs_capacity * sizeof(uint64_t))
        map.runs = runs
        map.runs_capacity = capacity
    ref = run_alloc(table.core.arena, order)
    if ref == 0:
        return False
    map.runs[map.n_runs] = (<uint64_t>ref << 8) | <uint64_t>order
    map.n_runs += 1
    map.run_bytes += <uint64_t>1 << order
    map.slots += <uint32_t>((<uint64_t>1 << order) // table.layout.stride)
    map.fresh = ref
    map.fresh_end = ref + <uint32_t>(
        ((<uint64_t>1 << order) // table.layout.stride * table.layout.stride) >> UNIT_SHIFT)
    if map.n_old == 0 and map.shrinking == SHRINK_NOT:
        set_sparse_below(map)
    return True


cdef inline void set_sparse_below(CowMap *map) noexcept nogil:
    map.sparse_below = map.slots // 2 if map.run_bytes - map.old_bytes > SMALL_RUNS else 0


cdef void note_sparse(Table *table, CowMap *map) noexcept nogil:
    """Leave it to `drain` to make a map smaller."""
    cdef Core *core = table.core
    map.sparse_below = 0
    if core.keeps_maps:
        return
    spin_lock(&core.directory_lock)      # lanes may come here at the same time
    map.shrinking = SHRINK_NOTED
    map.table = table
    map.next_sparse = NULL
    if core.sparse == NULL:
        core.sparse = map
    else:
        core.sparse_last.next_sparse = map
    core.sparse_last = map
    spin_unlock(&core.directory_lock)
    store_u32(&core.pending, 1)


cdef bint is_old(CowMap *map, uint32_t slot) noexcept nogil:
    """Return True if a slot is in one of the old runs."""
    cdef uint32_t low = 0, high = map.n_old, middle
    while low < high:
        middle = (low + high) // 2
        if <uint32_t>(map.old_runs[middle] >> 8) <= slot:
            low = middle + 1
        else:
            high = middle
    return low and slot - <uint32_t>(map.old_runs[low - 1] >> 8) < (
        <uint32_t>1 << ((map.old_runs[low - 1] & 0xFF) - UNIT_SHIFT))


cdef void forget_old_runs(Core *core, CowMap *map) noexcept nogil:
    raw_free(core.arena.budget, map.old_runs, map.n_old * sizeof(uint64_t))
    map.old_runs = NULL
    map.n_old = map.old_used = 0
    map.old_bytes = 0


cdef void free_old_runs(Table *table, CowMap *map) noexcept nogil:
    """Give the old runs back: their slots are unused."""
    cdef uint32_t i, freed = 0
    for i in range(map.n_old):
        release_run(table.core, <uint32_t>(map.runs[i] >> 8), <int>(map.runs[i] & 0xFF), &freed)
    map.n_runs -= map.n_old
    memmove(map.runs, map.runs + map.n_old, map.n_runs * sizeof(uint64_t))
    map.run_bytes -= map.old_bytes
    forget_old_runs(table.core, map)
    table.lane.relocated_entries += 1    # a sweep may pass over some, because the runs behind move up
    if map.shrinking == SHRINK_NOT:
        set_sparse_below(map)


cdef inline void slot_return(Table *table, CowMap *map, uint32_t slot) noexcept nogil:
    cdef Entry *entry = entry_at(table.core, slot)
    entry.version = FREE_SLOT
    if unlikely(map.n_old != 0) and is_old(map, slot):
        map.old_used -= 1
        if map.old_used == 0:
            free_old_runs(table, map)
    elif map.free_slot and map.free_in_block < FREE_BLOCK:
        free_refs(entry_at(table.core, map.free_slot))[map.free_in_block] = slot
        map.free_in_block += 1
    else:
        entry.next = map.free_slot
        map.free_slot = slot
        map.free_in_block = 0
    map.used -= 1
    if unlikely(map.used < map.sparse_below):
        note_sparse(table, map)
    count(table.core.arena.budget.probe, LIVE_ENTRIES, -1)


cdef void slot_free(Table *table, CowMap *map, uint32_t slot) noexcept nogil:
    """Free a slot that no chain, journal or snapshot names; the last one gives the map's memory back."""
    cdef Entry *entry = entry_at(table.core, slot)
    payload_drop(table, payload_of(table, entry))
    if table.layout.key_is_blob:
        blob_drop(table.core.blobs, <Blob *>entry.key)
    if table.layout.off_namespace:
        count_namespace(table, namespace_of(table, entry), -1)
    slot_return(table, map, slot)
    if map.used == 0:
        map_clear_storage(table, map)


cdef void release_run(Core *core, uint32_t ref, int order, uint32_t *freed) noexcept nogil:
    """Free a run; after the first few of one operation, leave it to `drain`."""
    freed[0] += 1
    if freed[0] > 8 and log_reserve(core.arena, &core.garbage, 16):
        push_run(&core.garbage, ref, order, FREE_SLOT)
        core.pending = 1
    else:
        run_free(core.arena, ref, order)


cdef void map_clear_storage(Table *table, CowMap *map) noexcept nogil:
    """Return an empty map to its initial state: no runs, no pages, smallest capacity."""
    cdef Core *core = table.core
    cdef uint32_t i, freed = 0
    cdef BucketTable *buckets
    cdef int t
    for i in range(map.n_runs):
        release_run(core, <uint32_t>(map.runs[i] >> 8), <int>(map.runs[i] & 0xFF), &freed)
    raw_free(core.arena.budget, map.runs, map.runs_capacity * sizeof(uint64_t))
    map.runs = NULL
    map.n_runs = map.runs_capacity = 0
    map.run_bytes = 0
    map.slots = map.sparse_below = 0
    forget_old_runs(core, map)
    map.free_slot = map.free_in_block = map.fresh = map.fresh_end = 0
    for t in range(2):
        buckets = &map.primary if t == 0 else &map.secondary
        for i in range(buckets.n_pages):
            if buckets.pages[i].ref == 0:
                continue
            if buckets.pages[i].version < core.highest_required_snapshot_version:
                if core.newest != NULL and log_reserve(core.arena, &core.newest.retired, 16):
                    push_page(&core.newest.retired, &buckets.pages[i], page_order(buckets.capacity))
                # without memory for the record the page stays until the arena goes
            else:
                release_run(core, buckets.pages[i].ref, page_order(buckets.capacity), &freed)
        if buckets.n_pages > 1:
            raw_free(core.arena.budget, buckets.pages, buckets.n_pages * sizeof(PageRef))
        memset(buckets, 0, sizeof(BucketTable))
    map.rehash_index = 0
    start_table(&map.primary, table.initial_capacity, &map.primary.single)
    map.threshold = table.initial_capacity // 4 * 3


# --- bucket pages --------------------------------------------------------------------------------------

cdef inline int page_order(uint32_t capacity) noexcept nogil:
    return order_for(<uint64_t>4 * (capacity if capacity < PAGE_BUCKETS else PAGE_BUCKETS))


cdef inline void push_run(Log *log, uint32_t ref, int order, uint32_t version) noexcept nogil:
    cdef char *room = log_take(log, 16)
    (<uint64_t *>room)[0] = version
    (<uint64_t *>(room + 8))[0] = (<uint64_t>RETIRED_RUN << 56) | (<uint64_t>order << 32) | ref


cdef inline void push_page(Log *log, PageRef *page, int order) noexcept nogil:
    push_run(log, page.ref, order, page.version)


cdef inline void start_table(BucketTable *buckets, uint32_t capacity, PageRef *pages) noexcept nogil:
    buckets.capacity = capacity
    buckets.n_pages = capacity >> PAGE_SHIFT if capacity > PAGE_BUCKETS else 1
    buckets.pages = pages
    buckets.size = 0


cdef inline Log *retired_log(Lane *lane) noexcept nogil:
    return &lane.retired if lane.is_worker else &lane.core.newest.retired


cdef uint32_t *bucket_for_write(Lane *lane, BucketTable *buckets, uint32_t index) noexcept nogil:
    """A bucket that may be changed: its page exists and belongs to no snapshot. NULL without memory."""
    cdef Core *core = lane.core
    cdef PageRef *page = &buckets.pages[index >> PAGE_SHIFT]
    cdef uint32_t ref
    cdef int order
    if unlikely(page.ref == 0):
        order = page_order(buckets.capacity)
        ref = run_alloc(core.arena, order)
        if ref == 0:
            return NULL
        memset(address(core.arena, ref), 0, <uint64_t>1 << order)
        page.ref = ref
        page.version = core.state_version
    elif unlikely(page.version < core.highest_required_snapshot_version):
        order = page_order(buckets.capacity)
        if not log_reserve(core.arena, retired_log(lane), 16):
            return NULL
        ref = run_alloc(core.arena, order)
        if ref == 0:
            return NULL
        memcpy(address(core.arena, ref), address(core.arena, page.ref), <uint64_t>1 << order)
        push_page(retired_log(lane), page, order)
        page.ref = ref
        page.version = core.state_version
        lane.copied_pages += 1
    return (<uint32_t *>address(core.arena, page.ref)) + (index & (PAGE_BUCKETS - 1))


cdef inline uint32_t *own_bucket(Lane *lane, BucketTable *buckets, uint32_t index) noexcept nogil:
    """`bucket_for_write`, but returns at once if the page exists and the live map owns it."""
    cdef PageRef *page = &buckets.pages[index >> PAGE_SHIFT]
    if likely(page.ref != 0 and page.version >= lane.core.highest_required_snapshot_version):
        return (<uint32_t *>address(lane.core.arena, page.ref)) + (index & (PAGE_BUCKETS - 1))
    return bucket_for_write(lane, buckets, index)


# --- logs that operations append to ----------------------------------------------------------------------

cdef bint segment_for_writing(Core *core, Journal *journal, Log **log) noexcept nogil:
    """The log of the newest segment; begins one if a mark was opened since the last record."""
    cdef Segment *segments
    cdef uint32_t capacity
    if journal.n_segments == 0 or journal.segments[journal.n_segments - 1].version < core.journal_version:
        if journal.n_segments == journal.capacity:
            capacity = journal.capacity * 2 if journal.capacity else 4
            segments = <Segment *>raw_alloc(core.arena.budget, capacity * sizeof(Segment))
            if segments == NULL:
                return False
            if journal.segments != NULL:
                memcpy(segments, journal.segments, journal.n_segments * sizeof(Segment))
            raw_free(core.arena.budget, journal.segments, journal.capacity * sizeof(Segment))
            journal.segments = segments
            journal.capacity = capacity
        note_filled(core, journal)
        memset(&journal.segments[journal.n_segments], 0, sizeof(Segment))
        journal.segments[journal.n_segments].version = core.journal_version
        journal.segments[journal.n_segments].log.until = core.highest_required_snapshot_version
        journal.n_segments += 1
    log[0] = &journal.segments[journal.n_segments - 1].log
    return True


cdef void forget_empty_journals(Core *core) noexcept nogil:
    """Take the journals that have nothing in them any more off the list of those that have. O(the list)."""
    cdef Journal **link = &core.filled_journals
    while link[0] != NULL:
        if is_journal_empty(link[0]):
            link[0].is_filled = False
            link[0] = link[0].next_filled
        else:
            link = &link[0].next_filled


cdef bint keep_payload(Lane *lane, Table *table, CowMap *map, uint32_t slot, RecordOp op,
                       bint *kept) noexcept nogil:
    """Append an entry's payload to the log that needs it. The references in it move to the log."""
    cdef Log *log
    cdef char *room
    cdef Entry *entry = entry_at(lane.core, slot)
    cdef uint32_t width = (table.layout.payload_width + 7) & ~7u
    if lane.core.journal_version and (entry.version < lane.core.journal_version or op == RECORD_COPIED):
        if not record_log(lane, table, &log):
            return False
    else:
        log = &lane.undo
    if not log_reserve(lane.core.arena, log, width + 8):
        return False
    room = log_take(log, width + 8)
    log.held += table.layout.value_kind != VALUE_FIXED
    copy_bytes(room, payload_of(table, entry), table.layout.payload_width)
    (<uint64_t *>(room + width))[0] = trailer(op, table, map.group, slot)
    kept[0] = True
    return True


cdef bint keep_bytes(Lane *lane, Table *table, CowMap *map, uint32_t slot) noexcept nogil:
    """Append the bytes of an entry's blob, and its timestamp, to the log that needs them. Then others may be there."""
    cdef Entry *entry = entry_at(lane.core, slot)
    cdef Blob *blob = (<Blob **>value_of(table, entry))[0]
    cdef uint32_t width = 8 * table.layout.has_timestamp + ((blob.length + 7) & ~7u) + <uint32_t>sizeof(BytesEnd)
    cdef Log *log = &lane.undo
    cdef char *room
    cdef BytesEnd *end
    if lane.core.journal_version and entry.version < lane.core.journal_version and not record_log(lane, table, &log):
        return False
    if log == NULL or not log_reserve(lane.core.arena, log, width):
        return False
    room = log_take(log, width)
    end = <BytesEnd *>(room + width) - 1
    end.length, end.width = blob.length, width
    end.trailer = trailer(RECORD_BYTES, table, map.group, slot)
    if table.layout.has_timestamp:
        (<int64_t *>room)[0] = (<int64_t *>payload_of(table, entry))[0]
        room += 8
    copy_bytes(room, blob_data(blob), blob.length)
    return True


cdef inline bint reserve_retirement(Lane *lane, Table *table, uint32_t n, Log **log) noexcept nogil:
    if not record_log(lane, table, log):
        return False
    if log[0] != NULL:
        return log_reserve(lane.core.arena, log[0], 16 * <uint64_t>n)
    return log_reserve(lane.core.arena, retired_log(lane), 16 * <uint64_t>n)


cdef inline void push_retired(Log *log, Table *table, uint32_t group, uint32_t slot) noexcept nogil:
    cdef char *room = log_take(log, 16)
    (<Table **>room)[0] = table
    (<uint64_t *>(room + 8))[0] = trailer(RETIRED_SLOT, table, group, slot)


cdef inline void retire(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t clone,
                        Log *log) noexcept nogil:
    """Hand over a slot that `clone` has replaced in the live map. Room was reserved."""
    cdef char *room
    if log != NULL:
        room = log_take(log, 16)
        log.held += 1
        (<uint64_t *>room)[0] = clone
        (<uint64_t *>(room + 8))[0] = trailer(RECORD_MOVED, table, map.group, slot)
    else:
        push_retired(retired_log(lane), table, map.group, slot)


# --- copy on write -----------------------------------------------------------------------------------------

cdef inline uint32_t clone_entry(Lane *lane, Table *table, CowMap *map, uint32_t slot) noexcept nogil:
    """A copy that only the live map owns, not yet linked anywhere; 0 without memory."""
    cdef uint32_t clone = slot_alloc(table, map)
    cdef Entry *entry
    if unlikely(clone == 0):
        return 0
    entry = entry_at(lane.core, clone)
    memcpy(entry, entry_at(lane.core, slot), table.layout.stride)
    entry.version = unwritten_version(lane.core)
    if table.layout.key_is_blob:
        (<Blob *>entry.key).refs += 1
    if table.layout.off_namespace:
        count_namespace(table, namespace_of(table, entry), 1)
    if table.layout.value_kind != VALUE_FIXED:
        payload_ref(table, payload_of(table, entry))
    lane.copied_entries += 1
    return clone


cdef void repoint_thread(Table *table, uint32_t slot) noexcept nogil:
    """Make the neighbours of a threaded entry name `slot`."""
    cdef Core *core = table.core
    cdef Entry *entry = entry_at(core, slot)
    cdef Thread *thread = thread_of(table, entry)
    cdef Anchor *anchor = <Anchor *>address(core.arena, namespace_of(table, entry))
    cdef uint32_t *link = &thread_of(table, entry_at(core, thread.prev)).next if thread.prev else &anchor.first
    if anchor.alive_from == link[0]:
        anchor.alive_from = slot
    link[0] = slot
    if thread.next:
        thread_of(table, entry_at(core, thread.next)).prev = slot
    else:
        anchor.last = slot


cdef void unlink_thread(Table *table, Entry *entry) noexcept nogil:
    """Take an entry out of its thread; it keeps its own links, through which it can come back."""
    cdef Core *core = table.core
    cdef Thread *thread = thread_of(table, entry)
    cdef Anchor *anchor = <Anchor *>address(core.arena, namespace_of(table, entry))
    cdef uint32_t *link = &thread_of(table, entry_at(core, thread.prev)).next if thread.prev else &anchor.first
    if anchor.alive_from == link[0]:
        anchor.alive_from = thread.next if thread.next else thread.prev
    link[0] = thread.next
    if thread.next:
        thread_of(table, entry_at(core, thread.next)).prev = thread.prev
    else:
        anchor.last = thread.prev
    anchor.modifications += 1


cdef uint32_t own_entry(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash) noexcept nogil:
    """Flink's handleChainedEntryCopyOnWrite: clone the old entries in the chain up to and including `slot`.

    Returns the slot that replaces `slot` in the live map, 0 without memory.
    """
    cdef Core *core = lane.core
    cdef uint32_t required = core.highest_required_snapshot_version
    cdef BucketTable *buckets = active_table(map, hash)
    cdef uint32_t *link = bucket_for_write(lane, buckets, hash & (buckets.capacity - 1))
    cdef uint32_t current, clone
    cdef Log *log
    if unlikely(link == NULL):
        return 0
    current = link[0]
    while True:
        clone = current
        if entry_at(core, current).version < required:
            if unlikely(not reserve_retirement(lane, table, 1, &log)):
                return 0
            clone = clone_entry(lane, table, map, current)
            if unlikely(clone == 0):
                return 0
            link[0] = clone
            if table.layout.off_thread:
                repoint_thread(table, clone)
            retire(lane, table, map, current, clone, log)
        if current == slot:
            return clone
        link = &entry_at(core, clone).next
        current = link[0]


cdef inline void add_directory(Snapshot *snapshot, Directory *directory) noexcept nogil:
    """Give a directory to a snapshot that it covers. The caller holds the lock."""
    directory.next = NULL
    if snapshot.last_directory != NULL:
        snapshot.last_directory.next = directory
    else:
        snapshot.directories = directory
    snapshot.last_directory = directory


cdef bint see_snapshots(Core *core, CowMap *map) noexcept nogil:
    """Give all snapshots since `seen_version` the map's page directory. Any thread may come first."""
    cdef uint64_t size
    cdef uint32_t n, i
    cdef Directory *directory = NULL
    cdef uint32_t *refs
    cdef uint64_t got = 0
    while True:
        spin_lock(&core.directory_lock)
        if map.seen_version >= core.highest_required_snapshot_version:
            break
        n = map.primary.n_pages + map.secondary.n_pages
        size = sizeof(Directory) + <uint64_t>n * 4
        if map_size(map) == 0:
            store_u32(&map.seen_version, core.highest_required_snapshot_version)
            break
        if got == size:
            directory.map = map
            directory.low = map.seen_version + 1
            directory.high = core.highest_required_snapshot_version
            directory.size = map_size(map)
            directory.rehash_index = map.rehash_index
            directory.primary_capacity = map.primary.capacity
            directory.secondary_capacity = map.secondary.capacity
            directory.primary_pages = map.primary.n_pages
            directory.secondary_pages = map.secondary.n_pages
            refs = <uint32_t *>(<char *>directory + sizeof(Directory))
            for i in range(map.primary.n_pages):
                refs[i] = map.primary.pages[i].ref
            refs += map.primary.n_pages
            for i in range(map.secondary.n_pages):
                refs[i] = map.secondary.pages[i].ref
            directory.older = map.directories
            map.directories = directory
            add_directory(core.newest, directory)
            store_u32(&map.seen_version, directory.high)
            directory = NULL
            got = 0
            count(core.arena.budget.probe, LIVE_DIRECTORIES, 1)
            break
        # Allocation happens outside the lock; if the map has changed meanwhile, the sizes reveal it.
        spin_unlock(&core.directory_lock)
        raw_free(core.arena.budget, directory, got)
        directory = <Directory *>raw_alloc(core.arena.budget, size)
        if directory == NULL:
            return False
        got = size
    spin_unlock(&core.directory_lock)
    raw_free(core.arena.budget, directory, got)
    return True


# --- growing ---------------------------------------------------------------------------------------------

cdef void begin_rehash(Core *core, CowMap *map, uint32_t capacity) noexcept nogil:
    """Open a secondary table, larger or smaller; without memory for its directory the map stays as it is."""
    cdef uint32_t n = capacity >> PAGE_SHIFT if capacity > PAGE_BUCKETS else 1
    cdef PageRef *pages = &map.secondary.single
    if capacity > MAXIMUM_CAPACITY:
        return
    if n > 1:
        pages = <PageRef *>raw_alloc(core.arena.budget, n * sizeof(PageRef))
        if pages == NULL:
            return
    memset(pages, 0, n * sizeof(PageRef))
    start_table(&map.secondary, capacity, pages)
    map.rehash_index = 0
    map.threshold = capacity // 4 * 3
    map.modifications += 1               # from here on reads move entries


cdef uint32_t capacity_for(Table *table, uint64_t entries) noexcept nogil:
    """Buckets for that many entries."""
    cdef uint32_t capacity = table.initial_capacity
    while capacity < PRESIZE_LIMIT and capacity // 4 * 3 < entries:
        capacity *= 2
    return capacity


cdef void presize(Table *table, CowMap *map, uint64_t entries) noexcept nogil:
    """Let a map that never held anything begin with buckets for that many entries. Bucket pages are made when they
    are needed, so a guess that is too high costs only a directory.
    """
    cdef uint32_t capacity = capacity_for(table, entries), n
    cdef PageRef *pages
    if map.used or map.secondary.capacity or map.primary.n_pages > 1 or map.primary.pages[0].ref:
        return
    n = capacity >> PAGE_SHIFT if capacity > PAGE_BUCKETS else 1
    pages = &map.primary.single
    if n > 1:
        pages = <PageRef *>raw_alloc(table.core.arena.budget, n * sizeof(PageRef))
        if pages == NULL:
            return
    memset(pages, 0, n * sizeof(PageRef))
    start_table(&map.primary, capacity, pages)
    map.threshold = capacity // 4 * 3


cdef void finish_rehash(Core *core, CowMap *map) noexcept nogil:
    if map.primary.n_pages > 1:
        raw_free(core.arena.budget, map.primary.pages, map.primary.n_pages * sizeof(PageRef))
    map.primary = map.secondary
    if map.primary.n_pages == 1:
        map.primary.pages = &map.primary.single
    memset(&map.secondary, 0, sizeof(BucketTable))
    map.rehash_index = 0


cdef int move_bucket(Lane *lane, Table *table, CowMap *map, uint32_t index) noexcept nogil:
    """Move one whole bucket to the secondary table; -1 without memory, otherwise the number of entries moved."""
    cdef Core *core = lane.core
    cdef uint32_t required = core.highest_required_snapshot_version
    cdef uint32_t mask = map.secondary.capacity - 1
    cdef uint32_t *source = bucket(core, &map.primary, index)
    cdef uint32_t slot, following, clone, pending = 0, pending_last = 0, old = 0
    cdef uint32_t *target
    cdef Log *log = NULL
    cdef uint32_t *targets[8]
    cdef Entry *entry
    cdef int moved = 0
    if source == NULL:
        return 0
    if index + PREFETCH_BUCKETS < map.primary.capacity and (
            (index & (PAGE_BUCKETS - 1)) + PREFETCH_BUCKETS < PAGE_BUCKETS):
        if source[PREFETCH_BUCKETS]:
            prefetch_write(entry_at(core, source[PREFETCH_BUCKETS]))
        if source[PREFETCH_CHAINS]:
            prefetch_write(entry_at(core, entry_at(core, source[PREFETCH_CHAINS]).next))
    if source[0] == 0:
        return 0
    # The steps that may fail: target pages, room for the records, the clones.
    slot = source[0]
    while slot:
        entry = entry_at(core, slot)
        target = own_bucket(lane, &map.secondary, hash_of(table, entry) & mask)
        if target == NULL:
            return -1
        if moved < 8:
            targets[moved] = target
        moved += 1
        old += entry.version < required
        slot = entry.next
    moved = 0
    if unlikely(old):
        if not reserve_retirement(lane, table, old, &log):
            return -1
        slot = source[0]
        while slot:
            entry = entry_at(core, slot)
            if entry.version < required:
                clone = clone_entry(lane, table, map, slot)
                if clone == 0:
                    while pending:
                        clone = pending
                        pending = entry_at(core, clone).next
                        slot_free(table, map, clone)
                    return -1
                entry_at(core, clone).next = 0
                if pending_last:
                    entry_at(core, pending_last).next = clone
                else:
                    pending = clone
                pending_last = clone
            slot = entry.next
    slot = source[0]
    while slot:
        entry = entry_at(core, slot)
        following = entry.next
        target = targets[moved] if moved < 8 else own_bucket(lane, &map.secondary, hash_of(table, entry) & mask)
        if entry.version < required:
            clone = pending
            entry = entry_at(core, clone)
            pending = entry.next
            if table.layout.off_thread:
                # A neighbour may have been replaced since the clone was made.
                thread_of(table, entry)[0] = thread_of(table, entry_at(core, slot))[0]
                repoint_thread(table, clone)
            retire(lane, table, map, slot, clone, log)
            slot = clone
        entry.next = target[0]
        target[0] = slot
        moved += 1
        slot = following
    map.primary.size -= moved
    map.secondary.size += moved
    return moved


cdef inline bint moves_stretches(Core *core, CowMap *map) noexcept nogil:
    return (core.newest == NULL and map.secondary.capacity > map.primary.capacity
            and map.secondary.capacity // map.primary.capacity <= MAX_SPLIT)


cdef int move_stretch(Lane *lane, Table *table, CowMap *map, uint32_t first, uint32_t n) noexcept nogil:
    """`move_bucket` for a stretch of a page, of a map that grows and that no snapshot needs.

    Chains end unpredictably. So this goes through the first entries of all buckets, then through the second ones, and
    so on: one loop without a branch for each length. Each bucket's entries keep their order all the same.
    """
    cdef Core *core = lane.core
    cdef uint32_t *source = bucket(core, &map.primary, first)
    cdef uint32_t *targets[16]
    cdef uint32_t slots[64]
    cdef uint32_t *target
    cdef uint32_t capacity = map.primary.capacity, mask = map.secondary.capacity - 1, i, left = 0, more, slot, position
    cdef int shift = 63 - clz64(capacity), moved = 0
    cdef char **extents = core.arena.extents
    cdef Entry *entry
    if source == NULL:
        return 0
    for i in range(map.secondary.capacity >> shift):
        targets[i] = own_bucket(lane, &map.secondary, first + i * capacity)
        if targets[i] == NULL:
            return -1
    for i in range(n):
        slots[left] = source[i]
        prefetch_write(unit_at(extents, source[i]))
        left += source[i] != 0
    if (first & (PAGE_BUCKETS - 1)) + 2 * n <= PAGE_BUCKETS and first + 2 * n <= capacity:
        for i in range(n, 2 * n):        # the next stretch's
            prefetch_write(unit_at(extents, source[i]))
    while left:
        more = 0
        for i in range(left):
            slot = slots[i]
            entry = <Entry *>unit_at(extents, slot)
            slots[more] = entry.next
            prefetch_write(unit_at(extents, entry.next))
            more += entry.next != 0
            position = hash_of(table, entry) & mask
            target = targets[position >> shift] + ((position & (capacity - 1)) - first)
            entry.next = target[0]
            target[0] = slot
        moved += left
        left = more
    map.primary.size -= moved
    map.secondary.size += moved
    return moved


cdef bint give_page_back(Lane *lane, CowMap *map, PageRef *page) noexcept nogil:
    """Free a page of the primary table that the rehash has emptied, or leave it to the snapshots that see it."""
    cdef Core *core = lane.core
    if page.ref == 0:
        return True
    if page.version < core.highest_required_snapshot_version:
        if not log_reserve(core.arena, retired_log(lane), 16):
            return False
        push_page(retired_log(lane), page, page_order(map.primary.capacity))
    else:
        run_free(core.arena, page.ref, page_order(map.primary.capacity))
    page.ref = 0
    return True


cdef void rehash_step(Lane *lane, Table *table, CowMap *map) noexcept nogil:
    """Flink's incrementalRehash: move at least four entries, whole buckets only, past few empty buckets."""
    rehash_some(lane, table, map, 1)


cdef void rehash_some(Lane *lane, Table *table, CowMap *map, uint32_t operations) noexcept nogil:
    """Move what so many operations have to move.

    Without memory it stops: the map is valid at every point, and the next operation continues.
    """
    cdef uint32_t index, n, transferred = 0, scanned = 0
    cdef int moved
    while True:
        index = map.rehash_index
        if index and (index & (PAGE_BUCKETS - 1) == 0 or index == map.primary.capacity):
            if not give_page_back(lane, map, &map.primary.pages[(index - 1) >> PAGE_SHIFT]):
                return
        if index == map.primary.capacity:
            finish_rehash(lane.core, map)
            return
        if (transferred >= MIN_TRANSFERRED_PER_INCREMENTAL_REHASH * operations
                or scanned >= MAX_BUCKETS_PER_INCREMENTAL_REHASH * operations):
            return
        n = 1
        if (operations > 1 or map.primary.capacity >= SHORT_STRETCHES_FROM) and moves_stretches(lane.core, map):
            n = STRETCH if operations > 1 else SHORT_STRETCH
            n = min(n, map.primary.capacity - index, PAGE_BUCKETS - (index & (PAGE_BUCKETS - 1)))
            moved = move_stretch(lane, table, map, index, n)
        else:
            moved = move_bucket(lane, table, map, index)
        if moved < 0:
            return
        map.rehash_index = index + n
        transferred += moved
        scanned += n
        lane.moved_entries += moved


# --- shrinking -------------------------------------------------------------------------------------------
#
# This happens in `drain`, when no slot is remembered.

cdef int compare_runs(const void *a, const void *b) noexcept nogil:
    cdef uint64_t mine = (<const uint64_t *>a)[0], other = (<const uint64_t *>b)[0]
    return (mine > other) - (mine < other)


cdef void begin_shrinking(Core *core, Table *table, CowMap *map) noexcept nogil:
    """Begin to move to fewer buckets, and to new runs, if it is worth while."""
    cdef uint32_t size = map_size(map), capacity = capacity_for(table, <uint64_t>size + size // 3 + 1)
    map.shrinking = SHRINK_BEGUN
    if map.slots > 2 * map.used and map.run_bytes > SMALL_RUNS and map.n_old == 0:
        map.old_runs = <uint64_t *>raw_alloc(core.arena.budget, map.n_runs * sizeof(uint64_t))
    if map.old_runs != NULL and map.n_old == 0:
        while map.fresh != map.fresh_end:
            entry_at(core, map.fresh).version = FREE_SLOT
            map.fresh += table.layout.stride >> UNIT_SHIFT
        memcpy(map.old_runs, map.runs, map.n_runs * sizeof(uint64_t))
        qsort(map.old_runs, map.n_runs, sizeof(uint64_t), compare_runs)
        map.n_old, map.old_used, map.old_bytes = map.n_runs, map.used, map.run_bytes
        map.old_run = map.old_slot = 0
        map.fresh = map.fresh_end = map.free_slot = map.free_in_block = 0
        map.slots = 0
    if 4 * <uint64_t>capacity <= map.primary.capacity:
        begin_rehash(core, map, capacity)


cdef bint relocate(Table *table, CowMap *map, uint32_t slot) noexcept nogil:
    """Move a live entry to another slot; False without memory. Its version stays, but where a snapshot has it."""
    cdef Core *core = table.core
    cdef Lane *lane = &table.lane
    cdef Entry *entry = entry_at(core, slot)
    cdef uint32_t hash = hash_of(table, entry), moved
    cdef bint is_shared = entry.version < core.highest_required_snapshot_version
    cdef uint32_t *link = link_before(lane, table, map, slot, hash)
    cdef Log *log
    if link == NULL or not record_log(lane, table, &log):
        return False
    if log != NULL and not log_reserve(core.arena, log, 16):
        return False
    if log == NULL and is_shared and not log_reserve(core.arena, retired_log(lane), 16):
        return False
    if log != NULL or is_shared:
        moved = clone_entry(lane, table, map, slot)
        if moved == 0:
            return False
        lane.copied_entries -= 1
        if not is_shared:
            entry_at(core, moved).version = entry.version
    else:
        moved = slot_alloc(table, map)
        if moved == 0:
            return False
        memcpy(entry_at(core, moved), entry, table.layout.stride)
    lane.relocated_entries += 1
    link[0] = moved
    if table.layout.off_thread:
        repoint_thread(table, moved)
    if log != NULL or is_shared:
        retire(lane, table, map, slot, moved, log)
    else:
        slot_return(table, map, slot)
    return True


cdef bint empty_old_runs(Core *core, Table *table, CowMap *map, int64_t *budget) noexcept nogil:
    """Look at a few slots of the old runs, up to the first live entry, and move that; False without memory."""
    cdef uint32_t end, first, units = table.layout.stride >> UNIT_SHIFT
    cdef int _look
    budget[0] -= 1
    first = slots_of_run(table, map.runs[map.old_run], &end)
    if map.old_slot == 0:
        map.old_slot = first
    for _look in range(SLOTS_PER_STEP):
        if map.old_slot == end:
            map.old_run += 1
            map.old_slot = 0
            return True
        if is_live(table, map, map.old_slot):
            if not relocate(table, map, map.old_slot):
                return False
            budget[0] -= STEPS_OF_A_MOVE
            map.old_slot += units
            return True
        map.old_slot += units
    return True


cdef bint shrink_maps(Core *core, int64_t *budget) noexcept nogil:
    """Make maps smaller, one after the other; False if memory stops it. Every map is valid at every point."""
    cdef CowMap *map
    cdef Table *table
    cdef uint32_t before
    if core.iterators or core.is_loading:
        return False
    while budget[0] > 0 and core.sparse != NULL:
        map, table = core.sparse, core.sparse.table
        if map.seen_version < core.highest_required_snapshot_version and not see_snapshots(core, map):
            return False
        if map.secondary.capacity:
            before = map.rehash_index
            rehash_some(&table.lane, table, map, 1)
            budget[0] -= 1
            if map.secondary.capacity and map.rehash_index == before:
                return False
        elif map.shrinking == SHRINK_NOTED:
            begin_shrinking(core, table, map)
            budget[0] -= 1
        elif map.n_old and map.old_run < map.n_old:
            if not empty_old_runs(core, table, map, budget):
                return False
        else:
            map.shrinking = SHRINK_NOT
            core.sparse = map.next_sparse
            if map.n_old == 0:
                set_sparse_below(map)
    return True


# --- the operations ------------------------------------------------------------------------------------------

cdef CowMap *map_new(Table *table, uint32_t group) noexcept nogil:
    """An empty map for a key group, published in the table; NULL without memory."""
    cdef CowMap *map = <CowMap *>raw_alloc(table.core.arena.budget, sizeof(CowMap))
    if map == NULL:
        return NULL
    memset(map, 0, sizeof(CowMap))
    map.group = group
    map.seen_version = table.core.highest_required_snapshot_version
    start_table(&map.primary, table.initial_capacity, &map.primary.single)
    map.threshold = table.initial_capacity // 4 * 3
    store_ptr(&table.maps[group - table.first_group], map)
    return map


cdef uint32_t find_blob(Table *table, CowMap *map, const char *data, uint64_t length,
                        uint32_t ns, uint32_t hash) noexcept nogil:
    """The live entry of a byte key, 0 if there is none. The stored hash spares most key fetches."""
    cdef Core *core = table.core
    cdef uint32_t slot = chain_head(core, map, hash), off = table.layout.off_namespace
    cdef Entry *entry
    cdef Blob *blob
    while slot:
        entry = entry_at(core, slot)
        if blob_hash(entry)[0] == hash and (off == 0 or (<uint32_t *>(<char *>entry + off))[0] == ns):
            blob = <Blob *>entry.key
            if blob.length == length and same_bytes(blob_data(blob), data, length):
                return slot
        slot = entry.next
    return 0


cdef bint prepare_insert(Lane *lane, Table *table, CowMap *map, const char *data, uint64_t length,
                         uint32_t hash, Insertion *ready) noexcept nogil:
    """Do the part of an insert that can fail; then call `finish_insert` or `abandon_insert`, with no operation between.

    As in Flink, the insert that makes the map double still goes into the old table.
    """
    cdef Core *core = lane.core
    cdef BucketTable *buckets
    ready.blob = NULL
    if unlikely(map.secondary.capacity == 0 and map.primary.size > map.threshold):
        begin_rehash(core, map, 2 * map.primary.capacity)
    if not record_log(lane, table, &ready.log):
        return False
    if ready.log != NULL and not log_reserve(core.arena, ready.log, 32):
        return False
    buckets = active_table(map, hash)
    ready.link = bucket_for_write(lane, buckets, hash & (buckets.capacity - 1))
    if unlikely(ready.link == NULL):
        return False
    if table.layout.key_is_blob:
        ready.blob = blob_new(lane.blobs, data, length)
        if unlikely(ready.blob == NULL):
            return False
    ready.slot = slot_alloc(table, map)
    if unlikely(ready.slot == 0):
        if ready.blob != NULL:
            blob_drop(core.blobs, ready.blob)
        return False
    return True


cdef void abandon_insert(Table *table, CowMap *map, Insertion *ready) noexcept nogil:
    if ready.blob != NULL:
        blob_drop(table.core.blobs, ready.blob)
    slot_return(table, map, ready.slot)


cdef uint32_t finish_insert(Lane *lane, Table *table, CowMap *map, int64_t key, uint32_t ns, uint32_t hash,
                            Insertion *ready) noexcept nogil:
    """Link the prepared entry in; its payload is all zero. Cannot fail."""
    cdef uint32_t slot = ready.slot
    cdef Entry *entry = entry_at(lane.core, slot)
    entry.version = lane.core.state_version
    set_value_version(table, entry, lane.core.state_version)
    if ready.blob != NULL:
        entry.key = <int64_t>ready.blob
        blob_hash(entry)[0] = hash
    else:
        entry.key = key
    if table.layout.off_namespace:
        (<uint32_t *>(<char *>entry + table.layout.off_namespace))[0] = ns
        count_namespace(table, ns, 1)
    memset(payload_of(table, entry), 0, table.layout.payload_width)
    entry.next = ready.link[0]
    ready.link[0] = slot
    active_table(map, hash).size += 1
    map.modifications += 1
    lane.entries += 1
    if ready.log != NULL:
        (<uint64_t *>log_take(ready.log, 8))[0] = trailer(RECORD_INSERT, table, map.group, slot)
    return slot


cdef uint32_t insert(Lane *lane, Table *table, CowMap *map, int64_t key, const char *data, uint64_t length,
                     uint32_t ns, uint32_t hash) noexcept nogil:
    """Add an entry for a key that is absent; its payload is all zero. 0 without memory."""
    cdef Insertion ready
    if unlikely(not prepare_insert(lane, table, map, data, length, hash, &ready)):
        return 0
    return finish_insert(lane, table, map, key, ns, hash, &ready)


cdef uint32_t *link_before(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash) noexcept nogil:
    """The link that names a live entry, made writable; NULL without memory.

    The head of a bucket needs no clone; before a later entry, old entries in the chain are cloned.
    """
    cdef Core *core = lane.core
    cdef BucketTable *buckets = active_table(map, hash)
    cdef uint32_t index = hash & (buckets.capacity - 1)
    cdef uint32_t current = bucket(core, buckets, index)[0], previous = 0
    while current != slot:
        previous = current
        current = entry_at(core, current).next
    if previous == 0:
        return bucket_for_write(lane, buckets, index)
    if entry_at(core, previous).version < core.highest_required_snapshot_version:
        previous = own_entry(lane, table, map, previous, hash)
        if unlikely(previous == 0):
            return NULL
    return &entry_at(core, previous).next


cdef inline void unlink_entry(Lane *lane, Table *table, CowMap *map, uint32_t *link, uint32_t slot,
                              uint32_t hash) noexcept nogil:
    link[0] = entry_at(lane.core, slot).next
    if table.layout.off_thread:
        unlink_thread(table, entry_at(lane.core, slot))
    active_table(map, hash).size -= 1
    map.modifications += 1
    lane.entries -= 1


cdef bint reserve_records(Lane *lane, Table *table) noexcept nogil:
    """Make room for a few records of inserts and removals, in the log that takes them."""
    cdef Log *log
    if not record_log(lane, table, &log):
        return False
    if log != NULL:
        return log_reserve(lane.core.arena, log, 64)
    return lane.core.newest == NULL or log_reserve(lane.core.arena, retired_log(lane), 64)


cdef bint prepare_remove(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash) noexcept nogil:
    """Do the part of a removal that needs memory, except records: after `reserve_records`, `remove` then succeeds."""
    return link_before(lane, table, map, slot, hash) != NULL


cdef bint remove(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash) noexcept nogil:
    """Remove a live entry; False without memory. A journal keeps the slot as it is, for rollback."""
    cdef Core *core = lane.core
    cdef Log *log
    cdef bint shared = entry_at(core, slot).version < core.highest_required_snapshot_version
    cdef uint32_t *link = link_before(lane, table, map, slot, hash)
    if unlikely(link == NULL):
        return False
    if not record_log(lane, table, &log):
        return False
    if log != NULL:
        if not log_reserve(core.arena, log, 8):
            return False
    elif shared and not log_reserve(core.arena, retired_log(lane), 16):
        return False
    unlink_entry(lane, table, map, link, slot, hash)
    if log != NULL:
        log.held += 1
        (<uint64_t *>log_take(log, 8))[0] = trailer(RECORD_REMOVE, table, map.group, slot)
    elif shared:
        push_retired(retired_log(lane), table, map.group, slot)
    else:
        slot_free(table, map, slot)
    return True


# --- undo ------------------------------------------------------------------------------------------------------
#
# Records are taken from the end of a log and reversed. A slot named by an older record may have been
# replaced by a clone meanwhile: `Core.moves` maps it to its successor. MOVED records outlive the undo, in
# `carried`, because records of older segments can name the same slots.

cdef inline uint64_t first_place(Moves *moves, uint32_t slot) noexcept nogil:
    return (slot * <uint64_t>0x9E3779B97F4A7C15 >> 32) & (moves.capacity - 1)


cdef inline uint64_t place_of(Moves *moves, uint32_t slot) noexcept nogil:
    """Where a slot is in the table, or the free place where it would go."""
    cdef uint64_t mask = moves.capacity - 1, at = first_place(moves, slot)
    while moves.pairs[2 * at] != 0 and moves.pairs[2 * at] != slot:
        at = (at + 1) & mask
    return at


cdef inline uint32_t current_slot(Core *core, uint32_t slot) noexcept nogil:
    cdef uint64_t at
    while slot != 0 and core.moves.n != 0:
        at = place_of(&core.moves, slot)
        if core.moves.pairs[2 * at] == 0:
            break
        slot = core.moves.pairs[2 * at + 1]
    return slot


cdef void forget_moves(Core *core) noexcept nogil:
    raw_free(core.arena.budget, core.moves.pairs, core.moves.capacity * 2 * sizeof(uint32_t))
    memset(&core.moves, 0, sizeof(Moves))


cdef bint reserve_moves(Core *core, uint64_t more) noexcept nogil:
    """Make room in the table, which is at most three quarters full; False without memory."""
    cdef Moves old = core.moves
    cdef Moves *moves = &core.moves
    cdef uint64_t i, capacity = old.capacity if old.capacity else 256
    if 4 * (old.n + more) <= 3 * old.capacity:
        return True
    while 4 * (old.n + more) > 3 * capacity:
        capacity *= 2
    moves.pairs = <uint32_t *>raw_alloc(core.arena.budget, capacity * 2 * sizeof(uint32_t))
    if moves.pairs == NULL:
        moves.pairs = old.pairs
        return False
    memset(moves.pairs, 0, capacity * 2 * sizeof(uint32_t))
    moves.capacity = capacity
    for i in range(old.capacity):
        if old.pairs[2 * i]:
            memcpy(&moves.pairs[2 * place_of(moves, old.pairs[2 * i])], &old.pairs[2 * i], 2 * sizeof(uint32_t))
    raw_free(core.arena.budget, old.pairs, old.capacity * 2 * sizeof(uint32_t))
    return True


cdef bint undo_write(Lane *lane, Table *table, CowMap *map, uint32_t slot, char *payload) noexcept nogil:
    cdef Entry *entry = entry_at(lane.core, slot)
    if entry.version < lane.core.highest_required_snapshot_version:
        slot = own_entry(lane, table, map, slot, hash_of(table, entry))
        if slot == 0:
            return False
        entry = entry_at(lane.core, slot)
    payload_drop(table, payload_of(table, entry))
    memcpy(payload_of(table, entry), payload, table.layout.payload_width)
    entry.version = lane.core.state_version
    set_value_version(table, entry, 0)   # a snapshot may share what came back
    return True


cdef bint undo_bytes(Lane *lane, Table *table, CowMap *map, uint32_t slot, const char *end) noexcept nogil:
    """Give an entry the bytes back that a record ends with: in its blob, if that is its own and of their size."""
    cdef uint32_t length = (<const BytesEnd *>end)[-1].length
    cdef const char *data = end - record_width(table, end) + 8 * table.layout.has_timestamp
    cdef Entry *entry = entry_at(lane.core, slot)
    cdef Blob **place
    cdef Blob *made
    if entry.version < lane.core.highest_required_snapshot_version:
        slot = own_entry(lane, table, map, slot, hash_of(table, entry))
        if slot == 0:
            return False
        entry = entry_at(lane.core, slot)
    place = <Blob **>value_of(table, entry)
    if blob_takes(place[0], length):
        blob_set(place[0], data, length)
    else:
        made = blob_new(lane.blobs, data, length)
        if made == NULL:
            return False
        blob_drop(lane.core.blobs, place[0])
        place[0] = made
    if table.layout.has_timestamp:
        (<int64_t *>payload_of(table, entry))[0] = (<const int64_t *>(data - 8))[0]
    entry.version = lane.core.state_version
    return True


cdef bint undo_insert(Lane *lane, Table *table, CowMap *map, uint32_t slot) noexcept nogil:
    cdef Core *core = lane.core
    cdef uint32_t hash = hash_of(table, entry_at(core, slot))
    cdef bint shared = entry_at(core, slot).version < core.highest_required_snapshot_version
    cdef uint32_t *link = link_before(lane, table, map, slot, hash)
    if link == NULL or (shared and not log_reserve(core.arena, retired_log(lane), 16)):
        return False
    unlink_entry(lane, table, map, link, slot, hash)
    if shared:
        push_retired(retired_log(lane), table, map.group, slot)
    else:
        slot_free(table, map, slot)
    return True


cdef inline void carry_move(Log *carried, Table *table, CowMap *map, uint32_t slot, uint32_t clone) noexcept nogil:
    cdef char *room = log_take(carried, 16)
    carried.held += 1
    (<uint64_t *>room)[0] = clone
    (<uint64_t *>(room + 8))[0] = trailer(RECORD_MOVED, table, map.group, slot)


cdef bint undo_remove(Lane *lane, Table *table, CowMap *map, uint32_t slot, Log *carried) noexcept nogil:
    cdef Core *core = lane.core
    cdef Entry *entry = entry_at(core, slot)
    cdef uint32_t hash = hash_of(table, entry), back = slot
    cdef BucketTable *buckets = active_table(map, hash)
    cdef uint32_t *link = bucket_for_write(lane, buckets, hash & (buckets.capacity - 1))
    cdef Thread *thread
    cdef Anchor *anchor
    if link == NULL:
        return False
    if entry.version < core.highest_required_snapshot_version or (map.n_old and is_old(map, slot)):
        if not log_reserve(core.arena, carried, 16):
            return False
        back = clone_entry(lane, table, map, slot)
        if back == 0:
            return False
        carry_move(carried, table, map, slot, back)
        entry = entry_at(core, back)
    entry.next = link[0]
    link[0] = back
    entry.version = core.state_version
    if table.layout.off_thread:
        thread = thread_of(table, entry)
        thread.prev = current_slot(core, thread.prev)
        thread.next = current_slot(core, thread.next)
        repoint_thread(table, back)
        anchor = <Anchor *>address(core.arena, namespace_of(table, entry))
        anchor.modifications += 1
        anchor.alive_from = 0            # what is back may be alive
    buckets.size += 1
    map.modifications += 1
    lane.entries += 1
    return True


cdef inline bint is_named_by_slot(Table *table) noexcept nogil:
    """Say whether records name slots of a table that they did not write: neighbours of a removed one, mere copies."""
    return table.layout.off_thread != 0 or table.layout.off_value_version != 0


cdef bint absorb_moves(Journal *journal, Log *carried) noexcept nogil:
    """Enter the moves that were appended to `carried` since the last time; False without memory.

    A slot that was not written since the oldest mark of the undo is named by no other record of it.
    """
    cdef Core *core = journal.tables[0].core
    cdef Moves *moves = &core.moves
    cdef uint64_t left = carried.records - moves.absorbed, place, last
    cdef LogChunk *chunk = carried.last
    cdef uint32_t at, slot
    if left == 0:
        return True
    if not reserve_moves(core, left):
        return False
    moves.absorbed += left
    while left:
        at = chunk.used
        while at and left:
            at -= 16
            left -= 1
            last = (<uint64_t *>(chunk_data(chunk) + at + 8))[0]
            slot = <uint32_t>last
            if (entry_at(core, slot).version < moves.floor
                    and not is_named_by_slot(journal.tables[(last >> 48) & 0xFF])):
                continue
            place = place_of(moves, slot)
            moves.n += moves.pairs[2 * place] == 0
            moves.pairs[2 * place] = slot
            moves.pairs[2 * place + 1] = (<uint32_t *>(chunk_data(chunk) + at))[0]
        chunk = chunk.prev
    return True


cdef inline void prefetch_undo(Core *core, char *end) noexcept nogil:
    """Prefetch the memory that an older record's undo touches, if the record has 16 bytes, as most have that name a
    clone."""
    cdef uint32_t slot = (<uint32_t *>(end - 8))[0], clone = (<uint32_t *>(end - 16))[0]
    if (slot >> EXTENT_UNITS_SHIFT) < core.arena.top:
        prefetch_write(entry_at(core, slot))
    if (clone >> EXTENT_UNITS_SHIFT) < core.arena.top:
        prefetch_write(entry_at(core, clone))
    if core.moves.n:
        prefetch_write(&core.moves.pairs[2 * first_place(&core.moves, slot)])


cdef bint undo_log(Journal *journal, Log *log, uint64_t down_to, Log *carried) noexcept nogil:
    """Reverse the newest records of `log` until `down_to` are left; False when memory ran out midway.

    Reversed records are off the log, so the call can be repeated. Call `forget_moves` before an undo that begins a new
    `carried`, and at the end.
    """
    cdef Core *core = journal.tables[0].core
    cdef uint64_t last
    cdef uint32_t slot, clone, width
    cdef int op, i
    cdef Table *table
    cdef CowMap *map
    cdef char *end
    cdef bint done = True
    core.undone += 1
    for i in range(2):
        if journal.tables[i] != NULL:
            journal.tables[i].lane.override = carried
    while done and not log_empty(core.arena, log) and log.records > down_to:
        if core.newest != NULL and log.last.used >= 16 * (RECLAIM_AHEAD + 1):
            prefetch_undo(core, chunk_data(log.last) + log.last.used - 16 * RECLAIM_AHEAD)
        last = log_last_trailer(log)
        op = <int>(last >> 56)
        table = journal.tables[(last >> 48) & 0xFF]
        map = table.maps[((last >> 32) & 0xFFFF) - table.first_group]
        slot = <uint32_t>last
        end = chunk_data(log.last) + log.last.used
        width = 8
        done = see_snapshots(core, map) and absorb_moves(journal, carried)
        if not done:
            break
        if op == RECORD_MOVED or op == RECORD_REPLACED:
            width = 16
            clone = <uint32_t>(<uint64_t *>(end - 16))[0]
            if op == RECORD_REPLACED:
                done = undo_write(&table.lane, table, map, current_slot(core, clone),
                                  payload_of(table, entry_at(core, slot)))
                if done:
                    payload_ref(table, payload_of(table, entry_at(core, slot)))      # the slot keeps it too
            done = done and log_reserve(core.arena, carried, 16)
            if done:
                carry_move(carried, table, map, slot, clone)
        elif op == RECORD_REMOVE:
            done = undo_remove(&table.lane, table, map, slot, carried)
        elif op == RECORD_INSERT:
            done = undo_insert(&table.lane, table, map, current_slot(core, slot))
        elif op == RECORD_BYTES:
            width = record_width(table, end)
            done = undo_bytes(&table.lane, table, map, current_slot(core, slot), end)
        else:
            width += (table.layout.payload_width + 7) & ~7u
            done = undo_write(&table.lane, table, map, current_slot(core, slot), end - width)
        if done:
            log_pop(core.arena, log, width)
    for i in range(2):
        if journal.tables[i] != NULL:
            journal.tables[i].lane.override = NULL
    return done


# --- reclaiming ------------------------------------------------------------------------------------------------


cdef inline Snapshot *holder_of(Core *core, uint32_t until) noexcept nogil:
    """The newest live snapshot up to a version, NULL if there is none: newer ones never saw what is that old."""
    if until != core.holder_until:
        core.holder_until = until
        core.holder = core.newest
        while core.holder != NULL and core.holder.version > until:
            core.holder = core.holder.older
    return core.holder

cdef void let_go(Core *core, Snapshot *holder, Table *table, CowMap *map, uint32_t slot) noexcept nogil:
    """Free a slot that no journal names any more, or leave it to the snapshots that may see it. Room was reserved."""
    if holder != NULL and entry_at(core, slot).version < holder.version:
        push_retired(&holder.retired, table, map.group, slot)
    else:
        slot_free(table, map, slot)


cdef inline uint64_t trailer_to_reclaim(Core *core, Log *log) noexcept nogil:
    """The newest record's trailer. Prefetches the entry that a slightly older record names: they lie anywhere.

    Most records that name one have 16 bytes. For another size this may read no trailer; prefetching is harmless.
    """
    cdef uint32_t slot
    if log.last.used >= 16 * (RECLAIM_AHEAD + 1):
        slot = (<uint32_t *>(chunk_data(log.last) + log.last.used - 16 * RECLAIM_AHEAD - 8))[0]
        if (slot >> EXTENT_UNITS_SHIFT) < core.arena.top:
            prefetch_write(entry_at(core, slot))
    return log_last_trailer(log)


cdef inline void ask_for_written(Log *log, Table *table) noexcept nogil:
    """Prefetch the blob that a slightly older record keeps, if that is like the newest: a value of this table."""
    cdef uint32_t width = ((table.layout.payload_width + 7) & ~7u) + 8
    if table.layout.value_kind == VALUE_BLOB and log.last.used >= (RECLAIM_AHEAD + 1) * width:
        ask_for_block((<void **>(chunk_data(log.last) + log.last.used - (RECLAIM_AHEAD + 1) * width
                                 + (table.layout.off_value - table.layout.off_payload)))[0])


cdef void drop_written(Core *core, Journal *journal, Log *log) noexcept nogil:
    """Drop the blobs of values that a lane has overwritten, newest first, up to a record that keeps something else.

    Lanes do this at the same time: it touches nothing but the log and blobs of the lane's own maps.
    """
    cdef uint64_t last
    cdef int op
    cdef uint32_t width
    cdef Table *table
    while log.held != 0 and not log_empty(core.arena, log):
        last = log_last_trailer(log)
        op = <int>(last >> 56)
        table = journal.tables[(last >> 48) & 0xFF]
        width = record_width(table, chunk_data(log.last) + log.last.used)
        if op == RECORD_WRITE and table.layout.value_kind == VALUE_BLOB:
            ask_for_written(log, table)
            payload_drop(table, chunk_data(log.last) + log.last.used - width)
            log_pop(core.arena, log, width)
        elif op == RECORD_INSERT or op == RECORD_BYTES:
            log_pop(core.arena, log, width)
        else:
            return


cdef void reclaim_log(Core *core, Journal *journal, Log *log, int64_t *budget) noexcept nogil:
    """Take up to `budget` records of a journal that no rollback can reach, newest first."""
    cdef uint64_t last
    cdef int op
    cdef uint32_t width
    cdef Table *table
    cdef CowMap *map
    cdef Snapshot *holder
    while budget[0] > 0 and not log_empty(core.arena, log):
        if log.held == 0:
            budget[0] -= 16
            log_drop_last_chunk(core.arena, log)
            continue
        budget[0] -= 1
        last = trailer_to_reclaim(core, log)
        op = <int>(last >> 56)
        table = journal.tables[(last >> 48) & 0xFF]
        width = record_width(table, chunk_data(log.last) + log.last.used)
        if op == RECORD_WRITE or op == RECORD_COPIED:
            ask_for_written(log, table)
            payload_drop(table, chunk_data(log.last) + log.last.used - width)
        elif op == RECORD_REMOVE or op == RECORD_MOVED or op == RECORD_REPLACED:
            map = table.maps[((last >> 32) & 0xFFFF) - table.first_group]
            holder = holder_of(core, log.last.until)
            if holder != NULL and not log_reserve(core.arena, &holder.retired, 16):
                return
            let_go(core, holder, table, map, <uint32_t>last)
        log_pop(core.arena, log, width)


cdef void reclaim_journals(Core *core, int64_t *budget) noexcept nogil:
    """Reclaim dead records in journals."""
    cdef Journal **link = &core.dying_journals
    cdef Journal *journal
    while budget[0] > 0 and link[0] != NULL:
        journal = link[0]
        reclaim_log(core, journal, &journal.dead, budget)
        if journal.dead.last == NULL:
            journal.is_dying = False
            link[0] = journal.next_dying
        elif budget[0] > 0:              # out of memory: go on with the others
            link = &journal.next_dying


cdef void reclaim_garbage(Core *core, int64_t *budget) noexcept nogil:
    """Free memory that ended snapshots have left, or leave it to an older one that sees it too."""
    cdef uint64_t last, first
    cdef Table *table
    cdef Snapshot *holder
    while budget[0] > 0 and not log_empty(core.arena, &core.garbage):
        budget[0] -= 1
        last = trailer_to_reclaim(core, &core.garbage)
        first = (<uint64_t *>(chunk_data(core.garbage.last) + core.garbage.last.used - 16))[0]
        holder = holder_of(core, core.garbage.last.until)
        if holder != NULL and not log_reserve(core.arena, &holder.retired, 16):
            return
        log_pop(core.arena, &core.garbage, 16)
        if <int>(last >> 56) == RETIRED_RUN:
            if holder != NULL and <uint32_t>first < holder.version:
                push_run(&holder.retired, <uint32_t>last, <int>((last >> 32) & 0xFFFF), <uint32_t>first)
            else:
                run_free(core.arena, <uint32_t>last, <int>((last >> 32) & 0xFFFF))
        else:
            table = <Table *>first
            let_go(core, holder, table, table.maps[((last >> 32) & 0xFFFF) - table.first_group], <uint32_t>last)


cdef void reclaim_lists(Core *core, int64_t *budget) noexcept nogil:
    """Drop chunks of dropped lists."""
    cdef Table *table
    cdef ListChunk *chunk
    while budget[0] > 0 and core.dead_lists != NULL:
        budget[0] -= 4
        table = core.dead_lists
        chunk = table.dead_chunks
        table.dead_chunks = next_dead(chunk)[0]
        if table.dead_chunks == NULL:
            core.dead_lists = table.next_dead_lists
        chunk.refs = 1
        drop_list(table, chunk)


cdef void end_snapshot(Core *core, Snapshot *snapshot) noexcept nogil:
    """Unlink a released snapshot. Entries that it kept are visited again, step by step: an older one may need it
    too."""
    cdef Snapshot *older = snapshot.older
    cdef Journal *journal = core.filled_journals
    spin_lock(&core.directory_lock)
    if snapshot.newer != NULL:
        snapshot.newer.older = older
    else:
        core.newest = older
    if older != NULL:
        older.newer = snapshot.newer
    else:
        core.oldest = snapshot.newer
    if snapshot.directories != NULL:
        snapshot.last_directory.next = core.dead_directories
        core.dead_directories = snapshot.directories
    core.highest_required_snapshot_version = core.newest.version if core.newest != NULL else 0
    core.holder, core.holder_until = NULL, 0
    spin_unlock(&core.directory_lock)
    log_append(core.arena, &core.garbage, &snapshot.retired)
    while journal != NULL:
        let_die(core, journal, &journal.waiting)
        journal = journal.next_filled
    raw_free(core.arena.budget, snapshot, sizeof(Snapshot))
    count(core.arena.budget.probe, LIVE_SNAPSHOTS, -1)


cdef void free_directories(Core *core, int64_t *budget) noexcept nogil:
    """Free directories of ended snapshots, or leave them to an older one that they cover."""
    cdef Directory *directory
    cdef Directory **link
    cdef Snapshot *holder
    cdef uint64_t size
    while budget[0] > 0 and core.dead_directories != NULL:
        budget[0] -= 1
        spin_lock(&core.directory_lock)
        directory = core.dead_directories
        core.dead_directories = directory.next
        holder = holder_of(core, directory.high)
        if holder != NULL and holder.version >= directory.low:
            add_directory(holder, directory)
            spin_unlock(&core.directory_lock)
            continue
        link = &directory.map.directories
        while link[0] != directory:
            link = &link[0].older
        link[0] = directory.older
        spin_unlock(&core.directory_lock)
        size = sizeof(Directory) + 4 * (<uint64_t>directory.primary_pages + directory.secondary_pages)
        raw_free(core.arena.budget, directory, size)
        count(core.arena.budget.probe, LIVE_DIRECTORIES, -1)


cdef void drain(Core *core, int64_t budget) noexcept nogil:
    """End released snapshots and reclaim up to `budget` unused things. Only on the mutating side."""
    cdef Snapshot *snapshot = core.oldest
    cdef Snapshot *newer
    cdef bint goes_on
    store_u32(&core.pending, 0)
    if load_u32(&core.any_released):
        store_u32(&core.any_released, 0)
        while snapshot != NULL:
            newer = snapshot.newer
            if load_u32(&snapshot.released):
                end_snapshot(core, snapshot)
            snapshot = newer
    free_directories(core, &budget)
    reclaim_lists(core, &budget)
    reclaim_garbage(core, &budget)
    reclaim_journals(core, &budget)
    goes_on = shrink_maps(core, &budget)
    if (budget <= 0 or core.dead_directories != NULL or core.dead_lists != NULL or core.garbage.records
            or (goes_on and core.sparse != NULL)):
        store_u32(&core.pending, 1)


cdef void wait_for_others(Core *core) noexcept:
    """Wait while another thread does work that must not be disturbed: a batch without the GIL, for example.

    One thread at a time uses a backend. But collections run finalisers on any thread, and those may use it.
    """
    while load_u32(&core.busy) and core.busy_thread != PyThread_get_thread_ident():
        with nogil:
            usleep(20)


cdef object key_object(Table *table, Entry *entry):
    """The key as a Python int or bytes."""
    cdef Blob *blob
    if table.layout.key_is_blob:
        blob = <Blob *>entry.key
        return blob_data(blob)[:blob.length]
    return entry.key
