"""Timers: tables hold them, and a queue orders them by firing; see `time_index.pyx`."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport Budget
from statebackend._core.tables.cow_map cimport Table, entry_at, value_of
from statebackend._core.handles.handle cimport Handle
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.map_table_handle cimport MapTableHandle
from statebackend._core.tables.map_table cimport MapTable
from statebackend._core.tables.state_core cimport UndoNote

cdef enum:
    NODE_SHIFT = 10                      # nodes of a page: 24 KB
    PAGE_NODES = 1 << 10
    TICKET_SHIFT = 7                     # tickets of a page: 536 bytes
    PAGE_TICKETS = 1 << 7
    PUT_ASIDE = 0xFFFFFFFF               # in place of a place: the node is in the log
    NOT_QUEUED = 0x80000000              # this bit: the queue lacks the node
    IN_MAP = 0x80000000                  # this bit of a ticket: the timer is an entry of the map state

cdef struct Timer:
    # What the entry of a key and namespace holds: the only timer, or the first of those that there were at once.
    int64_t time
    uint32_t ticket

cdef inline Timer *timer_at(Table *table, uint32_t slot) noexcept nogil:
    return <Timer *>value_of(table, entry_at(table.core, slot))

cdef struct Node:
    int64_t time
    int64_t key                          # the number, or the blob, to be compared without reading an entry
    uint32_t owner                       # the number of the namespace; IN_MAP: the anchor of key and namespace
    uint32_t ticket                      # its own for as long as it is in the queue or the log; the entry has it too
    # The node holds a reference to the anchor. Without one, to the blob and to the number of the namespace.

cdef struct Record:
    # What has happened to a timer while a mark was open.
    Node node                            # that left the queue; of a registration only the ticket counts
    uint64_t marks                       # that had been opened by then, twice; and 1 more if the node left

cdef struct Pages:
    char **pages
    uint32_t n_pages
    uint32_t capacity                    # of `pages`
    uint64_t size                        # in nodes or records

cdef inline Node *node_at(Pages *array, uint64_t index) noexcept nogil:
    return <Node *>array.pages[index >> NODE_SHIFT] + (index & (PAGE_NODES - 1))

cdef inline Record *record_at(Pages *array, uint64_t index) noexcept nogil:
    return <Record *>array.pages[index >> NODE_SHIFT] + (index & (PAGE_NODES - 1))

cdef struct TicketPage:
    TicketPage *next                     # pages with room, the one in which a ticket was freed last first
    TicketPage *prev
    uint32_t number
    uint32_t used
    uint32_t fresh                       # tickets from here on were never used
    uint32_t freed                       # the first freed ticket, PAGE_TICKETS for none
    uint32_t places[128]                 # in the queue, or PUT_ASIDE; of a freed ticket NOT_QUEUED and the next one

cdef struct Tickets:
    # A place is noted when a node comes into the queue, sinks, or lets another one rise past it. Nodes that rise into
    # the gap of one that has gone note nothing. So a node is at the place that it noted last, or above it.
    TicketPage **pages                   # NULL where a page was given back
    uint32_t n_pages                     # the last one is there
    uint32_t capacity                    # of `pages`
    uint32_t lowest                      # no page below is missing
    TicketPage *with_room
    uint64_t used

cdef inline TicketPage *page_of(Tickets *tickets, uint32_t ticket) noexcept nogil:
    return tickets.pages[(ticket & ~<uint32_t>IN_MAP) >> TICKET_SHIFT]

cdef inline uint32_t *place_of(Tickets *tickets, uint32_t ticket) noexcept nogil:
    """Where a ticket's node was in the queue when it last noted that; of a ticket in use only."""
    return &page_of(tickets, ticket).places[ticket & (PAGE_TICKETS - 1)]

cdef bint tickets_reserve(Budget *budget, Tickets *tickets) noexcept nogil
cdef uint32_t ticket_take(Tickets *tickets) noexcept nogil
cdef void ticket_give(Budget *budget, Tickets *tickets, uint32_t ticket) noexcept nogil
cdef uint32_t place_in_queue(Tickets *tickets, Pages *queue, uint32_t ticket) noexcept nogil
cdef void tickets_free(Budget *budget, Tickets *tickets) noexcept nogil

cdef class TimerHandle(Handle):
    cdef object make_more                # callable() -> MapTableHandle
    cdef readonly MapTableHandle more    # timers of keys that had one already; None before the first of those
    cdef Pages queue                     # nodes: a heap of four children each, the earliest first
    cdef Tickets tickets
    cdef Pages log                       # records, oldest first
    cdef uint64_t log_first              # records before it have been let go of
    cdef uint64_t complete_since         # the log tells of everything since this number of marks had been opened
    cdef UndoNote undone
    cdef bint is_noted                   # the core knows `undone`
    cdef readonly uint64_t fired
    cdef bint add_timer(self, int64_t time) except -1
    cdef bint add_more(self, int64_t time) except -1
    cdef bint is_in_more(self, int64_t time) noexcept
    cdef bint drop_timer(self, int64_t time) except -1
    cdef bint drop_more(self, int64_t time) except -1
    cdef object take_due(self, int64_t now)
    cdef bytes name_of(self, Node *node)
    cdef bint comes_before(self, Node *a, Node *b) except -1
    cdef uint64_t first_of(self, uint64_t first, uint64_t last) except 0
    cdef int sift_up(self, uint64_t index, int64_t time, int64_t key, uint32_t owner, uint32_t ticket) except -1
    cdef int sift_down(self, uint64_t index, Node node) except -1
    cdef int push(self, Table *table, uint32_t slot) except -1
    cdef int push_more(self, MapTable map, uint32_t slot) except -1
    cdef int take_out(self, uint64_t index) except -1
    cdef int retire(self, uint64_t index) except -1
    cdef int reserve_node(self) except -1
    cdef int reserve_record(self) except -1
    cdef int note_registration(self, uint32_t ticket) except -1
    cdef uint32_t namespace_of_node(self, Node *node) noexcept
    cdef uint32_t group_of_node(self, Node *node) noexcept
    cdef Table *heads_of(self, uint32_t namespace) noexcept
    cdef MapTable map_of(self, uint32_t namespace)
    cdef uint32_t entry_of(self, Node *node) except? 0xFFFFFFFF
    cdef void let_go(self, Node *node) noexcept
    cdef void let_go_record(self, Record *record) noexcept
    cdef void let_go_all(self) noexcept
    cdef int settle(self) except -1
    cdef int follow_rollback(self) except -1
    cdef int reverse(self, Record record) except -1
    cdef int trim_log(self) except -1
    cdef uint64_t live(self) noexcept
    cdef bint has_next(self) except -1
    cdef void ask_for(self, Node *node, bint entry) noexcept
    cdef int forget_all(self) except -1
    cdef int visit_all(self, list rows, uint32_t first, uint32_t last) except -1
    cdef int visit(self, Table *table, MapTable map, list rows, uint32_t first, uint32_t last) except -1
    cdef object canonical_key(self, int64_t key)
    cdef list pending(self)

cdef class TimerIndex:
    cdef KeyContext context
    cdef TimerHandle event               # None before its first timer
    cdef TimerHandle processing
    cdef object make                     # callable(domain) -> TimerHandle
    cdef object check_time               # callable(timestamp) -> int
    cdef object check_domain             # callable(domain)
    cdef TimerHandle of(self, object domain, bint makes)
    cdef int64_t time_of(self, object timestamp) except? -1
    cdef int usable_core(self) except -1
    cdef int usable(self) except -1
    cdef int add(self, TimerHandle handle, object timestamp, object domain) except -1
    cdef int drop(self, TimerHandle handle, object timestamp) except -1
