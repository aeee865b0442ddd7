"""The invariants of `cow_map.pxd`, `journal.pxd` and `objects.pxd` as code, for `_check()` of tables and cores."""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from statebackend._core.memory.arena cimport UNIT_SHIFT, address
from statebackend._core.memory.journal cimport Log, LogChunk, chunk_data
from statebackend._core.tables.cow_map cimport (
    FREE_BLOCK, FREE_SLOT, RECORD_BYTES, RECORD_INSERT, RECORD_MOVED, RECORD_REMOVE, RECORD_REPLACED, RETIRED_RUN,
    RETIRED_SLOT, VALUE_ANCHOR, VALUE_FIXED, VALUE_LIST, VALUE_OBJECT, Anchor, BucketTable, Core, CowMap, Entry,
    ExpiringHead, Journal, ListChunk, ListHead, Snapshot, Table, Thread, active_table, bucket, element_timestamp,
    elements_of, entry_at, first_of_run, free_refs, hash_of, head_anchor, is_journal_empty, is_old, key_object,
    namespace_of, next_chunk_of, next_dead, payload_of, record_width, slots_of_run, thread_of, value_of)


cdef object check_map(Table *table, CowMap *map):
    """Verify all invariants of `cow_map.pxd`; AssertionError names the broken one. O(entries)."""
    cdef Core *core = table.core
    cdef BucketTable *buckets
    cdef uint32_t index, slot, hash, size, where = map.group, free_slots = 0, total_slots = 0, old_used = 0
    cdef uint32_t *head
    cdef Entry *entry
    cdef Anchor *anchor
    cdef uint64_t i
    cdef int t
    seen = set()
    keys = set()
    anchors = {}
    assert map.rehash_index <= map.primary.capacity, f"map {where}: rehash index out of range"
    assert map.secondary.capacity in (0, map.primary.capacity * 2) or (
        map.primary.capacity % map.secondary.capacity == 0) or (
        map.secondary.capacity % map.primary.capacity == 0), f"map {where}: secondary capacity"
    assert map.secondary.capacity or map.rehash_index == 0, f"map {where}: rehash index without a rehash"
    # Not by `next_entry`: buckets that it passes over, and the table that an entry is in, are looked at too.
    for t in range(2):
        buckets = &map.primary if t == 0 else &map.secondary
        size = 0
        for index in range(buckets.capacity):
            head = bucket(core, buckets, index)
            slot = head[0] if head != NULL else 0
            if t == 0 and index < map.rehash_index:
                continue                 # stale: the bucket has moved
            if t == 1 and (index & (map.primary.capacity - 1)) >= map.rehash_index:
                assert slot == 0, f"map {where}: bucket {index} of the secondary table is ahead of the rehash"
            while slot:
                entry = entry_at(core, slot)
                hash = hash_of(table, entry)
                assert slot not in seen, f"map {where}: slot {slot} is in two chains"
                seen.add(slot)
                assert entry.version != FREE_SLOT, f"map {where}: slot {slot} is free and in a chain"
                assert entry.version <= core.state_version, f"map {where}: slot {slot} comes from the future"
                assert active_table(map, hash) == buckets, f"map {where}: slot {slot} in the wrong table"
                assert hash & (buckets.capacity - 1) == index, f"map {where}: slot {slot} in the wrong bucket"
                key = (key_object(table, entry), namespace_of(table, entry))
                assert key not in keys, f"map {where}: a key is there twice"
                keys.add(key)
                if table.layout.value_kind == VALUE_ANCHOR:
                    anchor = head_anchor(table, slot)
                    assert (anchor.group, anchor.namespace) == (where, namespace_of(table, entry)), (
                        f"map {where}: the anchor of slot {slot} is another key's")
                    assert anchor.key == entry.key, f"map {where}: the anchor of slot {slot} is another key's"
                    assert anchor.first, f"map {where}: the anchor of slot {slot} has no entries"
                if table.layout.value_kind == VALUE_LIST:
                    check_list(table, slot, <ListHead *>value_of(table, entry))
                if table.layout.off_thread:
                    anchors.setdefault(namespace_of(table, entry), set()).add(slot)
                size += 1
                slot = entry.next
        assert size == buckets.size, f"map {where}: table {t} has {size} entries and says {buckets.size}"
    slot = map.free_slot
    assert map.free_in_block <= FREE_BLOCK, f"map {where}: {map.free_in_block} slots in the first free block"
    while slot:
        entry = entry_at(core, slot)
        named = map.free_in_block if slot == map.free_slot else FREE_BLOCK
        for free in [slot, *[free_refs(entry)[i] for i in range(named)]]:
            assert entry_at(core, free).version == FREE_SLOT, f"map {where}: slot {free} in the free list is not free"
            assert free not in seen, f"map {where}: slot {free} is free and in a chain"
            assert not is_old(map, free), f"map {where}: slot {free} of an old run is to be used again"
            seen.add(free)
            free_slots += 1
        slot = entry.next
    for i in range(map.n_old):
        assert i == 0 or map.old_runs[i - 1] < map.old_runs[i], f"map {where}: old runs out of order"
        slot = slots_of_run(table, map.runs[i], &hash)
        while slot != hash:
            old_used += entry_at(core, slot).version != FREE_SLOT
            slot += table.layout.stride >> UNIT_SHIFT
    assert old_used == map.old_used, f"map {where}: {old_used} slots of old runs are used, it says {map.old_used}"
    assert (map.n_old == 0) == (map.old_used == 0), f"map {where}: old runs that nobody needs"
    for i in range(map.n_old, map.n_runs):
        total_slots += <uint32_t>((<uint64_t>1 << (map.runs[i] & 0xFF)) // table.layout.stride)
    assert total_slots == map.slots, f"map {where}: it has {total_slots} slots and says {map.slots}"
    total_slots -= (map.fresh_end - map.fresh) // (table.layout.stride >> UNIT_SHIFT)
    assert map.used - old_used + free_slots == total_slots, (
        f"map {where}: {map.used} used, {old_used} of them in old runs, and {free_slots} free of {total_slots} slots")
    assert map.used >= len(keys), f"map {where}: fewer slots in use than entries"
    for anchor_ref, slots in anchors.items():
        check_thread(table, anchor_ref, slots)
    return len(keys)


cdef object check_thread(Table *table, uint32_t anchor_ref, set slots):
    cdef Core *core = table.core
    cdef Anchor *anchor = <Anchor *>address(core.arena, anchor_ref)
    cdef uint32_t slot = anchor.first, previous = 0
    cdef uint64_t sequence = 0
    cdef Thread *thread
    walked = set()
    while slot:
        thread = thread_of(table, entry_at(core, slot))
        assert thread.prev == previous, f"anchor {anchor_ref}: prev of slot {slot}"
        assert previous == 0 or thread.sequence > sequence, f"anchor {anchor_ref}: order at slot {slot}"
        sequence = thread.sequence
        walked.add(slot)
        previous = slot
        slot = thread.next
    assert anchor.last == previous, f"anchor {anchor_ref}: last"
    assert walked == slots, f"anchor {anchor_ref}: its thread and the chains hold different entries"
    assert anchor.alive_from == 0 or anchor.alive_from in walked, f"anchor {anchor_ref}: the hint names another entry"


cdef object check_list(Table *table, uint32_t slot, ListHead *head):
    cdef ExpiringHead *expiring = <ExpiringHead *>head
    cdef ListChunk *chunk = head.tail
    cdef ListChunk *newer = NULL
    cdef uint32_t used = head.tail_used, i
    cdef uint64_t before = head.length
    cdef int64_t timestamp
    stamps = []
    while chunk != NULL:
        assert chunk.refs, f"list {slot}: a chunk that nobody refers to"
        assert 0 < used <= chunk.used <= chunk.capacity, f"list {slot}: elements of a chunk"
        assert used <= before, f"list {slot}: more elements than its length"
        before -= used
        if table.element_has_timestamp:
            assert newer == NULL or next_chunk_of(chunk)[0] == newer, f"list {slot}: the link to a newer chunk"
            if chunk == expiring.first:
                assert expiring.first_index < used, f"list {slot}: the place of the first live element"
                assert before + expiring.first_index == expiring.dead, f"list {slot}: the count of dead elements"
            for i in range(used):
                if before + used - 1 - i >= expiring.dead:
                    timestamp = element_timestamp(elements_of(table, chunk)
                                                  + <uint64_t>(used - 1 - i) * table.element_width)
                    stamps.append(timestamp)
        newer, used, chunk = chunk, chunk.prev_used, chunk.prev
    assert before == 0, f"list {slot}: fewer elements than its length"
    if table.element_has_timestamp:
        assert stamps, f"list {slot}: nothing is alive"
        assert expiring.oldest == min(stamps), f"list {slot}: the oldest timestamp"
        assert expiring.newest == max(stamps), f"list {slot}: the newest timestamp"
        assert not expiring.is_ordered or stamps == sorted(stamps, reverse=True), f"list {slot}: the order"


cdef uint64_t objects_in_chunks(ListChunk *chunk, set chunks) except? 0:
    """Count the elements of chunks that no list was seen to have before."""
    cdef uint64_t n = 0
    while chunk != NULL and <uintptr_t>chunk not in chunks:
        chunks.add(<uintptr_t>chunk)
        n += chunk.used
        chunk = chunk.prev
    return n


cdef uint64_t objects_of(Table *table, const char *payload, set chunks) except? 0:
    """Count the references to objects that a payload has, with those in chunks that were not seen before."""
    if table.element_kind != VALUE_OBJECT:
        return table.layout.value_kind == VALUE_OBJECT
    return objects_in_chunks((<ListHead *>(payload + (table.layout.off_value - table.layout.off_payload))).tail, chunks)


cdef uint64_t objects_in(Table *table, set chunks) except? 0:
    """Count the references to objects in the slots of a table, live, retired or removed, and in its dead lists."""
    cdef uint32_t g, slot, end
    cdef uint64_t r, n = 0
    cdef CowMap *map
    cdef ListChunk *dead = table.dead_chunks
    if table.layout.value_kind != VALUE_OBJECT and table.element_kind != VALUE_OBJECT:
        return 0
    for g in range(table.n_maps):
        map = table.maps[g]
        for r in range(map.n_runs if map != NULL else 0):
            slot = first_of_run(table, map, r, &end)
            while slot < end:
                if entry_at(table.core, slot).version != FREE_SLOT:
                    n += objects_of(table, payload_of(table, entry_at(table.core, slot)), chunks)
                slot += table.layout.stride >> UNIT_SHIFT
    while dead != NULL:
        n += objects_in_chunks(dead, chunks)
        dead = next_dead(dead)[0]
    return n


cdef object check_logs(Core *core):
    """Verify the logs of all journals and snapshots, and the count of references to objects. O(records and entries)."""
    cdef Journal *journal = core.journals
    cdef Journal *noted = core.filled_journals
    cdef Snapshot *snapshot = core.oldest
    cdef Table *table = core.tables
    cdef uint32_t i
    cdef int64_t filled = 0, dying = 0, objects = core.objects.n_dead
    cdef set chunks = set()              # of lists of objects
    while noted != NULL:
        assert noted.is_filled, "a journal is in the list of those with records, and says that it is not"
        filled += 1
        noted = noted.next_filled
    noted = core.dying_journals
    while noted != NULL:
        assert noted.is_dying, "a journal is in the list of those with dead records, and says that it is not"
        dying += 1
        noted = noted.next_dying
    while journal != NULL:
        assert journal.is_filled or is_journal_empty(journal), "a journal with records is overlooked"
        assert journal.is_dying or journal.dead.last == NULL, "a journal with dead records is overlooked"
        filled -= journal.is_filled
        dying -= journal.is_dying
        for i in range(journal.n_dropped, journal.n_segments):
            objects += check_log(journal, &journal.segments[i].log, f"segment {i}", True, chunks)
        objects += check_log(journal, &journal.carried, "carried", True, chunks)
        objects += check_log(journal, &journal.waiting, "waiting", True, chunks)
        objects += check_log(journal, &journal.dead, "dead", False, chunks)
        journal = journal.next
    assert filled == 0 and dying == 0, "a journal is missing in a list, or in it twice"
    while snapshot != NULL:
        check_log(NULL, &snapshot.retired, f"retired by snapshot {snapshot.version}", True, chunks)
        snapshot = snapshot.newer
    check_log(NULL, &core.garbage, "garbage", True, chunks)
    while table != NULL:
        objects += objects_in(table, chunks)
        table = table.next
    assert objects == core.objects.held, f"{objects} references to objects, counted {core.objects.held}"


cdef object check_log(Journal *journal, Log *log, str which, bint is_exact, set chunks):
    """Verify a log; of slots and runs that were retired, without a journal. Return its references to objects."""
    cdef LogChunk *chunk = log.last
    cdef LogChunk *newer = NULL
    cdef Table *table
    cdef const char *end
    cdef uint64_t records = 0, owning = 0, objects = 0
    cdef uint32_t at, width
    cdef int op
    while chunk != NULL:
        assert chunk.next == newer, f"log {which}: its chunks do not agree"
        assert chunk.used <= chunk.capacity, f"log {which}: more in a chunk than it has room for"
        at = chunk.used
        while at:
            assert at >= 8, f"log {which}: records do not end where the chunk begins"
            end = chunk_data(chunk) + at
            op = <int>((<const uint64_t *>(end - 8))[0] >> 56)
            width = 16
            if journal == NULL:
                assert op == RETIRED_SLOT or op == RETIRED_RUN, f"log {which}: a record of kind {op}"
            else:
                table = journal.tables[((<const uint64_t *>(end - 8))[0] >> 48) & 0xFF]
                assert table != NULL and op and op <= RECORD_REPLACED, f"log {which}: a record of kind {op}"
                width = record_width(table, end)
                if op == RECORD_REMOVE or op == RECORD_MOVED or op == RECORD_REPLACED:
                    owning += 1
                elif op != RECORD_INSERT and op != RECORD_BYTES:
                    owning += table.layout.value_kind != VALUE_FIXED
                    objects += objects_of(table, end - width, chunks)
            assert width <= at, f"log {which}: records do not end where the chunk begins"
            at -= width
            records += 1
        newer, chunk = chunk, chunk.prev
    assert log.first == newer, f"log {which}: its first chunk"
    assert log.records >= records, f"log {which}: {records} records, and it says {log.records}"
    assert not is_exact or log.records == records, f"log {which}: {records} records, and it says {log.records}"
    assert log.last != NULL or log.records == 0, f"log {which}: no chunk, and it says {log.records} records"
    assert log.held or owning == 0, f"log {which}: it says that no record owns anything, and {owning} do"
    return objects
