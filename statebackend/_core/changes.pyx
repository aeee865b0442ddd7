"""What has changed since a mark, as rows: what an incremental checkpoint writes.

The journal names the slots that were inserted, written or removed. Each key among them is looked up once more: if it
is there now, its row is the live entry, else the entry that a record still holds, of which only the key is read.

Of lists the journal holds old heads. A list with the stamp of its oldest one has only grown since: the elements that
one counts are as they were. Whatever else is done to a list gives it another stamp.
"""

import numpy as np

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp

from statebackend._core.arena cimport Blob, blob_data
from statebackend._core.cow_map cimport (
    RECORD_COPIED, RECORD_MOVED, RECORD_REMOVE, RECORD_REPLACED, RECORD_WRITE, VALUE_LIST, BucketTable, CowMap, Entry,
    Journal, ListHead, Table, active_table, bucket, entry_at, find_blob, find_int, hash_of, namespace_of, value_of)
from statebackend._core.entry_rows cimport LiveMoment, new_rows
from statebackend._core.journal cimport LogChunk, chunk_data
from statebackend._core.platform cimport prefetch
from statebackend._core.state_core cimport Mark, StateCore
from statebackend._core.state_table cimport StateTable

cdef enum:
    AHEAD = 16                           # how many rows ahead memory is asked for


def has_changes(StateTable table not None, Mark mark not None):
    """Whether anything was journalled since `mark`, of this table or one that shares its journal. O(open marks)."""
    (<StateCore>table.owner).require_open(mark)
    return count_records(table.table, mark.version) != 0


def changed_entries(StateTable table not None, Mark mark not None):
    """What was inserted, written or removed since `mark`: each key once, those that are there now as they are.

    >>> from statebackend._core.state_core import StateCore
    >>> from statebackend._core.state_table import StateTable
    >>> core = StateCore()
    >>> table = StateTable(core)
    >>> table.put(1, 10); table.put(2, 20)
    >>> mark = core.mark()
    >>> table.put(1, 11); removed = table.remove(2); table.put(3, 30)
    >>> rows = changed_entries(table, mark)
    >>> live = rows.take(rows.is_live).columns()
    >>> sorted(zip(live["key"].tolist(), live["value"].tolist())), rows.take(~rows.is_live).keys()
    ([(1, 11), (3, 30)], {'key': array([2])})
    """
    cdef StateCore owner = table.owner
    cdef int64_t n, distinct
    owner.require_open(mark)
    owner.enter()
    try:
        n = count_records(table.table, mark.version)
        found = np.empty(max(n, 1), dtype=np.uint64)
        groups = np.empty(max(n, 1), dtype=np.uint16)
        hashes = np.empty(max(n, 1), dtype=np.uint32)
        live = np.zeros(max(n, 1), dtype=np.bool_)
        removed = np.zeros(max(n, 1), dtype=np.bool_)
        # Of lists: the stamp of the oldest head and how many elements it counts, 0 where the list was not there.
        stamps = np.zeros(max(n, 1), dtype=np.uint32)
        kept = np.zeros(max(n, 1), dtype=np.int64)
        seen = np.zeros(1 << int(2 * n).bit_length(), dtype=np.uint32)
        distinct = collect(table.table, mark.version, found, groups, hashes, removed.view(np.uint8), stamps, kept, seen)
        find_live(table.table, distinct, found, groups, hashes, stamps, kept, live.view(np.uint8))
    finally:
        owner.leave()
    order = np.argsort(groups[:distinct], kind="stable")
    return new_rows(table, LiveMoment(owner), found[order], groups[order].astype(np.int64), live[order], kept[order],
                    removed[order])


cdef int64_t count_records(Table *table, uint32_t version) noexcept nogil:
    cdef uint32_t i
    cdef int64_t n = 0
    for i in range(table.journal.n_segments):
        if table.journal.segments[i].version >= version:
            n += table.journal.segments[i].log.records
    return n


cdef int64_t collect(Table *table, uint32_t version, uint64_t[::1] found, unsigned short[::1] groups,
                     uint32_t[::1] hashes, unsigned char[::1] removed, uint32_t[::1] stamps, int64_t[::1] kept,
                     uint32_t[::1] seen) noexcept nogil:
    """Entries that records name, each key once, and whether it was ever removed; how many."""
    cdef Journal *journal = table.journal
    cdef uint32_t i, at, width
    cdef LogChunk *chunk
    cdef uint64_t last, mask = seen.shape[0] - 1, place
    cdef int op
    cdef Table *owner
    cdef Entry *entry
    cdef ListHead *head
    cdef bint is_list = table.layout.value_kind == VALUE_LIST
    cdef int64_t n = 0, j, k, distinct = 0
    for i in range(journal.n_segments):
        if journal.segments[i].version < version:
            continue
        chunk = journal.segments[i].log.last
        while chunk != NULL:
            at = chunk.used
            while at:
                last = (<uint64_t *>(chunk_data(chunk) + at - 8))[0]
                op = <int>(last >> 56)
                owner = journal.tables[(last >> 48) & 0xFF]
                width = 8
                if op == RECORD_WRITE or op == RECORD_COPIED:
                    width += (owner.layout.payload_width + 7) & ~7u
                elif op == RECORD_MOVED or op == RECORD_REPLACED:
                    width = 16
                if owner == table and op != RECORD_MOVED and op != RECORD_COPIED:
                    # Also a slot that a clone replaced or that was removed still holds its key.
                    found[n] = <uint64_t><uintptr_t>entry_at(table.core, <uint32_t>last)
                    groups[n] = <unsigned short>(last >> 32)
                    removed[n] = op == RECORD_REMOVE
                    head = NULL
                    if is_list and op == RECORD_WRITE:
                        head = <ListHead *>(chunk_data(chunk) + at - width + table.layout.off_value
                                            - table.layout.off_payload)
                    elif is_list and op == RECORD_REPLACED:
                        head = <ListHead *>value_of(table, <Entry *><uintptr_t>found[n])
                    if head != NULL:
                        stamps[n] = head.stamp
                        kept[n] = head.length
                    n += 1
                at -= width
            chunk = chunk.prev
    for j in range(n):
        if j + AHEAD < n:
            prefetch(<void *><uintptr_t>found[j + AHEAD])
        hashes[j] = hash_of(table, <Entry *><uintptr_t>found[j])
    for j in range(n):
        entry = <Entry *><uintptr_t>found[j]
        place = hashes[j] & mask
        while seen[place] != 0 and not (hashes[seen[place] - 1] == hashes[j]
                                        and same_key(table, <Entry *><uintptr_t>found[seen[place] - 1], entry)):
            place = (place + 1) & mask
        if seen[place]:
            k = seen[place] - 1
            removed[k] |= removed[j]
            # Between two heads of one stamp the list has only grown, or gone back to where it had been.
            if stamps[k] != stamps[j] or kept[j] < kept[k]:
                kept[k] = kept[j] if stamps[k] == stamps[j] else 0
            continue
        # What is kept moves to the front, where none that is still to come lies.
        found[distinct], groups[distinct], hashes[distinct] = found[j], groups[j], hashes[j]
        removed[distinct], stamps[distinct], kept[distinct] = removed[j], stamps[j], kept[j]
        distinct += 1
        seen[place] = <uint32_t>distinct
    return distinct


cdef bint same_key(Table *table, Entry *a, Entry *b) noexcept nogil:
    cdef Blob *mine
    cdef Blob *other
    if namespace_of(table, a) != namespace_of(table, b):
        return False
    if not table.layout.key_is_blob:
        return a.key == b.key
    mine, other = <Blob *>a.key, <Blob *>b.key
    return mine == other or (mine.length == other.length
                             and memcmp(blob_data(mine), blob_data(other), mine.length) == 0)


cdef void find_live(Table *table, int64_t n, uint64_t[::1] found, unsigned short[::1] groups, uint32_t[::1] hashes,
                    uint32_t[::1] stamps, int64_t[::1] kept, unsigned char[::1] live) noexcept nogil:
    """Put the live entries of keys in the place of those that records name."""
    cdef ListHead *head
    cdef int64_t i, ahead
    cdef CowMap *map
    cdef BucketTable *buckets
    cdef Entry *entry
    cdef Blob *blob
    cdef uint32_t slot
    for i in range(n):
        ahead = i + AHEAD
        if ahead < n:
            map = table.maps[groups[ahead] - table.first_group]
            buckets = active_table(map, hashes[ahead])
            prefetch(bucket(table.core, buckets, hashes[ahead] & (buckets.capacity - 1)))
        entry = <Entry *><uintptr_t>found[i]
        map = table.maps[groups[i] - table.first_group]
        if table.layout.key_is_blob:
            blob = <Blob *>entry.key
            slot = find_blob(table, map, blob_data(blob), blob.length, namespace_of(table, entry), hashes[i])
        else:
            slot = find_int(table, map, entry.key, namespace_of(table, entry), hashes[i])
        if slot:
            found[i] = <uint64_t><uintptr_t>entry_at(table.core, slot)
            live[i] = 1
            if kept[i]:
                head = <ListHead *>value_of(table, entry_at(table.core, slot))
                if head.stamp != stamps[i] or head.length < <uint64_t>kept[i]:
                    kept[i] = 0
        else:
            kept[i] = 0
