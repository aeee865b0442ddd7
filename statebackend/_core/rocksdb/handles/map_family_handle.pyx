"""The handle of map states: each entry is its own row, so that none is read or written for the sake of another.

An entry is its timestamp, if there is a time to live; a byte that is 1 for None; and the bytes of the value.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stddef cimport size_t
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

from statebackend._core.codecs.key_value_codecs cimport KeyCodec
from statebackend._core.codecs.type_codec cimport Room, close_room, open_room, take_room
from statebackend._core.handles.state_handle cimport encoded_map_key, is_dead, time_of
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.rocksdb.handles.family_handle cimport (
    FamilyHandle, ValueCopy, STAMP_BYTES, damaged, hold, stamp_at)
from statebackend._core.rocksdb.binding.write_batch cimport WRITE_DELETE, WRITE_PUT
from statebackend._core.rocksdb.overlay.composite_keys cimport INT_BYTES, int_at
from statebackend._core.rocksdb.binding.database cimport PinnedValue
from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.tables.expiry cimport written_at

cdef object ABSENT = object()            # in place of a value


cdef class MapFamilyHandle(FamilyHandle):
    """A map; `keys_codec` is its keys'."""

    cdef readonly KeyCodec keys_codec

    def _take_keys(self, KeyCodec keys_codec not None):
        self.keys_codec = keys_codec

    # --- keys and values ---

    cdef object split(self, object key, CoreKey *inner):
        """The canonical form of a map key; returns what keeps its bytes."""
        memset(inner, 0, sizeof(CoreKey))
        return encoded_map_key(self.keys_codec, key, inner, self.codec.where)

    cdef const char *entry(self, CoreKey *inner, size_t *n) except NULL:
        """The composite key of a map key of the current place; good until the next call."""
        return self.store.entry_here(self.keys_codec.is_int, inner.number, inner.data, inner.length, n)

    cdef object value_of(self, const char *stored, size_t n):
        if unlikely(n <= self.front):
            raise damaged()
        if stored[self.front]:
            return None
        return self.loaded(self.codec, stored + self.front + 1, n - self.front - 1)

    def _value(self, bytes stored not None):
        return self.value_of(PyBytes_AS_STRING(stored), PyBytes_GET_SIZE(stored))

    def _map_key(self, bytes key not None, size_t place):
        """The map key behind the place in a composite key."""
        cdef const char *data = PyBytes_AS_STRING(key) + place
        cdef size_t n = PyBytes_GET_SIZE(key) - place
        if not self.keys_codec.is_int:
            return self.keys_codec.key_of(0, data, n)
        if unlikely(n != INT_BYTES):
            raise damaged()
        return self.keys_codec.key_of(int_at(data), NULL, 0)

    cdef bint write_value(self, object value, Room *room, bint is_plain) except -1:
        """Append an entry as it is stored; its timestamp, if it has one, is still to be set.

        If it `is_plain`, this runs no Python; False, with part of it appended, if it would.
        """
        cdef char *flag
        take_room(room, self.front)
        flag = take_room(room, 1)
        flag[0] = value is None
        if value is None:
            return True
        if is_plain:
            return self.codec.write_plain(value, room)
        self.put_in(self.codec, value, room)
        return True

    # --- one entry ---

    cdef object read_entry(self, object key, bint is_loaded):
        """The value of a map key, or ABSENT; without `is_loaded`, something else for a value.

        An entry that is dead is removed, one that is seen is renewed if reads do so.
        """
        cdef CoreKey inner
        cdef PinnedValue found
        cdef ValueCopy held
        cdef size_t n
        cdef object _inner_owner = self.split(key, &inner)
        cdef const char *at = self.entry(&inner, &n)
        cdef object _owner
        if not self.store.find(self.table, at, n, &found):
            return ABSENT
        _owner = hold(self.store.database, &found, &held)
        if self.ttl:
            if not self.seen(at, n, held.data, held.size):
                return ABSENT
        return self.value_of(held.data, held.size) if is_loaded else None

    cdef bint seen(self, const char *at, size_t n, const char *stored, size_t size) except -1:
        """Whether a read may see an entry with a timestamp, which it removes or renews."""
        cdef int64_t stamp, now
        cdef bytes renewed
        if self.has_gone(stored, size):
            if not is_dead(self, stamp_at(stored)):
                return False
            self.expired_on_read += 1
            self.change(WRITE_DELETE, at, n, NULL, 0)
            return self.shows_expired
        if self.refreshes:
            stamp = stamp_at(stored)
            now = written_at(stamp, time_of(self), self.in_event_time)
            if stamp != now:
                renewed = PyBytes_FromStringAndSize(stored, size)
                memcpy(PyBytes_AS_STRING(renewed), &now, STAMP_BYTES)
                self.change(WRITE_PUT, at, n, PyBytes_AS_STRING(renewed), size)
        return True

    def _seen(self, bytes key not None, bytes stored not None):
        """Return what is stored at a composite key, if a read may see it, or None; removes or renews it."""
        if not self.ttl or self.seen(key, len(key), stored, len(stored)):
            return stored
        return None

    def get(self, key, default=None):
        cdef object value = self.read_entry(key, True)
        return default if value is ABSENT else value

    def __getitem__(self, key):
        cdef object value = self.read_entry(key, True)
        if value is ABSENT:
            raise KeyError(f"the key is not in {self.codec.where}")
        return value

    def contains(self, key):
        return self.read_entry(key, False) is not ABSENT

    def __contains__(self, key):
        return self.read_entry(key, False) is not ABSENT

    def put(self, key, value):
        cdef CoreKey inner
        cdef Room room
        cdef object _inner_owner
        open_room(&room)
        try:
            self.store.need_key()
            _inner_owner = self.split(key, &inner)
            if unlikely(not self.write_value(value, &room, True)):
                room.used = 0
                self.write_value(value, &room, False)
            self.put_stored(&inner, &room)
        finally:
            close_room(&room)
            self.context.settle()

    cdef int put_stored(self, CoreKey *inner, Room *room) except -1:
        """Put an entry that `write_value` has written, stamped with the time."""
        cdef int64_t now
        cdef size_t n
        cdef const char *at
        if self.ttl:
            now = time_of(self)
            memcpy(room.data, &now, STAMP_BYTES)
        if unlikely(self.watched()):
            at = self.entry(inner, &n)
            self._note_growth(at[:n])
        at = self.entry(inner, &n)
        return self.change(WRITE_PUT, at, n, room.data, room.used)

    def __setitem__(self, key, value):
        self.put(key, value)

    def _note_growth(self, bytes at):
        """Tell iterations that a key is new, if it is."""
        stored = self.store.get_at(self.table, at)
        if stored is None or self.has_expired(stored):
            self.changed(self.store.place_here)

    def _entries_of(self, list pairs not None):
        """Pairs of a suffix, behind the place, and the stored bytes; all are checked first."""
        cdef CoreKey inner
        cdef Room room
        cdef list rows = []
        cdef object _owner
        for key, value in pairs:
            open_room(&room)
            try:
                _owner = self.split(key, &inner)
                self.write_value(value, &room, False)
                rows.append(((inner.number if self.keys_codec.is_int else inner.data[:inner.length]),
                             PyBytes_FromStringAndSize(room.data, room.used)))
            finally:
                close_room(&room)
        return rows

    def _put_entries(self, list rows not None):
        """Put what `_entries_of` gave, stamped with the time."""
        cdef int64_t now = time_of(self) if self.ttl else 0
        cdef const char *at
        cdef size_t n
        cdef bytes run, data
        for canonical, stored in rows:
            data = stored
            if self.ttl:
                memcpy(PyBytes_AS_STRING(data), &now, STAMP_BYTES)
            run = None if self.keys_codec.is_int else canonical
            if unlikely(self.watched()):
                at = self.canonical_entry(canonical, run, &n)
                self._note_growth(at[:n])
            at = self.canonical_entry(canonical, run, &n)
            self.change(WRITE_PUT, at, n, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    cdef const char *canonical_entry(self, object canonical, bytes run, size_t *n) except NULL:
        if run is None:
            return self.store.entry_here(True, canonical, NULL, 0, n)
        return self.store.entry_here(False, 0, PyBytes_AS_STRING(run), PyBytes_GET_SIZE(run), n)

    def remove(self, key):
        cdef CoreKey inner
        cdef size_t n
        cdef const char *at
        cdef object _inner_owner = self.split(key, &inner)
        cdef bint is_watched = self.watched()    # first: it may let other threads run
        at = self.entry(&inner, &n)
        if unlikely(is_watched):
            self.remove_visible(at[:n])
        else:
            self.change(WRITE_DELETE, at, n, NULL, 0)

    def __delitem__(self, key):
        cdef CoreKey inner
        cdef size_t n
        cdef object _inner_owner = self.split(key, &inner)
        cdef const char *at = self.entry(&inner, &n)
        if not self.remove_visible(at[:n]):
            raise KeyError(f"the key is not in {self.codec.where}")

    cdef bint remove_visible(self, bytes at) except -1:
        """Remove an entry; return whether it was visible before."""
        cdef bytes stored = self.store.get_at(self.table, at)
        if stored is not None or self.ttl:      # a compaction may have dropped what a checkpoint has
            self.change(WRITE_DELETE, at, len(at), NULL, 0)
        if stored is None or not self.shows_expired and self.has_expired(stored):
            return False
        if self.watched():
            self.changed(self.store.place_here)
        return True
