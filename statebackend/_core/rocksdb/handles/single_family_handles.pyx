"""Handles of states with one value for a key: value, reducing, aggregating and folding."""

cimport cython
import numpy as np
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stddef cimport size_t
from libc.stdint cimport INT64_MIN, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

from statebackend._core.codecs.type_codec cimport Room, close_room, open_room, take_room
from statebackend._core.handles.state_handle cimport (
    AGGREGATES, REDUCES, adding_kind, combined, default_of, is_dead, time_of)
from statebackend._core.memory.byte_rows cimport start_of
from statebackend._core.memory.interpreter cimport ROWS_IN_TURN, give_way
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.rocksdb.handles.family_handle cimport FamilyHandle, ValueCopy, STAMP_BYTES, hold, stamp_at
from statebackend._core.rocksdb.binding.write_batch cimport WRITE_DELETE, WRITE_PUT
from statebackend._core.rocksdb.handles.current_key cimport begin_call, end_call
from statebackend._core.rocksdb.binding.database cimport PinnedValue
from statebackend._core.codecs.value_bytes cimport ValueBytes
from statebackend._core.rocksdb.overlay.overlay cimport come_out, go_inside
from statebackend._core.tables.expiry cimport written_at

cdef int64_t ON_NOTHING = INT64_MIN      # in place of the timestamp of the value that a write builds on


cdef class SingleHandle(FamilyHandle):
    """One value for a key: its timestamp, if there is a time to live, and its bytes."""

    cdef object read(self):
        """The value, or None. One that is dead is removed; it is returned this once if the visibility says so."""
        cdef PinnedValue found
        cdef ValueCopy held
        cdef size_t n
        cdef int64_t stamp, now
        cdef const char *key = self.store.key_here(&n)
        if not self.store.find(self.table, key, n, &found):
            return None
        cdef bytes owner = hold(self.store.database, &found, &held)
        if likely(not self.ttl):
            return self.loaded(self.codec, held.data, held.size)
        if self.has_gone(held.data, held.size):
            if not is_dead(self, stamp_at(held.data)):
                return None
            self.expired_on_read += 1
            self.change(WRITE_DELETE, key, n, NULL, 0)
            if not self.shows_expired:
                return None
        elif self.refreshes:
            stamp = stamp_at(held.data)
            now = written_at(stamp, time_of(self), self.in_event_time)
            if stamp != now:
                if owner is None:
                    memcpy(held.few, &now, STAMP_BYTES)
                else:
                    owner = (<char *>&now)[:STAMP_BYTES] + owner[STAMP_BYTES:]
                    held.data = PyBytes_AS_STRING(owner)
                self.change(WRITE_PUT, key, n, held.data, held.size)
        return self.loaded(self.codec, held.data + STAMP_BYTES, held.size - STAMP_BYTES)

    cdef int write(self, object value, int64_t on) except -1:
        """Set the value of the current place; `on` is the timestamp of the value that it builds on."""
        cdef Room room
        cdef int64_t now
        cdef size_t n
        cdef const char *key
        open_room(&room)
        try:
            if self.front:
                take_room(&room, STAMP_BYTES)
            if not self.codec.write_plain(value, &room):
                self.put_in(self.codec, value, &room)
            if self.front:
                now = written_at(on, time_of(self), True)
                memcpy(room.data, &now, STAMP_BYTES)
            key = self.store.key_here(&n)
            self.change(WRITE_PUT, key, n, room.data, room.used)
            return self.context.settle()
        finally:
            close_room(&room)

    cdef int remove(self) except -1:
        cdef size_t n
        cdef const char *key = self.store.key_here(&n)
        return self.change(WRITE_DELETE, key, n, NULL, 0)

    cdef object read_unexpired(self, int64_t *on):
        """The value that a write builds on, or None: one that has expired is never merged with new input.

        And its timestamp, which the write keeps in event time if it is later.
        """
        cdef PinnedValue found
        cdef ValueCopy held
        cdef size_t n
        cdef const char *key = self.store.key_here(&n)
        on[0] = ON_NOTHING
        if not self.store.find(self.table, key, n, &found):
            return None
        cdef object _owner = hold(self.store.database, &found, &held)
        return self.unexpired_at(held.data, held.size, on)

    cdef object unexpired_at(self, const char *stored, size_t n, int64_t *on):
        on[0] = ON_NOTHING
        if self.has_gone(stored, n):
            return None
        if self.in_event_time:
            on[0] = stamp_at(stored)
        return self.loaded(self.codec, stored + self.front, n - self.front)

    def exists(self):
        cdef PinnedValue found
        cdef ValueCopy held
        cdef size_t n
        cdef const char *key = self.store.key_here(&n)
        if not self.store.find(self.table, key, n, &found):
            return False
        cdef object _owner = hold(self.store.database, &found, &held)
        return self.shows_expired or not self.has_gone(held.data, held.size)

    def clear(self):
        self.remove()

    def unexpired(self, bytes stored not None):
        """Return a stored value, or None if it has expired."""
        cdef int64_t on
        return self.unexpired_at(PyBytes_AS_STRING(stored), PyBytes_GET_SIZE(stored), &on)

    def moved(self, bytes stored not None):
        """What a merge of namespaces takes of a stored value; in event time, None if it has expired."""
        cdef int64_t now
        if not self.in_event_time:
            return stored
        if self.has_gone(stored, PyBytes_GET_SIZE(stored)):
            return None
        now = written_at(stamp_at(stored), time_of(self), True)
        return (<char *>&now)[:STAMP_BYTES] + stored[STAMP_BYTES:]

    def stored(self, value, on=None):
        """Return a value as it is stored, stamped with the time; `on` is the timestamp of the value that it builds
        on."""
        return self.stored_form(value, ON_NOTHING if on is None else on)

    cdef bytes stored_form(self, object value, int64_t on):
        cdef Room room
        cdef int64_t now
        open_room(&room)
        try:
            if self.front:
                take_room(&room, STAMP_BYTES)
            self.put_in(self.codec, value, &room)
            if self.front:
                now = written_at(on, time_of(self), True)
                memcpy(room.data, &now, STAMP_BYTES)
            return PyBytes_FromStringAndSize(room.data, room.used)
        finally:
            close_room(&room)


cdef class ValueHandle(SingleHandle):
    """A value; `default` gives what `value()` of an absent one returns."""

    cdef object default

    cdef int declared(self) except -1:
        self.default = default_of(self.descriptor)
        return 0

    def value(self):
        """Return the value; if there is none, a copy of the default, which may be None."""
        cdef object value = self.read()
        if value is None and self.default is not None:
            return self.default()
        return value

    def update(self, value):
        if unlikely(value is None):
            self.remove()
        else:
            self.write(value, ON_NOTHING)


@cython.final
cdef class KnownRows:
    """A vectorised call's knowledge of its keys, by number: the values before, and the values that its rows have
    stored."""

    cdef const int64_t[::1] key_ends, ends
    cdef const uint8_t[::1] keys, found, data
    cdef list kept                    # None: as it was before; False: nothing

    def __init__(self, keys, found, ends, data):
        self.key_ends, self.keys = keys
        self.found, self.ends, self.data = found.view(np.uint8), ends, data
        self.kept = [None] * len(found)

    cdef bint has_key(self, Py_ssize_t number, bytes key) noexcept:
        cdef int64_t size = self.key_ends[number + 1] - self.key_ends[number]
        return PyBytes_GET_SIZE(key) == size and not memcmp(
            PyBytes_AS_STRING(key), start_of(self.keys) + self.key_ends[number], size)

    cdef const char *stored(self, Py_ssize_t number, size_t *n) noexcept:
        """What is stored at a key, or NULL; good until the next row is kept there."""
        cdef object kept = self.kept[number]
        if kept is None:
            n[0] = self.ends[number + 1] - self.ends[number]
            return start_of(self.data) + self.ends[number] if self.found[number] else NULL
        if kept is False:
            return NULL
        n[0] = PyBytes_GET_SIZE(kept)
        return PyBytes_AS_STRING(kept)


cdef class AddingHandle(SingleHandle):
    """One value or accumulator, into which every added value goes, by the user's function."""

    cdef ValueBytes inputs            # the codec of added values; None: they may be anything
    cdef int kind

    cdef int declared(self) except -1:
        self.kind = adding_kind(self.descriptor)
        if self.kind == REDUCES:
            self.inputs = self.codec
        return 0

    def _take_inputs(self, ValueBytes inputs):
        """Check and copy values by this codec."""
        self.inputs = inputs

    cdef object copied(self, object value):
        """The value as the function gets it: as it comes back once it is stored, of the declared type, if there is one.

        It shares nothing mutable.
        """
        cdef Room room
        if self.inputs is None:
            return value
        open_room(&room)
        try:
            self.put_in(self.inputs, value, &room)
            return self.loaded(self.inputs, room.data, room.used)
        finally:
            close_room(&room)

    cdef object called(self, object accumulator, object value):
        """The user's function, inside the call."""
        go_inside(self.store.overlay)
        try:
            return combined(self.kind, self.descriptor, accumulator, value)
        finally:
            come_out(self.store.overlay)

    def add(self, value):
        cdef object accumulator
        cdef int64_t on
        if value is None:
            self.remove()
            return
        begin_call(self.context)
        try:
            accumulator = self.read_unexpired(&on)
            self.write(self.called(accumulator, self.copied(value)), on)
        finally:
            end_call(self.context)

    def _add_in_order(self, list rows not None, list namespaces, list times, list values not None, bint are_copies,
                      const int64_t[::1] numbers not None, keys, stored):
        """`add` each value, with its key in canonical form current, its namespace and its time, if these are given.

        If values `are_copies` of the declared type, which have no other owner, the function gets them as they are.

        `keys` are the composite keys of all rows, each once, `numbers` say which of them is a row's, and `stored`
        is what they have: whether anything, and what. That is not read again until another writer writes, or makes
        another place current: the function may. Each row is written before the next one, so reads in between find
        it.
        """
        cdef KnownRows known = KnownRows(keys, *stored)
        cdef Py_ssize_t row = 0
        cdef uint64_t version = self.table.version
        cdef bint is_alone = True
        cdef object canonical, value, accumulator
        cdef bytes at
        cdef int64_t on
        begin_call(self.context)
        try:
            for canonical in rows:
                if row % ROWS_IN_TURN == 0:
                    go_inside(self.store.overlay)
                    try:
                        give_way()
                    finally:
                        come_out(self.store.overlay)
                if times is not None:
                    self.context._event_now = times[row]
                self.context.visit(canonical, True)
                if namespaces is not None:
                    self.context._namespace = namespaces[row]
                at, value = self.store.place_here, values[row]
                is_alone = is_alone and self.table.version == version and known.has_key(numbers[row], at)
                if value is None:
                    self.remove()
                    known.kept[numbers[row]] = False
                else:
                    accumulator = (self.known_value(known, numbers[row], &on) if is_alone
                                   else self.read_unexpired(&on))
                    known.kept[numbers[row]] = self.add_at(
                        at, accumulator, value if are_copies else self.copied(value), on)
                version += 1
                row += 1
        finally:
            end_call(self.context)

    cdef bytes add_at(self, bytes at, object accumulator, object value, int64_t on):
        """Add a value to the accumulator of a place; return the bytes stored there then."""
        cdef bytes stored = self.stored_form(self.called(accumulator, value), on)
        self.change(WRITE_PUT, PyBytes_AS_STRING(at), PyBytes_GET_SIZE(at),
                    PyBytes_AS_STRING(stored), PyBytes_GET_SIZE(stored))
        self.context.settle()
        return stored

    cdef object known_value(self, KnownRows known, Py_ssize_t number, int64_t *on):
        """As `read_unexpired`, of the bytes read, or stored by a row before."""
        cdef size_t size
        cdef object _owner = known.kept[number]
        cdef const char *stored = known.stored(number, &size)
        on[0] = ON_NOTHING
        return None if stored == NULL else self.unexpired_at(stored, size, on)

    def get(self):
        cdef object accumulator = self.read()
        if self.kind != AGGREGATES or accumulator is None:
            return accumulator
        go_inside(self.store.overlay)
        try:
            return self.descriptor.aggregate.get_result(accumulator)
        finally:
            come_out(self.store.overlay)
            self.context.settle()
