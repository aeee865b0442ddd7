"""The current key of a keyed backend, in the form that composite keys have.

Setting a key converts and hashes it once, for all states, and writes key group, key and namespace in front of the
bytes that handles look up: see `KeyedStore.place`.
"""

from libc.stdint cimport uint32_t
from libc.string cimport memset

from statebackend._core.handles.time_and_namespace cimport TimeAndNamespace, begin_time
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.rocksdb.overlay.overlay cimport PyThread_get_thread_ident, come_out, go_inside
from statebackend._core.tables.cow_map cimport CoreKey

from statebackend.errors import ClosedError


cdef class CurrentKey(TimeAndNamespace):
    """The compiled half of a keyed backend: the current key, namespace and time."""

    cdef int opened(self, object store) except -1:
        self.store = store
        return 0

    cdef int check(self) except -1:
        if unlikely(self.closed):
            raise ClosedError("the backend is closed", hint="create another one")
        if unlikely(self.store.overlay.inside or self.store.overlay.is_busy):
            self.store.overlay.begin()
        return 0

    cdef bint is_shut(self) noexcept:
        return self.closed

    cdef bint is_inside(self) noexcept:
        return self.store.overlay.inside != 0

    def _refuse(self):
        """Raise what a call without a current key gets, or one after closing."""
        self.check()
        self.no_key()

    # --- calls ---

    @property
    def _calls_inside(self):
        return 0 if self.store is None else self.store.overlay.inside + self.store.overlay.is_busy

    @property
    def _under_way(self):
        return 0 if self.store is None else self.store.overlay.under_way

    @_under_way.setter
    def _under_way(self, uint32_t calls):
        self.store.overlay.under_way = calls
        self.store.overlay.inside_thread = PyThread_get_thread_ident()

    @property
    def _inside_thread(self):
        return self.store.overlay.inside_thread

    def _do_later(self, deferred):
        self._later.append(deferred)
        self.has_later = True

    def _run(self, function, *arguments):
        """Call a function of the user's inside a call: it may not call the backend."""
        go_inside(self.store.overlay)
        try:
            return function(*arguments)
        finally:
            come_out(self.store.overlay)

    cdef int settle(self) except -1:
        if unlikely(self.has_later) and not self.store.overlay.inside and not self.store.overlay.under_way:
            self._settle()
            self.has_later = len(self._later) > 0
        return 0

    @property
    def _closed(self):
        return self.closed

    @_closed.setter
    def _closed(self, bint closed):
        self.closed = closed

    # --- the key ---

    def set_current_key(self, key):
        self.visit(key, False)

    cdef int visit(self, object key, bint is_canonical) except -1:
        """Make a key current, which may be in canonical form."""
        cdef CoreKey new
        cdef object owner
        self.check()
        memset(&new, 0, sizeof(CoreKey))
        owner = self.codec.split_canonical(key, &new) if is_canonical else self.codec.split(key, &new)
        begin_time(self)
        self.check()                     # encoders and clocks may run anything
        self.take(&new, owner)
        if unlikely(self.cleans):
            self.tell_time()
        return 0

    cdef int take(self, CoreKey *key, object owner) except -1:
        """Make a key current: number, or pointer and length with their owner."""
        cdef object _old_owner = self.key_owner      # ends with this call, when all is set
        self.find_group(key)
        self.store.overlay.come_in()
        self.has_key = False
        self.turn += 1
        if self.codec.is_int:
            self.store.begin_place_of_int(key.group, key.number)
        else:
            self.store.begin_place_of_bytes(key.group, key.data, key.length)
        self.store.end_place(self.namespace_name)
        self.key.number, self.key.data, self.key.length, self.key.group = key.number, key.data, key.length, key.group
        self.key_owner = owner
        self.has_key = self.store.has_key = True
        return 0

    cdef int drop_key(self) noexcept:
        self.has_key = self.store.has_key = False
        self.turn += 1
        return 0

    def _enter(self, canonical, bytes namespace not None):
        """Make a canonical key and an encoded namespace current, and read the clock."""
        self._namespace = namespace
        self._key = canonical
        begin_time(self)

    # --- the namespace ---

    def set_current_namespace(self, namespace):
        self.check()
        if namespace is not None and namespace is self.namespace_object:
            return
        self._namespace = self.encode_namespace(namespace)
        if type(namespace) in self.frozen_types:
            self.namespace_object = namespace

    cdef int name_namespace(self, bytes name) except -1:
        self.store.overlay.come_in()
        self.namespace_object = None
        self.namespace_name = name
        self.turn += 1
        if self.has_key:
            self.has_key = self.store.has_key = False    # until the place is whole again
            self.store.end_place(name)
            self.has_key = self.store.has_key = True
        return 0

    # --- time ---

    cdef int tell_time(self) except -1:
        """Outside marks, let compactions know the time, if it is another than they know."""
        if self.store.overlay.n_marks or (self.is_told and self.time() == self.told_at):
            return 0
        self.told_at = self.time()
        self.is_told = self._let_expire()
        return 0

    def _cleans_up(self):
        """A state expires: compactions are told the time from now on."""
        self.cleans = True

    @property
    def event_cleaned_now(self):
        """The time by which states in event time are cleaned up."""
        return self.event_cleaned if self.has_event_time else self.time()
