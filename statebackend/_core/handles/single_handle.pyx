"""Handles of states with one value for a key: `SingleHandle`, and `ValueHandle` of value states."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.codecs.key_value_codecs cimport FORM_OBJECT, MAX_STORED, ValueCodec
from statebackend._core.tables.cow_map cimport Table, entry_at, payload_of, value_of
from statebackend._core.tables.expiry cimport is_expired, written_at
from statebackend._core.handles.table_handle cimport NEVER, look_up
from statebackend._core.handles.cleanup cimport begin_access, clean_up
from statebackend._core.handles.handle cimport Handle
from statebackend._core.handles.state_handle cimport default_of, is_dead, time_of
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.objects cimport object_at
from statebackend._core.tables.state_core cimport begin_call, come_out, end_call, end_objects, go_in
from statebackend._core.tables.entry_update cimport restamp, write_value
from statebackend._core.tables.values cimport TYPE_FLOAT, TYPE_LONG


cdef class SingleHandle(Handle):
    """A state with one value for a key."""

    # --- reading ---

    cdef int64_t timestamp_here(self) noexcept:
        return (<int64_t *>payload_of(self.table, entry_at(self.table.core, self.slot)))[0]

    cdef bint expired_here(self) except -1:
        return is_expired(self.timestamp_here(), self.ttl, time_of(self))

    cdef object load_here(self):
        """Load the value of the entry that was found. If a mark or a snapshot needs an object, this copies it first."""
        if self.codec.form == FORM_OBJECT:
            return self.load_object_here()
        return self.loaded(value_of(self.table, entry_at(self.table.core, self.slot)))

    cdef object load_object_here(self):
        cdef object value
        cdef uint64_t entered = go_in(self.core)     # copying runs the user's code
        self.stamp = NEVER
        try:
            self.slot = self.here()._unshare(self.map, self.slot, &self.context.key)
            value = object_at(value_of(self.table, entry_at(self.table.core, self.slot)))
            self.stamp = entered - 1
        finally:
            come_out(self.core, entered)
            self.core.settle()
        if self.watcher is not None:
            self.watcher.note(self, value, written=False)
        return value

    cdef object read(self):
        """Return the value, or None. A dead value is removed, and returned this once if it may be seen."""
        cdef object value = None
        begin_access(self)
        if self.slot == 0:
            return None
        if self.ttl:
            if self.expired_here():
                if not is_dead(self, self.timestamp_here()):
                    return None
                self.expired_on_read += 1
                begin_call(self.core)
                try:
                    if self.shows_expired:
                        value = self.load_here()
                        look_up(self)
                    if self.slot and self.expired_here():
                        self.remove_here()
                finally:
                    end_call(self.core)
                return value
            if self.refreshes:
                self.renew()
        return self.load_here()

    cdef int renew(self) except -1:
        cdef uint32_t slot
        cdef int64_t now = written_at(self.timestamp_here(), time_of(self), self.in_event_time)
        if self.timestamp_here() == now:
            return 0
        slot = restamp(&self.table.lane, self.table, self.map, self.slot, self.context.key.hash, now)
        if slot == 0:
            self.no_memory()
        self.slot = slot
        return 0

    cdef object unexpired(self):
        """Return the value that new input is merged into, or None. An expired value never is."""
        look_up(self)
        if self.slot == 0 or (self.ttl and self.expired_here()):
            return None
        return self.load_here()

    # --- merging namespaces ---

    def _take(self):
        """Remove what the current key has. Returns the value and its timestamp, or None if there is nothing."""
        cdef object value
        cdef int64_t timestamp = 0
        look_up(self)
        if self.slot == 0:
            return None
        if self.ttl:
            timestamp = self.timestamp_here()
        begin_call(self.core)
        try:
            value = self.load_here()
            self.clear_here()
        finally:
            end_call(self.core)
        return value, timestamp

    def _moved(self, stored):
        """The value and timestamp that a merge goes on with, or None; in event time, an expired value is dropped."""
        cdef int64_t now
        if not self.in_event_time:
            return stored
        now = time_of(self)
        return None if is_expired(stored[1], self.ttl, now) else (stored[0], written_at(stored[1], now, True))

    def _merge_stored(self, a, b):
        """Merge two values and their timestamps, and stamp the result now. An expired value counts as none."""
        cdef int64_t now = time_of(self) if self.ttl else 0
        cdef bint a_expired = self.ttl != 0 and is_expired(a[1], self.ttl, now)
        cdef bint b_expired = self.ttl != 0 and is_expired(b[1], self.ttl, now)
        cdef uint64_t entered
        if a_expired and b_expired:
            return None
        if a_expired or b_expired:
            return (b if a_expired else a)[0], now
        entered = go_in(self.core)
        try:
            return self.merged(a[0], b[0]), written_at(max(a[1], b[1]), now, self.in_event_time)
        finally:
            come_out(self.core, entered)

    cdef object merged(self, object a, object b):
        """Merge two values or accumulators, `a` first, by the user's function."""
        raise NotImplementedError

    def _put_stored(self, value, int64_t timestamp):
        begin_call(self.core)
        try:
            self.write(value)
            if self.ttl:
                self.forget_bounds()
                look_up(self)    # the watcher may have run anything
                if self.slot == 0:
                    return
                (<int64_t *>payload_of(self.table, entry_at(self.table.core, self.slot)))[0] = timestamp
        finally:
            end_call(self.core)

    # --- writing ---

    cdef int write(self, object value) except -1:
        cdef char stored[MAX_STORED]
        look_up(self)
        if unlikely(value is None):
            self.codec.refuse_none()
        if unlikely(self.map == NULL):
            self.make_room()
        if likely(self.codec.store(self.core, value, stored)):
            return self.write_stored(stored)
        return self.write_by_serializer(value)

    cdef int write_by_serializer(self, object value) except -1:
        """Set the value of the current key; the serializer may be the user's."""
        cdef char stored[MAX_STORED]
        cdef bytes data
        cdef uint64_t entered = go_in(self.core)
        try:
            data = self.codec.serialized(value)
        finally:
            come_out(self.core, entered)
        look_up(self)
        if self.map == NULL:
            self.make_room()
        self.codec.store_bytes(self.core, data, stored)
        self.write_stored(stored)
        return self.core.settle()

    cdef int64_t time_to_write(self) except? -1:
        cdef int64_t now = time_of(self) if self.ttl else 0
        if unlikely(self.keeps_latest) and self.slot:
            return written_at(self.timestamp_here(), now, True)
        return now

    cdef int write_stored(self, char *stored) except -1:
        """Put a stored form in. It belongs to the table afterwards, even if this raises."""
        cdef Table *table = self.table
        cdef int64_t now = self.time_to_write()
        cdef uint32_t slot = write_value(&table.lane, table, self.map, &self.context.key, self.slot, stored, now)
        if unlikely(slot == 0):
            self.codec.drop(self.core, stored)
            self.no_memory()
        self.slot = slot
        if unlikely(self.watcher is not None):
            self.watcher.note(self, object_at(stored))
        end_objects(self.core)
        return 0

    cdef object stored_copy(self, ValueCodec codec, object value):
        """Return a value as it comes back once it is stored: of the declared type, sharing nothing mutable."""
        cdef object prepared
        cdef char stored[MAX_STORED]
        cdef uint64_t entered = go_in(self.core)
        try:
            prepared = codec.prepared(value)
            if prepared is not value:
                return codec.deserialized(PyBytes_AS_STRING(prepared), PyBytes_GET_SIZE(prepared))
        finally:
            come_out(self.core, entered)
        if codec.form != TYPE_FLOAT:
            return value
        codec.store_native(self.core, value, stored)     # rounded to single precision
        return codec.load(stored)


cdef class ValueHandle(SingleHandle):
    """One value for a key; `default` gives what `value()` of an absent one returns."""

    cdef object default

    cdef int declared(self) except -1:
        self.default = default_of(self.descriptor)
        return 0

    def value(self):
        """Return the value; if there is none, a copy of the default, which may be None. O(1) expected."""
        cdef object value
        if likely(self.codec.form == TYPE_LONG and self.ttl == 0):
            look_up(self)
            if likely(self.slot != 0):
                return (<int64_t *>value_of(self.table, entry_at(self.table.core, self.slot)))[0]
            return None if self.default is None else self.default()
        value = self.read()
        if value is None and self.default is not None:
            return self.default()
        return value

    def update(self, value):
        clean_up(self)
        if value is None:
            self.clear_here()
        else:
            self.write(value)
