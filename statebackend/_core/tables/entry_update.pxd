"""How the value of an entry changes: the one place where something stored is overwritten.

    slot_to_write     everything that can fail: the entry is found or made, copied for snapshots, journalled for marks
    put_value         cannot fail: the old value goes, and the new one comes in its place, with its timestamp

`write_value` is both. `write_bytes` puts bytes where the old ones were, if their size is about the same. List values
have their own writers, in `lists`.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from statebackend._core.memory.arena cimport Blob, blob_set, blob_takes
from statebackend._core.memory.platform cimport copy_bytes, likely, unlikely
from statebackend._core.tables.cow_map cimport (
    VALUE_FIXED, CoreKey, CowMap, Entry, Lane, Table, entry_at, insert, keep_bytes, payload_of, payload_ref,
    set_value_version, slot_for_write, value_of, value_version)
from statebackend._core.tables.values cimport drop_value

cdef enum:
    LONGEST_IN_PLACE = 512               # bytes: a log has a copy of the replaced bytes

cdef inline uint32_t slot_to_write(Lane *lane, Table *table, CowMap *map, const CoreKey *key, uint32_t slot,
                                   bint *kept) noexcept nogil:
    """Make the entry of a key at `slot` writable, or make one if that is 0. 0 without memory; then nothing has changed.

    `kept` is False if the entry holds something that its writer has to drop.
    """
    if slot:
        return slot_for_write(lane, table, map, slot, key.hash, kept)
    kept[0] = True
    return insert(lane, table, map, key.number, key.data, key.length, key.namespace, key.hash)

cdef inline void put_value(Table *table, uint32_t slot, bint kept, const char *value, int64_t timestamp) noexcept nogil:
    """Put a stored form in a writable entry, which then owns what it refers to; NULL is None. Cannot fail.

    `value` may be what the entry holds, if it holds a number or raw bytes.
    """
    cdef Entry *entry = entry_at(table.core, slot)
    cdef char *place = value_of(table, entry)
    if (table.layout.payload_width == 8 and table.layout.value_width == 8 and table.layout.value_kind == VALUE_FIXED
            and likely(value != NULL)):
        (<uint64_t *>place)[0] = (<const uint64_t *>value)[0]    # eight bytes and nothing next to them: the usual case
        return
    if table.layout.has_timestamp:
        (<int64_t *>payload_of(table, entry))[0] = timestamp
    if table.layout.value_kind != VALUE_FIXED and not kept:
        drop_value(table.core, table.layout.value_kind, place)
    if unlikely(value == NULL):
        memset(place, 0, table.layout.value_width)
    elif table.layout.value_width == 8:
        (<uint64_t *>place)[0] = (<const uint64_t *>value)[0]
    else:
        copy_bytes(place, value, table.layout.value_width)
    if table.layout.off_null:
        (<uint8_t *>entry + table.layout.off_null)[0] = value == NULL

cdef inline uint32_t write_value(Lane *lane, Table *table, CowMap *map, const CoreKey *key, uint32_t slot,
                                 const char *value, int64_t timestamp) noexcept nogil:
    """Set the value of a key whose entry is at `slot`, 0 if it has none. Returns its slot, 0 without memory.

    All or nothing: without memory, nothing has changed and the stored form still is the caller's.
    """
    cdef bint kept = False
    slot = slot_to_write(lane, table, map, key, slot, &kept)
    if unlikely(slot == 0):
        return 0
    put_value(table, slot, kept, value, timestamp)
    return slot

cdef inline bint write_bytes(Lane *lane, Table *table, CowMap *map, uint32_t slot, const char *data, uint64_t length,
                             int64_t timestamp) noexcept nogil:
    """Overwrite the blob of an entry that the live map owns alone, and log what it held.

    False if it takes another blob, or memory ran out; then nothing has changed.
    """
    cdef Entry *entry = entry_at(lane.core, slot)
    cdef Blob *blob = (<Blob **>value_of(table, entry))[0]
    if blob == NULL or length > LONGEST_IN_PLACE or not blob_takes(blob, length):
        return False
    if not keep_bytes(lane, table, map, slot):
        return False
    blob_set(blob, data, length)
    if table.layout.has_timestamp:
        (<int64_t *>payload_of(table, entry))[0] = timestamp
    entry.version = lane.core.state_version
    return True

cdef inline uint32_t restamp(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash,
                             int64_t now) noexcept nogil:
    """Give an entry another timestamp; returns its slot, 0 without memory.

    An object stays whose it was: if a mark or a snapshot needs it, the next who reads it gets a copy.
    """
    cdef bint kept = False
    cdef uint32_t version = value_version(table, entry_at(lane.core, slot))
    slot = slot_for_write(lane, table, map, slot, hash, &kept)
    if unlikely(slot == 0):
        return 0
    if kept:                             # what it refers to is the log's and the entry's now
        payload_ref(table, payload_of(table, entry_at(lane.core, slot)))
    set_value_version(table, entry_at(lane.core, slot), version)
    (<int64_t *>payload_of(table, entry_at(lane.core, slot)))[0] = now
    return slot
