"""`TimeAndNamespace`: the current key, namespace and time of a keyed backend, the base of both compiled backends.

    TimeAndNamespace
      KeyContext      `_core.handles.key_context`, heap: the key as tables look it up
      CurrentKey      `_core.rocksdb.handles.current_key`: the key in front of composite keys

Time. A clock given by the caller is read when a key is set. The machine's clock is read when a state with a TTL first
asks for the time after that, so programs without TTL do not pay for it.
"""

from functools import partial

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memset

from statebackend._core.codecs.key_value_codecs cimport KeyCodec
from statebackend._core.key_groups cimport group_of_hash, hash_canonical_bytes, hash_canonical_int
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.wall_clock cimport wall_clock_init, wall_clock_ms

from statebackend.errors import KeyGroupError, UsageError


cdef class TimeAndNamespace:
    """What the compiled halves of keyed backends have in common."""

    def _open(self, store not None, KeyCodec codec not None, uint32_t max_parallelism, uint32_t first_group,
              uint32_t last_group, clock, read_clock, bint is_system_clock, encode_namespace,
              frozenset frozen_types not None):
        """Begin to work; `read_clock(clock)` gives milliseconds, `frozen_types` are of namespaces that never change."""
        memset(&self.key, 0, sizeof(CoreKey))
        wall_clock_init(&self.wall_clock)
        self.codec = codec
        self.max_parallelism = max_parallelism
        self.first_group, self.n_groups = first_group, last_group - first_group + 1
        self.clock, self.read_clock = clock, read_clock
        self.clock_source = TIME_OF_SYSTEM if is_system_clock else TIME_OF_CLOCK
        self.time_source = self.clock_source
        self.namespace_name = b""
        self.encode_namespace, self.frozen_types = encode_namespace, frozen_types
        self.opened(store)

    # --- to be written: the storage of a backend ---

    cdef int opened(self, object store) except -1:
        """Take over what the states are stored in."""
        raise NotImplementedError

    cdef int check(self) except -1:
        """Raise where a call may not begin: the backend is closed, or a call is in progress."""
        raise NotImplementedError

    cdef bint is_shut(self) noexcept:
        """Whether the backend is closed."""
        return False

    cdef bint is_inside(self) noexcept:
        """Whether the user's code runs inside a call."""
        return False

    cdef int take(self, CoreKey *key, object owner) except -1:
        """Make a key current: its number, or its bytes with their owner."""
        raise NotImplementedError

    cdef int name_namespace(self, bytes name) except -1:
        """Make an encoded namespace current."""
        raise NotImplementedError

    # --- the key ---

    cdef int find_group(self, CoreKey *key) except -1:
        """Set the key group of a key, which this backend must serve."""
        if self.codec.is_int:
            key.group = group_of_hash(hash_canonical_int(&self.codec.plan.program, key.number), self.max_parallelism)
        else:
            key.group = group_of_hash(
                hash_canonical_bytes(&self.codec.plan.program, <const uint8_t *>key.data, key.length),
                self.max_parallelism)
        if unlikely(key.group - self.first_group >= self.n_groups):
            self.group_outside(key.group)
        return 0

    cdef int group_outside(self, uint32_t group) except -1:
        raise KeyGroupError(
            "the key belongs to a key group that this backend does not serve",
            detail=f"key group {group}, served are {self.first_group} to {self.first_group + self.n_groups - 1}",
            hint="send it to the instance that operator_index_for(...) names")

    cdef int drop_key(self) noexcept:
        """Have no current key."""
        self.has_key = False
        self.turn += 1
        return 0

    @property
    def _key(self):
        return self.codec.canonical(&self.key) if self.has_key else None

    @_key.setter
    def _key(self, canonical):
        cdef CoreKey new
        cdef object owner
        if self.codec is None:
            return
        if canonical is None:
            self.drop_key()
            return
        memset(&new, 0, sizeof(CoreKey))
        owner = self.codec.split_canonical(canonical, &new)
        self.take(&new, owner)

    @property
    def _key_group(self):
        """The key group of the current key, which follows from the key: the value set here is ignored."""
        return self.key.group

    @_key_group.setter
    def _key_group(self, group):
        pass

    cdef int no_key(self) except -1:
        """Raise what a call without a current key gets."""
        raise UsageError("no current key is set", code="USAGE.NO_KEY", hint="call set_current_key(key) first")

    def _require_key(self):
        """The current key in canonical form; raises if there is none."""
        self.check()
        if not self.has_key:
            self.no_key()
        return self.codec.canonical(&self.key)

    def _save_key(self):
        return self._key, self.now_known, self.now, self.namespace_name

    def _restore_key(self, saved):
        """Return to the key that `_save_key` gave, without reading the clock; inside a call, at its end."""
        if self.is_inside():
            self._do_later(partial(self._restore_key, saved))
            return
        if self.is_shut():
            return
        key, known, now, name = saved
        self.name_namespace(name)
        self._key = key
        self.now_known, self.now = known, now

    # --- the namespace ---

    @property
    def _namespace(self):
        return self.namespace_name

    @_namespace.setter
    def _namespace(self, bytes name not None):
        if self.codec is not None:
            self.name_namespace(name)

    # --- time ---

    cdef int begin_other_time(self) except -1:
        """`begin_time` where it is not the machine's clock that tells the time."""
        return self.begin_at(self.fixed_now if self.time_source == TIME_FIXED else self.read_clock(self.clock))

    cdef int begin_at(self, int64_t now) noexcept:
        """An operation begins at this time of the batch, or of the clock that was given."""
        self.now = now
        self.now_known = True
        if self.clock_source == TIME_OF_CLOCK:
            self.worked_at = now
            self.has_worked = True
        return 0

    cdef int64_t time(self) noexcept:
        """The time at which the current key was set, or of the vectorised call that is running."""
        if not self.now_known:
            self.now = wall_clock_ms(&self.wall_clock)
            self.now_known = True
        if unlikely(self.now < self.latest):
            self.setbacks += 1
        self.latest = self.now
        return self.now

    @property
    def _now(self):
        return self.time()

    @_now.setter
    def _now(self, int64_t now):
        self.now = now
        self.now_known = True

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

    @property
    def _event_now(self):
        """The time of states in event time; None: they use the time of all others."""
        return self.event_now if self.has_event_time else None

    @_event_now.setter
    def _event_now(self, now):
        self.has_event_time = now is not None
        self.is_told = False
        if self.has_event_time:
            self.event_now = now

    @property
    def _event_cleaned(self):
        """The time of cleanup in event time."""
        return self.event_cleaned

    @_event_cleaned.setter
    def _event_cleaned(self, int64_t now):
        self.is_told = False
        self.event_cleaned = now

    @property
    def _worked_at(self):
        """The time of the last operation that may have changed something, or None; never the machine's."""
        return self.worked_at if self.has_worked else None

    @_worked_at.setter
    def _worked_at(self, now):
        self.has_worked = now is not None
        if self.has_worked:
            self.worked_at = now
