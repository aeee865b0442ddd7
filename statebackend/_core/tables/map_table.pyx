"""Map states: one entry per map key, threaded by key in insertion order.

    heads:    key -> Anchor            entries:  (anchor, map key) -> value
                       |  first, last             ^     ^     ^
                       +--------------------------+ <-> + <-> +      thread

Both tables are in the key group of the key and share one journal, so undo reverses their changes in the right order.
Putting or removing one map key writes, copies and journals one entry, however large the map is. A key has a head
exactly while its map has entries.
"""

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset

from statebackend._core.memory.arena cimport address, block_free
from statebackend._core.tables.cow_map cimport (
    Anchor, Core, CoreKey, CowMap, Insertion, Lane, Table, Walk, abandon_insert, anchor_new, append_thread,
    before_operation, begin_walk, entry_at, find, finish_insert, hash_of, head_anchor, map_new, name_anchor,
    namespace_of, next_entry, prepare_insert, prepare_remove, remove, reserve_records, segment_for_writing)
from statebackend._core.memory.journal cimport Log, log_append
from statebackend._core.key_groups cimport HashPlan
from statebackend._core.tables.state_core cimport StateCore, discard_log
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.values cimport CODE_LIST, drop_value

from statebackend.errors import UsageError


cdef uint32_t insert_threaded(Lane *head_lane, Table *heads, CowMap *head_map, CoreKey *head, uint32_t head_slot,
                              Lane *lane, Table *table, CowMap *map, CoreKey *inner) noexcept nogil:
    """Add an absent entry, its payload all zero, and its key's head if `head_slot` is 0; 0 without memory.

    All or nothing: the steps that can fail come first.
    """
    cdef Insertion new_head
    cdef Insertion new_entry
    cdef uint32_t anchor = 0, slot
    if head_slot == 0:
        anchor = anchor_new(head_lane)
        if anchor == 0:
            return 0
        if not prepare_insert(head_lane, heads, head_map, head.data, head.length, head.hash, &new_head):
            block_free(heads.core.blobs, address(heads.core.arena, anchor), sizeof(Anchor))
            return 0
        hash_map_key(table, inner, anchor)
    if not prepare_insert(lane, table, map, inner.data, inner.length, inner.hash, &new_entry):
        if head_slot == 0:
            abandon_insert(heads, head_map, &new_head)
            block_free(heads.core.blobs, address(heads.core.arena, anchor), sizeof(Anchor))
        return 0
    # Both write to the same log, in which the second has made room for the first as well.
    if head_slot == 0:
        new_head.log = new_entry.log
        head_slot = finish_insert(head_lane, heads, head_map, head.number, head.namespace, head.hash, &new_head)
        name_anchor(heads, head_map, head_slot, anchor)
    slot = finish_insert(lane, table, map, inner.number, inner.namespace, inner.hash, &new_entry)
    append_thread(table, slot)
    return slot


cdef bint remove_threaded(Lane *head_lane, Table *heads, CowMap *head_map, CoreKey *head, uint32_t head_slot,
                          Lane *lane, Table *table, CowMap *map, CoreKey *inner, uint32_t slot) noexcept nogil:
    """Remove an entry, and its key's head with the last one; False without memory.

    All or nothing: the steps that can fail come first.
    """
    cdef Anchor *anchor = head_anchor(heads, head_slot)
    cdef bint is_last = anchor.first == anchor.last
    if not (prepare_remove(lane, table, map, slot, inner.hash)
            and (not is_last or prepare_remove(head_lane, heads, head_map, head_slot, head.hash))
            and reserve_records(lane, table)):
        return False
    remove(lane, table, map, slot, inner.hash)
    if is_last:
        remove(head_lane, heads, head_map, head_slot, head.hash)
    return True


cdef class MapTable:
    """A map state: keys to insertion-ordered maps, each of whose entries is an entry of the table.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> table = MapTable(StateCore(), key="int", map_key="bytes", value="long")
    >>> table.put(1, b"a", 10); table.put(1, b"b", 20); table.put(1, b"a", 11)
    >>> len(table), table.remove(1, b"a"), table.clear(1), table.clear(1)
    (2, True, True, False)
    """

    def __cinit__(self, StateCore owner not None, *, map_key="int", value="long", timestamps=False,
                  namespaces=False, hash_mask=0xFFFFFFFF, copy_value=None, nullable=False, key="int",
                  max_parallelism=128, key_group_range=None, HashPlan plan=None, initial_capacity=64):
        shape = {"max_parallelism": max_parallelism, "key_group_range": key_group_range,
                 "initial_capacity": initial_capacity, "hash_mask": hash_mask}
        self.owner = owner
        self.heads = StateTable(owner, key=key, plan=plan, namespaces=namespaces, is_anchor_table=True, **shape)
        self.entries = StateTable(owner, key=map_key, value=value, timestamps=timestamps, anchors=self.heads,
                                  copy_value=copy_value, nullable=nullable, **shape)
        if self.entries.value_code == CODE_LIST:
            raise UsageError("a map state does not hold lists")

    cdef uint32_t locate(self, object key, uint32_t namespace, CoreKey *head, CowMap **map) except? 0:
        """The head's slot, 0 without a map."""
        return self.heads._locate(key, namespace, head, map)

    cdef uint32_t locate_entry(self, object key, object map_key, uint32_t namespace, CoreKey *head,
                               uint32_t *head_slot, CoreKey *inner, CowMap **inner_map) except? 0:
        """The slot of a map entry, 0 if it is absent; checks both keys in any case."""
        cdef CowMap *map = NULL
        cdef uint32_t anchor = 0
        head_slot[0] = self.locate(key, namespace, head, &map)
        if head_slot[0]:
            anchor = anchor_ref(self.heads.table, head_slot[0])
        self.entries.split_map_key(map_key, anchor, head.group, inner)
        inner_map[0] = self.entries.map_or_null(head.group)
        if head_slot[0] == 0 or inner_map[0] == NULL:
            return 0
        if not before_operation(&self.entries.table.lane, self.entries.table, inner_map[0]):
            self.owner.out_of_memory()
        return find(self.entries.table, inner_map[0], inner)

    def put(self, key, map_key, value, uint32_t namespace=0, int64_t timestamp=0):
        """Set one entry of a key's map; a new one goes to the end. O(1) expected, for maps of any size."""
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0, slot
        cdef char room[8]
        cdef char *stored
        cdef Table *table
        self.owner.enter()
        try:
            table = self.entries.table
            stored = self.entries.store_own(value, room)
            try:
                slot = self.locate_entry(key, map_key, namespace, &head, &head_slot, &inner, &map)
                if not self.put_at(&head, head_slot, &inner, slot, stored, timestamp):
                    self.owner.out_of_memory()
            except BaseException:
                if stored != NULL:
                    drop_value(table.core, table.layout.value_kind, stored)
                raise
        finally:
            self.owner.leave()

    cdef uint32_t put_at(self, CoreKey *head, uint32_t head_slot, CoreKey *inner, uint32_t slot, const char *value,
                         int64_t timestamp) noexcept:
        """Set the entry at `slot`, or add one if that is 0, with its key's head if `head_slot` is 0.

        Returns its slot, 0 without memory; see `write_value`.
        """
        cdef Table *table = self.entries.table
        cdef Table *heads = self.heads.table
        cdef CowMap *head_map = heads.maps[head.group - heads.first_group]
        cdef CowMap *map = table.maps[head.group - table.first_group]
        if slot == 0:
            if head_map == NULL:
                head_map = map_new(heads, head.group)
            if map == NULL:
                map = map_new(table, head.group)
            if (head_map == NULL or map == NULL or not before_operation(&table.lane, table, map)
                    or not before_operation(&heads.lane, heads, head_map)):
                return 0
        return put_threaded(&heads.lane, heads, head_map, head, head_slot, &table.lane, table, map, inner, slot, value,
                            timestamp)

    def remove(self, key, map_key, uint32_t namespace=0):
        """Remove one entry; the last one removes the key. Return True if it existed. O(1) expected."""
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0, slot
        self.owner.enter()
        try:
            slot = self.locate_entry(key, map_key, namespace, &head, &head_slot, &inner, &map)
            if slot == 0:
                return False
            self.unlink(&head, head_slot, &inner, slot)
            return True
        finally:
            self.owner.leave()

    cdef int unlink(self, CoreKey *head, uint32_t head_slot, CoreKey *inner, uint32_t slot) except -1:
        """Remove an entry, and the head with the last one."""
        if not remove_threaded(&self.heads.table.lane, self.heads.table, self.heads.map_or_null(head.group), head,
                               head_slot, &self.entries.table.lane, self.entries.table,
                               self.entries.map_or_null(head.group), inner, slot):
            self.owner.out_of_memory()
        return 0

    def clear(self, key, uint32_t namespace=0):
        """Remove all entries of a key; return True if there were any. O(entries of the key)."""
        cdef CoreKey head
        cdef CowMap *map
        self.owner.enter()
        try:
            self.heads.split_key(key, namespace, &head)
            map = self.heads.map_or_null(head.group)
            if map == NULL or find(self.heads.table, map, &head) == 0:
                return False
            self.clear_at(&head)
            return True
        finally:
            self.owner.leave()

    cdef int clear_at(self, CoreKey *head) except -1:
        """Remove all entries of a key that has some. All or nothing: removed slots are kept until the last is out."""
        cdef StateCore owner = self.owner
        cdef Core *core = &owner.core
        cdef Table *table = self.entries.table
        cdef Table *heads = self.heads.table
        cdef Log removed
        cdef Log *log = NULL
        cdef bint done
        owner.calls += 1
        if core.journal_version and not segment_for_writing(core, heads.journal, &log):
            owner.out_of_memory()
        memset(&removed, 0, sizeof(Log))
        removed.until = core.highest_required_snapshot_version
        table.lane.override = heads.lane.override = &removed
        done = self.unlink_all(head)
        table.lane.override = heads.lane.override = NULL
        if not done:
            owner.undo_call(heads.journal, &removed)
            owner.out_of_memory()
        if log != NULL:
            log_append(core.arena, log, &removed)
        else:
            discard_log(core, heads.journal, &removed)
        return 0

    cdef bint unlink_all(self, CoreKey *head) noexcept:
        """Unlink all entries; False without memory. The removed slots go to the log that takes the records."""
        cdef CowMap *head_map = self.heads.map_or_null(head.group)
        cdef CowMap *map = self.entries.map_or_null(head.group)
        cdef Table *table = self.entries.table
        cdef Table *heads = self.heads.table
        cdef CoreKey inner
        cdef uint32_t head_slot, slot
        cdef bint more = True
        while more:
            if not (before_operation(&heads.lane, heads, head_map) and before_operation(&table.lane, table, map)):
                return False
            head_slot = find(self.heads.table, head_map, head)
            slot = head_anchor(heads, head_slot).first
            more = slot != head_anchor(heads, head_slot).last
            inner.hash = hash_of(table, entry_at(table.core, slot))
            if not remove_threaded(&heads.lane, heads, head_map, head, head_slot, &table.lane, table, map, &inner,
                                   slot):
                return False
        return True

    def __len__(self):
        return len(self.entries)

    def _check(self):
        """Verify both tables, and that heads and threads belong together. O(entries)."""
        self.heads._check()
        self.entries._check()
        anchors = anchors_of(self.heads.table)
        assert len(anchors) == len(self.heads), "two keys share an anchor"
        assert anchors_of(self.entries.table) == anchors, "heads without entries or entries without a head"


cdef set anchors_of(Table *table):
    """Collect the anchors that heads have as values, or entries as namespaces."""
    cdef Walk walk
    cdef uint32_t g, slot
    found = set()
    for g in range(table.n_maps):
        begin_walk(table.maps[g], &walk)
        slot = next_entry(table.core, &walk)
        while slot:
            found.add(namespace_of(table, entry_at(table.core, slot)) if table.anchors else anchor_ref(table, slot))
            slot = next_entry(table.core, &walk)
    return found
