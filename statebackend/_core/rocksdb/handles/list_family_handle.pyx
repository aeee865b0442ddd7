"""The handle of list states: elements one behind the other in one value; appending merges, and reads nothing.

Empty bytes are not a list: a merge leaves them when all elements have expired.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy, memset

from statebackend._core.codecs.type_codec cimport Room, close_room, open_room, take_room
from statebackend._core.handles.state_handle cimport is_dead, time_of
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.rocksdb.handles.family_handle cimport FamilyHandle, ValueCopy, STAMP_BYTES, damaged, hold
from statebackend._core.rocksdb.binding.write_batch cimport WRITE_DELETE, WRITE_MERGE, WRITE_PUT, Write
from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, drop
from statebackend._core.rocksdb.handles.current_key cimport begin_call, end_call
from statebackend._core.rocksdb.binding.database cimport PinnedValue
from statebackend._core.tables.expiry cimport is_expired, written_at

from statebackend.errors import SerializationError

cdef enum:
    LENGTH_BYTES = 4                  # in front of elements that vary


cdef struct Element:
    const char *data                  # behind the timestamp
    size_t size
    int64_t stamp


cdef class ListFamilyHandle(FamilyHandle):
    """A list."""

    cdef bint next_element(self, ValueCopy *held, size_t *at, Element *element) except -1:
        """The element at this place of the stored bytes, and the place of the next one; False at the end."""
        cdef uint32_t length
        cdef size_t size = self.front + self.codec.width
        if at[0] >= held.size:
            return False
        if not self.codec.width:
            if held.size - at[0] < LENGTH_BYTES:
                raise damaged()
            memcpy(&length, held.data + at[0], LENGTH_BYTES)
            size = length
            at[0] += LENGTH_BYTES
        if held.size - at[0] < size or size < self.front:
            raise damaged()
        element.stamp = 0
        if self.front:
            memcpy(&element.stamp, held.data + at[0], STAMP_BYTES)
        element.data = held.data + at[0] + self.front
        element.size = size - self.front
        at[0] += size
        return True

    cdef Py_ssize_t count_unexpired(self, ValueCopy *held, int64_t now) except -1:
        """How many elements have not expired; reads all stored bytes."""
        cdef Element element
        cdef size_t at = 0
        cdef Py_ssize_t left = 0
        while self.next_element(held, &at, &element):
            left += not self.ttl or not is_expired(element.stamp, self.ttl, now)
        return left

    cdef bint is_all_dead(self, ValueCopy *held) except -1:
        """Whether a list of which all elements have expired may be removed."""
        cdef Element element
        cdef size_t at = 0
        while self.next_element(held, &at, &element):
            if not is_dead(self, element.stamp):
                return False
        return True

    # --- reading ---

    def get(self):
        cdef PinnedValue found
        cdef ValueCopy held
        cdef Element element
        cdef size_t n, at = 0
        cdef int64_t now = 0
        cdef list shown = []
        cdef const char *key = self.store.key_here(&n)
        if not self.store.find(self.table, key, n, &found):
            return shown
        cdef object _owner = hold(self.store.database, &found, &held)
        if held.size == 0:
            self.change(WRITE_DELETE, key, n, NULL, 0)
            return shown
        if self.ttl:
            now = time_of(self)
            if self.count_unexpired(&held, now) == 0:
                if self.is_all_dead(&held):
                    self.expired_on_read += 1
                    self.change(WRITE_DELETE, key, n, NULL, 0)
            elif self.refreshes:
                self.renew(key, n, &held, now)
        begin_call(self.context)
        try:
            while self.next_element(&held, &at, &element):
                if not self.ttl or self.shows_expired or not is_expired(element.stamp, self.ttl, now):
                    shown.append(self.loaded(self.codec, element.data, element.size))
        finally:
            end_call(self.context)
        return shown

    cdef int renew(self, const char *key, size_t n, ValueCopy *held, int64_t now) except -1:
        """Write the elements that are not dead; those that have not expired are stamped with the time."""
        cdef Bytes made
        cdef Element element
        cdef size_t at = 0
        cdef uint32_t length
        cdef int64_t stamp
        cdef bint is_done = True
        memset(&made, 0, sizeof(made))
        try:
            while is_done and self.next_element(held, &at, &element):
                stamp = element.stamp
                if not is_expired(stamp, self.ttl, now):
                    stamp = written_at(stamp, now, self.in_event_time)
                elif is_dead(self, stamp):
                    continue
                length = <uint32_t>(element.size + STAMP_BYTES)
                if not self.codec.width:
                    is_done = append(&made, <const char *>&length, LENGTH_BYTES)
                is_done = is_done and append(&made, <const char *>&stamp, STAMP_BYTES)
                is_done = is_done and append(&made, element.data, element.size)
            if not is_done:
                raise MemoryError
            return self.change(WRITE_PUT, key, n, made.data, made.size)
        finally:
            drop(&made)

    def exists(self):
        cdef PinnedValue found
        cdef ValueCopy held
        cdef size_t n
        cdef const char *key = self.store.key_here(&n)
        if not self.store.find(self.table, key, n, &found):
            return False
        cdef object _owner = hold(self.store.database, &found, &held)
        if self.ttl and not self.shows_expired:
            return self.count_unexpired(&held, time_of(self)) > 0
        return held.size > 0

    # --- writing ---

    cdef bint write_element(self, object value, Room *room, bint is_plain) except -1:
        """Append an element as it is stored; its timestamp, if it has one, is still to be set.

        If it `is_plain`, this runs no Python; False, with nothing appended, if it would.
        """
        cdef unsigned long long begin = room.used
        cdef uint32_t length
        take_room(room, self.front + (0 if self.codec.width else LENGTH_BYTES))
        if not is_plain:
            self.put_in(self.codec, value, room)
        elif not self.codec.write_plain(value, room):
            room.used = begin
            return False
        if not self.codec.width:
            if room.used - begin - LENGTH_BYTES > <unsigned long long>0xFFFFFFFF:
                raise SerializationError("an element is 4 GB or longer", detail=self.codec.where)
            length = <uint32_t>(room.used - begin - LENGTH_BYTES)
            memcpy(room.data + begin, &length, LENGTH_BYTES)
        return True

    cdef int stamp_all(self, Room *room) except -1:
        """Set the timestamps of all elements in it."""
        cdef int64_t now = time_of(self)
        cdef unsigned long long at = 0
        cdef uint32_t length
        while at < room.used:
            if self.codec.width:
                memcpy(room.data + at, &now, STAMP_BYTES)
                at += self.front + self.codec.width
            else:
                memcpy(&length, room.data + at, LENGTH_BYTES)
                memcpy(room.data + at + LENGTH_BYTES, &now, STAMP_BYTES)
                at += LENGTH_BYTES + length
        return 0

    cdef int write(self, Write what, Room *room) except -1:
        """Write elements at the current place, stamped with the time."""
        cdef size_t n
        cdef const char *key
        if self.ttl:
            self.stamp_all(room)
        key = self.store.key_here(&n)
        self.change(what, key, n, room.data, room.used)
        if unlikely(self.watched()):
            self.changed(self.store.place_here)
        return 0

    def add(self, value):
        cdef Room room
        open_room(&room)
        try:
            if self.write_element(value, &room, True):
                self.write(WRITE_MERGE, &room)
            else:
                self.write_given([value], WRITE_MERGE)
        finally:
            close_room(&room)

    def add_all(self, values):
        self.write_given(values, WRITE_MERGE)

    def update(self, values):
        self.write_given(values, WRITE_PUT)

    cdef int write_given(self, object values, Write what) except -1:
        """Append elements to the list of the current place, or replace it."""
        cdef Room room
        cdef list given
        self.store.need_key()
        given = self._elements_of(values)        # before the call: the user's iterable may do anything
        open_room(&room)
        try:
            for value in given:
                self.write_element(value, &room, False)
            if given:
                self.write(what, &room)
            elif what == WRITE_PUT:
                self.clear()
        finally:
            close_room(&room)
            self.context.settle()
        return 0

    def clear(self):
        cdef size_t n
        cdef const char *key
        self.store.need_key()
        if unlikely(self.watched()) and self.store.get_at(self.table, self.store.place_here):
            self.changed(self.store.place_here)
        key = self.store.key_here(&n)        # what was asked above may let other threads run
        self.change(WRITE_DELETE, key, n, NULL, 0)
