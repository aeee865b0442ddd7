"""Walks over the keys of a column family in order, within bounds."""

cimport cython
import numpy as np
from libc.stddef cimport size_t
from libc.stdint cimport int64_t
from libc.string cimport memcmp, memset

from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, compare, drop
from statebackend._core.rocksdb.binding.database cimport ColumnFamily, Database, array_of
from statebackend._core.rocksdb.binding.library cimport api, check, is_forked, rocksdb_family_t, rocksdb_iterator_t

from statebackend.errors import ClosedError, UsageError


def successor(bytes prefix not None):
    """Return the least key above all keys that begin with `prefix`; None if there is none."""
    stem = prefix.rstrip(b"\xff")
    last = len(stem) - 1
    return stem[:last] + bytes([stem[last] + 1]) if stem else None


@cython.final
@cython.no_gc                         # cycles cannot form, and the database must stay until the link is gone
cdef class Iterator:
    """Goes over the keys from `lower` up to `upper`, which is left out, that begin with `prefix`, each if given.

    It sees the database as it was when the iterator was made. At first it stands nowhere: `seek` it. As a Python
    iterator it gives pairs of keys and values from the first on. Close it: it holds files that compactions have
    replaced.
    """

    def __cinit__(self, ColumnFamily family not None, *, bytes lower=None, bytes upper=None, bytes prefix=None,
                  bint fill_cache=True):
        cdef Database database = family.database
        cdef rocksdb_family_t *handle
        cdef rocksdb_iterator_t *iterator
        if database is None:
            raise TypeError("Database.column_family makes a column family")
        handle = database.handle_of(family)
        if prefix is not None:
            lower = prefix if lower is None else max(prefix, lower)
            end = successor(prefix)
            upper = end if upper is None else upper if end is None else min(end, upper)
        self.database = database
        self.lower, self.upper, self.prefix = lower, upper, prefix
        memset(&self.link, 0, sizeof(self.link))
        self.link.family = family.family
        self.link.options = api.readoptions_create()
        if lower is not None:
            self.low, self.n_low = lower, len(lower)
            api.readoptions_set_iterate_lower_bound(self.link.options, self.low, self.n_low)
        if upper is not None:
            self.high, self.n_high = upper, len(upper)
            api.readoptions_set_iterate_upper_bound(self.link.options, self.high, self.n_high)
        if prefix is not None:
            self.stem, self.n_stem = prefix, len(prefix)
        api.readoptions_set_fill_cache(self.link.options, fill_cache)
        database.enter()
        with nogil:
            iterator = api.create_iterator_cf(database.db, self.link.options, handle)
        database.leave()
        self.link.iterator = iterator
        database.link(&self.link)

    def __dealloc__(self):
        if self.database is not None:
            self.database.unlink(&self.link)

    def close(self):
        if self.is_busy:
            raise UsageError("a thread is inside the iterator", code="USAGE.OVERLAPPING_CALL",
                             hint="use an iterator from one thread at a time")
        self.has_entry = False
        self.database.unlink(&self.link)

    @property
    def is_closed(self):
        """Whether the iterator was closed, itself or with its database."""
        return self.link.iterator == NULL or self.database.is_closed

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()

    # -------------------------------------------------------------------------------------------- moving

    cdef int enter(self) except -1:
        """Begin to use RocksDB's iterator; nothing between this and `leave` may raise."""
        if self.is_busy:
            raise UsageError("two threads are inside one iterator", code="USAGE.OVERLAPPING_CALL",
                             hint="use an iterator from one thread at a time")
        if is_forked or self.database.db == NULL or self.database.is_closing:
            self.database.refuse()
        if self.link.iterator == NULL:
            raise ClosedError("the iterator is closed", detail=self.database.path, hint="make another")
        self.database.calls += 1
        self.is_busy = True
        return 0

    cdef int leave(self) except -1:
        """End it, and raise what the iterator complains about."""
        cdef char *error = NULL
        self.is_busy = False
        self.database.calls -= 1
        if not self.has_entry:
            api.iter_get_error(self.link.iterator, &error)
            if error != NULL:
                check(error, self.database.where("iterating"))
        return 0

    cdef void settle(self) noexcept nogil:
        """See where the iterator has come to."""
        self.has_entry = False
        if not api.iter_valid(self.link.iterator):
            return
        self.here = api.iter_key(self.link.iterator, &self.n_here)
        if self.low != NULL and compare(self.here, self.n_here, self.low, self.n_low) < 0:
            return
        if self.high != NULL and compare(self.here, self.n_here, self.high, self.n_high) >= 0:
            return
        if self.n_here < self.n_stem or self.n_stem and memcmp(self.here, self.stem, self.n_stem):
            return
        self.has_entry = True

    def seek(self, bytes key not None):
        """Go to the first key that is not below `key`; returns whether there is one. O(log entries)."""
        cdef const char *to = key
        cdef size_t n = len(key)
        if self.lower is not None and key < self.lower:
            to, n = self.lower, len(self.lower)
        self.enter()
        with nogil:
            api.iter_seek(self.link.iterator, to, n)
            self.settle()
        self.leave()
        return self.has_entry

    def seek_to_first(self):
        return self.seek(b"" if self.lower is None else self.lower)

    def next(self):
        if not self.has_entry:
            self.enter()
            self.leave()
            return False
        self.enter()
        with nogil:
            api.iter_next(self.link.iterator)
            self.settle()
        self.leave()
        return self.has_entry

    # ------------------------------------------------------------------------------------------- reading

    @property
    def is_valid(self):
        return self.has_entry and not self.is_closed

    def key(self):
        self._need_entry()
        return self.here[:self.n_here]

    def value(self):
        cdef size_t n
        cdef const char *data = self.value_here(&n)
        return data[:n]

    def _need_entry(self):
        if self.is_busy or self.link.iterator == NULL or self.database.db == NULL or is_forked:
            self.enter()              # raises
        if not self.has_entry:
            raise UsageError("the iterator stands on no entry", detail=self.database.path, hint="seek first")

    cdef const char *value_here(self, size_t *n) except NULL:
        """The value in place: good until the iterator moves."""
        self._need_entry()
        return api.iter_value(self.link.iterator, n)

    def __iter__(self):
        self.seek_to_first()
        while self.has_entry:
            yield self.key(), self.value()
            self.next()

    def read_many(self, Py_ssize_t rows, Py_ssize_t nbytes=1 << 24):
        """Read entries from here on: at most `rows`, and about as many bytes; the iterator goes behind them.

        Returns offsets and bytes of keys, and of values, as arrays, without an object for each; no rows at the end.
        """
        cdef Bytes keys, values
        cdef Py_ssize_t n = 0
        cdef const char *value
        cdef size_t size
        cdef bint is_done = True
        cdef int64_t[::1] key_end, value_end
        if rows < 1:
            raise UsageError("rows must be at least 1")
        key_ends = np.zeros(rows + 1, np.int64)
        value_ends = np.zeros(rows + 1, np.int64)
        key_end, value_end = key_ends, value_ends
        memset(&keys, 0, sizeof(keys))
        memset(&values, 0, sizeof(values))
        self.enter()
        with nogil:
            while self.has_entry and n < rows and <Py_ssize_t>(keys.size + values.size) < nbytes:
                value = api.iter_value(self.link.iterator, &size)
                is_done = append(&keys, self.here, self.n_here) and append(&values, value, size)
                if not is_done:
                    break
                n += 1
                key_end[n] = keys.size
                value_end[n] = values.size
                api.iter_next(self.link.iterator)
                self.settle()
        try:
            self.leave()
            if not is_done:
                raise MemoryError
            return (key_ends[:n + 1], array_of(keys.data, keys.size),
                    value_ends[:n + 1], array_of(values.data, values.size))
        finally:
            drop(&keys)
            drop(&values)
