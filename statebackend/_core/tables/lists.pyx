"""Lists: chains of chunks that only grow.

    ListHead (in the entry)          chunks, newest first
    +--------+--------+------+       +----------------+      +-----------+
    | tail   | length | used |------>| c d e .  prev  |----->| a b  prev |
    +--------+--------+------+       +----------------+      +-----------+

An append writes behind the elements that any list has reached. Then it changes the head, which is the value of an
ordinary entry: cloned for snapshots, journalled for marks. So an old head still names exactly its elements, and an
append costs one element, however long the list is.
"""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.memory.arena cimport (
    LARGEST_CLASS, Blob, Budget, blob_drop, block_alloc, block_free, injected_failure)
from statebackend._core.tables.cow_map cimport (
    VALUE_BLOB, VALUE_FIXED, VALUE_OBJECT, CowMap, Lane, ListChunk, ListHead, Table, drop_list, entry_at, insert,
    new_stamp, slot_for_write, value_of)

cdef extern from "Python.h":
    void Py_INCREF(PyObject *object)
    void Py_DECREF(PyObject *object)

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


cdef void free_chain(Table *table, ListChunk *last, uint64_t n) noexcept nogil:
    """Free the `n` newest chunks of a chain, but not the objects of their elements."""
    cdef ListChunk *chunk
    while n:
        n -= 1
        chunk = last
        last = chunk.prev
        block_free(table.core.blobs, chunk, sizeof(ListChunk) + <uint64_t>chunk.capacity * table.element_width)


cdef bint list_extend(Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k, const char *elements,
                      uint64_t n, bint replace) noexcept nogil:
    """Append elements in stored form, timestamps included, or replace those at `slot` with them.

    All or nothing; False without memory. The list then owns what the elements refer to.
    """
    cdef uint32_t width = table.element_width, tail_used = 0
    cdef uint64_t in_place = 0, left = n, made = 0, capacity, limit = (LARGEST_CLASS - sizeof(ListChunk)) // width
    cdef ListHead *head = NULL
    cdef ListChunk *tail = NULL
    cdef ListChunk *old = NULL
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
        chunk = <ListChunk *>block_alloc(lane.core.blobs, sizeof(ListChunk) + capacity * width)
        if chunk == NULL:
            free_chain(table, last, made)
            return False
        chunk.prev = last
        chunk.prev_used = last.used if made else tail_used + <uint32_t>in_place
        chunk.refs = 1
        chunk.capacity = <uint32_t>capacity
        chunk.used = <uint32_t>(capacity if capacity < left else left)
        memcpy(<char *>chunk + sizeof(ListChunk), elements + (n - left) * width, chunk.used * <uint64_t>width)
        left -= chunk.used
        last = chunk
        made += 1
    if slot:
        slot = slot_for_write(lane, table, map, slot, k.hash, &kept)
    else:
        slot = insert(lane, table, map, k.number, k.data, k.length, k.namespace, k.hash)
    if slot == 0:
        free_chain(table, last, made)
        return False
    head = <ListHead *>value_of(table, entry_at(lane.core, slot))
    if replace or head.length == 0:
        head.length = 0
        head.stamp = <uint32_t>new_stamp(lane.core)
    elif kept:
        tail.refs += 1                   # the journal's payload names it as well
    if in_place:
        memcpy(<char *>tail + sizeof(ListChunk) + <uint64_t>tail.used * width, elements, in_place * width)
        tail.used += <uint32_t>in_place
    head.tail = last
    head.tail_used = last.used if made else tail_used + <uint32_t>in_place
    head.length += n
    if old != NULL and not kept:
        drop_list(table, old)
    return True


cdef void refer_to_element(Table *table, char *element) noexcept nogil:
    """Take a reference for a copy of an element, which begins with its timestamp, if it has one."""
    cdef char *value = element + (8 if table.element_has_timestamp else 0)
    if table.element_kind == VALUE_BLOB:
        (<Blob **>value)[0].refs += 1
    elif table.element_kind == VALUE_OBJECT:
        with gil:
            Py_INCREF((<PyObject **>value)[0])


cdef void drop_elements(Table *table, char *elements, uint64_t n) noexcept nogil:
    """Drop the references of elements that no list has taken."""
    cdef uint64_t i
    cdef char *value
    if table.element_kind == VALUE_FIXED:
        return
    for i in range(n):
        value = elements + i * table.element_width + (8 if table.element_has_timestamp else 0)
        if table.element_kind == VALUE_BLOB:
            blob_drop(table.core.blobs, (<Blob **>value)[0])
        else:
            with gil:
                Py_DECREF((<PyObject **>value)[0])


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
    # `max_bytes` does not refuse reads: this memory is not counted.
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
