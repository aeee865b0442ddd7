"""The changes since a mark, as rows, for incremental checkpoints; and their number.

The journal names the slots that were inserted, written or removed. If each record names another entry that is there
now, the slots are the rows, and no live entry is read. Otherwise each key among them is looked up once. If the key
exists now, its row is the live entry. Otherwise its row is the entry that a record still holds, of which only the key
is read.

This takes a while, without the GIL. Other threads' calls wait for it (`StateCore.occupy`).

For lists the journal holds old heads. A list that still has the stamp of the oldest head has only grown: the elements
that this head counts are as they were. Any other change gives a list another stamp, except for elements at its front
that have expired since. A list that lost some is a row with all of its live elements, not with its new elements: no row
says what to drop from an older one, and elements that are gone must not be back after a restore with a longer time to
live.
"""

import numpy as np

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp

from statebackend._core.memory.arena cimport Blob, address, blob_data
from statebackend._core.memory.journal cimport chunk_data
from statebackend._core.tables.cow_map cimport (
    RECORD_COPIED, RECORD_INSERT, RECORD_MOVED, RECORD_REMOVE, RECORD_REPLACED, RECORD_WRITE, VALUE_LIST, Anchor,
    BucketTable, CowMap, Entry, Journal, ListHead, RecordCursor, Table, active_table, begin_records, bucket,
    count_records, dead_elements, entry_at, find_stored, hash_of, hash_stored, namespace_of, next_change, next_chunk,
    record_width, value_of)
from statebackend._core.snapshots.entry_rows cimport LiveMoment, find_owner, new_rows
from statebackend._core.memory.platform cimport prefetch
from statebackend._core.tables.state_core cimport CoreMark, StateCore
from statebackend._core.tables.state_table cimport StateTable

cdef enum:
    AHEAD = 16                           # rows: memory is asked for so far ahead


def changed_entries(StateTable table not None, CoreMark mark not None):
    """Return the rows inserted, written or removed since `mark`: each key once, with its present value if it has one.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
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
    cdef LiveMoment moment
    once, moment = changes_now(table, mark, recorded_once)
    if once is not None:
        found, groups, kept = once
        return new_rows(table, moment, found, groups, np.ones(len(found), dtype=np.bool_), kept)
    (found, groups, removed, _born, kept, live, _oldest), moment = changes_now(table, mark, distinct_changes)
    order = np.argsort(groups, kind="stable")
    return new_rows(table, moment, found[order], groups[order], live.view(np.bool_)[order], kept[order],
                    removed.view(np.bool_)[order])


def entries_before(StateTable table not None, CoreMark mark not None):
    """Return the rows removed since `mark` of keys that were there then, as they were; the keys may be back.

    For tables whose entries are never written, only inserted and removed.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> core = StateCore()
    >>> table = StateTable(core)
    >>> table.put(1, 10); table.put(2, 20)
    >>> mark = core.mark()
    >>> removed = table.remove(2); table.put(2, 21); removed = table.remove(2); table.put(2, 22)
    >>> entries_before(table, mark).columns()
    {'key': array([2]), 'value': array([20])}
    """
    cdef LiveMoment moment
    (_found, groups, _removed, born, _kept, _live, oldest), moment = changes_now(table, mark, distinct_changes)
    rows = np.flatnonzero(born == 0)
    rows = rows[np.argsort(groups[rows], kind="stable")]
    return new_rows(table, moment, oldest[rows], groups[rows], np.ones(len(rows), dtype=np.bool_))


ctypedef object (*Collect)(Table *table, uint32_t version)


cdef tuple changes_now(StateTable table, CoreMark mark, Collect collect):
    """Collect the changes since `mark`, and the moment at which they are valid."""
    cdef StateCore owner = table.owner
    owner.enter_step()
    owner.occupy()
    try:
        owner.require_open(mark)         # now: objects that ended before the call may have released it
        return collect(table.table, mark.version), LiveMoment(owner)
    finally:
        owner.vacate()
        owner.leave()


def count_changes(StateTable table not None, CoreMark mark not None):
    """Count the keys put or written since `mark` that exist now, and the keys that existed then and are gone.

    O(changes), a few nanoseconds each. After a removal, a move or an undone call, each key is looked up.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> core = StateCore()
    >>> table = StateTable(core)
    >>> table.put(1, 10); table.put(2, 20)
    >>> mark = core.mark()
    >>> table.put(1, 11); removed = table.remove(2); table.put(3, 30); table.put(4, 40); removed = table.remove(4)
    >>> count_changes(table, mark)
    (2, 1)
    """
    cdef StateCore owner = table.owner
    cdef Table *changed = table.table
    cdef int64_t distinct
    cdef uint64_t[::1] addresses
    cdef unsigned char[::1] came
    cdef unsigned char[::1] there_now
    owner.enter_step()
    owner.occupy()
    try:
        owner.require_open(mark)         # now: objects that ended before the call may have released it
        counts = counts_of_once(changed, mark.version)
        if counts is not None:
            return int(counts.sum()), 0
        found, _groups, _removed, born, _kept, live, _oldest = distinct_changes(changed, mark.version)
        if changed.anchors != NULL:
            distinct, addresses, came, there_now = len(found), found, born, live
            with nogil:
                find_returned(changed, distinct, addresses, came, there_now)
    finally:
        owner.vacate()
        owner.leave()
    there = int(np.count_nonzero(live))
    return there, len(found) - there - int(np.count_nonzero(born > live))


cdef object recorded_once(Table *table, uint32_t version):
    """Collect the entries that records since a version name, by ascending key group, as arrays: found, groups, kept.

    None if two records may name the same key, or one names an entry that was removed, or has moved after its write.
    """
    counts = counts_of_once(table, version)
    if counts is None:
        return None
    cdef int64_t n = counts.sum()
    cdef bint is_list = table.layout.value_kind == VALUE_LIST
    found, kept = np.empty(n, dtype=np.uint64), np.zeros(n if is_list else 0, dtype=np.int64)
    groups = np.repeat(np.arange(table.n_maps, dtype=np.uint16) + np.uint16(table.first_group), counts)
    cdef int64_t[::1] ends = np.cumsum(counts)
    cdef uint64_t[::1] entries = found
    cdef int64_t[::1] of_kept = kept
    with nogil:
        fill_once(table, version, ends, entries, of_kept)
    return found, groups, kept if is_list else None


cdef object counts_of_once(Table *table, uint32_t version):
    """Count the records since a version by key group, if each names another entry, and all of these are there; or None.

    A segment journals an entry once, unless several have been joined. So it can be told if all records are in one
    segment, which was always one, and none is of a removal or a move.
    """
    cdef Journal *journal = table.journal
    cdef uint32_t i, segments = 0
    cdef bint is_once
    for i in range(journal.n_segments):
        if journal.segments[i].version >= version and journal.segments[i].log.records != 0:
            segments += 1 + journal.segments[i].joined
    if segments > 1:
        return None
    counts = np.zeros(table.n_maps, dtype=np.int64)
    cdef int64_t[::1] by_group = counts
    with nogil:
        is_once = count_once(table, version, by_group)
    return counts if is_once else None


cdef bint next_named(RecordCursor *cursor, Table *table, uint32_t version, uint32_t *slot) noexcept nogil:
    """Go to the next older change of a table, and to the `slot` of its entry as it is now; False after the oldest.

    Also False, with slot 0, where that slot is not known: the entry was removed, or moved after it had been written.
    """
    cdef const char *end
    cdef uint64_t last
    cdef Table *owner
    slot[0] = 1
    while cursor.at != 0 or next_chunk(cursor):
        end = chunk_data(cursor.chunk) + cursor.at
        last = (<const uint64_t *>(end - 8))[0]
        cursor.op = <int>(last >> 56)
        owner = cursor.journal.tables[(last >> 48) & 0xFF]
        cursor.at -= record_width(owner, end)
        if owner != table or cursor.op == RECORD_COPIED:
            continue
        cursor.slot = slot[0] = <uint32_t>last
        if cursor.op == RECORD_MOVED:
            # A snapshot begins another segment. So it was not written before it was cloned, but for maps that shrink.
            if entry_at(table.core, cursor.slot).version < version:
                continue
            slot[0] = 0
        elif cursor.op == RECORD_REMOVE:
            slot[0] = 0
        elif cursor.op == RECORD_REPLACED:
            slot[0] = (<const uint32_t *>(end - 16))[0]
        cursor.group = <uint32_t>(last >> 32) & 0xFFFF
        cursor.payload = chunk_data(cursor.chunk) + cursor.at
        return slot[0] != 0
    return False


cdef bint count_once(Table *table, uint32_t version, int64_t[::1] counts) noexcept nogil:
    cdef RecordCursor record
    cdef uint32_t slot
    begin_records(table.journal, version, &record)
    while next_named(&record, table, version, &slot):
        counts[record.group - table.first_group] += 1
    return slot != 0


cdef void fill_once(Table *table, uint32_t version, int64_t[::1] ends, uint64_t[::1] found,
                    int64_t[::1] kept) noexcept nogil:
    """Put the entries that records name where their key groups end, from the newest record to the oldest."""
    cdef RecordCursor record
    cdef bint is_list = table.layout.value_kind == VALUE_LIST
    cdef ListHead *old
    cdef uint32_t group, slot
    cdef int64_t at
    begin_records(table.journal, version, &record)
    while next_named(&record, table, version, &slot):
        group = record.group - table.first_group
        at = ends[group] - 1
        ends[group] = at
        found[at] = <uint64_t><uintptr_t>entry_at(table.core, slot)
        if not is_list or record.op == RECORD_INSERT:
            continue
        if record.op == RECORD_REPLACED:
            old = <ListHead *>value_of(table, entry_at(table.core, record.slot))
        else:
            old = <ListHead *>(record.payload + table.layout.off_value - table.layout.off_payload)
        kept[at] = kept_elements(table, entry_at(table.core, slot), old.stamp, old.length, dead_elements(table, old))


cdef inline int64_t kept_elements(Table *table, Entry *entry, uint32_t stamp, int64_t length,
                                  uint64_t dead) noexcept nogil:
    """The elements of an older head that the list still has in front of others; 0 if it did not only grow."""
    cdef ListHead *head = <ListHead *>value_of(table, entry)
    if head.stamp == stamp and head.length >= <uint64_t>length and dead_elements(table, head) == dead:
        return length
    return 0


cdef object distinct_changes(Table *table, uint32_t version):
    """Collect each key that records since a version name, once, as arrays: found, groups, removed, born, kept, live,
    and the entry that the oldest record names.
    """
    cdef int64_t n = count_records(table.journal, version), room = max(n, 1), distinct
    found, hashes = np.empty(room, dtype=np.uint64), np.empty(room, dtype=np.uint32)
    groups = np.empty(room, dtype=np.uint16)
    removed, born = np.zeros(room, dtype=np.uint8), np.zeros(room, dtype=np.uint8)
    live, oldest = np.zeros(room, dtype=np.uint8), np.empty(room, dtype=np.uint64)
    # For lists: the stamp of the oldest head, and how many elements it counts; 0 if the list was not there. And how
    # many of these were dead.
    stamps, kept = np.zeros(room, dtype=np.uint32), np.zeros(room, dtype=np.int64)
    dead = np.zeros(room, dtype=np.uint64)
    seen = np.zeros(1 << int(2 * n).bit_length(), dtype=np.uint32)
    cdef uint64_t[::1] of_found = found
    cdef unsigned short[::1] of_groups = groups
    cdef uint32_t[::1] of_hashes = hashes
    cdef unsigned char[::1] of_removed = removed
    cdef unsigned char[::1] of_born = born
    cdef uint32_t[::1] of_stamps = stamps
    cdef int64_t[::1] of_kept = kept
    cdef uint64_t[::1] of_dead = dead
    cdef uint32_t[::1] of_seen = seen
    cdef unsigned char[::1] of_live = live
    cdef uint64_t[::1] of_oldest = oldest
    with nogil:
        distinct = collect(table, version, of_found, of_groups, of_hashes, of_removed, of_born, of_stamps, of_kept,
                           of_dead, of_seen, of_oldest)
        find_live(table, distinct, of_found, of_groups, of_hashes, of_stamps, of_kept, of_dead, of_live)
    return tuple([column[:distinct] for column in (found, groups, removed, born, kept, live, oldest)])


cdef void find_returned(Table *table, int64_t n, uint64_t[::1] found, unsigned char[::1] born,
                        unsigned char[::1] live) noexcept nogil:
    """Find entries that are not gone but there again below another anchor, because their map was emptied and refilled.

    The live rows have them too, as entries that came into being.
    """
    cdef int64_t i
    cdef Entry *entry
    cdef Anchor *anchor
    cdef uint32_t slot, ref
    cdef CowMap *map
    for i in range(n):
        if live[i] or born[i]:
            continue
        entry = <Entry *><uintptr_t>found[i]
        anchor = <Anchor *>address(table.core.arena, namespace_of(table, entry))
        slot = find_owner(table.anchors, anchor)
        if slot == 0:
            continue
        ref = (<uint32_t *>value_of(table.anchors, entry_at(table.core, slot)))[0]
        map = table.maps[anchor.group - table.first_group]
        if find_stored(table, map, entry.key, ref, hash_stored(table, entry.key, ref)):
            born[i] = 1


cdef int64_t collect(Table *table, uint32_t version, uint64_t[::1] found, unsigned short[::1] groups,
                     uint32_t[::1] hashes, unsigned char[::1] removed, unsigned char[::1] born, uint32_t[::1] stamps,
                     int64_t[::1] kept, uint64_t[::1] dead, uint32_t[::1] seen, uint64_t[::1] oldest) noexcept nogil:
    """Collect the entries that records name, each key once; returns how many.

    Notes which keys were ever removed, which came into being since, and the entry that the oldest record of each names.
    Goes from the newest record to the oldest.
    """
    cdef RecordCursor record
    cdef uint64_t mask = seen.shape[0] - 1, place
    cdef Entry *entry
    cdef ListHead *head
    cdef bint is_list = table.layout.value_kind == VALUE_LIST
    cdef int64_t n = 0, j, k, distinct = 0
    begin_records(table.journal, version, &record)
    while next_change(&record, table):
        found[n] = <uint64_t><uintptr_t>entry_at(table.core, record.slot)
        groups[n] = <unsigned short>record.group
        removed[n] = record.op == RECORD_REMOVE
        born[n] = record.op == RECORD_INSERT
        head = NULL
        if is_list and record.op == RECORD_WRITE:
            head = <ListHead *>(record.payload + table.layout.off_value - table.layout.off_payload)
        elif is_list and record.op == RECORD_REPLACED:
            head = <ListHead *>value_of(table, <Entry *><uintptr_t>found[n])
        if head != NULL:
            stamps[n] = head.stamp
            kept[n] = head.length
            dead[n] = dead_elements(table, head)
        n += 1
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
            born[k] = born[j]            # the oldest record tells
            oldest[k] = found[j]
            # Between two heads of one stamp the list has only grown, or gone back to where it had been.
            if stamps[k] != stamps[j] or kept[j] < kept[k]:
                kept[k] = kept[j] if stamps[k] == stamps[j] else 0
            dead[k] = dead[j]
            continue
        # What is kept moves to the front, where none that is still to come lies.
        found[distinct], groups[distinct], hashes[distinct] = found[j], groups[j], hashes[j]
        removed[distinct], born[distinct] = removed[j], born[j]
        stamps[distinct], kept[distinct], dead[distinct] = stamps[j], kept[j], dead[j]
        oldest[distinct] = found[j]
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
                    uint32_t[::1] stamps, int64_t[::1] kept, uint64_t[::1] dead,
                    unsigned char[::1] live) noexcept nogil:
    """Replace the entries that records name by the live entries of their keys."""
    cdef int64_t i, ahead
    cdef CowMap *map
    cdef BucketTable *buckets
    cdef Entry *entry
    cdef uint32_t slot
    for i in range(n):
        ahead = i + AHEAD
        if ahead < n:
            map = table.maps[groups[ahead] - table.first_group]
            buckets = active_table(map, hashes[ahead])
            prefetch(bucket(table.core, buckets, hashes[ahead] & (buckets.capacity - 1)))
        entry = <Entry *><uintptr_t>found[i]
        map = table.maps[groups[i] - table.first_group]
        slot = find_stored(table, map, entry.key, namespace_of(table, entry), hashes[i])
        if slot:
            found[i] = <uint64_t><uintptr_t>entry_at(table.core, slot)
            live[i] = 1
            if kept[i]:
                kept[i] = kept_elements(table, entry_at(table.core, slot), stamps[i], kept[i], dead[i])
        else:
            kept[i] = 0
