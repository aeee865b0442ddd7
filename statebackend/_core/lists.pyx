"""Lists: chains of chunks that only grow.

    ListHead (in the entry)          chunks, newest first
    +--------+--------+------+       +----------------+      +-----------+
    | tail   | length | used |------>| c d e .  prev  |----->| a b  prev |
    +--------+--------+------+       +----------------+      +-----------+

An append writes behind the elements that any list has reached and then changes the head, which is the value of an
ordinary entry: cloned for snapshots, journalled for marks. So an old head goes on naming exactly its elements,
at the cost of one element an append, however long the list is.
"""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.arena cimport LARGEST_CLASS, Budget, block_alloc, block_free, injected_failure
from statebackend._core.cow_map cimport (
    CowMap, Lane, ListChunk, ListHead, Table, entry_at, insert, new_stamp, slot_for_write, value_of)

cdef enum:
    LIST_FIRST_BYTES = 64


cdef uint32_t chunk_capacity(Table *table, ListChunk *previous) noexcept nogil:
    """Chunks double until they are as large as the largest slab block."""
    cdef uint64_t bytes = LIST_FIRST_BYTES
    if previous != NULL:
        bytes = 2 * (sizeof(ListChunk) + <uint64_t>previous.capacity * table.element_width)
    if bytes > LARGEST_CLASS:
        bytes = LARGEST_CLASS
    if bytes < sizeof(ListChunk) + table.element_width:
        return 1
    return <uint32_t>((bytes - sizeof(ListChunk)) // table.element_width)


cdef bint list_append(Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k, char *value,
                      int64_t timestamp) noexcept nogil:
    """Append to the list at `slot`, or make one if `slot` is 0; False without memory.

    A chunk is filled in place only by the list that reached its end; a list that was rolled back to before
    that begins a new chunk, so that snapshots of what came after stay what they were.
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
        fresh = <ListChunk *>block_alloc(lane.core.blobs,
                                         sizeof(ListChunk) + <uint64_t>capacity * table.element_width)
        if fresh == NULL:
            return False
        fresh.prev = tail
        fresh.prev_used = tail_used
        fresh.refs = 1
        fresh.used = 0
        fresh.capacity = capacity
    if slot:
        slot = slot_for_write(lane, table, map, slot, k.hash, &kept)
    else:
        slot = insert(lane, table, map, k.number, k.data, k.length, k.namespace, k.hash)
    if slot == 0:
        if fresh != NULL:
            block_free(lane.core.blobs, fresh,
                       sizeof(ListChunk) + <uint64_t>fresh.capacity * table.element_width)
        return False
    head = <ListHead *>value_of(table, entry_at(lane.core, slot))
    if kept and tail != NULL:
        tail.refs += 1                   # the journal's payload names it as well
    if head.length == 0:
        head.stamp = <uint32_t>new_stamp(lane.core)
    if fresh != NULL:
        head.tail = fresh                # and `fresh.prev` takes over the head's reference
        head.tail_used = 0
        tail = fresh
    element = <char *>tail + sizeof(ListChunk) + <uint64_t>tail.used * table.element_width
    if table.element_has_timestamp:
        (<int64_t *>element)[0] = timestamp
        element += 8
    memcpy(element, value, table.element_value_width)
    tail.used += 1
    head.tail_used += 1
    head.length += 1
    return True


cdef bint cursor_open(Budget *budget, ListHead *head, ListCursor *cursor) noexcept nogil:
    cdef ListChunk *chunk = head.tail
    cdef uint32_t used = head.tail_used
    cdef uint64_t i
    cursor.n = 0
    cursor.at = 0
    cursor.element = 0
    while chunk != NULL:
        cursor.n += 1
        chunk = chunk.prev
    # Reading is not refused for `max_bytes`: this memory is not counted.
    cursor.chunks = NULL if injected_failure(budget) else <ListChunk **>PyMem_RawMalloc(cursor.n * 12)
    if cursor.chunks == NULL:
        return False
    cursor.used = <uint32_t *>(cursor.chunks + cursor.n)
    chunk = head.tail
    i = cursor.n
    while chunk != NULL:
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
            element = (<char *>cursor.chunks[cursor.at] + sizeof(ListChunk)
                       + <uint64_t>cursor.element * table.element_width)
            cursor.element += 1
            return element
        cursor.at += 1
        cursor.element = 0
    return NULL


cdef void cursor_close(ListCursor *cursor) noexcept nogil:
    PyMem_RawFree(cursor.chunks)
