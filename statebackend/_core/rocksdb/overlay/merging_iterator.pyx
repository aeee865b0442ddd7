"""Walks over a column family in order, through what an open batch has changed.

RocksDB's iterator goes over the database as it was when the walk was made; the nodes of a layer go over the changes in
front of it. Where both have a key, the layer says what is there. A layer that changes between two reads is seen as it
is then: `read_many` looks for its place again.
"""

cimport cython
import numpy as np
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp, memset

from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, compare, drop
from statebackend._core.rocksdb.binding.database cimport ColumnFamily, array_of
from statebackend._core.rocksdb.binding.iterators cimport Iterator
from statebackend._core.rocksdb.binding.library cimport api
from statebackend._core.rocksdb.overlay.overlay cimport Layer, Node, Overlay, key_of, resolve

from statebackend.errors import UsageError

cdef enum:
    ROWS_AHEAD = 256                  # that a walk in Python reads at a time


@cython.final
cdef class MergingIterator:
    """Goes over the keys that begin with `prefix`, from `start` on, in order. Close it, or read it to its end."""

    cdef Iterator base
    cdef ColumnFamily family
    cdef bint fill_cache
    cdef Layer layer                  # or None
    cdef Overlay overlay              # which the layer is of; None if the layer is the walk's own
    cdef uint64_t written             # of the layer, when the iterator was made
    cdef Node *node                   # the next one
    cdef uint64_t version             # of the layer, when `node` was found
    cdef bytes prefix
    cdef bytes start                  # where the layer is looked for
    cdef bytes first                  # where it began
    cdef bint has_begun

    def __init__(self, ColumnFamily family not None, Layer layer, bytes prefix not None=b"", bytes start=None, *,
                 Overlay overlay=None, bint fill_cache=True):
        self.base = Iterator(family, prefix=prefix, lower=start, fill_cache=fill_cache)
        self.family, self.fill_cache, self.prefix = family, fill_cache, prefix
        self.layer, self.overlay = layer, None if layer is None else overlay
        self.written = 0 if layer is None else layer.rows.written
        self.start = self.first = prefix if start is None else max(prefix, start)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()

    def close(self):
        self.base.close()

    def restart(self):
        """Go back to the first key, at the same moment."""
        self.start, self.has_begun = self.first, False

    cdef int find_places(self) except -1:
        """Find where to read on. Rows written to the database meanwhile are not in sight of the iterator."""
        if self.layer is not None and self.layer.rows.written != self.written:
            self.base.close()
            self.written = self.layer.rows.written
            self.base = Iterator(self.family, prefix=self.prefix, lower=self.start, fill_cache=self.fill_cache)
            self.has_begun = False
        if not self.has_begun:
            self.base.seek_to_first()
            self.has_begun = True
        elif self.layer is None or self.layer.rows.version == self.version:
            return 0
        if self.layer is not None:
            self.node = self.layer.at_or_after(self.start, len(self.start))
            self.version = self.layer.rows.version
        return 0

    cdef void go_in(self) noexcept:
        """Keep others out as `Overlay.go_in` does, unless the layer is the walk's own."""
        if self.overlay is not None:
            self.overlay.go_in()

    cdef void go_out(self) noexcept:
        if self.overlay is not None:
            self.overlay.go_out()

    def read_many(self, Py_ssize_t rows, Py_ssize_t nbytes=1 << 24):
        """Read entries from here on: at most `rows`, and about as many bytes; the walk goes behind them.

        Returns offsets and bytes of keys, and of values, as arrays, without an object for each; no rows at the end.
        """
        cdef Bytes keys, values
        cdef Py_ssize_t n = 0
        cdef const char *stem = self.prefix
        cdef size_t n_stem = len(self.prefix), size, before
        cdef const char *value
        cdef Iterator base
        cdef bint has_node
        cdef int order, is_there = 1
        cdef int64_t[::1] key_end, value_end
        if rows < 1:
            raise UsageError("rows must be at least 1")
        key_ends, value_ends = np.zeros(rows + 1, np.int64), np.zeros(rows + 1, np.int64)
        key_end, value_end = key_ends, value_ends
        memset(&keys, 0, sizeof(keys))
        memset(&values, 0, sizeof(values))
        if self.overlay is not None:
            self.overlay.come_in()
        self.go_in()                     # before finding the places, which lets go of the GIL too
        try:
            self.find_places()
            base = self.base
            base.enter()
        except BaseException:
            self.go_out()
            raise
        with nogil:
            while n < rows and <Py_ssize_t>(keys.size + values.size) < nbytes:
                has_node = self.node != NULL and self.node.size >= n_stem and not memcmp(
                    key_of(self.node), stem, n_stem)
                if not has_node and not base.has_entry:
                    break
                order = -1 if has_node else 1
                if has_node and base.has_entry:
                    order = compare(key_of(self.node), self.node.size, base.here, base.n_here)
                value, size, before = NULL, 0, keys.size
                if order >= 0:
                    value = api.iter_value(base.link.iterator, &size)
                if order > 0:
                    is_there = 1 if append(&keys, base.here, base.n_here) and append(&values, value, size) else -1
                else:
                    is_there = -1
                    if append(&keys, key_of(self.node), self.node.size):
                        is_there = resolve(self.node.newest, value, size, order == 0, &values)
                    if is_there == 0:
                        keys.size = before
                if is_there < 0:
                    break
                if is_there:
                    n += 1
                    key_end[n] = keys.size
                    value_end[n] = values.size
                if order <= 0:
                    self.node = self.node.next[0]
                if order >= 0:
                    api.iter_next(base.link.iterator)
                    base.settle()
        self.go_out()
        try:
            base.leave()
            if is_there < 0:
                raise MemoryError
            if n:
                self.start = keys.data[key_end[n - 1]:key_end[n]] + b"\0"
            return (key_ends[:n + 1], array_of(keys.data, keys.size),
                    value_ends[:n + 1], array_of(values.data, values.size))
        finally:
            drop(&keys)
            drop(&values)

    def rows(self, Py_ssize_t most):
        """Read up to so many pairs of key and value from here on."""
        cdef Py_ssize_t i
        cdef list found = []
        cdef bytes keys, values
        cdef int64_t[::1] key_end, value_end
        key_ends, key_data, value_ends, value_data = self.read_many(most)
        keys, values = key_data.tobytes(), value_data.tobytes()
        key_end, value_end = key_ends, value_ends
        for i in range(key_end.shape[0] - 1):
            found.append((keys[key_end[i]:key_end[i + 1]], values[value_end[i]:value_end[i + 1]]))
        return found

    def __iter__(self):
        while rows := self.rows(ROWS_AHEAD):
            yield from rows
