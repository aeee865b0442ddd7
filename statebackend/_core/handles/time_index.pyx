"""Timers of one domain: the registered ones, and the one that is due next.

    key, namespace -> timer                         queue: a heap in the order of (time, key, namespace)
    +--------------+                                +------------------------------+
    | time, ticket |    MapTableHandle `more`:      | time, key | owner  | ticket  |  24 bytes, in pages
    +--------------+    key, namespace -> {time}    +------------------------------+
              |         +-------+   +-------+              ^                     |
              |         | time  |<->| time  |              |                     |
              |         +-------+   +-------+              |                     |
              |             | ticket                       |                     |
              v             v                              |                     v
          +--------------------------------------------------------------------------+
          | places: of each ticket, where its node is in the queue, or               |
          | where it was before it rose                                              |
          +--------------------------------------------------------------------------+

The set is state of the backend, so timers are journalled, rolled back, written to checkpoints and rescaled like state.
The first timer of a key and namespace is in their own entry: most keys have one timer, or none. Timers that are
registered while there is one are entries of a map state. They stay there when the first has gone, so a key may have
timers there only; the next one that is registered goes to the key's entry again. No timer is in both.

The queue only orders them: it has one node for each timer, and no others. The entry and the node have the same ticket,
which leads from one to the other. So a deleted timer takes its node along, wherever that is.

A rollback changes the set behind the queue's back. So while a mark is open, the queue keeps its own log: of each
registration its ticket, and each node that left the queue, with its ticket and its references, so that meanwhile the
number of the anchor or the namespace names no other. After a rollback, the log is reversed down to the mark. Records
that are older than the oldest open mark are let go of, a few in each call.

No call costs more than O(log timers), except the one that reverses: it costs as much as the rollback.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove, memset

from statebackend._core.memory.arena cimport Blob, Budget, address, blob_data, blob_drop, raw_alloc, raw_free
from statebackend._core.memory.interpreter cimport PyLong_CheckExact
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, Entry, Table, Walk, before_operation, begin_walk, drop_anchor, entry_at, find_int,
    find_stored, hash_int_key, hash_stored, insert, namespace_of, next_entry, value_of, wait_for_others)
from statebackend._core.tables.values cimport long_as_int64
from statebackend._core.handles.table_handle cimport find_key
from statebackend._core.handles.handle cimport Handle
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.time_and_namespace cimport TIME_OF_CLOCK, begin_time
from statebackend._core.handles.look_ahead cimport ask_for_bucket, ask_for_entry
from statebackend._core.handles.map_table_handle cimport MapTableHandle
from statebackend._core.key_groups cimport group_of_hash, hash_canonical_bytes, hash_canonical_int
from statebackend._core.tables.map_table cimport MapTable, insert_threaded
from statebackend._core.memory.platform cimport likely, prefetch, unlikely
from statebackend._core.tables.state_core cimport NOT_UNDONE
from statebackend._core.tables.state_table cimport StateTable

cdef enum:
    SPARE_PAGES = 2                      # kept when the queue shrinks
    LET_GO_PER_OPERATION = 8


# --- nodes and records in pages ------------------------------------------------------------------------------------

cdef bint pages_reserve(Budget *budget, Pages *array, uint32_t width) noexcept nogil:
    """Make room for one more, of `width` bytes; False without memory."""
    cdef char **pages
    cdef uint32_t capacity
    if likely(array.size < <uint64_t>array.n_pages << NODE_SHIFT):
        return True
    if array.n_pages == array.capacity:
        capacity = 2 * array.capacity if array.capacity else 4
        pages = <char **>raw_alloc(budget, capacity * sizeof(char *))
        if pages == NULL:
            return False
        if array.pages != NULL:
            memcpy(pages, array.pages, array.n_pages * sizeof(char *))
            raw_free(budget, array.pages, array.capacity * sizeof(char *))
        array.pages = pages
        array.capacity = capacity
    array.pages[array.n_pages] = <char *>raw_alloc(budget, PAGE_NODES * width)
    if array.pages[array.n_pages] == NULL:
        return False
    array.n_pages += 1
    return True


cdef void pages_shrink(Budget *budget, Pages *array, uint32_t width) noexcept nogil:
    """Give a page back if more than two are unused."""
    if unlikely(array.size + (SPARE_PAGES << NODE_SHIFT) < <uint64_t>array.n_pages << NODE_SHIFT):
        array.n_pages -= 1
        raw_free(budget, array.pages[array.n_pages], PAGE_NODES * width)


cdef void pages_forget_first(Budget *budget, Pages *array, uint32_t width) noexcept nogil:
    """Forget the first page, with all that it holds. O(pages)."""
    raw_free(budget, array.pages[0], PAGE_NODES * width)
    array.n_pages -= 1
    array.size -= PAGE_NODES
    memmove(array.pages, array.pages + 1, array.n_pages * sizeof(char *))


cdef void pages_free(Budget *budget, Pages *array, uint32_t width) noexcept nogil:
    while array.n_pages:
        array.n_pages -= 1
        raw_free(budget, array.pages[array.n_pages], PAGE_NODES * width)
    raw_free(budget, array.pages, array.capacity * sizeof(char *))
    memset(array, 0, sizeof(Pages))


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
    """A free ticket; there must be room."""
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
    """Return a ticket. An empty page goes if another one has room."""
    cdef TicketPage *page = page_of(tickets, ticket)
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


cdef uint32_t place_in_queue(Tickets *tickets, Pages *queue, uint32_t ticket) noexcept nogil:
    """Where a ticket's node is in the queue, for any ticket; NOT_QUEUED if it is not there. O(log nodes)."""
    cdef uint32_t place, page = (ticket & ~<uint32_t>IN_MAP) >> TICKET_SHIFT
    if page >= tickets.n_pages or tickets.pages[page] == NULL \
            or (ticket & (PAGE_TICKETS - 1)) >= tickets.pages[page].fresh:
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
    """The ticket of an entry of the map state: it fills the gap between the anchor's number and the thread."""
    return <uint32_t *>(<char *>entry + table.layout.off_namespace + 4)


# --- timers --------------------------------------------------------------------------------------------------------

TIMER_BYTES = sizeof(Timer)              # the value of an entry


@cython.final
@cython.no_gc_clear                      # nodes hold references into the core
cdef class TimerHandle(Handle):
    """The timers of one domain: a timer in the entry of its key, and a map state for those next to it."""

    def __init__(self, *arguments, make_more, **options):
        """`make_more()` returns the MapTableHandle of a map state whose keys are times."""
        self.make_more = make_more
        Handle.__init__(self, *arguments, **options)
        if not self.is_noted:
            self.core.keep_note(&self.undone)
            self.is_noted = True
            self.complete_since = self.core.marks_opened

    def __dealloc__(self):
        if self.core is None:
            return
        if self.is_noted:
            self.core.forget_note(&self.undone)
        self.let_go_all()

    cdef int adopt_table(self, object made, bint is_spaced) except -1:
        cdef StateTable table = made
        assert table.table.layout.value_width == sizeof(Timer), "no room for a timer"
        return Handle.adopt_table(self, made, is_spaced)

    @property
    def plain_map(self):
        """The heads and entries of `more` in the namespace VOID, or None."""
        return None if self.more is None else self.more.plain_map

    @property
    def spaced_map(self):
        """The heads and entries of `more` in other namespaces, or None."""
        return None if self.more is None else self.more.spaced_map

    def _tables(self):
        found = Handle._tables(self)
        return found if self.more is None else [*found, *self.more._tables()]

    # --- the set ---

    cdef bint add_timer(self, int64_t time) except -1:
        """Register a timer of the current key and namespace; return True if it is new."""
        cdef CoreKey *key = &self.context.key
        cdef uint32_t slot
        self.settle()
        if self.stamp != self.core.calls:
            self.find_here()
        if unlikely(self.map == NULL):
            self.make_room()             # which may run Python; nothing below does, except for `add_more`
        if unlikely(self.slot != 0):
            return timer_at(self.table, self.slot).time != time and self.add_more(time)
        if unlikely(self.more is not None) and self.is_in_more(time):
            return False
        if unlikely(self.undone.mark != NOT_UNDONE):
            self.follow_rollback()
        self.reserve_node()
        self.reserve_record()
        slot = insert(&self.table.lane, self.table, self.map, key.number, key.data, key.length, key.namespace,
                      key.hash)
        if unlikely(slot == 0):
            self.no_memory()
        timer_at(self.table, slot).time = time
        self.slot = slot
        self.push(self.table, slot)
        return self.note_registration(timer_at(self.table, slot).ticket) == 0

    cdef bint add_more(self, int64_t time) except -1:
        """Register a timer of a key that has one already; return True if it is new."""
        cdef CoreKey inner
        cdef MapTableHandle more = self.more
        cdef MapTable map
        cdef Table *heads
        cdef Table *table
        cdef CowMap *entries
        cdef uint32_t slot
        if more is None:
            more = self.make_more()
            if self.more is None:        # making it may have run this method
                self.more = more
            more = self.more
        if more.stamp != self.core.calls:
            more.find_here()
        more.make_map()                  # which may run Python; nothing below does
        memset(&inner, 0, sizeof(CoreKey))
        inner.number = time
        if more.find_entry(&inner):
            return False
        slot = find_key(self.table, &self.context.key)
        if slot and timer_at(self.table, slot).time == time:     # since a finaliser ran
            return False
        if unlikely(self.undone.mark != NOT_UNDONE):
            self.follow_rollback()
        self.reserve_node()
        self.reserve_record()
        map = more.map_here()
        heads, table = more.table, map.entries.table
        inner.group = self.context.key.group
        entries = map.entries.map_for(inner.group)
        slot = 0
        if before_operation(&heads.lane, heads, more.map) and before_operation(&table.lane, table, entries):
            slot = insert_threaded(&heads.lane, heads, more.map, &self.context.key, more.slot, &table.lane, table,
                                   entries, &inner)
        self.core.calls += 1
        if slot == 0:
            self.no_memory()
        self.push_more(map, slot)
        return self.note_registration(ticket_of(table, entry_at(table.core, slot))[0]) == 0

    cdef bint is_in_more(self, int64_t time) noexcept:
        """Return True if the map state has this timer of the current key and namespace. Runs no Python."""
        cdef CoreKey *key = &self.context.key
        cdef Table *heads = self.heads_of(key.namespace)
        cdef Table *table
        cdef uint32_t ref, slot
        if heads == NULL or heads.lane.entries == 0:
            return False
        slot = find_key(heads, key)
        if slot == 0:
            return False
        ref = (<uint32_t *>value_of(heads, entry_at(heads.core, slot)))[0]
        table = self.map_of(key.namespace).entries.table
        return find_int(table, table.maps[key.group - table.first_group], time, ref,
                        hash_int_key(table, time, ref)) != 0

    cdef bint drop_timer(self, int64_t time) except -1:
        """Delete a timer of the current key and namespace; return True if it existed."""
        cdef uint32_t place
        self.settle()
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot == 0 or timer_at(self.table, self.slot).time != time:
            return self.more is not None and self.is_in_more(time) and self.drop_more(time)
        if unlikely(self.undone.mark != NOT_UNDONE):     # by a finaliser
            self.follow_rollback()
        place = place_in_queue(&self.tickets, &self.queue, timer_at(self.table, self.slot).ticket)
        self.reserve_record()
        self.remove_here()
        if likely(place != <uint32_t>NOT_QUEUED):        # it is there, unless a rollback has stopped halfway
            self.retire(place)
        return True

    cdef bint drop_more(self, int64_t time) except -1:
        """Delete a timer of the map state; return True if it existed."""
        cdef CoreKey inner
        cdef Table *table
        cdef uint32_t slot, place
        memset(&inner, 0, sizeof(CoreKey))
        inner.number = time
        slot = self.more.find_entry(&inner)
        if slot == 0:
            return False
        if unlikely(self.undone.mark != NOT_UNDONE):     # by a finaliser
            self.follow_rollback()
        table = self.more.map_here().entries.table
        place = place_in_queue(&self.tickets, &self.queue, ticket_of(table, entry_at(table.core, slot))[0])
        self.reserve_record()
        self.more.remove_entry(&inner, slot, False)
        if likely(place != <uint32_t>NOT_QUEUED):
            self.retire(place)
        return True

    cdef list pending(self):
        cdef list times = [] if self.more is None else list(self.more.keys())
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot:
            times.append(timer_at(self.table, self.slot).time)
        times.sort()
        return times

    # --- firing ---

    def next_time(self):
        return node_at(&self.queue, 0).time if self.has_next() else None

    cdef bint has_next(self) except -1:
        self.settle()
        return self.queue.size != 0

    cdef object take_due(self, int64_t now):
        """Take the next timer that is due, and make its key and namespace current; its time, or None. O(log timers)."""
        cdef Node node
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
            memset(&at, 0, sizeof(CoreKey))
            if self.context.codec.is_int:
                at.number = node.key
            else:
                blob = <Blob *>node.key
                owner = self.context.codec.split_canonical(PyBytes_FromStringAndSize(blob_data(blob), blob.length), &at)
            at.group = self.group_of_node(&node)
            self.context.number_namespace(self.namespace_of_node(&node))
            self.context.adopt(&at, owner)
            turn = self.context.turn
            if node.ticket & <uint32_t>IN_MAP:
                self.more.find_here()    # reclaims, which may run finalisers: they may register and delete timers
            else:
                self.find_here()         # the same
            if self.context.turn == turn and self.undone.mark == NOT_UNDONE and self.queue.size and (
                    memcmp(node_at(&self.queue, 0), &node, sizeof(Node)) == 0):
                if node.ticket & <uint32_t>IN_MAP:
                    memset(&inner, 0, sizeof(CoreKey))
                    inner.number = node.time
                    slot = self.more.find_entry(&inner)
                elif self.slot and timer_at(self.table, self.slot).ticket == node.ticket:
                    slot = self.slot
                self.reserve_record()
                if unlikely(slot == 0):  # a rollback has stopped halfway
                    self.retire(0)
        if self.context.time_source == TIME_OF_CLOCK:
            self.context.begin_at(clock)
        else:
            begin_time(self.context)
        if node.ticket & <uint32_t>IN_MAP:
            self.more.remove_entry(&inner, slot, False)
        else:
            self.remove_here()
        self.retire(0)
        self.fired += 1
        return node.time

    cdef void ask_for(self, Node *node, bint entry) noexcept:
        """Prefetch the bucket of a timer, or its first entry once the bucket has arrived."""
        cdef uint32_t group
        cdef uint32_t hash
        cdef Table *table
        if node.ticket & <uint32_t>IN_MAP:
            group = self.group_of_node(node)
            table = self.map_of(self.namespace_of_node(node)).entries.table
            hash = hash_int_key(table, node.time, node.owner)
        elif not entry and not self.context.codec.is_int:
            prefetch(<void *>node.key)
            return
        else:
            group = self.group_of_node(node)
            table = self.plain_table if node.owner == 0 else self.spaced_table
            hash = hash_stored(table, node.key, node.owner)
        if entry:
            ask_for_entry(table, group, hash)
            prefetch(place_of(&self.tickets, node.ticket))
        else:
            ask_for_bucket(table, group, hash)

    # --- the queue ---

    cdef bytes name_of(self, Node *node):
        return self.core.namespaces.names[self.namespace_of_node(node)]

    cdef bint comes_before(self, Node *a, Node *b) except -1:
        cdef Blob *first
        cdef Blob *second
        cdef uint64_t common
        cdef int order
        if likely(a.time != b.time):
            return a.time < b.time
        if self.context.codec.is_int:
            if a.key != b.key:
                return a.key < b.key
        elif a.key != b.key:
            first, second = <Blob *>a.key, <Blob *>b.key
            common = first.length if first.length < second.length else second.length
            order = memcmp(blob_data(first), blob_data(second), common)
            if order or first.length != second.length:
                return order < 0 if order else first.length < second.length
        return self.name_of(a) < self.name_of(b)

    cdef int sift_up(self, uint64_t index, int64_t time, int64_t key, uint32_t owner, uint32_t ticket) except -1:
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
                node.time, node.key, node.owner, node.ticket = time, key, owner, ticket
                if not self.comes_before(&node, other):
                    break
            node_at(&self.queue, index)[0] = other[0]
            place_of(&self.tickets, other.ticket)[0] = <uint32_t>index
            index = parent
        other = node_at(&self.queue, index)
        other.time, other.key, other.owner, other.ticket = time, key, owner, ticket
        place_of(&self.tickets, ticket)[0] = <uint32_t>index
        return 0

    cdef uint64_t first_of(self, uint64_t first, uint64_t last) except 0:
        """Where the first to fire is of the nodes from `first` to `last`. Without branches, as times are random."""
        cdef int64_t best = node_at(&self.queue, first).time, other
        cdef uint64_t at = first, child
        cdef uint32_t equal = 0
        for child in range(first + 1, last + 1):
            other = node_at(&self.queue, child).time
            equal |= other == best
            at = child if other < best else at
            best = other if other < best else best
        if unlikely(equal != 0):
            at = first
            for child in range(first + 1, last + 1):
                if self.comes_before(node_at(&self.queue, child), node_at(&self.queue, at)):
                    at = child
        return at

    cdef int sift_down(self, uint64_t index, Node node) except -1:
        """Let a node sink from a free place to its own. Nodes that rise for it do not note that: see `Tickets`.

        What comes near the front will be due soon: its bucket is prefetched first, then its entry.
        """
        cdef uint64_t child, first, last
        cdef Node *other
        while True:
            first = 4 * index + 1
            if first >= self.queue.size:
                break
            last = first + 3 if first + 3 < self.queue.size else self.queue.size - 1
            if 4 * first + 1 < self.queue.size:
                prefetch(node_at(&self.queue, 4 * first + 1))
            child = self.first_of(first, last)
            other = node_at(&self.queue, child)
            if other.time > node.time or (other.time == node.time and not self.comes_before(other, &node)):
                break
            node_at(&self.queue, index)[0] = other[0]
            if index <= 20 and index:
                self.ask_for(other, index <= 4)
            index = child
        node_at(&self.queue, index)[0] = node
        place_of(&self.tickets, node.ticket)[0] = <uint32_t>index
        return 0

    cdef int reserve_node(self) except -1:
        """Make room for a node and its ticket."""
        if unlikely(not pages_reserve(&self.core.arena.budget, &self.queue, sizeof(Node))
                    or not tickets_reserve(&self.core.arena.budget, &self.tickets)):
            self.no_memory()
        return 0

    cdef int reserve_record(self) except -1:
        """Make room for a record, if a mark is open."""
        if self.core.core.journal_version and not pages_reserve(&self.core.arena.budget, &self.log, sizeof(Record)):
            self.no_memory()
        return 0

    cdef int note_registration(self, uint32_t ticket) except -1:
        """Tell the log of a registration, if a mark is open. There must be room."""
        cdef Record *record
        if self.core.core.journal_version:
            record = record_at(&self.log, self.log.size)
            record.node.ticket = ticket
            record.marks = 2 * self.core.marks_opened
            self.log.size += 1
        return 0

    cdef int push(self, Table *table, uint32_t slot) except -1:
        """Queue the timer of a key's entry; there must be room."""
        cdef Entry *entry = entry_at(table.core, slot)
        cdef Timer *timer = timer_at(table, slot)
        cdef uint32_t namespace = namespace_of(table, entry)
        timer.ticket = ticket_take(&self.tickets)
        if table.layout.key_is_blob:
            (<Blob *>entry.key).refs += 1
        self.core.core.namespace_refs[namespace] += 1
        self.queue.size += 1
        return self.sift_up(self.queue.size - 1, timer.time, entry.key, namespace, timer.ticket)

    cdef int push_more(self, MapTable map, uint32_t slot) except -1:
        """Queue the timer of an entry of the map state; there must be room."""
        cdef Table *table = map.entries.table
        cdef Entry *entry = entry_at(table.core, slot)
        cdef uint32_t ref = namespace_of(table, entry), ticket = ticket_take(&self.tickets) | <uint32_t>IN_MAP
        cdef Anchor *anchor = <Anchor *>address(table.core.arena, ref)
        ticket_of(table, entry)[0] = ticket
        anchor.refs += 1
        self.queue.size += 1
        return self.sift_up(self.queue.size - 1, entry.key, anchor.key, ref, ticket)

    cdef int retire(self, uint64_t index) except -1:
        """Take the node of a removed timer off the queue; into the log while a mark is open. There must be room."""
        cdef Node node = node_at(&self.queue, index)[0]
        cdef Record *record
        if self.core.core.journal_version:
            place_of(&self.tickets, node.ticket)[0] = PUT_ASIDE
            record = record_at(&self.log, self.log.size)
            record.node = node
            record.marks = 2 * self.core.marks_opened + 1
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
                self.sift_up(index, last.time, last.key, last.owner, last.ticket)
            else:
                self.sift_down(index, last)
        pages_shrink(&self.core.arena.budget, &self.queue, sizeof(Node))
        return 0

    cdef uint32_t namespace_of_node(self, Node *node) noexcept:
        if node.ticket & <uint32_t>IN_MAP:
            return (<Anchor *>address(&self.core.arena.core, node.owner)).namespace
        return node.owner

    cdef uint32_t group_of_node(self, Node *node) noexcept:
        cdef KeyContext context = self.context
        cdef Blob *blob
        if context.codec.is_int:
            return group_of_hash(hash_canonical_int(&context.codec.plan.program, node.key), context.max_parallelism)
        blob = <Blob *>node.key
        return group_of_hash(hash_canonical_bytes(&context.codec.plan.program, <const uint8_t *>blob_data(blob),
                                                  blob.length), context.max_parallelism)

    cdef Table *heads_of(self, uint32_t namespace) noexcept:
        return self.more.plain_table if namespace == 0 else self.more.spaced_table

    cdef MapTable map_of(self, uint32_t namespace):
        return self.more.plain_map if namespace == 0 else self.more.spaced_map

    cdef uint32_t entry_of(self, Node *node) except? 0xFFFFFFFF:
        """The entry of a node, 0 if its timer does not exist. Changes nothing."""
        cdef uint32_t namespace = self.namespace_of_node(node), group = self.group_of_node(node), slot
        cdef Table *table
        if node.ticket & <uint32_t>IN_MAP:
            table = self.map_of(namespace).entries.table
            slot = find_int(table, table.maps[group - table.first_group], node.time, node.owner,
                            hash_int_key(table, node.time, node.owner))
            return slot if slot and ticket_of(table, entry_at(table.core, slot))[0] == node.ticket else 0
        table = self.plain_table if namespace == 0 else self.spaced_table
        slot = find_stored(table, table.maps[group - table.first_group], node.key, namespace,
                           hash_stored(table, node.key, namespace))
        return slot if slot and timer_at(table, slot).ticket == node.ticket else 0

    cdef void let_go(self, Node *node) noexcept:
        """Give up what a node holds."""
        if node.ticket & <uint32_t>IN_MAP:
            drop_anchor(self.heads_of(self.namespace_of_node(node)), node.owner)
        else:
            if self.plain_table.layout.key_is_blob:
                blob_drop(self.core.core.blobs, <Blob *>node.key)
            self.core.core.namespace_refs[node.owner] -= 1
        ticket_give(&self.core.arena.budget, &self.tickets, node.ticket)

    cdef void let_go_record(self, Record *record) noexcept:
        if record.marks & 1:
            self.let_go(&record.node)

    cdef void let_go_all(self) noexcept:
        cdef uint64_t i
        if not self.core.closed:
            for i in range(self.queue.size):
                self.let_go(node_at(&self.queue, i))
            for i in range(self.log_first, self.log.size):
                self.let_go_record(record_at(&self.log, i))
        pages_free(&self.core.arena.budget, &self.queue, sizeof(Node))
        pages_free(&self.core.arena.budget, &self.log, sizeof(Record))
        tickets_free(&self.core.arena.budget, &self.tickets)
        self.log_first = 0

    # --- the log ---

    cdef int settle(self) except -1:
        """Begin a call: follow a rollback, or let go of a few old records."""
        if unlikely(self.core.core.busy):
            wait_for_others(&self.core.core)
        if unlikely(self.core.closed):
            self.begin()
        if unlikely(self.undone.mark != NOT_UNDONE):
            self.follow_rollback()
        elif self.log.size and (record_at(&self.log, self.log_first).marks >> 1 != self.core.marks_opened
                                or not self.core.core.journal_version):
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
                if record_at(&self.log, self.log.size - 1).marks >> 1 < self.undone.mark:
                    break
                self.reverse(record_at(&self.log, self.log.size - 1)[0])
                self.log.size -= 1
                pages_shrink(&self.core.arena.budget, &self.log, sizeof(Record))
        finally:
            self.core.arena.budget.limit = limit
        if self.log.size == self.log_first:
            self.log.size = self.log_first = 0
        self.undone.mark = NOT_UNDONE
        return 0

    cdef int reverse(self, Record record) except -1:
        """Make the queue agree with the set about one timer."""
        cdef Node *node = &record.node
        cdef uint32_t place
        if not record.marks & 1:
            place = place_in_queue(&self.tickets, &self.queue, node.ticket)
            if place != <uint32_t>NOT_QUEUED and self.entry_of(node_at(&self.queue, place)) == 0:
                self.let_go(node_at(&self.queue, place))
                self.take_out(place)
        elif self.entry_of(node):
            if not pages_reserve(&self.core.arena.budget, &self.queue, sizeof(Node)):
                self.no_memory()
            self.queue.size += 1
            self.sift_up(self.queue.size - 1, node.time, node.key, node.owner, node.ticket)
        else:
            self.let_go(node)
        return 0

    cdef int trim_log(self) except -1:
        """Let go of a few records that are older than the oldest open mark: no rollback needs them.

        There are none while a mark is open and none has been opened since the oldest record was made.
        """
        cdef int _step
        cdef uint64_t oldest = self.core.oldest_mark()
        for _step in range(LET_GO_PER_OPERATION):
            if record_at(&self.log, self.log_first).marks >> 1 >= oldest:
                return 0
            self.let_go_record(record_at(&self.log, self.log_first))
            self.log_first += 1
            if self.log_first == self.log.size:
                self.log.size = self.log_first = 0
                pages_shrink(&self.core.arena.budget, &self.log, sizeof(Record))
                return 0
            if self.log_first == PAGE_NODES:
                pages_forget_first(&self.core.arena.budget, &self.log, sizeof(Record))
                self.log_first = 0
        return 0

    cdef uint64_t live(self) noexcept:
        cdef int64_t entries = self.plain_table.lane.entries
        if self.spaced_table != NULL:
            entries += self.spaced_table.lane.entries
        if self.more is not None:
            entries += self.more.plain_map.entries.table.lane.entries
            if self.more.spaced_map is not None:
                entries += self.more.spaced_map.entries.table.lane.entries
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
        self.forget_all()

    cdef int forget_all(self) except -1:
        wait_for_others(&self.core.core)
        self.let_go_all()
        return 0

    def _requeue(self):
        """Build the queue again from the set, after something else has filled it. O(timers log timers)."""
        self.forget_all()
        self.complete_since = self.core.marks_opened
        self.visit_all(None, 0, 0xFFFFFFFF)
        self.undone.mark = NOT_UNDONE

    def _rows(self, uint32_t first_group, uint32_t last_group):
        """The timers of a range of key groups: (key group, canonical key, encoded namespace, time). O(timers)."""
        cdef list rows = []
        self.core.enter()
        self.core.occupy()
        try:
            self.visit_all(rows, first_group, last_group)
        finally:
            self.core.vacate()
            self.core.leave()
        return rows

    cdef int visit_all(self, list rows, uint32_t first, uint32_t last) except -1:
        """Visit all timers: collect them in `rows`, or queue them if it is None."""
        self.visit(self.plain_table, None, rows, first, last)
        if self.spaced_table != NULL:
            self.visit(self.spaced_table, None, rows, first, last)
        if self.more is not None:
            self.visit(self.more.plain_map.entries.table, self.more.plain_map, rows, first, last)
            if self.more.spaced_map is not None:
                self.visit(self.more.spaced_map.entries.table, self.more.spaced_map, rows, first, last)
        return 0

    cdef int visit(self, Table *table, MapTable map, list rows, uint32_t first, uint32_t last) except -1:
        """Visit the entries of a table, which has the entries of `map` unless this is None."""
        cdef CowMap *entries
        cdef Walk walk
        cdef Entry *entry
        cdef Anchor *anchor
        cdef int64_t key, time
        cdef uint32_t g, slot, namespace
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
                    if map is None:
                        self.push(table, slot)
                    else:
                        self.push_more(map, slot)
                else:
                    namespace = namespace_of(table, entry)
                    if map is None:
                        key, time = entry.key, timer_at(table, slot).time
                    else:
                        anchor = <Anchor *>address(table.core.arena, namespace)
                        key, namespace, time = anchor.key, anchor.namespace, entry.key
                    rows.append((entries.group, self.canonical_key(key), self.core.namespaces.name(namespace), time))
                slot = next_entry(table.core, &walk)
        return 0

    cdef object canonical_key(self, int64_t key):
        """The key of an entry or an anchor in canonical form."""
        cdef Blob *blob = <Blob *>key
        if self.context.codec.is_int:
            return key
        return PyBytes_FromStringAndSize(blob_data(blob), blob.length)

    def _check(self):
        """Verify the set and the queue. O(timers).

        A time is registered once for a key and namespace: in the key's entry or in the map state. The queue is a heap,
        every timer has its node, and tickets name both.
        """
        cdef uint64_t i, aside = 0, used = 0
        cdef uint32_t page
        cdef Node *node
        cdef Record *record
        cdef TicketPage *each
        self.settle()
        rows = self._rows(0, 0xFFFFFFFF)
        assert len(set(rows)) == len(rows) == self._pending_count(), "a timer is registered twice"
        for i in range(self.queue.size):
            node = node_at(&self.queue, i)
            if i:
                assert not self.comes_before(node, node_at(&self.queue, (i - 1) >> 2)), f"node {i} is above its parent"
            assert place_in_queue(&self.tickets, &self.queue, node.ticket) == i, f"node {i} is lost"
            assert self.entry_of(node), f"node {i} has no timer"
        assert self.queue.size == self.live(), f"{self.live()} timers, {self.queue.size} nodes"
        for i in range(self.log_first, self.log.size):
            record = record_at(&self.log, i)
            assert i == self.log_first or record.marks >> 1 >= record_at(&self.log, i - 1).marks >> 1, \
                f"record {i} is too old"
            if record.marks & 1:
                aside += 1
                assert place_of(&self.tickets, record.node.ticket)[0] == <uint32_t>PUT_ASIDE, f"record {i} is queued"
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
            if domain != "processing":
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

    cdef int usable_core(self) except -1:
        self.context.core.enter()
        self.context.core.leave()
        return 0

    cdef int usable(self) except -1:
        self.usable_core()
        if not self.context.has_key:
            self.context.no_key()
        return 0

    cdef int add(self, TimerHandle handle, object timestamp, object domain) except -1:
        cdef int64_t time = self.time_of(timestamp)
        if self.context.core.closed or self.context.core.inside or not self.context.has_key:
            self.usable()
        if unlikely(handle is None):
            handle = self.of(domain, True)
        handle.add_timer(time)
        return 0

    cdef int drop(self, TimerHandle handle, object timestamp) except -1:
        cdef int64_t time = self.time_of(timestamp)
        self.usable()
        if handle is not None:
            handle.drop_timer(time)
        return 0

    def register_event_time_timer(self, timestamp):
        """Register a timer of the current key and namespace. O(log timers) expected."""
        self.add(self.event, timestamp, "event")

    def register_processing_time_timer(self, timestamp):
        """Register a timer of the current key and namespace. O(log timers) expected."""
        self.add(self.processing, timestamp, "processing")

    def delete_event_time_timer(self, timestamp):
        """Delete a timer of the current key and namespace; do nothing if there is none. O(log timers) expected."""
        self.drop(self.event, timestamp)

    def delete_processing_time_timer(self, timestamp):
        """Delete a timer of the current key and namespace; do nothing if there is none. O(log timers) expected."""
        self.drop(self.processing, timestamp)

    def _register(self, timestamp, domain):
        self.add(self.of(domain, False), timestamp, domain)

    def _delete(self, timestamp, domain):
        self.drop(self.of(domain, False), timestamp)

    def _pending(self, domain):
        """The times at which the current key has timers in the current namespace, in order."""
        cdef TimerHandle handle = self.of(domain, False)
        self.usable()
        return [] if handle is None else handle.pending()

    def _firing(self, int64_t now, domain):
        """Take the timers that are due, one by one; in the end, the key is what it was."""
        cdef TimerHandle handle
        cdef object timestamp
        self.usable_core()
        saved = self.context._save_key()
        try:
            handle = self.of(domain, False)
            while handle is not None:
                self.usable_core()
                timestamp = handle.take_due(now)
                if timestamp is None:
                    return
                yield timestamp
        finally:
            if not self.context.core.closed:
                self.context._restore_key(saved)

    def next_due(self, domain="event"):
        cdef TimerHandle handle = self.of(domain, False)
        self.usable_core()
        return None if handle is None else handle.next_time()

    def count(self, domain="event"):
        cdef TimerHandle handle = self.of(domain, False)
        self.usable_core()
        return 0 if handle is None else handle._pending_count()

    @property
    def fired(self):
        return (0 if self.event is None else self.event.fired) + (
            0 if self.processing is None else self.processing.fired)

    def _made(self, domain, bint makes=False):
        """The handle of a domain; None if it is empty and not to be made."""
        return self.of(domain, makes)
