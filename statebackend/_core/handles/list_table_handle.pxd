"""The handle of list states; see `list_table_handle.pyx`."""

from libc.stdint cimport int64_t, uint64_t

from statebackend._core.tables.cow_map cimport ListHead
from statebackend._core.handles.handle cimport Handle
from statebackend._core.tables.lists cimport ListCursor

cdef class ListTableHandle(Handle):
    cdef uint64_t iterators              # that are open
    cdef ListHead *head(self) noexcept
    cdef int open_cursor(self, ListHead *head, ListCursor *cursor) except -1
    cdef list raw_elements(self, bint all, list found)
    cdef int put_elements(self, char *elements, uint64_t n, bint replace) except -1
    cdef int store_given(self, object values, bint replace) except -1
    cdef int store_all(self, list values, bint replace) except -1
    cdef char *living_elements(self, bint renews, uint64_t *n) except? NULL
    cdef bint all_expired(self) except -1
    cdef list read_last(self, list found, uint64_t n)
    cdef list read_list(self, list found)
    cdef list all_finished(self, list found)
