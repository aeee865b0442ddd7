"""The current key of a keyed backend, in the form that composite keys have.

Setting a key converts and hashes it once, for all states, and writes key group, key and namespace in front of the
bytes that handles look up: see `Store.place`.
"""

from functools import partial

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset

from statebackend._core.codecs.codecs cimport KeyCodec
from statebackend._core.handles.time_and_namespace cimport TIME_FIXED, TIME_OF_CLOCK, TIME_OF_SYSTEM, TimeAndNamespace
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.rocksdb.overlay.overlay cimport PyThread_get_thread_ident, come_out, go_inside
from statebackend._core.rocksdb.overlay.store cimport Store
from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.wall_clock cimport wall_clock_ms

from statebackend.errors import ClosedError, UsageError


cdef class CurrentKey(TimeAndNamespace):
    """The compiled half of a keyed backend: the current key, namespace and time."""

    def _open(self, Store store not None, KeyCodec codec not None, uint32_t max_parallelism, uint32_t first_group,
              uint32_t last_group, clock, read_clock, bint is_system_clock, encode_namespace,
              frozenset frozen_types not None):
        """Begin to work; `read_clock(clock)` gives milliseconds, `frozen_types` are of namespaces that never change."""
        self.store = store
        self.set_up(codec, max_parallelism, first_group, last_group, clock, read_clock, is_system_clock,
                    encode_namespace, frozen_types)

    cdef int check(self) except -1:
        if unlikely(self.closed):
            raise ClosedError("the backend is closed", hint="create another one")
        if unlikely(self.store.overlay.inside or self.store.overlay.is_busy):
            self.store.overlay.begin()
        return 0

    cdef int no_key(self) except -1:
        """Raise what a call without a current key gets."""
        self.check()
        raise UsageError("no current key is set", hint="call set_current_key(key) first")

    def _refuse(self):
        """Raise what a call without a current key gets."""
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
        """Call `deferred` at the end of the outermost call."""
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
        """Run what was deferred to the end of the outermost call."""
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
        """Make `key` the one that handles work on. O(bytes)."""
        cdef CoreKey new
        cdef object owner
        self.check()
        memset(&new, 0, sizeof(CoreKey))
        owner = self.codec.split(key, &new)
        self.begin_time()
        self.check()                     # encoders and clocks may run anything
        self.take(&new, owner)
        if unlikely(self.cleans):
            self.tell_time()

    cdef int visit(self, object canonical) except -1:
        """Make a key current that is in canonical form, as `set_current_key` does."""
        cdef CoreKey new
        cdef object owner
        self.check()
        memset(&new, 0, sizeof(CoreKey))
        owner = self.codec.split_canonical(canonical, &new)
        self.begin_time()
        self.check()
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

    def clear_current_key(self):
        """Have no current key."""
        self.check()
        self._key = None

    cdef int drop_key(self) noexcept:
        self.has_key = self.store.has_key = False
        self.turn += 1
        return 0

    @property
    def _key_group(self):
        """The key group of the current key, which follows from the key: what is set here is not looked at."""
        return self.key.group

    @_key_group.setter
    def _key_group(self, group):
        pass

    def _require_key(self):
        """The current key in canonical form; raises if there is none."""
        self.check()
        if not self.has_key:
            self.no_key()
        return self.codec.canonical(&self.key)

    def _restore_key(self, saved):
        """Return to the key that `_save_key` gave, without reading the clock; inside a call, at its end."""
        if self.store.overlay.inside:
            self._do_later(partial(self._restore_key, saved))
            return
        if self.closed:
            return
        key, known, now, name = saved
        self._namespace = name
        self._key = key
        self.now_known, self.now = known, now

    def _enter(self, canonical, bytes namespace not None):
        """Make a canonical key and an encoded namespace current, and read the clock."""
        self._namespace = namespace
        self._key = canonical
        self.begin_time()

    # --- the namespace ---

    def set_current_namespace(self, namespace):
        """Make `namespace` the one that handles work in. O(bytes)."""
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

    cdef int begin_time(self) except -1:
        """An operation begins that may change something: it goes by the time from here on."""
        if likely(self.time_source == TIME_OF_SYSTEM):
            self.now_known = False
            return 0
        if self.time_source == TIME_FIXED:
            self.now = self.fixed_now
        else:
            self.now = self.read_clock(self.clock)
        self.now_known = True
        if self.clock_source == TIME_OF_CLOCK:
            self.worked_at = self.now
            self.has_worked = True
        return 0

    cdef int64_t time(self) noexcept:
        """The time at which the current key was set."""
        if not self.now_known:
            self.now = wall_clock_ms(&self.wall_clock)
            self.now_known = True
        return self.now

    cdef int64_t time_in(self, bint in_event_time) noexcept:
        """The time by which states are read and stamped that go by the time of rows, or do not."""
        return self.event_now if in_event_time and self.has_event_time else self.time()

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
    def _now(self):
        return self.time()

    @_now.setter
    def _now(self, int64_t now):
        self.now = now
        self.now_known = True

    @property
    def event_cleaned_now(self):
        """The time by which states in event time are cleaned up."""
        return self.event_cleaned if self.has_event_time else self.time()

    @property
    def _fixed_now(self):
        """The time of the batch, or of the vectorised call, that is running; None: the clock tells."""
        return self.fixed_now if self.time_source == TIME_FIXED else None

    @_fixed_now.setter
    def _fixed_now(self, now):
        if now is None:
            self.time_source = self.clock_source
        else:
            self.fixed_now = now
            self.time_source = TIME_FIXED
