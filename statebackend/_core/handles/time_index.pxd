"""Timers: a map state holds them, and a queue orders them by firing; see `time_index.pyx`."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport Budget
from statebackend._core.tables.cow_map cimport Anchor, CowMap, Table
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.map_handle cimport MapHandle
from statebackend._core.tables.map_table cimport MapTable

cdef enum:
    NODE_SHIFT = 10                      # nodes of a page: 24 KB
    PAGE_NODES = 1 << 10

cdef struct Node:
    int64_t time
    int64_t key                          # copied from the anchor, to be compared without reading it
    uint32_t anchor                      # of the key and namespace; the node holds a reference
    uint32_t tag                         # the low half of the entry's sequence number: the registration

cdef struct NodeArray:
    Node **pages
    uint32_t n_pages
    uint32_t capacity                    # of `pages`
    uint64_t size

cdef inline Node *node_at(NodeArray *array, uint64_t index) noexcept nogil:
    return array.pages[index >> NODE_SHIFT] + (index & (PAGE_NODES - 1))

cdef bint nodes_reserve(Budget *budget, NodeArray *array) noexcept nogil
cdef void nodes_shrink(Budget *budget, NodeArray *array) noexcept nogil
cdef void nodes_forget_page(Budget *budget, NodeArray *array) noexcept nogil
cdef void nodes_free(Budget *budget, NodeArray *array) noexcept nogil

cdef class TimerHandle(MapHandle):
    cdef NodeArray queue                 # a heap of four children each, the earliest first
    # Nodes taken off the queue while a mark was open, oldest first. Their `key` is the core's version at that time.
    cdef NodeArray dropped
    cdef uint64_t dropped_first          # nodes before it have been released
    cdef uint64_t rollbacks              # of the core, when `dropped` was last looked at
    cdef uint64_t cursor                 # where the search for stale nodes continues
    cdef readonly uint64_t fired
    cdef bint add_timer(self, int64_t time) except -1
    cdef bint drop_timer(self, int64_t time) except -1
    cdef bint comes_before(self, Node *a, Node *b) except -1
    cdef int sift_up(self, uint64_t index, Node node) except -1
    cdef int sift_down(self, uint64_t index, Node node) except -1
    cdef int push(self, MapTable map, uint32_t slot) except -1
    cdef int take_off(self, uint64_t index) except -1
    cdef Anchor *anchor_at(self, uint32_t ref) noexcept
    cdef MapTable map_of(self, Anchor *anchor)
    cdef uint32_t entry_of(self, Node *node) except? 0xFFFFFFFF
    cdef void let_go(self, Node *node) noexcept
    cdef int settle(self) except -1
    cdef int put_back(self) except -1
    cdef int let_go_of_some(self) except -1
    cdef int drop_stale(self) except -1
    cdef uint64_t live(self) noexcept
    cdef bint has_next(self) except -1
    cdef int ask_for_next(self) except -1
    cdef int forget_all(self) except -1
    cdef int visit_all(self, MapTable map, list rows, uint32_t first, uint32_t last) except -1

cdef class TimerIndex:
    cdef KeyContext context
    cdef TimerHandle event               # None before its first timer
    cdef TimerHandle processing
    cdef object make                     # callable(domain) -> TimerHandle
    cdef object check_time               # callable(timestamp) -> int
    cdef object check_domain             # callable(domain)
    cdef TimerHandle of(self, object domain, bint makes)
    cdef int64_t time_of(self, object timestamp) except? -1
    cdef int usable(self) except -1
