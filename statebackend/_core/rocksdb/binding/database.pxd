"""A database: its handles, the threads inside it, and the objects that must go before it.

    Database ---> rocksdb_t
       |  ^  `--> Family ---> Family ---> ...     a handle of each column family; lives as long as the Database
       |  |         ^
       |  ColumnFamily (Python)
       |
       +--> Link <---> Link ...                   an iterator each, that is still open
              |
            Iterator (Python) ---> Database

Python objects hold the Database, never the other way round: so cycles cannot form. Closing destroys the objects that
RocksDB wants gone first: iterators, then family handles, then the database. Their holders then find NULL.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t

from statebackend._core.rocksdb.binding.library cimport (
    rocksdb_family_t, rocksdb_iterator_t, rocksdb_read_t, rocksdb_slice_t, rocksdb_t,
    rocksdb_write_t,
)
from statebackend._core.rocksdb.binding.database_options cimport MemoryBudget

cdef struct Family:
    rocksdb_family_t *handle          # NULL once the database is closed, or a dropped one is not needed any more
    bint is_dropped
    Family *next

cdef struct Link:
    rocksdb_iterator_t *iterator      # NULL once it is destroyed
    rocksdb_read_t *options           # of the iterator, which reads its bounds there
    Family *family
    bint is_linked
    Link *next
    Link *previous

cdef struct PinnedValue:
    rocksdb_slice_t *slice            # of the block cache, or NULL
    char *own                         # from malloc, or NULL
    const char *data
    size_t size


cdef class Database:
    cdef object __weakref__
    cdef rocksdb_t *db                # NULL once closed
    cdef Family *families
    cdef Link *links
    cdef rocksdb_read_t *reads
    cdef rocksdb_write_t *writes[4]   # by sync + 2 * without WAL
    cdef int calls                    # threads inside RocksDB, each of which holds this object
    cdef int pins                     # values that are read in place
    cdef bint is_closing
    cdef readonly str path
    cdef MemoryBudget budget          # or None
    cdef dict names                   # of column families: the addresses of their Family

    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    cdef str where(self, str doing)
    cdef int keep_to_budget(self) except -1
    cdef rocksdb_family_t *handle_of(self, ColumnFamily family) except NULL
    cdef rocksdb_write_t *how(self, bint sync, bint wal) noexcept nogil
    cdef bint pin(self, ColumnFamily family, const char *key, size_t n, PinnedValue *found) except -1
    cdef void unpin(self, PinnedValue *found) noexcept
    cdef void link(self, Link *link) noexcept
    cdef void unlink(self, Link *link) noexcept
    cdef void drop_iterators(self, Family *family) noexcept
    cdef int refuse(self) except -1
    cdef void close_at_exit(self) noexcept
    cdef void close_now(self) noexcept
    cdef object background_errors(self)
    cdef int raise_background_error(self, str doing) except -1
    cdef void reap(self) noexcept
    cdef Family *add_family(self, rocksdb_family_t *handle) except NULL


cdef object array_of(const char *data, size_t size)
cdef int check_sizes(Py_ssize_t n, Py_ssize_t size) except -1


cdef class ColumnFamily:
    cdef readonly Database database
    cdef readonly str name
    cdef Family *family
