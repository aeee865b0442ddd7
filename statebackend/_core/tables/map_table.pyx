"""Map states: one entry per map key, threaded by key in insertion order.

    heads:    key -> Anchor            entries:  (anchor, map key) -> value
                       |  first, last             ^     ^     ^
                       +--------------------------+ <-> + <-> +      thread

Both tables lie in the key group of the key and share one journal, so undo reverses their changes in the right order.
Putting or removing one map key writes, copies and journals one entry, however large the map is. A key has a head
exactly while its map has entries.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from statebackend._core.memory.arena cimport address, block_free
from statebackend._core.tables.cow_map cimport (
    Anchor, Core, CoreKey, CowMap, Insertion, Lane, Table, abandon_insert, anchor_new, append_thread, before_operation,
    entry_at, find, finish_insert, hash_of, head_anchor, key_object, name_anchor, prepare_insert, prepare_remove,
    remove, reserve_records, segment_for_writing, slot_for_write, thread_of, value_of)
from statebackend._core.memory.journal cimport Log, log_append
from statebackend._core.key_groups cimport HashPlan
from statebackend._core.tables.state_core cimport StateCore, discard_log
from statebackend._core.tables.state_table cimport CODE_LIST, CODE_OBJECT, StateTable

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


@cython.final
cdef class MapTable:
    """A map state: keys to insertion-ordered maps, each of whose entries is an entry of the table.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> table = MapTable(StateCore(), key="int", map_key="bytes", value="long")
    >>> table.put(1, b"a", 10); table.put(1, b"b", 20); table.put(1, b"a", 11)
    >>> list(table.items(1)), table.get(2, b"a")
    ([(b'a', 11), (b'b', 20)], None)
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

    cdef Anchor *anchor_of(self, uint32_t head_slot) noexcept:
        return head_anchor(self.heads.table, head_slot)

    cdef uint32_t locate(self, object key, uint32_t namespace, CoreKey *head, CowMap **map) except? 0:
        """The head's slot, 0 if the key has no map."""
        return self.heads._locate(key, namespace, head, map)

    cdef uint32_t locate_entry(self, object key, object map_key, uint32_t namespace, CoreKey *head,
                               uint32_t *head_slot, CoreKey *inner, CowMap **inner_map) except? 0:
        """The slot of a map entry, 0 if it is absent; checks both keys in any case."""
        cdef CowMap *map = NULL
        cdef uint32_t anchor = 0
        head_slot[0] = self.locate(key, namespace, head, &map)
        if head_slot[0]:
            anchor = (<uint32_t *>value_of(self.heads.table, entry_at(self.heads.table.core, head_slot[0])))[0]
        self.entries.split_map_key(map_key, anchor, head.group, inner)
        inner_map[0] = self.entries.map_or_null(head.group)
        if head_slot[0] == 0 or inner_map[0] == NULL:
            return 0
        if not before_operation(&self.entries.table.lane, self.entries.table, inner_map[0]):
            self.owner.out_of_memory()
        return find(self.entries.table, inner_map[0], inner)

    def put(self, key, map_key, value, uint32_t namespace=0, int64_t timestamp=0):
        """Set one entry of a key's map; a new one goes to the end. O(1) expected, whatever the map's size."""
        self.owner.enter()
        try:
            self.put_entry(key, map_key, value, namespace, timestamp)
        finally:
            self.owner.leave()

    cdef int put_entry(self, object key, object map_key, object value, uint32_t namespace,
                       int64_t timestamp) except -1:
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0, slot
        cdef char stored[16]
        cdef char *source = stored
        cdef bint kept = False
        cdef object _dropped             # ends with this call, when the table is whole again
        cdef Table *table = self.entries.table
        source = self.entries.store_any(value, stored)
        try:
            slot = self.locate_entry(key, map_key, namespace, &head, &head_slot, &inner, &map)
            if slot == 0:
                self.fill_entry(&head, head_slot, &inner, source, timestamp)
                return 0
            slot = slot_for_write(&table.lane, table, map, slot, inner.hash, &kept)
            if slot == 0:
                self.owner.out_of_memory()
        except BaseException:
            self.entries.drop_stored(stored, self.entries.value_code)
            raise
        if not kept:
            _dropped = self.entries._let_go(slot)
        self.entries._fill(slot, source, timestamp)
        return 0

    cdef int fill_entry(self, CoreKey *head, uint32_t head_slot, CoreKey *inner, char *value,
                        int64_t timestamp) except -1:
        """Add an absent entry, and its key's head if that is absent too."""
        cdef Table *table = self.entries.table
        cdef Table *heads = self.heads.table
        cdef CowMap *head_map = self.heads.map_for(head.group)
        cdef CowMap *map = self.entries.map_for(head.group)
        cdef uint32_t slot = 0
        if before_operation(&table.lane, table, map) and before_operation(&heads.lane, heads, head_map):
            slot = insert_threaded(&heads.lane, heads, head_map, head, head_slot, &table.lane, table, map, inner)
        if slot == 0:
            self.owner.out_of_memory()
        self.entries._fill(slot, value, timestamp)
        return 0

    def get(self, key, map_key, uint32_t namespace=0):
        """The value of one entry of a key's map, or None. O(1) expected."""
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0, slot
        self.owner.enter()
        try:
            slot = self.locate_entry(key, map_key, namespace, &head, &head_slot, &inner, &map)
            if slot == 0:
                return None
            return self.entries._load(self.entries._unshare(map, slot, &inner), None)
        finally:
            self.owner.leave()

    def contains(self, key, map_key, uint32_t namespace=0):
        """Return True if a key's map has an entry. O(1) expected."""
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0
        self.owner.enter()
        try:
            return self.locate_entry(key, map_key, namespace, &head, &head_slot, &inner, &map) != 0
        finally:
            self.owner.leave()

    def remove(self, key, map_key, uint32_t namespace=0):
        """Remove one entry; the last one removes the key. Return True if it existed. O(1) expected."""
        self.owner.enter()
        try:
            return self.remove_entry(key, map_key, namespace)
        finally:
            self.owner.leave()

    cdef bint remove_entry(self, object key, object map_key, uint32_t namespace) except -1:
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0
        cdef uint32_t slot = self.locate_entry(key, map_key, namespace, &head, &head_slot, &inner, &map)
        cdef object _dropped = None      # ends with this call, when both tables are whole again
        if slot == 0:
            return False
        if self.entries.value_code == CODE_OBJECT:
            _dropped = self.entries._load(slot, None)
        self.unlink(&head, head_slot, &inner, slot)
        return True

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
        if self.heads.entry(key, namespace) is None:
            return False
        self.heads.split_key(key, namespace, &head)
        self.clear_at(&head)
        return True

    cdef int clear_at(self, CoreKey *head) except -1:
        """Remove all entries of a key that has some. All or nothing: removed slots are kept until the last is out."""
        cdef StateCore owner = self.owner
        cdef Core *core = &owner.core
        cdef Table *table = self.entries.table
        cdef Table *heads = self.heads.table
        cdef Log removed
        cdef Log *log = NULL
        cdef bint done
        owner.enter()
        try:
            if core.journal_version and not segment_for_writing(core, heads.journal, &log):
                owner.out_of_memory()
            memset(&removed, 0, sizeof(Log))
            removed.until = core.highest_required_snapshot_version
            table.lane.override = heads.lane.override = &removed
            done = self.unlink_all(head)
            table.lane.override = heads.lane.override = NULL
            if not done:                 # undone before an error is made: that may run finalisers
                owner.undo_call(heads.journal, &removed)
                owner.out_of_memory()
            if log != NULL:
                log_append(core.arena, log, &removed)
            else:
                discard_log(core, heads.journal, &removed)
        finally:
            owner.leave()
            owner.end_dropped()
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
            if head_slot == 0:
                break                    # a finaliser was quicker
            slot = self.anchor_of(head_slot).first
            more = slot != self.anchor_of(head_slot).last
            inner.hash = hash_of(table, entry_at(table.core, slot))
            if not remove_threaded(&heads.lane, heads, head_map, head, head_slot, &table.lane, table, map, &inner,
                                   slot):
                return False
        return True

    def items(self, key, uint32_t namespace=0):
        """The entries of a key's map in insertion order; fails at the next step if entries came or went."""
        return MapItems(self, key, namespace)

    def __len__(self):
        return len(self.entries)

    def _check(self):
        """Verify both tables, and that heads and threads belong together. O(entries)."""
        self.heads._check()
        self.entries._check()
        anchors = {entry.value: entry for entry in self.heads}
        assert len(anchors) == len(self.heads), "two keys share an anchor"
        threaded = {entry.namespace for entry in self.entries}
        assert threaded == set(anchors), "heads without entries or entries without a head"


@cython.final
cdef class MapItems:
    """Walks a key's thread, as (map key, value). Finds its place again if other calls came in between."""
    cdef MapTable owner
    cdef object key
    cdef uint32_t namespace
    cdef uint32_t group
    cdef uint32_t anchor                 # of the map being walked, 0 before the first step
    cdef uint32_t slot                   # returned last; valid while `calls` stands still
    cdef uint32_t modifications
    cdef uint64_t calls
    cdef uint64_t rollbacks
    cdef uint64_t sequence               # of the entry that was returned last
    cdef object map_key                  # returned last

    def __init__(self, MapTable owner not None, key, uint32_t namespace):
        self.owner = owner
        self.key = key
        self.namespace = namespace
        self.rollbacks = owner.owner.rollbacks

    def __iter__(self):
        return self

    def __next__(self):
        cdef StateTable entries = self.owner.entries
        cdef Table *table = entries.table
        cdef CoreKey inner
        cdef object value
        entries.usable()
        if self.anchor == 0 or self.calls != self.owner.owner.calls:
            self.find_place()
        else:
            self.slot = thread_of(table, entry_at(table.core, self.slot)).next
        if self.slot == 0:
            self.calls = 0               # another step searches for its place, and ends again
            raise StopIteration
        self.map_key = key_object(table, entry_at(table.core, self.slot))
        self.sequence = thread_of(table, entry_at(table.core, self.slot)).sequence
        if table.layout.off_value_version:
            entries.split_map_key(self.map_key, self.anchor, self.group, &inner)
            self.slot = entries._unshare(entries.map_or_null(self.group), self.slot, &inner)
        value = entries._load(self.slot, None)
        return self.map_key, value

    cdef int find_place(self) except -1:
        """Find the slot to return next again; RuntimeError if entries came or went since the last step."""
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0
        cdef Anchor *anchor
        cdef Table *table = self.owner.entries.table
        cdef uint32_t found
        self.owner.owner.enter()
        try:
            self.calls = self.owner.owner.calls
            if self.rollbacks != self.owner.owner.rollbacks:
                raise RuntimeError("the state was rolled back during iteration")
            head_slot = self.owner.locate(self.key, self.namespace, &head, &map)
            found = (<uint32_t *>value_of(self.owner.heads.table, entry_at(table.core, head_slot)))[0] \
                if head_slot else 0
            self.group = head.group
            if self.anchor == 0:
                self.slot = 0
                if found:
                    anchor = <Anchor *>address(table.core.arena, found)
                    self.anchor = found
                    self.modifications = anchor.modifications
                    self.slot = anchor.first
                return 0
            if found != self.anchor or self.modifications != self.owner.anchor_of(head_slot).modifications:
                raise RuntimeError("the map changed during iteration")
            self.owner.entries.split_map_key(self.map_key, found, head.group, &inner)
            self.slot = find(self.owner.entries.table, self.owner.entries.map_or_null(head.group), &inner)
            if self.slot == 0 or thread_of(table, entry_at(table.core, self.slot)).sequence != self.sequence:
                raise RuntimeError("the map changed during iteration")
            self.slot = thread_of(table, entry_at(table.core, self.slot)).next
            return 0
        finally:
            self.owner.owner.leave()
