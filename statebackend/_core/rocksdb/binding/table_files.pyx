"""Files of rows, made next to the database and taken in whole: for many rows that were not read or written yet.

Put rows go through a memtable, a file of the first level, and the compactions below. Rows that are in order can
are in a file of the last level from the beginning, if no others of these keys are there.
"""

import os

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.rocksdb.binding.database cimport ColumnFamily, Database
from statebackend._core.rocksdb.binding.library cimport (
    api, check, is_forked, live, need_library, rocksdb_environment_t, rocksdb_family_t, rocksdb_file_writer_t,
    rocksdb_ingest_t,
)
from statebackend._core.rocksdb.binding.database_options cimport Options

from statebackend.errors import UsageError


@cython.final
cdef class TableFile:
    """A new file at `path`, to which rows are added in order of their keys; `options` are the family's.

    One thread at a time uses it. After an error, and if it is not finished, a part of the file may be there.
    """

    cdef readonly object path
    cdef readonly bytes last          # the last key; None at first
    cdef rocksdb_environment_t *environment
    cdef rocksdb_file_writer_t *writer
    cdef Options options              # the writer has its address

    def __init__(self, path not None, Options options not None):
        cdef char *error = NULL
        cdef bytes encoded = os.fsencode(path)
        cdef const char *name = encoded
        need_library()
        if self.writer != NULL:
            raise UsageError("a file is begun once")
        self.path, self.options = path, options
        with nogil:
            self.environment = api.envoptions_create()
            self.writer = api.sstfilewriter_create(self.environment, options.options)
            api.sstfilewriter_open(self.writer, name, &error)
        live.table_files += 1
        check(error, f"writing {os.fsdecode(path)}")

    def __dealloc__(self):
        if self.writer == NULL or is_forked:
            return
        api.sstfilewriter_destroy(self.writer)
        api.envoptions_destroy(self.environment)
        live.table_files -= 1

    def add(self, const int64_t[::1] offsets not None, const uint8_t[::1] keys not None,
            const int64_t[::1] value_offsets not None, const uint8_t[::1] values not None,
            const int64_t[::1] order not None):
        """Add rows, taken in this order. Their keys must ascend, and lie above the last one."""
        cdef char *error = NULL
        cdef const char *k = start_of(keys)
        cdef const char *v = start_of(values)
        cdef Py_ssize_t i, n = check_rows(offsets, keys, "keys"), count = order.shape[0]
        cdef int64_t row = 0
        if check_rows(value_offsets, values, "values") != n:
            raise UsageError("there are not as many values as keys")
        for i in range(count):
            if not 0 <= order[i] < n:
                raise UsageError("the order names a row that is not there")
        need_library()
        with nogil:
            for i in range(count):
                row = order[i]
                api.sstfilewriter_put(self.writer, k + offsets[row], offsets[row + 1] - offsets[row],
                                      v + value_offsets[row], value_offsets[row + 1] - value_offsets[row], &error)
                if error != NULL:
                    break
        check(error, f"writing {os.fsdecode(self.path)}")
        if count:
            self.last = k[offsets[row]:offsets[row + 1]]

    @property
    def size(self):
        cdef uint64_t found = 0
        need_library()
        api.sstfilewriter_file_size(self.writer, &found)
        return found

    def finish(self):
        """Write what is left, and make the file durable. It needs a row."""
        cdef char *error = NULL
        need_library()
        with nogil:
            api.sstfilewriter_finish(self.writer, &error)
        check(error, f"writing {os.fsdecode(self.path)}")


def ingest(ColumnFamily family not None, path not None):
    """Take a file into a column family, as the newest rows there; it is moved into the database.

    Memtables that have keys between its first and its last are flushed before.
    """
    cdef char *error = NULL
    cdef rocksdb_ingest_t *options
    cdef Database database = family.database
    cdef rocksdb_family_t *handle = database.handle_of(family)
    cdef bytes encoded = os.fsencode(path)
    cdef const char *name = encoded
    database.enter()
    with nogil:
        options = api.ingestexternalfileoptions_create()
        api.ingestexternalfileoptions_set_move_files(options, True)
        api.ingest_external_file_cf(database.db, handle, &name, 1, options, &error)
        api.ingestexternalfileoptions_destroy(options)
    database.leave()
    check(error, database.where(f"taking a file into column family {family.name!r}"))
