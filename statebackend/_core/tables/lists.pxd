"""Appending to lists and walking them; see `lists.pyx`."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.tables.cow_map cimport CoreKey, CowMap, ExpiringHead, Lane, ListChunk, ListHead, Table

cdef struct ListCursor:
    # Walks a list from its first live element. The chain of chunks leads backwards, so it is collected first.
    ListChunk **chunks
    uint32_t *used
    uint64_t n
    uint64_t at
    uint32_t element

cdef bint list_append(Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k, char *value,
                      int64_t timestamp) noexcept nogil
cdef bint list_extend(Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k, const char *elements,
                      uint64_t n, bint replace) noexcept nogil
cdef void refer_to_element(Table *table, char *element) noexcept nogil
cdef void drop_elements(Table *table, char *elements, uint64_t n) noexcept nogil
cdef void pass_expired(Table *table, ExpiringHead *head, int64_t ttl, int64_t now) noexcept nogil
cdef bint list_skip(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash,
                    ExpiringHead *to) noexcept nogil
cdef bint cursor_open(Table *table, ListHead *head, ListCursor *cursor) noexcept nogil
cdef char *cursor_next(Table *table, ListCursor *cursor) noexcept nogil
cdef void cursor_close(ListCursor *cursor) noexcept nogil
