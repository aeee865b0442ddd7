"""Lists: chains of chunks that only grow.

    ListHead (in the entry)          chunks, newest first
    +--------+--------+------+       +----------------+      +-----------+
    | tail   | length | used |------>| c d e .  prev  |----->| a b  prev |
    +--------+--------+------+       +----------------+      +-----------+

An append writes behind the elements that any list has reached. Then it changes the head, which is the value of an
ordinary entry: cloned for snapshots, journalled for marks. So an old head still names exactly its elements, and an
append costs one element, however long the list is.

Where elements expire, they usually do so in order. Then expiry moves the place of the first live element, in the head,
and touches no other element. The handle rewrites a list when more of it is dead than alive. So an element that expires
costs O(1) amortised, and a list takes at most about twice the memory of its live elements. For the step from one chunk
to the next newer one, these chunks have a second link.
"""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.memory.arena cimport (
    LARGEST_CLASS, Blob, block_alloc, block_free, injected_failure)
from statebackend._core.tables.cow_map cimport (
    VALUE_BLOB, VALUE_FIXED, VALUE_OBJECT, CowMap, ExpiringHead, Lane, ListChunk, ListHead, Table, chunk_bytes,
    chunk_header, drop_list, element_timestamp, elements_of, entry_at, live_elements, new_stamp, next_chunk_of,
    slot_for_write, stamp_element, value_of)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.tables.objects cimport share_object
from statebackend._core.tables.values cimport drop_value
from statebackend._core.tables.entry_update cimport slot_to_write

cdef enum:
    LIST_FIRST_BYTES = 64


cdef uint32_t chunk_capacity(Table *table, ListChunk *previous) noexcept nogil:
    """Chunks double until they are as large as the largest slab block."""
    cdef uint64_t bytes = LIST_FIRST_BYTES
    if previous != NULL:
        bytes = 2 * chunk_bytes(table, previous)
    if bytes > LARGEST_CLASS:
        bytes = LARGEST_CLASS
    if bytes < chunk_header(table) + table.element_width:
        return 1
    return <uint32_t>((bytes - chunk_header(table)) // table.element_width)


cdef inline void begin_expiring(ExpiringHead *head, ListChunk *first, int64_t timestamp) noexcept nogil:
    """Begin a list with an element at the start of a chunk."""
    head.dead = 0
    head.first = first
    head.first_index = 0
    head.is_ordered = True
    head.oldest = head.newest = timestamp


cdef inline void note_timestamp(ExpiringHead *head, int64_t timestamp) noexcept nogil:
    """Note the timestamp of an element that is appended."""
    if timestamp >= head.newest:
        head.newest = timestamp
    else:
        head.is_ordered = False
        if timestamp < head.oldest:
            head.oldest = timestamp


cdef bint list_append(Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k, char *value,
                      int64_t timestamp) noexcept nogil:
    """Append to the list at `slot`, or make one if `slot` is 0; False without memory.

    Only the list that reached a chunk's end fills it in place. A list that was rolled back to an earlier length
    begins a new chunk, so that snapshots of the later elements stay as they are.
    """
    cdef ListHead *head = NULL
    cdef ListChunk *tail = NULL
    cdef ListChunk *fresh = NULL
    cdef uint32_t capacity, tail_used = 0
    cdef char *element
    cdef bint kept = False
    if slot:
        head = <ListHead *>value_of(table, entry_at(lane.core, slot))
        tail = head.tail
        tail_used = head.tail_used
    if tail == NULL or tail.used != tail_used or tail.used == tail.capacity:
        capacity = chunk_capacity(table, tail)
        fresh = <ListChunk *>block_alloc(lane.blobs,
                                         chunk_header(table) + <uint64_t>capacity * table.element_width)
        if fresh == NULL:
            return False
        fresh.prev = tail
        fresh.prev_used = tail_used
        fresh.refs = 1
        fresh.used = 0
        fresh.capacity = capacity
    slot = slot_to_write(lane, table, map, k, slot, &kept)
    if slot == 0:
        if fresh != NULL:
            block_free(lane.core.blobs, fresh, chunk_bytes(table, fresh))
        return False
    head = <ListHead *>value_of(table, entry_at(lane.core, slot))
    if kept and tail != NULL:
        tail.refs += 1                   # the journal's payload names it as well
    if head.length == 0:
        head.stamp = <uint32_t>new_stamp(lane.core)
    if fresh != NULL:
        if tail != NULL and table.element_has_timestamp:
            next_chunk_of(tail)[0] = fresh
        head.tail = fresh                # and `fresh.prev` takes over the head's reference
        head.tail_used = 0
        tail = fresh
    element = elements_of(table, tail) + <uint64_t>tail.used * table.element_width
    if table.element_has_timestamp:
        if head.length == 0:
            begin_expiring(<ExpiringHead *>head, tail, timestamp)
        else:
            note_timestamp(<ExpiringHead *>head, timestamp)
        stamp_element(element, timestamp)
        element += 8
    memcpy(element, value, table.element_value_width)
    tail.used += 1
    head.tail_used += 1
    head.length += 1
    return True


cdef void free_chain(Table *table, ListChunk *last, uint64_t n) noexcept nogil:
    """Free the `n` newest chunks of a chain, but not the objects of their elements."""
    cdef ListChunk *chunk
    while n:
        n -= 1
        chunk = last
        last = chunk.prev
        block_free(table.core.blobs, chunk, chunk_bytes(table, chunk))


cdef bint list_extend(Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k, const char *elements,
                      uint64_t n, bint replace) noexcept nogil:
    """Append elements in stored form, timestamps included, or replace those at `slot` with them.

    All or nothing; False without memory. The list then owns what the elements refer to.
    """
    cdef uint32_t width = table.element_width, tail_used = 0
    cdef uint64_t in_place = 0, left = n, made = 0, capacity, i
    cdef uint64_t limit = (LARGEST_CLASS - chunk_header(table)) // width
    cdef ListHead *head = NULL
    cdef ListChunk *tail = NULL
    cdef ListChunk *old = NULL
    cdef ListChunk *first = NULL         # of those that are made
    cdef ListChunk *last
    cdef ListChunk *chunk
    cdef bint kept = False
    if slot:
        head = <ListHead *>value_of(table, entry_at(lane.core, slot))
        if replace:
            old = head.tail
        else:
            tail = head.tail
            tail_used = head.tail_used
    if tail != NULL and tail.used == tail_used:
        in_place = tail.capacity - tail.used
        if in_place > n:
            in_place = n
        left -= in_place
    last = tail
    while left:
        capacity = chunk_capacity(table, last)
        if capacity < left:
            capacity = left if left < limit else limit if limit else 1
        chunk = <ListChunk *>block_alloc(lane.blobs, chunk_header(table) + capacity * width)
        if chunk == NULL:
            free_chain(table, last, made)
            return False
        chunk.prev = last
        chunk.prev_used = last.used if made else tail_used + <uint32_t>in_place
        chunk.refs = 1
        chunk.capacity = <uint32_t>capacity
        chunk.used = <uint32_t>(capacity if capacity < left else left)
        memcpy(elements_of(table, chunk), elements + (n - left) * width, chunk.used * <uint64_t>width)
        left -= chunk.used
        if made == 0:
            first = chunk
        elif table.element_has_timestamp:
            next_chunk_of(last)[0] = chunk
        last = chunk
        made += 1
    slot = slot_to_write(lane, table, map, k, slot, &kept)
    if slot == 0:
        free_chain(table, last, made)
        return False
    head = <ListHead *>value_of(table, entry_at(lane.core, slot))
    if replace or head.length == 0:
        head.length = 0
        head.stamp = <uint32_t>new_stamp(lane.core)
    elif kept:
        tail.refs += 1                   # the journal's payload names it as well
    if table.element_has_timestamp and n:
        if head.length == 0:
            begin_expiring(<ExpiringHead *>head, first, element_timestamp(elements))
        elif made:
            next_chunk_of(tail)[0] = first
        for i in range(n):
            note_timestamp(<ExpiringHead *>head, element_timestamp(elements + i * width))
    if in_place:
        memcpy(elements_of(table, tail) + <uint64_t>tail.used * width, elements, in_place * width)
        tail.used += <uint32_t>in_place
    head.tail = last
    head.tail_used = last.used if made else tail_used + <uint32_t>in_place
    head.length += n
    if old != NULL and not kept:
        drop_list(table, old)
    return True


cdef void pass_expired(Table *table, ExpiringHead *head, int64_t ttl, int64_t now) noexcept nogil:
    """Move the copy of a head past what has expired of an ordered list, of which something has not. O(expired)."""
    cdef ListChunk *following
    cdef uint32_t end
    cdef int64_t timestamp
    while True:
        following = next_chunk_of(head.first)[0] if head.first != head.list.tail else NULL
        end = following.prev_used if following != NULL else head.list.tail_used
        while head.first_index < end:
            timestamp = element_timestamp(elements_of(table, head.first)
                                          + <uint64_t>head.first_index * table.element_width)
            if not is_expired(timestamp, ttl, now):
                head.oldest = timestamp
                return
            head.first_index += 1
            head.dead += 1
        head.first = following
        head.first_index = 0


cdef bint list_skip(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash,
                    ExpiringHead *to) noexcept nogil:
    """Let a list begin where the copy of its head says; False without memory. O(1)."""
    cdef bint kept = False
    slot = slot_for_write(lane, table, map, slot, hash, &kept)
    if slot == 0:
        return False
    if kept:
        to.list.tail.refs += 1           # the journal's payload names it as well
    (<ExpiringHead *>value_of(table, entry_at(lane.core, slot)))[0] = to[0]
    return True


cdef void refer_to_element(Table *table, char *element) noexcept nogil:
    """Take a reference for a copy of an element, which begins with its timestamp, if it has one."""
    cdef char *value = element + (8 if table.element_has_timestamp else 0)
    if table.element_kind == VALUE_BLOB:
        (<Blob **>value)[0].refs += 1
    elif table.element_kind == VALUE_OBJECT:
        share_object(&table.core.objects, value)


cdef void drop_elements(Table *table, char *elements, uint64_t n) noexcept nogil:
    """Drop the references of elements that no list has taken."""
    cdef uint64_t i
    if table.element_kind == VALUE_FIXED:
        return
    for i in range(n):
        drop_value(table.core, table.element_kind,
                   elements + i * table.element_width + (8 if table.element_has_timestamp else 0))


cdef bint cursor_open(Table *table, ListHead *head, ListCursor *cursor) noexcept nogil:
    cdef ListChunk *chunk = head.tail
    cdef uint32_t used = head.tail_used
    cdef uint64_t i, left = live_elements(table, head)
    cursor.n = 1
    cursor.at = 0
    while used < left:
        cursor.n += 1
        left -= used
        used = chunk.prev_used
        chunk = chunk.prev
    cursor.element = used - <uint32_t>left
    # `max_bytes` does not refuse reads: this memory is not counted.
    cursor.chunks = NULL if injected_failure(table.core.arena.budget) else <ListChunk **>PyMem_RawMalloc(cursor.n * 12)
    if cursor.chunks == NULL:
        return False
    cursor.used = <uint32_t *>(cursor.chunks + cursor.n)
    chunk = head.tail
    used = head.tail_used
    i = cursor.n
    while i:
        i -= 1
        cursor.chunks[i] = chunk
        cursor.used[i] = used
        used = chunk.prev_used
        chunk = chunk.prev
    return True


cdef char *cursor_next(Table *table, ListCursor *cursor) noexcept nogil:
    cdef char *element
    while cursor.at < cursor.n:
        if cursor.element < cursor.used[cursor.at]:
            element = (elements_of(table, cursor.chunks[cursor.at])
                       + <uint64_t>cursor.element * table.element_width)
            cursor.element += 1
            return element
        cursor.at += 1
        cursor.element = 0
    return NULL


cdef void cursor_close(ListCursor *cursor) noexcept nogil:
    PyMem_RawFree(cursor.chunks)
