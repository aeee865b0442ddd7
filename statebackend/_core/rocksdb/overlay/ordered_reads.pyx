"""Reads of many keys, and looks below many prefixes, each once, in the order of the database.

RocksDB finds a key faster next to the one before. Where a large part of a column family is asked for, an iterator that
goes over all of it is faster still.
"""

import numpy as np
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp, memset

from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, compare, drop
from statebackend._core.rocksdb.binding.database cimport ColumnFamily, array_of
from statebackend._core.rocksdb.binding.iterators cimport Iterator
from statebackend._core.rocksdb.binding.write_batch cimport WRITE_DELETE
from statebackend._core.rocksdb.binding.library cimport api
from statebackend._core.rocksdb.overlay.overlay cimport Layer, Node, key_of
from statebackend._core.rocksdb.overlay.sorted_rows import order_and_places, picked

cdef enum:
    FEW = 64                          # keys are asked for as they come
    DENSE = 6                         # an iterator passes so many keys in the time in which one is looked up
    LEAST_DENSE = 2_000               # an iterator costs as much as many keys


def read_many(ColumnFamily family not None, const int64_t[::1] offsets not None, const uint8_t[::1] keys not None):
    """Read many keys, in any order, also several times; returns what `Database.multi_get` does.

    O(n log n), without an object for a key.
    """
    cdef Py_ssize_t n = check_rows(offsets, keys, "keys")
    if n < FEW:
        return family.database.multi_get(family, offsets, keys)
    order, places = order_and_places(offsets, keys)
    is_in_order = np.array_equal(places, np.arange(n))
    asked = (np.asarray(offsets), np.asarray(keys)) if is_in_order else picked(offsets, keys, order)
    if LEAST_DENSE <= len(order) and is_dense(family, len(order)):
        found, ends, data = read_dense(family, asked[0], asked[1])
    else:
        found, ends, data = family.database.multi_get(family, asked[0], asked[1], is_sorted=True)
    if is_in_order:
        return found, ends, data
    return (found[places], *picked(ends, data, places))


cdef bint is_dense(ColumnFamily family, Py_ssize_t n) except -1:
    """Whether so many keys are so large a part of a column family that reading all of it takes less time."""
    held = family.database.int_property("rocksdb.estimate-num-keys", family)
    return held is not None and held <= DENSE * n


cdef object read_dense(ColumnFamily family, const int64_t[::1] offsets, const uint8_t[::1] keys):
    """Read keys that ascend by going over all that lie between."""
    cdef Py_ssize_t i, n = offsets.shape[0] - 1
    cdef const char *start = start_of(keys)
    cdef const char *key
    cdef const char *value
    cdef size_t size
    cdef int order, skipped
    cdef bint is_done = True
    cdef Bytes data
    cdef int64_t[::1] end
    cdef uint8_t[::1] mark
    cdef Iterator base = Iterator(family)
    is_found, ends = np.zeros(n, np.bool_), np.zeros(n + 1, np.int64)
    mark, end = is_found.view(np.uint8), ends
    memset(&data, 0, sizeof(data))
    base.seek(start[offsets[0]:offsets[1]])
    base.enter()
    with nogil:
        for i in range(n):
            key, size = start + offsets[i], offsets[i + 1] - offsets[i]
            order, skipped = -1, 0
            while base.has_entry:
                order = compare(base.here, base.n_here, key, size)
                if order >= 0:
                    break
                if skipped == 2 * DENSE:
                    api.iter_seek(base.link.iterator, key, size)
                else:
                    api.iter_next(base.link.iterator)
                skipped += 1
                base.settle()
            if base.has_entry and order == 0:
                value = api.iter_value(base.link.iterator, &size)
                is_done = append(&data, value, size)
                if not is_done:
                    break
                mark[i] = 1
            end[i + 1] = data.size
    try:
        base.leave()
        if not is_done:
            raise MemoryError
        return is_found, ends, array_of(data.data, data.size)
    finally:
        base.close()
        drop(&data)


def have_rows(ColumnFamily family not None, Layer layer, const int64_t[::1] offsets not None,
              const uint8_t[::1] prefixes not None):
    """Say of many prefixes, in any order, whether a key begins with it, in the layer or else in the database.

    For what is never merged. O(n log n), and O(1) for each key that the layer removes.
    """
    cdef Py_ssize_t i, n
    cdef const char *start
    cdef const char *prefix
    cdef size_t size
    cdef Node *node = NULL
    cdef int order
    cdef bint has_node, has_row
    cdef const int64_t[::1] end
    cdef const uint8_t[::1] data
    cdef uint8_t[::1] mark
    cdef Iterator base
    order_of_rows, places = order_and_places(offsets, prefixes)
    end, data = picked(offsets, prefixes, order_of_rows)
    n, start = len(order_of_rows), start_of(data)
    is_found = np.zeros(n, np.bool_)
    mark = is_found.view(np.uint8)
    if layer is not None:
        layer.at_or_after(b"", 0)        # puts its keys in order
    base = Iterator(family)
    try:
        if n:
            base.seek(start[end[0]:end[1]])
        base.enter()
        with nogil:
            for i in range(n):
                prefix, size = start + end[i], end[i + 1] - end[i]
                go_on_to(base, prefix, size)
                if layer is not None:
                    node = layer.from_here(prefix, size)
                while True:
                    has_node = node != NULL and begins_with(key_of(node), node.size, prefix, size)
                    has_row = base.has_entry and begins_with(base.here, base.n_here, prefix, size)
                    order = 1
                    if has_node:
                        order = compare(key_of(node), node.size, base.here, base.n_here) if has_row else -1
                    if order > 0 or node.newest.what != WRITE_DELETE:
                        mark[i] = has_row if order > 0 else True
                        break
                    node = node.next[0]
                    if order == 0:
                        api.iter_next(base.link.iterator)
                        base.settle()
        base.leave()
    finally:
        base.close()
    return is_found[places]


cdef inline bint begins_with(const char *key, size_t n, const char *prefix, size_t size) noexcept nogil:
    return n >= size and memcmp(key, prefix, size) == 0


cdef void go_on_to(Iterator base, const char *key, size_t n) noexcept nogil:
    """Go to the first key that is not below this one, from where the iterator is; it may be near.

    An iterator that has come to an end stays there: another seek would forget its error.
    """
    for _ in range(DENSE):
        if not base.has_entry or compare(base.here, base.n_here, key, n) >= 0:
            return
        api.iter_next(base.link.iterator)
        base.settle()
    if not base.has_entry:
        return
    api.iter_seek(base.link.iterator, key, n)
    base.settle()
