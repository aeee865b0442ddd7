"""Timers of one domain: the registered ones, and the one that is due next.

    MapHandle: key, namespace -> {time}             queue: a heap in the order of (time, key, namespace)
    +--------+      +-------+   +-------+           +------------------------------+
    | head   |----->| time  |<->| time  |           | time, key | anchor | ticket  |  24 bytes, in pages
    +--------+      +-------+   +-------+           +------------------------------+
         |  anchor      | ticket                       ^                     |
         |              v                              |                     v
         |          +-------------------------------------------------------------+
         |          | places: of each ticket, where its node is in the queue, or  |
         |          | where it was before it rose                                 |
         |          +-------------------------------------------------------------+
         +--- every node holds a reference

The set is an ordinary map state of the backend, so timers are journalled, rolled back, written to checkpoints,
restored and rescaled like state. The queue only orders them: it has one node for each timer, and no others. The entry
and the node have the same ticket, which leads from one to the other. So a deleted timer takes its node along, wherever
that is.

A rollback changes the set behind the queue's back. So while a mark is open, the queue keeps a log of its own: of each
registration its ticket, and each node that left the queue, with its ticket and its reference to the anchor, so that
meanwhile the anchor's number names no other key. After a rollback, the log is reversed down to the mark. Records that
are older than the oldest open mark are let go of, a few in each call.

No call costs more than O(log timers), except the one that reverses: it costs as much as the rollback.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove, memset

from statebackend._core.memory.arena cimport Blob, Budget, address, blob_data, raw_alloc, raw_free
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, Entry, Table, Walk, before_operation, begin_walk, drop_anchor, entry_at, find_int,
    hash_int_key, namespace_of, next_entry, wait_for_others)
from statebackend._core.codecs.objects cimport long_as_int64
from statebackend._core.handles.key_context cimport TIME_OF_CLOCK, TIME_OF_SYSTEM, KeyContext
from statebackend._core.handles.look_ahead cimport ask_for_bucket, ask_for_entry
from statebackend._core.handles.map_handle cimport MapHandle
from statebackend._core.tables.map_table cimport MapTable, insert_threaded
from statebackend._core.memory.platform cimport likely, prefetch, unlikely
from statebackend._core.tables.state_core cimport NOT_UNDONE

cdef extern from "Python.h":
    bint PyLong_CheckExact(object o)

cdef enum:
    SPARE_PAGES = 2                      # kept when the queue shrinks
    LET_GO_PER_OPERATION = 8


# --- nodes in pages ------------------------------------------------------------------------------------------------

cdef bint nodes_reserve(Budget *budget, NodeArray *array) noexcept nogil:
    """Make room for one node more; False without memory."""
    cdef Node **pages
    cdef uint32_t capacity
    if likely(array.size < <uint64_t>array.n_pages << NODE_SHIFT):
        return True
    if array.n_pages == array.capacity:
        capacity = 2 * array.capacity if array.capacity else 4
        pages = <Node **>raw_alloc(budget, capacity * sizeof(Node *))
        if pages == NULL:
            return False
        if array.pages != NULL:
            memcpy(pages, array.pages, array.n_pages * sizeof(Node *))
            raw_free(budget, array.pages, array.capacity * sizeof(Node *))
        array.pages = pages
        array.capacity = capacity
    array.pages[array.n_pages] = <Node *>raw_alloc(budget, PAGE_NODES * sizeof(Node))
    if array.pages[array.n_pages] == NULL:
        return False
    array.n_pages += 1
    return True


cdef void nodes_shrink(Budget *budget, NodeArray *array) noexcept nogil:
    """Give a page back if more than two are unused."""
    if unlikely(array.size + (SPARE_PAGES << NODE_SHIFT) < <uint64_t>array.n_pages << NODE_SHIFT):
        array.n_pages -= 1
        raw_free(budget, array.pages[array.n_pages], PAGE_NODES * sizeof(Node))


cdef void nodes_forget_page(Budget *budget, NodeArray *array) noexcept nogil:
    """Forget the first page, with all of its nodes. O(pages)."""
    raw_free(budget, array.pages[0], PAGE_NODES * sizeof(Node))
    array.n_pages -= 1
    array.size -= PAGE_NODES
    memmove(array.pages, array.pages + 1, array.n_pages * sizeof(Node *))


cdef void nodes_free(Budget *budget, NodeArray *array) noexcept nogil:
    while array.n_pages:
        array.n_pages -= 1
        raw_free(budget, array.pages[array.n_pages], PAGE_NODES * sizeof(Node))
    raw_free(budget, array.pages, array.capacity * sizeof(Node *))
    memset(array, 0, sizeof(NodeArray))


# --- tickets -------------------------------------------------------------------------------------------------------

cdef void link_page(Tickets *tickets, TicketPage *page) noexcept nogil:
    page.prev = NULL
    page.next = tickets.with_room
    if page.next != NULL:
        page.next.prev = page
    tickets.with_room = page


cdef void unlink_page(Tickets *tickets, TicketPage *page) noexcept nogil:
    if page.prev != NULL:
        page.prev.next = page.next
    else:
        tickets.with_room = page.next
    if page.next != NULL:
        page.next.prev = page.prev
    page.next = page.prev = NULL


cdef bint resize_directory(Budget *budget, Tickets *tickets, uint32_t capacity) noexcept nogil:
    cdef TicketPage **pages = <TicketPage **>raw_alloc(budget, capacity * sizeof(TicketPage *))
    if pages == NULL:
        return False
    if tickets.pages != NULL:
        memcpy(pages, tickets.pages, tickets.n_pages * sizeof(TicketPage *))
        raw_free(budget, tickets.pages, tickets.capacity * sizeof(TicketPage *))
    tickets.pages = pages
    tickets.capacity = capacity
    return True


cdef bint tickets_reserve(Budget *budget, Tickets *tickets) noexcept nogil:
    """Make room for one ticket more; False without memory."""
    cdef TicketPage *page
    if likely(tickets.with_room != NULL):
        return True
    while tickets.lowest < tickets.n_pages and tickets.pages[tickets.lowest] != NULL:
        tickets.lowest += 1
    if tickets.lowest == tickets.capacity:
        if not resize_directory(budget, tickets, 2 * tickets.capacity if tickets.capacity else 4):
            return False
    page = <TicketPage *>raw_alloc(budget, sizeof(TicketPage))
    if page == NULL:
        return False
    page.number = tickets.lowest
    page.used = page.fresh = 0
    page.freed = PAGE_TICKETS
    tickets.pages[page.number] = page
    if page.number == tickets.n_pages:
        tickets.n_pages += 1
    link_page(tickets, page)
    return True


cdef uint32_t ticket_take(Tickets *tickets) noexcept nogil:
    """A ticket that nobody has; there must be room."""
    cdef TicketPage *page = tickets.with_room
    cdef uint32_t which = page.freed
    if which != PAGE_TICKETS:
        page.freed = page.places[which] & ~<uint32_t>NOT_QUEUED
    else:
        which = page.fresh
        page.fresh += 1
    page.used += 1
    tickets.used += 1
    if page.used == PAGE_TICKETS:
        unlink_page(tickets, page)
    return (page.number << TICKET_SHIFT) + which


cdef void ticket_give(Budget *budget, Tickets *tickets, uint32_t ticket) noexcept nogil:
    """Take a ticket back. An empty page goes if another one has room."""
    cdef TicketPage *page = tickets.pages[ticket >> TICKET_SHIFT]
    cdef uint32_t which = ticket & (PAGE_TICKETS - 1)
    page.places[which] = <uint32_t>NOT_QUEUED | page.freed
    page.freed = which
    if page.used == PAGE_TICKETS:
        link_page(tickets, page)
    page.used -= 1
    tickets.used -= 1
    if page.used == 0 and (page.next != NULL or page.prev != NULL):
        unlink_page(tickets, page)
        tickets.pages[page.number] = NULL
        if page.number < tickets.lowest:
            tickets.lowest = page.number
        raw_free(budget, page, sizeof(TicketPage))
        while tickets.pages[tickets.n_pages - 1] == NULL:
            tickets.n_pages -= 1
        if 8 < tickets.capacity and tickets.n_pages < tickets.capacity >> 2:
            resize_directory(budget, tickets, tickets.capacity >> 1)     # without memory, the next time


cdef uint32_t place_in_queue(Tickets *tickets, NodeArray *queue, uint32_t ticket) noexcept nogil:
    """Where a ticket's node is in the queue, whatever the ticket; NOT_QUEUED if it is not there. O(log nodes)."""
    cdef uint32_t place
    if (ticket >> TICKET_SHIFT) >= tickets.n_pages or tickets.pages[ticket >> TICKET_SHIFT] == NULL \
            or (ticket & (PAGE_TICKETS - 1)) >= tickets.pages[ticket >> TICKET_SHIFT].fresh:
        return NOT_QUEUED
    place = place_of(tickets, ticket)[0]
    if place & <uint32_t>NOT_QUEUED:
        return NOT_QUEUED
    while place >= queue.size or node_at(queue, place).ticket != ticket:
        if place == 0:
            return NOT_QUEUED
        place = (place - 1) >> 2
    return place


cdef void tickets_free(Budget *budget, Tickets *tickets) noexcept nogil:
    cdef uint32_t i
    for i in range(tickets.n_pages):
        raw_free(budget, tickets.pages[i], sizeof(TicketPage))
    raw_free(budget, tickets.pages, tickets.capacity * sizeof(TicketPage *))
    memset(tickets, 0, sizeof(Tickets))


cdef inline uint32_t *ticket_of(Table *table, Entry *entry) noexcept nogil:
    """The ticket of a timer's entry: it fills the gap between the anchor's number and the thread."""
    return <uint32_t *>(<char *>entry + table.layout.off_namespace + 4)


# --- timers --------------------------------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear                      # nodes hold references into the core
cdef class TimerHandle(MapHandle):
    """The timers of one domain: a map state whose keys are times."""

    def __init__(self, *arguments, **options):
        MapHandle.__init__(self, *arguments, **options)
        if not self.is_noted:
            self.core.keep_note(&self.undone)
            self.is_noted = True
            self.complete_since = self.core.marks_opened

    def __dealloc__(self):
        cdef uint64_t i
        if self.core is None:
            return
        if self.is_noted:
            self.core.forget_note(&self.undone)
        if not self.core.closed:
            for i in range(self.queue.size):
                self.let_go(node_at(&self.queue, i))
            for i in range(self.log_first, self.log.size):
                self.let_go(node_at(&self.log, i))
        nodes_free(&self.core.arena.budget, &self.queue)
        nodes_free(&self.core.arena.budget, &self.log)
        tickets_free(&self.core.arena.budget, &self.tickets)

    cdef int adopt_table(self, object made, bint is_spaced) except -1:
        cdef MapTable map = made
        cdef Table *table = map.entries.table
        assert table.layout.off_thread >= table.layout.off_namespace + 8, "no room for tickets"
        return MapHandle.adopt_table(self, made, is_spaced)

    # --- the set ---

    cdef bint add_timer(self, int64_t time, object given) except -1:
        """Register a timer of the current key and namespace; return True if it is new. `given` is the user's time."""
        cdef CoreKey inner
        cdef MapTable map
        cdef Table *heads
        cdef Table *table
        cdef CowMap *entries
        cdef Node *record
        cdef uint32_t slot = 0
        self.settle()
        if self.stamp != self.core.calls:
            self.find_here()
        self.expect_after(given)
        self.make_map()                  # which may run Python; nothing below does
        memset(&inner, 0, sizeof(CoreKey))
        inner.number = time
        if self.find_entry(&inner):
            return False
        if unlikely(self.undone.mark != NOT_UNDONE):
            self.follow_rollback()
        self.reserve_node()
        self.reserve_record()
        map = self.map_here()
        heads, table = self.table, map.entries.table
        inner.group = self.context.key.group
        entries = map.entries.map_for(inner.group)
        if before_operation(&heads.lane, heads, self.map) and before_operation(&table.lane, table, entries):
            slot = insert_threaded(&heads.lane, heads, self.map, &self.context.key, self.slot, &table.lane, table,
                                   entries, &inner)
        self.core.calls += 1
        if slot == 0:
            self.no_memory()
        self.push(map, slot)
        if self.core.core.journal_version:
            record = node_at(&self.log, self.log.size)
            record.time = time
            record.key = self.core.marks_opened
            record.anchor = 0
            record.ticket = ticket_of(table, entry_at(table.core, slot))[0]
            self.log.size += 1
        return True

    cdef bint drop_timer(self, int64_t time) except -1:
        """Delete a timer of the current key and namespace; return True if it existed."""
        cdef CoreKey inner
        cdef Table *table
        cdef uint32_t slot, place
        self.settle()
        if self.stamp != self.core.calls:
            self.find_here()
        memset(&inner, 0, sizeof(CoreKey))
        inner.number = time
        slot = self.find_entry(&inner)
        if slot == 0:
            return False
        if unlikely(self.undone.mark != NOT_UNDONE):     # by a finaliser
            self.follow_rollback()
        table = self.map_here().entries.table
        place = place_in_queue(&self.tickets, &self.queue, ticket_of(table, entry_at(table.core, slot))[0])
        self.reserve_record()
        self.remove_entry(&inner, slot, False)
        if likely(place != <uint32_t>NOT_QUEUED):        # it is there, unless a rollback has stopped halfway
            self.retire(place)
        return True

    # --- firing ---

    def next_time(self):
        """The time of the next timer of any key, or None. O(1)."""
        return node_at(&self.queue, 0).time if self.has_next() else None

    cdef bint has_next(self) except -1:
        self.settle()
        return self.queue.size != 0

    def take_due(self, int64_t now):
        """Take the next timer that is due, and make its key and namespace current; its time, or None. O(log timers)."""
        cdef Node node
        cdef Anchor *anchor
        cdef CoreKey at
        cdef CoreKey inner
        cdef object owner = None
        cdef int64_t clock = 0
        cdef uint64_t turn
        cdef uint32_t slot = 0
        cdef Blob *blob
        if not self.has_next() or node_at(&self.queue, 0).time > now:
            return None
        if self.context.time_source == TIME_OF_CLOCK:
            clock = self.context.read_clock(self.context.clock)
        while slot == 0:
            if not self.has_next() or node_at(&self.queue, 0).time > now:   # a clock may do anything
                return None
            node = node_at(&self.queue, 0)[0]
            anchor = self.anchor_at(node.anchor)
            self.ask_for_entries(&node, anchor)
            memset(&at, 0, sizeof(CoreKey))
            if self.context.codec.is_int:
                at.number = anchor.key
            else:
                blob = <Blob *>anchor.key
                owner = self.context.codec.split_canonical(PyBytes_FromStringAndSize(blob_data(blob), blob.length), &at)
            at.group = anchor.group
            self.context.number_namespace(anchor.namespace)
            self.context.adopt(&at, owner)
            turn = self.context.turn
            self.find_here()             # reclaims, which may run finalisers: they may register and delete timers
            if self.context.turn == turn and self.undone.mark == NOT_UNDONE and self.queue.size and (
                    memcmp(node_at(&self.queue, 0), &node, sizeof(Node)) == 0):
                memset(&inner, 0, sizeof(CoreKey))
                inner.number = node.time
                slot = self.find_entry(&inner)
                self.reserve_record()
                if unlikely(slot == 0):  # a rollback has stopped halfway
                    self.retire(0)
        if self.context.time_source == TIME_OF_CLOCK:
            self.context.begin_at(clock)
        elif self.context.time_source == TIME_OF_SYSTEM:
            self.context.now_known = False
        self.remove_entry(&inner, slot, False)
        self.retire(0)
        self.ask_for_next()
        self.fired += 1
        return node.time

    cdef void ask_for_entries(self, Node *node, Anchor *anchor) noexcept:
        """Prefetch the entry of a timer and that of its key, both at once. Their buckets have been asked for."""
        cdef Table *table = self.map_of(anchor).entries.table
        ask_for_entry(table, anchor.group, hash_int_key(table, node.time, node.anchor))
        if self.context.codec.is_int:
            table = table.anchors
            ask_for_entry(table, anchor.group, hash_int_key(table, anchor.key, anchor.namespace))

    cdef int ask_for_next(self) except -1:
        """Prefetch the data of the next timer, while this one's function runs."""
        cdef Node *node
        cdef Anchor *anchor
        cdef Table *table
        cdef uint64_t child
        cdef uint32_t hash
        if self.queue.size == 0:
            return 0
        node = node_at(&self.queue, 0)
        anchor = self.anchor_at(node.anchor)     # prefetched below, unless it was the last to rise
        table = self.map_of(anchor).entries.table
        hash = hash_int_key(table, node.time, node.anchor)
        ask_for_bucket(table, anchor.group, hash)
        if self.context.codec.is_int:
            ask_for_bucket(self.map_of(anchor).heads.table, anchor.group,
                           hash_int_key(table, anchor.key, anchor.namespace))
        for child in range(1, 5 if self.queue.size > 4 else self.queue.size):
            node = node_at(&self.queue, child)
            prefetch(self.anchor_at(node.anchor))
            prefetch(self.tickets.pages[node.ticket >> TICKET_SHIFT])
            prefetch(place_of(&self.tickets, node.ticket))
        return 0

    # --- the queue ---

    cdef bint comes_before(self, Node *a, Node *b) except -1:
        cdef Blob *first
        cdef Blob *second
        cdef uint64_t common
        cdef int order
        cdef list names
        if likely(a.time != b.time):
            return a.time < b.time
        if a.anchor == b.anchor:
            return False
        if self.context.codec.is_int:
            if a.key != b.key:
                return a.key < b.key
        else:
            first, second = <Blob *>a.key, <Blob *>b.key
            common = first.length if first.length < second.length else second.length
            order = memcmp(blob_data(first), blob_data(second), common)
            if order or first.length != second.length:
                return order < 0 if order else first.length < second.length
        names = self.core.namespaces.names
        return <bytes>names[self.anchor_at(a.anchor).namespace] < <bytes>names[self.anchor_at(b.anchor).namespace]

    cdef int sift_up(self, uint64_t index, int64_t time, int64_t key, uint32_t anchor, uint32_t ticket) except -1:
        """Let a node rise from a free place to its own.

        It comes field by field: a processor that loads a whole node which was just stored in parts waits for all stores
        before it.
        """
        cdef uint64_t parent
        cdef Node node
        cdef Node *other
        while index:
            parent = (index - 1) >> 2
            other = node_at(&self.queue, parent)
            if time > other.time:
                break
            if unlikely(time == other.time):
                node.time, node.key, node.anchor, node.ticket = time, key, anchor, ticket
                if not self.comes_before(&node, other):
                    break
            node_at(&self.queue, index)[0] = other[0]
            place_of(&self.tickets, other.ticket)[0] = <uint32_t>index
            index = parent
        other = node_at(&self.queue, index)
        other.time, other.key, other.anchor, other.ticket = time, key, anchor, ticket
        place_of(&self.tickets, ticket)[0] = <uint32_t>index
        return 0

    cdef int sift_down(self, uint64_t index, Node node) except -1:
        """Let a node sink from a free place to its own. What rises for it does not note that: see `Tickets`."""
        cdef uint64_t child, first, last
        cdef Node *other
        while True:
            first = 4 * index + 1
            if first >= self.queue.size:
                break
            last = first + 4 if first + 4 < self.queue.size else self.queue.size
            if 4 * first + 1 < self.queue.size:
                prefetch(node_at(&self.queue, 4 * first + 1))
            child = first
            for first in range(first + 1, last):
                if self.comes_before(node_at(&self.queue, first), node_at(&self.queue, child)):
                    child = first
            other = node_at(&self.queue, child)
            if not self.comes_before(other, &node):
                break
            node_at(&self.queue, index)[0] = other[0]
            index = child
        node_at(&self.queue, index)[0] = node
        place_of(&self.tickets, node.ticket)[0] = <uint32_t>index
        return 0

    cdef int reserve_node(self) except -1:
        """Make room for a node and its ticket."""
        if unlikely(not nodes_reserve(&self.core.arena.budget, &self.queue)
                    or not tickets_reserve(&self.core.arena.budget, &self.tickets)):
            self.no_memory()
        return 0

    cdef int reserve_record(self) except -1:
        """Make room for a record, if a mark is open."""
        if self.core.core.journal_version and not nodes_reserve(&self.core.arena.budget, &self.log):
            self.no_memory()
        return 0

    cdef int push(self, MapTable map, uint32_t slot) except -1:
        """Queue the timer of an entry; there must be room."""
        cdef Table *table = map.entries.table
        cdef Entry *entry = entry_at(table.core, slot)
        cdef uint32_t ref = namespace_of(table, entry), ticket = ticket_take(&self.tickets)
        cdef Anchor *anchor = self.anchor_at(ref)
        ticket_of(table, entry)[0] = ticket
        anchor.refs += 1
        self.queue.size += 1
        return self.sift_up(self.queue.size - 1, entry.key, anchor.key, ref, ticket)

    cdef int retire(self, uint64_t index) except -1:
        """Take the node of a removed timer off the queue; into the log while a mark is open. There must be room."""
        cdef Node node = node_at(&self.queue, index)[0]
        if self.core.core.journal_version:
            place_of(&self.tickets, node.ticket)[0] = PUT_ASIDE
            node.key = self.core.marks_opened
            node_at(&self.log, self.log.size)[0] = node
            self.log.size += 1
        else:
            self.let_go(&node)
        return self.take_out(index)

    cdef int take_out(self, uint64_t index) except -1:
        """Close the gap of a node that leaves the queue."""
        cdef Node last
        self.queue.size -= 1
        last = node_at(&self.queue, self.queue.size)[0]
        if index < self.queue.size:
            if index and self.comes_before(&last, node_at(&self.queue, (index - 1) >> 2)):
                self.sift_up(index, last.time, last.key, last.anchor, last.ticket)
            else:
                self.sift_down(index, last)
        nodes_shrink(&self.core.arena.budget, &self.queue)
        return 0

    cdef Anchor *anchor_at(self, uint32_t ref) noexcept:
        return <Anchor *>address(&self.core.arena.core, ref)

    cdef MapTable map_of(self, Anchor *anchor):
        return self.plain_map if anchor.namespace == 0 else self.spaced_map

    cdef uint32_t entry_of(self, Node *node) except? 0xFFFFFFFF:
        """The entry of a node, 0 if its timer does not exist. Changes nothing."""
        cdef Anchor *anchor = self.anchor_at(node.anchor)
        cdef Table *table = self.map_of(anchor).entries.table
        cdef uint32_t slot = find_int(table, table.maps[anchor.group - table.first_group], node.time, node.anchor,
                                      hash_int_key(table, node.time, node.anchor))
        if slot and ticket_of(table, entry_at(table.core, slot))[0] == node.ticket:
            return slot
        return 0

    cdef void let_go(self, Node *node) noexcept:
        """Give up what a node or a record holds."""
        if node.anchor:
            drop_anchor(self.map_of(self.anchor_at(node.anchor)).heads.table, node.anchor)
            ticket_give(&self.core.arena.budget, &self.tickets, node.ticket)

    # --- the log ---

    cdef int settle(self) except -1:
        """Begin a call: follow a rollback, or let go of a few old records."""
        if unlikely(self.core.core.busy):
            wait_for_others(&self.core.core)
        if unlikely(self.core.closed):
            self.begin()
        if unlikely(self.undone.mark != NOT_UNDONE):
            self.follow_rollback()
        elif self.log.size:
            self.trim_log()
        return 0

    cdef int follow_rollback(self) except -1:
        """Reverse the log down to the oldest mark that was rolled back to. As a rollback, it may pass `max_bytes`."""
        cdef int64_t limit = self.core.arena.budget.limit
        self.core.arena.budget.limit = 0
        try:
            if unlikely(self.undone.mark <= self.complete_since):
                self._requeue()
            while self.log.size > self.log_first:
                if <uint64_t>node_at(&self.log, self.log.size - 1).key < self.undone.mark:
                    break
                self.reverse(node_at(&self.log, self.log.size - 1)[0])
                self.log.size -= 1
                nodes_shrink(&self.core.arena.budget, &self.log)
        finally:
            self.core.arena.budget.limit = limit
        if self.log.size == self.log_first:
            self.log.size = self.log_first = 0
        self.undone.mark = NOT_UNDONE
        return 0

    cdef int reverse(self, Node record) except -1:
        """Make the queue agree with the set about one timer."""
        cdef uint32_t place
        if record.anchor == 0:
            place = place_in_queue(&self.tickets, &self.queue, record.ticket)
            if place != <uint32_t>NOT_QUEUED and self.entry_of(node_at(&self.queue, place)) == 0:
                self.let_go(node_at(&self.queue, place))
                self.take_out(place)
        elif self.entry_of(&record):
            if not nodes_reserve(&self.core.arena.budget, &self.queue):
                self.no_memory()
            record.key = self.anchor_at(record.anchor).key
            self.queue.size += 1
            self.sift_up(self.queue.size - 1, record.time, record.key, record.anchor, record.ticket)
        else:
            self.let_go(&record)
        return 0

    cdef int trim_log(self) except -1:
        """Let go of a few records that are older than the oldest open mark: no rollback needs them."""
        cdef int _step
        cdef uint64_t oldest = self.core.oldest_mark()
        for _step in range(LET_GO_PER_OPERATION):
            if <uint64_t>node_at(&self.log, self.log_first).key >= oldest:
                return 0
            self.let_go(node_at(&self.log, self.log_first))
            self.log_first += 1
            if self.log_first == self.log.size:
                self.log.size = self.log_first = 0
                nodes_shrink(&self.core.arena.budget, &self.log)
                return 0
            if self.log_first == PAGE_NODES:
                nodes_forget_page(&self.core.arena.budget, &self.log)
                self.log_first = 0
        return 0

    cdef uint64_t live(self) noexcept:
        cdef int64_t entries = self.plain_map.entries.table.lane.entries
        if self.spaced_map is not None:
            entries += self.spaced_map.entries.table.lane.entries
        return <uint64_t>entries

    # --- for the backend ---

    def _pending_count(self):
        """The number of registered timers, of all keys. O(1)."""
        return self.live()

    def _queued(self):
        """The number of nodes in the queue, and of records in the log. O(1)."""
        return self.queue.size, self.log.size - self.log_first

    def _settle(self):
        """After a rollback: let the queue follow it. O(log timers) for each timer that it concerns."""
        self.settle()

    def _close(self):
        """Release the core, which is about to be closed."""
        self.forget_all()

    cdef int forget_all(self) except -1:
        cdef uint64_t i
        wait_for_others(&self.core.core)
        for i in range(self.queue.size):
            self.let_go(node_at(&self.queue, i))
        for i in range(self.log_first, self.log.size):
            self.let_go(node_at(&self.log, i))
        nodes_free(&self.core.arena.budget, &self.queue)
        nodes_free(&self.core.arena.budget, &self.log)
        tickets_free(&self.core.arena.budget, &self.tickets)
        self.log_first = 0
        return 0

    def _requeue(self):
        """Build the queue anew from the set, after something else has filled it. O(timers log timers)."""
        self.forget_all()
        self.complete_since = self.core.marks_opened
        self.visit_all(self.plain_map, None, 0, 0xFFFFFFFF)
        if self.spaced_map is not None:
            self.visit_all(self.spaced_map, None, 0, 0xFFFFFFFF)
        self.undone.mark = NOT_UNDONE

    def _rows(self, uint32_t first_group, uint32_t last_group):
        """The timers of a range of key groups: (key group, canonical key, encoded namespace, time). O(timers)."""
        cdef list rows = []
        self.core.enter()
        self.core.hold()
        try:
            self.visit_all(self.plain_map, rows, first_group, last_group)
            if self.spaced_map is not None:
                self.visit_all(self.spaced_map, rows, first_group, last_group)
        finally:
            self.core.let_go()
            self.core.leave()
        return rows

    cdef int visit_all(self, MapTable map, list rows, uint32_t first, uint32_t last) except -1:
        """Visit all entries: collect them in `rows`, or queue them if it is None."""
        cdef Table *table = map.entries.table
        cdef CowMap *entries
        cdef Walk walk
        cdef Entry *entry
        cdef Anchor *anchor
        cdef Blob *blob
        cdef object key
        cdef uint32_t g, slot
        for g in range(table.n_maps):
            entries = table.maps[g]
            if entries == NULL or not first <= entries.group <= last:
                continue
            begin_walk(entries, &walk)
            slot = next_entry(table.core, &walk)
            while slot:
                entry = entry_at(table.core, slot)
                if rows is None:
                    self.reserve_node()
                    self.push(map, slot)
                else:
                    anchor = self.anchor_at(namespace_of(table, entry))
                    if self.context.codec.is_int:
                        key = anchor.key
                    else:
                        blob = <Blob *>anchor.key
                        key = PyBytes_FromStringAndSize(blob_data(blob), blob.length)
                    rows.append((entries.group, key, self.core.namespaces.name(anchor.namespace), entry.key))
                slot = next_entry(table.core, &walk)
        return 0

    def _check(self):
        """Verify the queue: it is a heap, every timer has its node, and tickets name both. O(timers log timers)."""
        cdef uint64_t i, aside = 0, used = 0
        cdef uint32_t page
        cdef Node *node
        cdef TicketPage *each
        self.settle()
        for i in range(self.queue.size):
            node = node_at(&self.queue, i)
            if i:
                assert not self.comes_before(node, node_at(&self.queue, (i - 1) >> 2)), f"node {i} is above its parent"
            assert place_in_queue(&self.tickets, &self.queue, node.ticket) == i, f"node {i} is lost"
            assert self.entry_of(node), f"node {i} has no timer"
        assert self.queue.size == self.live(), f"{self.live()} timers, {self.queue.size} nodes"
        for i in range(self.log_first, self.log.size):
            node = node_at(&self.log, i)
            assert i == self.log_first or node.key >= node_at(&self.log, i - 1).key, f"record {i} is too old"
            if node.anchor:
                aside += 1
                assert place_of(&self.tickets, node.ticket)[0] == <uint32_t>PUT_ASIDE, f"record {i} is queued"
        assert self.tickets.used == self.queue.size + aside, f"{self.tickets.used} tickets"
        for page in range(self.tickets.n_pages):
            each = self.tickets.pages[page]
            if each != NULL:
                assert each.number == page, f"page {page} of tickets is that of {each.number}"
                used += each.used
            else:
                assert self.tickets.lowest <= page, f"page {page} of tickets is missing"
        assert used == self.tickets.used, f"{used} tickets in pages"


cdef class TimerIndex:
    """The timers of both domains of a backend: checks a call's arguments and passes it to its domain."""

    def __init__(self, KeyContext context not None, make, check_time, check_domain):
        """`make(domain)` returns a TimerHandle; `check_time` and `check_domain` raise for bad arguments."""
        self.context = context
        self.make = make
        self.check_time = check_time
        self.check_domain = check_domain

    cdef TimerHandle of(self, object domain, bint makes):
        cdef TimerHandle handle
        if domain == "event":
            handle = self.event
        else:
            self.check_domain(domain)
            handle = self.processing
        if unlikely(handle is None and makes):
            handle = self.make(domain)
            if domain == "event":
                self.event = handle
            else:
                self.processing = handle
        return handle

    cdef int64_t time_of(self, object timestamp) except? -1:
        cdef int64_t time
        if likely(PyLong_CheckExact(timestamp) and long_as_int64(timestamp, &time)):
            return time
        return self.check_time(timestamp)

    cdef int usable(self) except -1:
        self.context.core.enter()
        self.context.core.leave()
        if not self.context.has_key:
            self.context.no_key()
        return 0

    def register(self, timestamp, domain="event"):
        """Register a timer of the current key and namespace. O(log timers) expected."""
        cdef int64_t time = self.time_of(timestamp)
        if self.context.core.closed or not self.context.has_key:
            self.usable()
        self.of(domain, True).add_timer(time, timestamp)

    def delete(self, timestamp, domain="event"):
        """Delete a timer of the current key and namespace; do nothing if there is none. O(log timers) expected."""
        cdef int64_t time = self.time_of(timestamp)
        cdef TimerHandle handle = self.of(domain, False)
        self.usable()
        if handle is not None:
            handle.drop_timer(time)

    def pending(self, domain="event"):
        """The times at which the current key has timers in the current namespace, in order."""
        cdef TimerHandle handle = self.of(domain, False)
        self.usable()
        return [] if handle is None else sorted(handle.keys())

    def _made(self, domain):
        """The handle of a domain, or None if there was no timer in it."""
        return self.of(domain, False)
