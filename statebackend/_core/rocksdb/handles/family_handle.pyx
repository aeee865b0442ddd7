"""The base of all handles: where a state's values lie, and when they expire.

A scalar call makes no Python object but its result. The looked-up bytes are the current key's
(`KeyedStore.place`), with a map key behind them; values are written into a `Room` and read from a copy (`ValueCopy`).

Order of work. The user's code (serializers, functions) runs inside the call: calls that it makes are refused, and a
`close()` waits until the call is over. An iterable or a mapping is read before.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stddef cimport size_t
from libc.string cimport memcpy

from statebackend._core.handles.state_handle cimport StateHandle, time_of
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.rocksdb.binding.write_batch cimport Write
from statebackend._core.rocksdb.binding.database cimport Database, PinnedValue
from statebackend._core.rocksdb.handles.current_key cimport CurrentKey
from statebackend._core.rocksdb.overlay.overlay cimport come_out, go_inside
from statebackend._core.rocksdb.overlay.keyed_store cimport Table
from statebackend._core.codecs.type_codec cimport Room
from statebackend._core.codecs.value_bytes cimport ValueBytes
from statebackend._core.tables.expiry cimport is_expired

from statebackend.errors import StoreError


cdef object damaged():
    return StoreError("a value of the database cannot be read", code="STORE.DATABASE_CORRUPT",
                      hint="restore the state from a checkpoint")


cdef object hold(Database database, PinnedValue *found, ValueCopy *held):
    """Copy a value that was pinned, and unpin it; returns what keeps the copy, if it is longer than `held` itself."""
    cdef bytes owner = None
    held.size = found.size
    if found.size <= FEW:
        memcpy(held.few, found.data, found.size)
        held.data = held.few
        database.unpin(found)
        return None
    try:
        owner = PyBytes_FromStringAndSize(found.data, found.size)
    finally:
        database.unpin(found)
    held.data = PyBytes_AS_STRING(owner)
    return owner


cdef class FamilyHandle(StateHandle):
    """What the handles of all kinds of state have in common."""

    def _set_up(self, CurrentKey context not None, descriptor, ValueBytes codec not None, Table table not None):
        self.belong(context, descriptor)
        self.context, self.store, self.table, self.codec = context, context.store, table, codec
        self.front = STAMP_BYTES if self.ttl else 0
        self.declared()

    # --- time ---

    def now(self):
        return time_of(self)

    def cleaned_at(self):
        """The time by which `advance` cleans up."""
        return self.cleanup_time()

    cdef bint has_gone(self, const char *stored, size_t n) except -1:
        """Whether what begins with this timestamp, if there is one, has expired: this call does not see it."""
        if not self.ttl:
            return False
        if unlikely(n < STAMP_BYTES):
            raise damaged()
        return is_expired(stamp_at(stored), self.ttl, time_of(self))

    def has_expired(self, bytes stored not None):
        """Return True if a stored value, which begins with its timestamp, has expired now."""
        return self.has_gone(stored, len(stored))

    # --- writing ---

    cdef int change(self, Write what, const char *key, size_t n, const char *value, size_t size) except -1:
        """Write at a composite key of the current namespace. Rows that a delta removes have a namespace too."""
        if unlikely(self.store.is_spaced):
            self.table.has_namespaces = True
        return self.store.change(self.table, what, key, n, value, size)

    # --- conversions, which may run the user's code: inside the call, in which others are refused ---

    cdef object loaded(self, ValueBytes codec, const char *stored, size_t n):
        if likely(codec.reads_plain):
            return codec.read(stored, n)
        go_inside(self.store.overlay)
        try:
            return codec.read(stored, n)
        finally:
            come_out(self.store.overlay)
            self.context.settle()

    cdef int put_in(self, ValueBytes codec, object value, Room *room) except -1:
        """Append the bytes of a value, which is not None."""
        go_inside(self.store.overlay)
        try:
            return codec.write(value, room)
        finally:
            come_out(self.store.overlay)

    cdef bint watched(self) except -1:
        """Whether one of the state's collections is iterated over."""
        if self.may_be_watched:
            self.may_be_watched = self.is_watched
        return self.may_be_watched

    def _is_watched_from_now_on(self):
        self.may_be_watched = True
