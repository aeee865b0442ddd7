"""The handle of list states, and the iterator over a list.

An operation on a list costs only the part that it touches: an append writes one element, also under a mark or while a
snapshot is written. An iterator holds a place, not a copy. If the count of calls has changed since its last step, it
finds its place again by the stamp and the length of the list. Another list or another length ends it with
RuntimeError.
"""

cimport cython
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.codecs.key_value_codecs cimport MAX_STORED
from statebackend._core.tables.cow_map cimport (
    CoreKey, CowMap, Entry, ExpiringHead, ListHead, Table, element_timestamp, elements_of, entry_at, key_object,
    live_elements, namespace_of, stamp_element, value_of)
from statebackend._core.tables.expiry cimport is_expired, written_at
from statebackend._core.handles.table_handle cimport WANT_ALIVE, WANT_EXPIRED, find_key, look_up
from statebackend._core.handles.cleanup cimport begin_access, clean_up
from statebackend._core.handles.handle cimport Handle
from statebackend._core.tables.lists cimport (
    ListCursor, cursor_close, cursor_next, cursor_open, drop_elements, list_extend, list_skip, pass_expired,
    refer_to_element)
from statebackend._core.handles.look_ahead cimport REACH_LIST
from statebackend._core.handles.state_handle cimport is_dead, time_of
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.state_core cimport begin_call, end_call, end_objects
from statebackend._core.tables.values cimport TYPE_BOOL, load_number

from statebackend.errors import ClosedError

cdef enum:
    MOST_DEAD = 32                       # elements at the front of a short list; in a longer one, as many as are alive


cdef class ListTableHandle(Handle):
    """A list for a key."""

    def __init__(self, *arguments, **options):
        Handle.__init__(self, *arguments, **options)
        self.reach = REACH_LIST

    cdef ListHead *head(self) noexcept:
        return <ListHead *>value_of(self.table, entry_at(self.table.core, self.slot))

    cdef int open_cursor(self, ListHead *head, ListCursor *cursor) except -1:
        if not cursor_open(self.table, head, cursor):
            self.no_memory()
        return 0

    cdef bint has_any(self, Table *table, Entry *entry, int wanted) except -1:
        cdef ExpiringHead *head
        cdef int64_t now = time_of(self)
        if self.ttl == 0:
            return wanted == WANT_ALIVE
        head = <ExpiringHead *>value_of(table, entry)
        if wanted == WANT_EXPIRED:
            return is_expired(head.oldest, self.ttl, now)
        return not is_expired(head.newest, self.ttl, now)

    cdef bint all_expired(self) except -1:
        return not self.has_any(self.table, entry_at(self.table.core, self.slot), WANT_ALIVE)

    cdef list raw_elements(self, bint all, list found):
        """Collect raw elements in `found`, all or only the unexpired, for `finished` to convert. Runs no Python."""
        cdef ListCursor cursor
        cdef char *element
        cdef int64_t now = 0 if all else time_of(self)
        cdef uint32_t skip = 8 if self.table.element_has_timestamp else 0
        self.open_cursor(self.head(), &cursor)
        try:
            element = cursor_next(self.table, &cursor)
            while element != NULL:
                if all or not is_expired(element_timestamp(element), self.ttl, now):
                    found.append(self.codec.load_raw(element + skip))
                element = cursor_next(self.table, &cursor)
        finally:
            cursor_close(&cursor)
        return found

    cdef char *living_elements(self, bint renews, uint64_t *n) except? NULL:
        """Copies of the elements that are not dead in stored form, to be freed; `renews` timestamps of unexpired ones.
        """
        cdef ListCursor cursor
        cdef char *element
        cdef char *copies
        cdef uint32_t width = self.table.element_width
        cdef int64_t timestamp = 0, now = time_of(self)
        cdef bint is_seen
        n[0] = 0
        copies = <char *>PyMem_RawMalloc(live_elements(self.table, self.head()) * width + 1)
        if copies == NULL:
            raise MemoryError("no memory to copy a list; nothing has changed")
        if not cursor_open(self.table, self.head(), &cursor):
            PyMem_RawFree(copies)
            self.no_memory()
        element = cursor_next(self.table, &cursor)
        while element != NULL:
            if self.ttl:
                timestamp = element_timestamp(element)
            is_seen = self.ttl == 0 or not is_expired(timestamp, self.ttl, now)
            if is_seen or not is_dead(self, timestamp):
                memcpy(copies + n[0] * width, element, width)
                refer_to_element(self.table, copies + n[0] * width)
                if renews and is_seen:
                    stamp_element(copies + n[0] * width, written_at(timestamp, now, self.in_event_time))
                n[0] += 1
            element = cursor_next(self.table, &cursor)
        cursor_close(&cursor)
        return copies

    cdef int put_elements(self, char *elements, uint64_t n, bint replace) except -1:
        """Append elements in stored form, or replace the list with them; the list owns them afterwards."""
        cdef bint done = list_extend(&self.table.lane, self.table, self.map, self.slot, &self.context.key, elements, n,
                                     replace)
        self.core.calls += 1
        if not done:
            drop_elements(self.table, elements, n)
            end_objects(self.core)
            self.no_memory()
        return 0

    cdef int store_all(self, list values, bint replace) except -1:
        """Store values in prepared form: all, or none if memory runs out."""
        cdef uint64_t n = len(values), i, stored = 0
        cdef uint32_t width, skip
        cdef int64_t now
        cdef char *elements
        look_up(self)
        if self.map == NULL:
            self.make_room()
        now = time_of(self) if self.ttl else 0
        width = self.table.element_width
        skip = 8 if self.table.element_has_timestamp else 0
        elements = <char *>PyMem_RawMalloc(n * width)
        if elements == NULL:
            raise MemoryError("no memory for the elements of a list; nothing has changed")
        try:
            try:
                for i in range(n):
                    self.codec.store_prepared(self.core, values[i], elements + i * width + skip)
                    if skip:
                        stamp_element(elements + i * width, now)
                    stored += 1
            except BaseException:
                drop_elements(self.table, elements, stored)
                raise
            self.put_elements(elements, n, replace)
        finally:
            PyMem_RawFree(elements)
        if self.watcher is not None:
            self.watcher.note_all(self, values)
        return 0

    # --- the methods ---

    def get(self):
        """The elements, in order, as a new list; empty if there are none. O(length)."""
        cdef list found
        cdef uint64_t n, calls
        begin_access(self)
        if self.slot and self.ttl == 0:
            n = live_elements(self.table, self.head())
            if n <= self.head().tail_used:
                calls = self.core.calls
                found = PyList_New(n)            # which may run finalisers, and they this handle
                if self.core.calls == calls:
                    return self.read_last(found, n)
        found = []                       # before the entry is found, for the same reason
        look_up(self)
        if self.slot == 0:
            return found
        return self.read_list(found)

    cdef list read_last(self, list found, uint64_t n):
        """Fill a list without items with as many last elements, which are in one chunk."""
        cdef ListHead *head = self.head()
        cdef uint32_t width = self.table.element_width
        cdef char *element = elements_of(self.table, head.tail) + <uint64_t>(head.tail_used - n) * width
        cdef object value
        cdef uint64_t i
        cdef int form = self.codec.form
        for i in range(n):
            value = load_number(form, element) if form <= TYPE_BOOL else self.codec.load_raw(element)
            Py_INCREF(value)
            PyList_SET_ITEM(found, i, value)
            element += width
        return self.all_finished(found)

    cdef list all_finished(self, list found):
        """Turn raw elements into objects, in place."""
        cdef Py_ssize_t i
        if self.codec.is_native:
            return found
        begin_call(self.core)
        try:
            for i in range(len(found)):
                found[i] = self.finished(found[i])
        finally:
            end_call(self.core)
        return found

    cdef list read_list(self, list found):
        cdef char *copies
        cdef uint64_t n = 0
        cdef bint is_hidden = self.ttl != 0 and self.all_expired()
        if not is_hidden or self.shows_expired:
            self.raw_elements(self.ttl == 0 or self.shows_expired, found)
        if self.ttl:
            if is_hidden:
                if is_dead(self, (<ExpiringHead *>self.head()).newest):
                    self.expired_on_read += 1
                    self.remove_here()
            elif self.refreshes:
                copies = self.living_elements(True, &n)
                try:
                    self.put_elements(copies, n, True)
                finally:
                    PyMem_RawFree(copies)
            end_objects(self.core)
        return self.all_finished(found)

    def __iter__(self):
        """The elements, in order. O(1) before the first step, unless reads renew."""
        clean_up(self)
        return ListIterator.__new__(ListIterator, self)

    def add(self, value):
        cdef char stored[MAX_STORED + 8]
        cdef char *element = stored
        begin_access(self)
        if unlikely(value is None):
            self.codec.refuse_none()
        if unlikely(self.map == NULL):
            self.make_room()
        if self.ttl:
            stamp_element(stored, time_of(self))
            element += 8
        if unlikely(not self.codec.store(self.core, value, element)):
            self.store_given([value], False)
            return
        if unlikely(not list_extend(&self.table.lane, self.table, self.map, self.slot, &self.context.key, stored, 1,
                                    False)):
            self.codec.drop(self.core, element)
            self.no_memory()
        self.core.calls += 1
        if self.watcher is not None:
            self.watcher.note(self, value)

    def add_all(self, values):
        clean_up(self)
        self.store_given(values, False)

    def update(self, values):
        clean_up(self)
        self.store_given(values, True)

    cdef int store_given(self, object values, bint replace) except -1:
        """Append elements to the current key's list, or replace it: all, or none if one is refused."""
        cdef list given
        cdef Py_ssize_t i
        look_up(self)
        # Before the call: the user's iterable may do anything.
        given = list(values) if type(values) is list else (<object>self)._elements_of(values)
        begin_call(self.core)
        try:
            for i in range(len(given)):
                given[i] = self.prepared(given[i])
            if replace and self.watcher is not None and given:
                self.watcher.forget(self)
            if given:
                self.store_all(given, replace)
            elif replace:
                self.clear_here()
        finally:
            end_call(self.core)
        return 0

    # --- for the backend ---

    cdef bint clean_slot(self, bint spaced, CowMap *map, uint32_t slot) except -1:
        cdef Table *table = self.swept(spaced).table
        if self.iterators:               # otherwise they would find another list
            return False
        return self.clean_key(key_object(table, entry_at(table.core, slot)),
                              namespace_of(table, entry_at(table.core, slot)))

    cdef bint clean_here(self) except -1:
        cdef ExpiringHead to
        cdef char *copies
        cdef uint64_t n = 0
        look_up(self)
        if self.slot == 0 or not self.has_any(self.table, entry_at(self.table.core, self.slot), WANT_EXPIRED):
            return False
        if self.all_expired():
            self.remove_here()
            return True
        to = (<ExpiringHead *>self.head())[0]
        if to.is_ordered:
            pass_expired(self.table, &to, self.ttl, time_of(self))
            if to.dead <= MOST_DEAD or to.dead <= live_elements(self.table, &to.list):
                if not list_skip(&self.table.lane, self.table, self.map, self.slot, self.context.key.hash, &to):
                    self.no_memory()
                self.core.calls += 1
                return True
        copies = self.living_elements(False, &n)
        try:
            self.put_elements(copies, n, True)
        finally:
            PyMem_RawFree(copies)
        return True

    def _take(self, ListParts parts):
        """Move the current key's elements, with their timestamps, to the end of `parts`; None makes a new one."""
        cdef char *copies
        cdef uint64_t n = 0
        cdef int64_t ttl = self.ttl
        look_up(self)
        if self.slot == 0:
            return parts
        if self.watcher is not None:
            self.watcher.forget(self)
        if parts is None:
            parts = ListParts.__new__(ListParts, self)
        look_up(self)        # both may have run finalisers
        if self.slot == 0:
            return parts
        self.ttl = 0                     # all elements, expired or not
        try:
            copies = self.living_elements(False, &n)
        finally:
            self.ttl = ttl
        parts.join(copies, n)
        self.remove_here()
        return parts

    def _put(self, ListParts parts not None):
        """Append the elements that `_take` has taken to the current key's list."""
        cdef char *elements = parts.elements
        cdef uint64_t n = parts.n
        look_up(self)
        if self.map == NULL:
            self.make_room()
        parts.elements = NULL
        parts.n = 0
        self.forget_bounds()
        try:
            self.put_elements(elements, n, False)
        finally:
            PyMem_RawFree(elements)


@cython.final
@cython.no_gc_clear
cdef class ListParts:
    """Elements in stored form on their way from one namespace to another."""

    cdef ListTableHandle handle
    cdef Table *table
    cdef char *elements
    cdef uint64_t n

    def __cinit__(self, ListTableHandle handle not None):
        self.handle = handle
        self.table = handle.table

    def __dealloc__(self):
        # If the backend is closed, only references to objects are left to drop.
        if self.elements != NULL:
            if not self.handle.core.closed:
                drop_elements(self.table, self.elements, self.n)
                end_objects(self.handle.core)
            PyMem_RawFree(self.elements)

    cdef int join(self, char *more, uint64_t n) except -1:
        """Take over elements in memory from `PyMem_RawMalloc`."""
        cdef uint32_t width = self.table.element_width
        cdef char *joined
        if self.elements == NULL:
            self.elements = more
            self.n = n
            return 0
        joined = <char *>PyMem_RawRealloc(self.elements, (self.n + n) * width)
        if joined == NULL:
            drop_elements(self.table, more, n)
            PyMem_RawFree(more)
            raise MemoryError("no memory to merge lists; nothing has changed")
        memcpy(joined + self.n * width, more, n * width)
        PyMem_RawFree(more)
        self.elements = joined
        self.n += n
        return 0


@cython.final
@cython.no_gc_clear
cdef class ListIterator:
    """The elements of one list; RuntimeError at the next step after it has changed."""

    cdef ListTableHandle handle
    cdef CoreKey key
    cdef object owner                    # keeps `key.data` valid
    cdef object values                   # iterator over elements that had to be read at once, or None
    cdef ListCursor cursor
    cdef bint is_open
    cdef uint64_t calls
    cdef uint64_t rollbacks
    cdef uint64_t length
    cdef uint32_t stamp
    cdef int64_t now

    def __cinit__(self, ListTableHandle handle not None):
        cdef list found = []             # before the entry is found: making the list may run finalisers
        look_up(handle)
        self.handle = handle
        handle.iterators += 1
        self.now = time_of(handle) if handle.ttl else 0
        if handle.slot and handle.ttl and (handle.refreshes or handle.all_expired()):
            self.values = iter(handle.read_list(found))
            look_up(handle)
        self.key = handle.context.key
        self.owner = handle.context.key_owner
        if handle.slot:
            self.stamp = handle.head().stamp
            self.length = handle.head().length
            if self.values is None:
                handle.open_cursor(handle.head(), &self.cursor)
                self.is_open = True
        self.calls = handle.core.calls
        self.rollbacks = handle.core.rollbacks

    def __dealloc__(self):
        if self.handle is not None:
            self.handle.iterators -= 1
        if self.is_open:
            cursor_close(&self.cursor)

    def __iter__(self):
        return self

    def __next__(self):
        cdef ListTableHandle handle = self.handle
        cdef Table *table
        cdef char *element
        cdef object value
        if handle.core.calls != self.calls:
            self.find_place()
        if self.values is not None:
            return next(self.values)
        if not self.is_open:
            raise StopIteration
        table = handle.plain_table if self.key.namespace == 0 else handle.spaced_table
        while True:
            element = cursor_next(table, &self.cursor)
            if element == NULL:
                raise StopIteration
            if handle.ttl == 0:
                break
            if handle.shows_expired or not is_expired(element_timestamp(element), handle.ttl, self.now):
                element += 8
                break
        value = handle.codec.load_raw(element)
        return value if handle.codec.is_native else handle.finished(value)

    cdef int find_place(self) except -1:
        cdef ListTableHandle handle = self.handle
        cdef Table *table = handle.plain_table if self.key.namespace == 0 else handle.spaced_table
        cdef ListHead *head
        cdef uint32_t slot
        if handle.core.closed:
            raise ClosedError("the backend of this iterator is closed")
        if handle.core.inside:
            handle.core.refuse()
        if handle.core.rollbacks != self.rollbacks:
            raise RuntimeError("the state was rolled back while it was iterated")
        slot = find_key(table, &self.key)
        head = <ListHead *>value_of(table, entry_at(table.core, slot)) if slot else NULL
        if (head.length if slot else 0) != self.length or (slot and head.stamp != self.stamp):
            raise RuntimeError("the state was changed while it was iterated")
        self.calls = handle.core.calls
        return 0
