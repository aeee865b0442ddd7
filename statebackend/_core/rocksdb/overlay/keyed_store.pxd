"""The reads and writes of a keyed backend: to the database, or to the batch in front of it.

    Store ---> Database          written to without a log, many rows at a time, in order
          `--> Overlay           written to and read first; a layer for each table
          place                  key group, key and namespace that are current, as composite keys have them
          changes                `KeyChanges` for each table: the changes of changed keys
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint64_t

from statebackend._core.rocksdb.binding.write_batch cimport Write
from statebackend._core.rocksdb.binding.buffers cimport Bytes
from statebackend._core.rocksdb.binding.database cimport ColumnFamily, Database, PinnedValue
from statebackend._core.rocksdb.overlay.key_changes cimport KeyChanges
from statebackend._core.rocksdb.overlay.overlay cimport Layer, Node, Overlay


cdef class Table:
    cdef readonly ColumnFamily family
    cdef readonly Layer layer            # the changes of the open batch
    cdef readonly Py_ssize_t number      # in `changes`; below 0: changes are not needed
    cdef readonly bint grows             # appended bytes stay as they are: note how many there are
    cdef readonly uint64_t version       # counts writes: checked by calls that have read ahead
    cdef readonly bint has_namespaces    # something was written in a namespace other than VOID


cdef class KeyedStore:
    cdef readonly Database database
    cdef readonly Overlay overlay
    cdef readonly list tables
    cdef readonly bint is_batched        # the overlay may have something; True while there is a mark
    cdef bint has_failed                 # some of the overlay could not be written: the next call tries again first
    cdef public uint64_t unmarked_keys   # so many changed without a mark are written; tests set less
    cdef uint64_t gathered               # bytes that were written without a mark since `flush`, at most
    cdef Bytes place
    cdef size_t key_end                  # of key group and key in it
    cdef Bytes scratch                   # the place and the bytes behind it
    cdef bint has_key
    cdef bint is_spaced                  # the current namespace is not VOID
    cdef object refuse                   # raises, for a call without a current key, or after closing
    cdef list changes                    # or None: not needed

    cdef int begin_place_of_int(self, uint16_t key_group, int64_t number) except -1
    cdef int begin_place_of_bytes(self, uint16_t key_group, const char *data, size_t n) except -1
    cdef int end_place(self, bytes namespace) except -1
    cdef int need_key(self) except -1
    cdef const char *key_here(self, size_t *n) except NULL
    cdef const char *entry_here(self, bint is_int, int64_t number, const char *data, size_t size,
                                size_t *n) except NULL
    cdef bint find(self, Table table, const char *key, size_t n, PinnedValue *found) except -1
    cdef object read(self, Table table, const char *key, size_t n)
    cdef int change(self, Table table, Write what, const char *key, size_t n, const char *value,
                    size_t size) except -1
    cdef int enter(self, Table table) except -1
    cdef KeyChanges noted_in(self, Table table)
    cdef bint find_in_database(self, Table table, const char *key, size_t n, PinnedValue *found) except -1
    cdef bint find_joined(self, Table table, const char *key, size_t n, Node *node, PinnedValue *found) except -1
    cdef int change_rows(self, Table table, Write what, const int64_t[::1] offsets, const uint8_t[::1] keys,
                         const int64_t[::1] value_offsets, const uint8_t[::1] values,
                         const uint8_t[::1] nulls) except -1
    cdef int flush_table(self, Table table) except -1
