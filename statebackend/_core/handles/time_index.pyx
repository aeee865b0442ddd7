"""Timers of one domain: the registered ones, and the one that is due next.

    MapHandle: key, namespace -> {time}             queue: a heap in the order of (time, key, namespace)
    +--------+      +-------+   +-------+           +---------------------------+
    | head   |----->| time  |<->| time  |           | time, key | anchor | tag  |  24 bytes, in pages
    +--------+      +-------+   +-------+           +---------------------------+
         |  anchor      ^ sequence                                |
         +--------------+-----------------------------------------+

The set is an ordinary map state of the backend, so timers are journalled, rolled back, written to checkpoints,
restored and rescaled like state. The queue only orders them; it never decides if a timer exists. A node counts if the
set has its time below its anchor, with the sequence number of that registration. A deleted timer leaves its node
behind, which is then stale; so does a timer whose registration is rolled back.

A timer that a rollback brings back needs its node again. So a node that leaves the queue while a mark is open is put
aside. It returns to the queue after the core has rolled back, and is released once the oldest open mark is newer. A
node holds a reference to its anchor, so that meanwhile the anchor's number names no other key.

Once more than half of the queue is stale, each registration looks for a few stale nodes: no operation does more than a
bounded expected amount of work.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove, memset

from statebackend._core.memory.arena cimport Blob, Budget, address, blob_data, raw_alloc, raw_free
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, Entry, Table, Walk, before_operation, begin_walk, drop_anchor, entry_at, find_int,
    hash_int_key, namespace_of, next_entry, thread_of, wait_for_others)
from statebackend._core.codecs.codecs cimport long_as_int64
from statebackend._core.handles.key_context cimport TIME_OF_CLOCK, TIME_OF_SYSTEM, KeyContext
from statebackend._core.handles.look_ahead cimport ask_for_bucket
from statebackend._core.handles.map_handle cimport MapHandle
from statebackend._core.tables.map_table cimport MapTable, insert_threaded
from statebackend._core.memory.platform cimport likely, prefetch, unlikely
from statebackend._core.tables.state_core cimport Mark

cdef extern from "Python.h":
    bint PyLong_CheckExact(object o)

cdef enum:
    SPARE_PAGES = 2                      # kept when the queue shrinks
    STALE_AT_LEAST = 64                  # fewer stale nodes are not searched for
    LOOKS_PER_REGISTRATION = 4
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


# --- timers --------------------------------------------------------------------------------------------------------

@cython.no_gc_clear                      # nodes hold references into the core
cdef class TimerHandle(MapHandle):
    """The timers of one domain: a map state whose keys are times."""

    def __dealloc__(self):
        cdef uint64_t i
        if self.core is None:
            return
        if not self.core.closed:
            for i in range(self.queue.size):
                self.let_go(node_at(&self.queue, i))
            for i in range(self.dropped_first, self.dropped.size):
                self.let_go(node_at(&self.dropped, i))
        nodes_free(&self.core.arena.budget, &self.queue)
        nodes_free(&self.core.arena.budget, &self.dropped)

    # --- the set ---

    cdef bint add_timer(self, int64_t time) except -1:
        """Register a timer of the current key and namespace; return True if it is new."""
        cdef CoreKey inner
        cdef MapTable map
        cdef Table *heads
        cdef Table *table
        cdef CowMap *entries
        cdef uint32_t slot = 0
        self.settle()
        if self.stamp != self.core.calls:
            self.find_here()
        self.make_map()                  # which may run Python; nothing below does
        memset(&inner, 0, sizeof(CoreKey))
        inner.number = time
        if self.find_entry(&inner):
            return False
        if not nodes_reserve(&self.core.arena.budget, &self.queue):
            self.no_memory()
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
        self.drop_stale()
        return True

    cdef bint drop_timer(self, int64_t time) except -1:
        """Delete a timer of the current key and namespace; return True if it existed."""
        cdef CoreKey inner
        cdef uint32_t slot
        self.settle()
        if self.stamp != self.core.calls:
            self.find_here()
        memset(&inner, 0, sizeof(CoreKey))
        inner.number = time
        slot = self.find_entry(&inner)
        if slot == 0:
            return False
        self.remove_entry(&inner, slot, False)
        return True

    # --- firing ---

    def next_time(self):
        """The time of the next timer of any key, or None. O(1), and a little for each stale node in front."""
        return node_at(&self.queue, 0).time if self.has_next() else None

    cdef bint has_next(self) except -1:
        """Drop stale nodes in front, so that the queue's first is a timer; return True if there is one."""
        self.settle()
        while self.queue.size:
            if self.entry_of(node_at(&self.queue, 0)):
                return True
            self.take_off(0)
        return False

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
            if self.context.turn == turn and self.queue.size and (
                    memcmp(node_at(&self.queue, 0), &node, sizeof(Node)) == 0):
                memset(&inner, 0, sizeof(CoreKey))
                inner.number = node.time
                slot = self.find_entry(&inner)
        if self.context.time_source == TIME_OF_CLOCK:
            self.context.begin_at(clock)
        elif self.context.time_source == TIME_OF_SYSTEM:
            self.context.now_known = False
        self.remove_entry(&inner, slot, False)
        self.take_off(0)
        self.ask_for_next()
        self.fired += 1
        return node.time

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
            prefetch(self.anchor_at(node_at(&self.queue, child).anchor))
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

    cdef int sift_up(self, uint64_t index, Node node) except -1:
        """Let a node rise from a free place to its own."""
        cdef uint64_t parent
        while index:
            parent = (index - 1) >> 2
            if not self.comes_before(&node, node_at(&self.queue, parent)):
                break
            node_at(&self.queue, index)[0] = node_at(&self.queue, parent)[0]
            index = parent
        node_at(&self.queue, index)[0] = node
        return 0

    cdef int sift_down(self, uint64_t index, Node node) except -1:
        """Let a node sink from a free place to its own."""
        cdef uint64_t child, first, last
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
            if not self.comes_before(node_at(&self.queue, child), &node):
                break
            node_at(&self.queue, index)[0] = node_at(&self.queue, child)[0]
            index = child
        node_at(&self.queue, index)[0] = node
        return 0

    cdef int push(self, MapTable map, uint32_t slot) except -1:
        """Queue the timer of an entry; there must be room."""
        cdef Table *table = map.entries.table
        cdef Entry *entry = entry_at(table.core, slot)
        cdef Anchor *anchor
        cdef Node node
        node.time = entry.key
        node.anchor = namespace_of(table, entry)
        node.tag = <uint32_t>thread_of(table, entry).sequence
        anchor = self.anchor_at(node.anchor)
        anchor.refs += 1
        node.key = anchor.key
        self.queue.size += 1
        return self.sift_up(self.queue.size - 1, node)

    cdef int take_off(self, uint64_t index) except -1:
        """Take a node off the queue; put it aside while a mark is open."""
        cdef Node node = node_at(&self.queue, index)[0]
        cdef Node last
        if self.core.core.journal_version:
            if not nodes_reserve(&self.core.arena.budget, &self.dropped):
                self.no_memory()
            node.key = self.core.core.state_version
            node_at(&self.dropped, self.dropped.size)[0] = node
            self.dropped.size += 1
        else:
            self.let_go(&node)
        self.queue.size -= 1
        last = node_at(&self.queue, self.queue.size)[0]
        if index < self.queue.size:
            if index and self.comes_before(&last, node_at(&self.queue, (index - 1) >> 2)):
                self.sift_up(index, last)
            else:
                self.sift_down(index, last)
        nodes_shrink(&self.core.arena.budget, &self.queue)
        return 0

    cdef Anchor *anchor_at(self, uint32_t ref) noexcept:
        return <Anchor *>address(&self.core.arena.core, ref)

    cdef MapTable map_of(self, Anchor *anchor):
        return self.plain_map if anchor.namespace == 0 else self.spaced_map

    cdef uint32_t entry_of(self, Node *node) except? 0xFFFFFFFF:
        """The entry of a node, 0 if it is stale. Changes nothing."""
        cdef Anchor *anchor = self.anchor_at(node.anchor)
        cdef Table *table = self.map_of(anchor).entries.table
        cdef uint32_t slot = find_int(table, table.maps[anchor.group - table.first_group], node.time, node.anchor,
                                      hash_int_key(table, node.time, node.anchor))
        if slot and <uint32_t>thread_of(table, entry_at(table.core, slot)).sequence == node.tag:
            return slot
        return 0

    cdef void let_go(self, Node *node) noexcept:
        drop_anchor(self.map_of(self.anchor_at(node.anchor)).heads.table, node.anchor)

    cdef int settle(self) except -1:
        """Begin a call: after a rollback, return the nodes that were put aside to the queue."""
        if unlikely(self.core.core.busy):
            wait_for_others(&self.core.core)
        if unlikely(self.core.closed):
            self.begin()
        if self.dropped.size:
            if self.rollbacks != self.core.rollbacks:
                self.put_back()
            else:
                self.let_go_of_some()
        self.rollbacks = self.core.rollbacks
        return 0

    cdef int put_back(self) except -1:
        cdef Node node
        while self.dropped.size > self.dropped_first:
            if not nodes_reserve(&self.core.arena.budget, &self.queue):
                self.no_memory()
            self.dropped.size -= 1
            node = node_at(&self.dropped, self.dropped.size)[0]
            node.key = self.anchor_at(node.anchor).key
            self.queue.size += 1
            self.sift_up(self.queue.size - 1, node)
            nodes_shrink(&self.core.arena.budget, &self.dropped)
        self.dropped.size = self.dropped_first = 0
        return 0

    cdef int let_go_of_some(self) except -1:
        """Release a few nodes that were put aside before the oldest open mark: no rollback needs them."""
        cdef int _step
        cdef int64_t oldest = INT64_MAX
        if self.core.open_marks:
            oldest = (<Mark>self.core.open_marks[0]).version
        for _step in range(LET_GO_PER_OPERATION):
            if node_at(&self.dropped, self.dropped_first).key >= oldest:
                return 0
            self.let_go(node_at(&self.dropped, self.dropped_first))
            self.dropped_first += 1
            if self.dropped_first == self.dropped.size:
                self.dropped.size = self.dropped_first = 0
                nodes_shrink(&self.core.arena.budget, &self.dropped)
                return 0
            if self.dropped_first == PAGE_NODES:
                nodes_forget_page(&self.core.arena.budget, &self.dropped)
                self.dropped_first = 0
        return 0

    cdef int drop_stale(self) except -1:
        """Look for a few stale nodes, once they are more than half."""
        cdef int _look
        for _look in range(LOOKS_PER_REGISTRATION):
            if likely(self.queue.size <= 2 * self.live() + STALE_AT_LEAST):
                return 0
            if self.cursor >= self.queue.size:
                self.cursor = 0
            if self.entry_of(node_at(&self.queue, self.cursor)):
                self.cursor += 1
            else:
                self.take_off(self.cursor)
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
        """The number of nodes in the queue and put aside. O(1)."""
        return self.queue.size, self.dropped.size - self.dropped_first

    def _close(self):
        """Release the core, which is about to be closed."""
        self.forget_all()

    cdef int forget_all(self) except -1:
        cdef uint64_t i
        wait_for_others(&self.core.core)
        for i in range(self.queue.size):
            self.let_go(node_at(&self.queue, i))
        for i in range(self.dropped_first, self.dropped.size):
            self.let_go(node_at(&self.dropped, i))
        nodes_free(&self.core.arena.budget, &self.queue)
        nodes_free(&self.core.arena.budget, &self.dropped)
        self.dropped_first = self.cursor = 0
        return 0

    def _requeue(self):
        """Rebuild the queue from the set, after something else has filled it. O(timers log timers)."""
        self.forget_all()
        self.rollbacks = self.core.rollbacks
        self.visit_all(self.plain_map, None, 0, 0xFFFFFFFF)
        if self.spaced_map is not None:
            self.visit_all(self.spaced_map, None, 0, 0xFFFFFFFF)

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
                    if not nodes_reserve(&self.core.arena.budget, &self.queue):
                        self.no_memory()
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
        """Verify the queue: it is a heap, and every timer has exactly one node. O(timers log timers)."""
        cdef uint64_t i
        cdef Node *node
        counted = {}
        self.settle()
        for i in range(self.queue.size):
            node = node_at(&self.queue, i)
            if i:
                assert not self.comes_before(node, node_at(&self.queue, (i - 1) >> 2)), f"node {i} is above its parent"
            slot = self.entry_of(node)
            if slot:
                counted[slot] = counted.get(slot, 0) + 1
        assert set(counted.values()) <= {1}, "a timer has two nodes"
        assert len(counted) == self.live(), f"{self.live()} timers, {len(counted)} of them in the queue"


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
        self.of(domain, True).add_timer(time)

    def delete(self, timestamp, domain="event"):
        """Delete a timer of the current key and namespace; do nothing if there is none. O(1) expected."""
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
