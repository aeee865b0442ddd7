"""Writes that go into a database together.

Batches belong to a database, whose column families they name. They hold no memory of the database itself, so they may
outlive its closing; they only refuse to be used.
"""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t

from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.rocksdb.binding.database cimport ColumnFamily, Database, check_sizes
from statebackend._core.rocksdb.binding.library cimport api, check, is_forked, live, rocksdb_family_t

from statebackend.errors import UsageError


cdef object _overlap():
    return UsageError("two threads are inside one batch", code="USAGE.OVERLAPPING_CALL",
                      hint="use a batch from one thread at a time")


@cython.final
@cython.no_gc
cdef class WriteBatch:
    """Writes that go into the database together, or not at all; in the order in which they were added."""

    def __cinit__(self, Database database not None):
        database.enter()
        self.database = database
        self.batch = api.writebatch_create()
        database.leave()
        live.batches += 1

    def __dealloc__(self):
        if self.batch == NULL or is_forked:
            return
        api.writebatch_destroy(self.batch)
        live.batches -= 1

    cdef int begin(self) except -1:
        if self.is_busy:
            raise _overlap()
        if is_forked or self.database.db == NULL or self.database.is_closing:
            self.database.refuse()
        return 0

    cdef rocksdb_family_t *begin_with(self, ColumnFamily family) except NULL:
        if self.is_busy:
            raise _overlap()
        return self.database.handle_of(family)

    def __len__(self):
        self.begin()
        return api.writebatch_count(self.batch)

    @property
    def nbytes(self):
        """The bytes of the batch as it will be written."""
        cdef size_t n
        self.begin()
        api.writebatch_data(self.batch, &n)
        return n

    def put(self, ColumnFamily family not None, bytes key not None, bytes value not None):
        """Add: write the value of a key."""
        check_sizes(len(key), len(value))
        api.writebatch_put_cf(self.batch, self.begin_with(family), key, len(key), value, len(value))

    def merge(self, ColumnFamily family not None, bytes key not None, bytes operand not None):
        """Add: append elements to the list of a key."""
        check_sizes(len(key), len(operand))
        api.writebatch_merge_cf(self.batch, self.begin_with(family), key, len(key), operand, len(operand))

    def delete(self, ColumnFamily family not None, bytes key not None):
        """Add: remove a key."""
        check_sizes(len(key), 0)
        api.writebatch_delete_cf(self.batch, self.begin_with(family), key, len(key))

    def delete_range(self, ColumnFamily family not None, bytes start not None, bytes end not None):
        """Add: remove the keys from `start` up to `end`, which stays."""
        check_sizes(len(start), len(end))
        api.writebatch_delete_range_cf(self.batch, self.begin_with(family), start, len(start), end, len(end))

    def put_many(self, ColumnFamily family not None, const int64_t[::1] key_offsets not None,
                 const uint8_t[::1] keys not None, const int64_t[::1] value_offsets not None,
                 const uint8_t[::1] values not None):
        """Add: write the values of many keys, each cut out of the bytes by offsets, without an object for each."""
        _check_pairs(key_offsets, keys, value_offsets, values)
        self.add(family, WRITE_PUT, key_offsets, keys, value_offsets, values)

    def merge_many(self, ColumnFamily family not None, const int64_t[::1] key_offsets not None,
                   const uint8_t[::1] keys not None, const int64_t[::1] value_offsets not None,
                   const uint8_t[::1] values not None):
        """Add: append to the lists of many keys."""
        _check_pairs(key_offsets, keys, value_offsets, values)
        self.add(family, WRITE_MERGE, key_offsets, keys, value_offsets, values)

    def delete_many(self, ColumnFamily family not None, const int64_t[::1] key_offsets not None,
                    const uint8_t[::1] keys not None):
        """Add: remove many keys."""
        check_rows(key_offsets, keys, "keys")
        self.add(family, WRITE_DELETE, key_offsets, keys, key_offsets, keys)

    cdef int add(self, ColumnFamily family, Write what, const int64_t[::1] key_offsets, const uint8_t[::1] keys,
                 const int64_t[::1] value_offsets, const uint8_t[::1] values) except -1:
        cdef rocksdb_family_t *handle = self.begin_with(family)
        cdef const char *k = start_of(keys)
        cdef const char *v = start_of(values)
        cdef Py_ssize_t i, n = key_offsets.shape[0] - 1
        cdef size_t key_size, size
        self.database.enter()
        self.is_busy = True
        with nogil:
            for i in range(n):
                key_size = key_offsets[i + 1] - key_offsets[i]
                size = value_offsets[i + 1] - value_offsets[i]
                if what == WRITE_PUT:
                    api.writebatch_put_cf(self.batch, handle, k + key_offsets[i], key_size, v + value_offsets[i], size)
                elif what == WRITE_MERGE:
                    api.writebatch_merge_cf(self.batch, handle, k + key_offsets[i], key_size,
                                            v + value_offsets[i], size)
                else:
                    api.writebatch_delete_cf(self.batch, handle, k + key_offsets[i], key_size)
        self.is_busy = False
        self.database.leave()
        return 0

    def clear(self):
        self.begin()
        api.writebatch_clear(self.batch)

    def write(self, *, bint sync=False, bint wal=True):
        """Write all of it, and clear the batch. If that fails, nothing was written, and the batch is as it was.

        Then flushes, if the database has overdrawn its budget.
        """
        cdef char *error = NULL
        self.begin()
        self.database.enter()
        self.is_busy = True
        with nogil:
            api.write(self.database.db, self.database.how(sync, wal), self.batch, &error)
        self.is_busy = False
        self.database.leave()
        check(error, self.database.where("writing a batch"))
        api.writebatch_clear(self.batch)
        self.database.keep_to_budget()


cdef int _check_pairs(const int64_t[::1] key_offsets, const uint8_t[::1] keys, const int64_t[::1] value_offsets,
                      const uint8_t[::1] values) except -1:
    cdef Py_ssize_t i, n = check_rows(key_offsets, keys, "keys")
    if check_rows(value_offsets, values, "values") != n:
        raise UsageError("there are not as many values as keys")
    for i in range(n):
        check_sizes(key_offsets[i + 1] - key_offsets[i], value_offsets[i + 1] - value_offsets[i])
    return 0
