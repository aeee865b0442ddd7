"""Map states: two tables with one journal."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport address
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, Lane, Table, entry_at, find, hash_key, head_anchor, thread_of, value_of)
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.entry_update cimport put_value, write_value

cdef inline uint32_t anchor_ref(Table *heads, uint32_t head_slot) noexcept nogil:
    return (<uint32_t *>value_of(heads, entry_at(heads.core, head_slot)))[0]

cdef inline void hash_map_key(Table *table, CoreKey *key, uint32_t anchor) noexcept nogil:
    """Put a map key below an anchor."""
    key.namespace = anchor
    key.hash = hash_key(table, key, anchor)

cdef uint32_t insert_threaded(Lane *head_lane, Table *heads, CowMap *head_map, CoreKey *head, uint32_t head_slot,
                              Lane *lane, Table *table, CowMap *map, CoreKey *inner) noexcept nogil
cdef bint remove_threaded(Lane *head_lane, Table *heads, CowMap *head_map, CoreKey *head, uint32_t head_slot,
                          Lane *lane, Table *table, CowMap *map, CoreKey *inner, uint32_t slot) noexcept nogil

cdef inline uint32_t put_threaded(Lane *head_lane, Table *heads, CowMap *head_map, CoreKey *head, uint32_t head_slot,
                                  Lane *lane, Table *table, CowMap *map, CoreKey *inner, uint32_t slot,
                                  const char *value, int64_t timestamp) noexcept nogil:
    """`write_value` for a map entry. A new one goes to the end, and its key gets a head if `head_slot` is 0."""
    if slot:
        return write_value(lane, table, map, inner, slot, value, timestamp)
    slot = insert_threaded(head_lane, heads, head_map, head, head_slot, lane, table, map, inner)
    if slot:
        put_value(table, slot, True, value, timestamp)
    return slot

cdef struct ThreadPlace:
    # A place among the entries of one key, in their order: the entry that was visited last.
    uint32_t anchor                      # of the map, 0 if there was none
    uint32_t modifications               # as the anchor had them
    uint64_t stamp                       # of that anchor: another one may later occupy its place
    uint64_t sequence                    # of the entry, 0 before the first step
    uint32_t slot                        # of the entry; the stepping call knows if it still is there

cdef inline void begin_thread(ThreadPlace *place, Table *heads, uint32_t head_slot) noexcept nogil:
    """Begin before the first entry of a key whose head is at `head_slot`; 0 if it has none."""
    cdef Anchor *anchor
    place.anchor = place.slot = 0
    place.sequence = 0
    if head_slot:
        anchor = head_anchor(heads, head_slot)
        place.anchor = anchor_ref(heads, head_slot)
        place.modifications = anchor.modifications
        place.stamp = anchor.next_sequence >> 32

cdef inline bint is_same_map(ThreadPlace *place, Table *heads, uint32_t head_slot) noexcept nogil:
    """Return True if the key still has the same map, and no entry came or went that iterators take notice of."""
    cdef Anchor *anchor
    if head_slot == 0 or place.anchor == 0:
        return head_slot == 0 and place.anchor == 0
    anchor = head_anchor(heads, head_slot)
    return (anchor_ref(heads, head_slot) == place.anchor and anchor.modifications == place.modifications
            and anchor.next_sequence >> 32 == place.stamp)

cdef inline bint find_again(ThreadPlace *place, Table *table, CowMap *map, CoreKey *inner) noexcept nogil:
    """Find the slot of the entry that was visited last, by its map key; False if it no longer exists."""
    hash_map_key(table, inner, place.anchor)
    place.slot = find(table, map, inner)
    return place.slot != 0 and thread_of(table, entry_at(table.core, place.slot)).sequence == place.sequence

cdef inline uint32_t next_in_thread(const ThreadPlace *place, Table *table) noexcept nogil:
    """The entry behind the one that was visited last, 0 at the end. There has to be a map."""
    if place.sequence:
        return thread_of(table, entry_at(table.core, place.slot)).next
    return (<Anchor *>address(table.core.arena, place.anchor)).first

cdef inline void visit_entry(ThreadPlace *place, Table *table, uint32_t slot) noexcept nogil:
    """Make an entry the one that was visited last."""
    place.slot = slot
    place.sequence = thread_of(table, entry_at(table.core, slot)).sequence

cdef class MapTable:
    cdef readonly StateCore owner
    cdef readonly StateTable heads       # key -> anchor
    cdef readonly StateTable entries     # (anchor, map key) -> value
    cdef uint32_t locate(self, object key, uint32_t namespace, CoreKey *head, CowMap **map) except? 0
    cdef uint32_t locate_entry(self, object key, object map_key, uint32_t namespace, CoreKey *head,
                               uint32_t *head_slot, CoreKey *inner, CowMap **inner_map) except? 0
    cdef uint32_t put_at(self, CoreKey *head, uint32_t head_slot, CoreKey *inner, uint32_t slot, const char *value,
                         int64_t timestamp) noexcept
    cdef int clear_at(self, CoreKey *head) except -1
    cdef bint unlink_all(self, CoreKey *head) noexcept
    cdef int unlink(self, CoreKey *head, uint32_t head_slot, CoreKey *inner, uint32_t slot) except -1
