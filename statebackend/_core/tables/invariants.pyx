"""The invariants of `cow_map.pxd` as code; `_check()` of a table verifies them, in every build."""

from libc.stdint cimport uint32_t, uint64_t

from statebackend._core.memory.arena cimport UNIT_SHIFT, address
from statebackend._core.tables.cow_map cimport (
    FREE_BLOCK, FREE_SLOT, VALUE_ANCHOR, Anchor, BucketTable, Core, CowMap, Entry, Table, Thread, active_table, bucket,
    entry_at, free_refs, hash_of, head_anchor, key_object, namespace_of, thread_of)


cdef object check_map(Table *table, CowMap *map):
    """Verify all invariants of `cow_map.pxd`; AssertionError names the broken one. O(entries)."""
    cdef Core *core = table.core
    cdef BucketTable *buckets
    cdef uint32_t index, slot, hash, size, where = map.group, free_slots = 0, total_slots = 0
    cdef uint32_t *head
    cdef Entry *entry
    cdef Anchor *anchor
    cdef uint64_t i
    cdef int t
    seen = set()
    keys = set()
    anchors = {}
    assert map.rehash_index <= map.primary.capacity, f"map {where}: rehash index out of range"
    assert map.secondary.capacity in (0, 2 * map.primary.capacity), f"map {where}: secondary capacity"
    assert map.secondary.capacity or map.rehash_index == 0, f"map {where}: rehash index without a rehash"
    # Not by `next_entry`: buckets that it passes over, and the table that an entry is in, are looked at, too.
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
            seen.add(free)
            free_slots += 1
        slot = entry.next
    for i in range(map.n_runs):
        total_slots += <uint32_t>((<uint64_t>1 << (map.runs[i] & 0xFF)) // table.layout.stride)
    total_slots -= (map.fresh_end - map.fresh) // (table.layout.stride >> UNIT_SHIFT)
    assert map.used + free_slots == total_slots, (
        f"map {where}: {map.used} used and {free_slots} free of {total_slots} slots")
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
