"""The handle of map states, and the iterator over a map.

An operation on a map costs only the part that it touches: a put writes one entry, also under a mark or while a
snapshot is written. An iterator holds a place, not a copy: the sequence number of the entry that it returned last. If
the count of calls has changed since then, it finds its place again. A count of changes in the anchor tells if the
user has added or removed keys, which ends the iterator with RuntimeError; reads that remove what has expired do not
change that count. A handle knows the iterators over states with a time to live. If the entry that one of them returned
last is removed as expired, it steps back to the entry before.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from statebackend._core.memory.arena cimport address
from statebackend._core.codecs.key_value_codecs cimport FORM_OBJECT, KEY_NUMBER, MAX_STORED, KeyCodec
from statebackend._core.memory.interpreter cimport PyLong_CheckExact
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, Entry, Table, Thread, before_operation, entry_at, find, find_stored, hash_key, hash_of,
    hash_stored, key_object, namespace_of, payload_of, thread_of, value_of)
from statebackend._core.tables.expiry cimport is_expired, written_at
from statebackend._core.handles.table_handle cimport NEVER, WANT_ALIVE, WANT_EXPIRED, find_key, look_up
from statebackend._core.handles.cleanup cimport begin_access
from statebackend._core.handles.handle cimport Handle
from statebackend._core.handles.look_ahead cimport REACH_THREAD, note_map_entry
from statebackend._core.handles.state_handle cimport encoded_map_key, is_dead, time_of
from statebackend._core.tables.map_table cimport (
    MapTable, ThreadPlace, begin_thread, find_again, is_same_map, next_in_thread, visit_entry)
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.objects cimport object_at
from statebackend._core.tables.state_core cimport (
    CoreMark, begin_call, begin_inside, come_out, end_call, end_objects, go_in)
from statebackend._core.tables.state_table cimport StateTable, is_null
from statebackend._core.tables.values cimport TYPE_BOOL, load_number, long_as_int64, store_number
from statebackend._core.tables.entry_update cimport restamp, write_value

from statebackend.errors import ClosedError, MemoryLimitError


cdef object ABSENT = object()            # in place of a value


cdef inline Table *entries_here(MapTableHandle handle) noexcept:
    """The entries of maps in the current namespace; NULL if nothing was ever put there."""
    return handle.plain_entries if handle.context.key.namespace == 0 else handle.spaced_entries


cdef inline int64_t timestamp_at(Table *table, uint32_t slot) noexcept:
    """The timestamp of a map entry."""
    return (<int64_t *>payload_of(table, entry_at(table.core, slot)))[0]


cdef inline bint split_number(MapTableHandle handle, object key, CoreKey *inner) noexcept:
    """Take a map key that is a number of the declared width; False for others."""
    cdef KeyCodec codec = handle.keys_codec
    memset(inner, 0, sizeof(CoreKey))
    if unlikely(not (codec.form == KEY_NUMBER and PyLong_CheckExact(key) and long_as_int64(key, &inner.number)
                     and codec.low <= inner.number <= codec.high)):
        return False
    return True


cdef class MapTableHandle(Handle):
    """A map for a key, in insertion order; `keys_codec` encodes the map keys."""

    def __init__(self, *arguments, KeyCodec keys_codec not None, **options):
        self.keys_codec = keys_codec
        Handle.__init__(self, *arguments, **options)
        self.reach = REACH_THREAD

    cdef int adopt_table(self, object made, bint is_spaced) except -1:
        cdef MapTable map = made
        if is_spaced:
            self.spaced_map = map
            self.spaced_entries = map.entries.table
        else:
            self.plain_map = map
            self.plain_entries = map.entries.table
        return Handle.adopt_table(self, map.heads, is_spaced)

    cdef MapTable map_here(self):
        return self.plain_map if self.context.key.namespace == 0 else self.spaced_map

    cdef uint32_t anchor_here(self) noexcept:
        return (<uint32_t *>value_of(self.table, entry_at(self.table.core, self.slot)))[0]

    cdef object split_map_key(self, object key, CoreKey *inner):
        if likely(split_number(self, key, inner)):
            return None
        return encoded_map_key(self.keys_codec, key, inner, self.codec.where)

    cdef uint32_t find_entry(self, CoreKey *inner) except? 0:
        """The slot of a map entry of the current key, 0 if it is absent. Runs no Python."""
        cdef Table *table
        cdef CowMap *map
        look_up(self)
        table = entries_here(self)
        if self.followed != NULL and self.context.ahead.in_run:
            note_map_entry(self.followed, table, inner, self.context.ahead.turn)
        if self.slot == 0:
            return 0
        inner.group = self.context.key.group
        map = table.maps[inner.group - table.first_group]
        if unlikely(map.secondary.capacity != 0
                    or map.seen_version < self.core.core.highest_required_snapshot_version):
            self.core.calls += 1         # entries may move; heads do not
            self.stamp = self.core.calls
            if not before_operation(&table.lane, table, map):
                self.no_memory()
        inner.namespace = self.anchor_here()
        inner.hash = hash_key(table, inner, inner.namespace)
        return find(table, map, inner)

    cdef bint entry_expired(self, Table *table, uint32_t slot) except -1:
        return is_expired(timestamp_at(table, slot), self.ttl, time_of(self))

    cdef object load_entry(self, StateTable entries, CoreKey *inner, uint32_t slot):
        cdef Table *table = entries.table
        cdef object value
        cdef uint64_t entered
        if is_null(table, entry_at(table.core, slot)):
            return None
        if self.codec.form == FORM_OBJECT:
            begin_call(self.core)
            try:
                entered = go_in(self.core)       # copying runs the user's code
                try:
                    slot = entries._unshare(entries.map_or_null(inner.group), slot, inner)
                    value = object_at(value_of(table, entry_at(table.core, slot)))
                finally:
                    come_out(self.core, entered)
                    self.core.calls += 1     # the entry may have moved
                if self.watcher is not None:
                    self.watcher.note(self, value, self.keys_codec.canonical(inner), written=False)
            finally:
                end_call(self.core)
            return value
        return self.loaded(value_of(table, entry_at(table.core, slot)))

    cdef int renew_entry(self, CoreKey *inner, uint32_t *slot) except -1:
        cdef StateTable entries = self.map_here().entries
        cdef Table *table = entries.table
        cdef int64_t timestamp = timestamp_at(table, slot[0])
        cdef int64_t now = written_at(timestamp, time_of(self), self.in_event_time)
        cdef uint32_t renewed
        if timestamp == now:
            return 0
        renewed = restamp(&table.lane, table, entries.map_or_null(inner.group), slot[0], inner.hash, now)
        if renewed == 0:
            self.no_memory()
        if renewed != slot[0]:
            self.core.calls += 1
            self.stamp = self.core.calls
            slot[0] = renewed
        return 0

    cdef int remove_entry(self, CoreKey *inner, uint32_t slot, bint is_cleanup) except -1:
        """Remove an entry of the current key; with an expired one, iterators do not notice."""
        if self.watcher is not None:
            self.watcher.forget(self, self.keys_codec.canonical(inner))
            if self.stamp != self.core.calls:
                slot = self.find_entry(inner)
                if slot == 0:
                    return 0
        return self.unlink_entry(self.map_here(), &self.context.key, self.slot, inner, slot, is_cleanup)

    cdef int unlink_entry(self, MapTable map, CoreKey *at, uint32_t head_slot, CoreKey *inner, uint32_t slot,
                          bint is_cleanup) except -1:
        """Remove an entry of the key `at`, whose head is at `head_slot`. Iterators do not notice a cleanup."""
        cdef Table *table = map.entries.table
        cdef uint32_t ref = namespace_of(table, entry_at(table.core, slot))
        cdef Anchor *anchor = <Anchor *>address(table.core.arena, ref)
        cdef bint is_last = anchor.first == anchor.last
        cdef Thread thread = thread_of(table, entry_at(table.core, slot))[0]
        cdef uint64_t before = 0
        cdef MapIterator each
        cdef PyObject *open_one
        cdef object map_key = None       # of the entry before
        if is_cleanup and self.iterators != NULL and thread.prev:
            before = thread_of(table, entry_at(table.core, thread.prev)).sequence
            map_key = key_object(table, entry_at(table.core, thread.prev))
        try:
            map.unlink(at, head_slot, inner, slot)
        except MemoryLimitError as error:
            raise self.named(error)
        self.core.calls += 1
        if is_cleanup:
            if not is_last:
                anchor.modifications -= 1
            open_one = self.iterators
            while open_one != NULL:
                each = <MapIterator>open_one
                if each.place.anchor == ref and is_last:
                    each.is_cleaned = True
                elif each.place.anchor == ref and each.place.sequence == thread.sequence:
                    each.place.sequence, each.map_key = before, map_key
                open_one = each.older
        return 0

    cdef object read_entry(self, object key, bint only_look):
        """The value, or ABSENT; `only_look` leaves the value out.

        It removes a dead entry, and returns it this once if it may be seen. It renews what it sees if reads do so.
        """
        cdef CoreKey inner
        cdef object _owner = None, value = None
        cdef uint32_t slot
        cdef Entry *entry
        begin_access(self)
        if unlikely(not split_number(self, key, &inner)):
            _owner = self.split_map_key(key, &inner)
        slot = self.find_entry(&inner)
        if slot == 0:
            return ABSENT
        if self.ttl:
            if self.entry_expired(entries_here(self), slot):
                if not is_dead(self, timestamp_at(entries_here(self), slot)):
                    return ABSENT
                self.expired_on_read += 1
                if self.shows_expired:
                    begin_call(self.core)
                    try:
                        if not only_look:
                            value = self.load_entry(self.map_here().entries, &inner, slot)
                            slot = self.find_entry(&inner)
                        if slot and self.entry_expired(entries_here(self), slot):
                            self.remove_entry(&inner, slot, True)
                    finally:
                        end_call(self.core)
                    return value
                self.remove_entry(&inner, slot, True)
                end_objects(self.core)
                return ABSENT
            if self.refreshes:
                self.renew_entry(&inner, &slot)
        if not only_look:
            if likely(self.codec.form <= TYPE_BOOL):
                entry = entry_at(self.table.core, slot)
                if likely(not is_null(entries_here(self), entry)):
                    return load_number(self.codec.form, value_of(entries_here(self), entry))
            value = self.load_entry(self.map_here().entries, &inner, slot)
        return value

    cdef int make_map(self) except -1:
        """Make tables and maps for the current key, if need be. May run Python."""
        cdef Table *table
        if unlikely(self.map == NULL):
            self.make_room()
        table = entries_here(self)
        if unlikely(table.maps[self.context.key.group - table.first_group] == NULL):
            self.map_here().entries.map_for(self.context.key.group)
        return 0

    cdef int put_prepared(self, CoreKey *inner, object value) except -1:
        """Set one entry to a prepared value, or to None. Runs no Python before it is done."""
        cdef char stored[MAX_STORED]
        cdef char *source = stored
        cdef int64_t now = time_of(self) if self.ttl else 0
        cdef uint32_t slot = self.slot_to_put(inner, now)
        if value is None and self.codec.form != FORM_OBJECT:
            source = NULL
        else:
            self.codec.store_prepared(self.core, value, stored)
        return self.put_stored(inner, slot, source, now)

    cdef uint32_t slot_to_put(self, CoreKey *inner, int64_t now) except? 0:
        """The entry to overwrite, 0 if one is to be added; there is a table for it afterwards."""
        cdef uint32_t slot
        look_up(self)
        self.make_map()
        slot = self.find_entry(inner)
        if slot and self.ttl and is_expired(timestamp_at(entries_here(self), slot), self.ttl, now):
            self.remove_entry(inner, slot, False)        # an expired entry does not keep its place
            self.find_here()
            self.make_map()
            slot = self.find_entry(inner)        # that reclaims: a finaliser may have put one
        return slot

    cdef int put_stored(self, CoreKey *inner, uint32_t slot, char *source, int64_t now) except -1:
        """Set the entry at `slot`, or add one if that is 0, to a stored form; NULL is None."""
        cdef uint32_t written
        cdef Table *table
        if slot:
            table = entries_here(self)
            written = write_value(&table.lane, table, table.maps[inner.group - table.first_group], inner, slot, source,
                                  now)
        else:
            written = self.map_here().put_at(&self.context.key, self.slot, inner, 0, source, now)
        if unlikely(written == 0):
            if source != NULL:
                self.codec.drop(self.core, source)
            self.no_memory()
        if written != slot:
            self.core.calls += 1
            if slot:
                self.stamp = self.core.calls     # only the entry has moved: the head is where it was
        return 0

    cdef object named(self, error):
        """The error, with the state's name if it comes from the memory limit."""
        return error.at(self.codec.where) if isinstance(error, MemoryLimitError) else error

    # --- the methods ---

    def get(self, key, default=None):
        """The value of a key, `default` if the key is absent. O(1) expected."""
        cdef object found = self.read_entry(key, False)
        return default if found is ABSENT else found

    def __getitem__(self, key):
        cdef object found = self.read_entry(key, False)
        if found is ABSENT:
            raise KeyError(f"the key is not in {self.codec.where}")
        return found

    def contains(self, key):
        """Return True if the key is present, even with None for a value. O(1) expected."""
        return self.read_entry(key, True) is not ABSENT

    def __contains__(self, key):
        return self.read_entry(key, True) is not ABSENT

    def put(self, key, value):
        """Set the value of a key; a new key goes to the end. O(1) expected, for maps of any size."""
        cdef CoreKey inner
        cdef char number[8]
        cdef int64_t now
        begin_access(self)
        if likely(self.codec.form <= TYPE_BOOL and split_number(self, key, &inner)
                  and store_number(self.codec.form, value, number)):
            now = time_of(self) if self.ttl else 0
            self.put_stored(&inner, self.slot_to_put(&inner, now), number, now)
            return
        self.put_any(key, value)

    cdef int put_any(self, object key, object value) except -1:
        cdef CoreKey inner
        cdef object _owner = self.split_map_key(key, &inner)
        begin_call(self.core)
        try:
            self.put_prepared(&inner, None if value is None else self.prepared(value))
            if self.watcher is not None and value is not None:
                self.watcher.note(self, value, self.keys_codec.canonical(&inner))
        finally:
            end_call(self.core)
        return 0

    def __setitem__(self, key, value):
        self.put(key, value)

    def put_all(self, entries):
        cdef list keys = []
        cdef list values = []
        # Before the call: a mapping of the user's may do anything.
        given = entries.items() if type(entries) is dict else (<object>self)._pairs_of(entries)
        begin_access(self)
        begin_call(self.core)
        try:
            self.prepare_entries(given, keys, values)
            if keys:
                self.put_all_prepared(keys, values)
        finally:
            end_call(self.core)

    cdef int prepare_entries(self, object entries, list keys, list values) except -1:
        cdef CoreKey inner
        cdef object _owner
        for key, value in entries:
            _owner = self.split_map_key(key, &inner)
            keys.append(self.keys_codec.canonical(&inner))
            values.append(None if value is None else self.prepared(value))
        return 0

    cdef int put_all_prepared(self, list keys, list values) except -1:
        cdef CoreKey inner
        cdef object _owner
        cdef Py_ssize_t i
        cdef CoreMark mark = self.core.mark()
        try:
            for i in range(len(keys)):
                memset(&inner, 0, sizeof(CoreKey))
                _owner = self.keys_codec.split_canonical(keys[i], &inner)
                self.put_prepared(&inner, values[i])
                if self.watcher is not None and values[i] is not None:
                    self.watcher.note(self, values[i], keys[i])
        except BaseException:
            if mark.is_open:
                self.core.rollback(mark)
            raise
        finally:
            self.core.release(mark)
        return 0

    def remove(self, key):
        """Remove a key; do nothing if it is absent. Removing the last one removes the map. O(1) expected."""
        self._remove(key)

    def __delitem__(self, key):
        if not self._remove(key):
            raise KeyError(f"the key is not in {self.codec.where}")

    def _remove(self, key):
        """Remove a key; return True if it was visible before."""
        cdef CoreKey inner
        cdef object _owner
        cdef uint32_t slot
        cdef bint is_hidden
        begin_access(self)
        _owner = self.split_map_key(key, &inner)
        slot = self.find_entry(&inner)
        if slot == 0:
            return False
        is_hidden = (self.ttl and not self.shows_expired
                     and self.entry_expired(self.map_here().entries.table, slot))
        self.remove_entry(&inner, slot, is_hidden)
        end_objects(self.core)
        return not is_hidden

    def is_empty(self):
        """Return True if no read would return an entry; never changes anything."""
        return not self.exists()

    cdef bint has_any(self, Table *table, Entry *entry, int wanted) except -1:
        cdef Table *entries
        cdef Anchor *anchor
        cdef uint32_t slot, setbacks
        cdef bint is_hinted
        cdef int64_t now
        if self.ttl == 0:
            return wanted == WANT_ALIVE
        now = time_of(self)              # notes a clock that was set back
        entries = self.plain_map.entries.table if table == self.plain_table else self.spaced_map.entries.table
        anchor = <Anchor *>address(table.core.arena, (<uint32_t *>value_of(table, entry))[0])
        setbacks = <uint32_t>(self.context.event_setbacks if self.in_event_time else self.context.setbacks)
        is_hinted = anchor.alive_from != 0 and anchor.setbacks == setbacks
        slot = anchor.alive_from if is_hinted and wanted == WANT_ALIVE else anchor.first
        while slot:
            if is_expired(timestamp_at(entries, slot), self.ttl, now) == (wanted == WANT_EXPIRED):
                break
            slot = thread_of(entries, entry_at(entries.core, slot)).next
        if wanted == WANT_ALIVE:
            anchor.alive_from = slot if slot else anchor.last
            anchor.setbacks = setbacks
        return slot != 0

    def keys(self):
        return MapIterator.__new__(MapIterator, self, 0)

    def __iter__(self):
        return MapIterator.__new__(MapIterator, self, 0)

    def values(self):
        return MapIterator.__new__(MapIterator, self, 1)

    def items(self):
        return MapIterator.__new__(MapIterator, self, 2)

    def _tables(self):
        found = [self.plain_map.heads, self.plain_map.entries]
        return found if self.spaced_map is None else [*found, self.spaced_map.heads, self.spaced_map.entries]

    # --- removing ---

    cdef int remove_here(self) except -1:
        begin_inside(self.core)          # without memory to undo it, `leave` ends the backend
        try:
            self.map_here().clear_at(&self.context.key)
        except MemoryLimitError as error:
            raise self.named(error)
        finally:
            self.core.leave()
        return 0

    cdef StateTable swept(self, bint spaced):
        return (self.spaced_map if spaced else self.plain_map).entries

    cdef bint clean_slot(self, bint spaced, CowMap *map, uint32_t slot) except -1:
        cdef MapTable of = self.spaced_map if spaced else self.plain_map
        cdef Table *table = of.entries.table
        cdef Table *heads = of.heads.table
        cdef CowMap *head_map = heads.maps[map.group - heads.first_group]
        cdef Anchor *anchor = <Anchor *>address(table.core.arena, namespace_of(table, entry_at(table.core, slot)))
        cdef CoreKey at
        cdef CoreKey inner
        cdef uint32_t head_slot
        memset(&at, 0, sizeof(CoreKey))
        memset(&inner, 0, sizeof(CoreKey))
        at.group, at.namespace = map.group, anchor.namespace
        if not before_operation(&heads.lane, heads, head_map):
            return False
        self.core.calls += 1
        at.hash = hash_stored(heads, anchor.key, at.namespace)
        head_slot = find_stored(heads, head_map, anchor.key, at.namespace, at.hash)
        if self.watcher is not None:     # it has to know which key it is
            return self.clean_key(key_object(heads, entry_at(heads.core, head_slot)), at.namespace)
        inner.hash = hash_of(table, entry_at(table.core, slot))
        try:
            self.unlink_entry(of, &at, head_slot, &inner, slot, True)
        except MemoryError:              # a later step will do it
            return False
        return True

    cdef bint clean_here(self) except -1:
        cdef StateTable entries
        cdef Table *table
        cdef CoreKey inner
        cdef object key, _owner
        cdef list keys = []
        cdef uint32_t slot
        look_up(self)
        if self.slot == 0:
            return False
        entries = self.map_here().entries
        table = entries.table
        slot = (<Anchor *>address(table.core.arena, self.anchor_here())).first
        while slot:
            if self.entry_expired(table, slot):
                keys.append(key_object(table, entry_at(table.core, slot)))
            slot = thread_of(table, entry_at(table.core, slot)).next
        for key in keys:
            memset(&inner, 0, sizeof(CoreKey))
            _owner = self.keys_codec.split_canonical(key, &inner)
            slot = self.find_entry(&inner)
            if slot:
                self.remove_entry(&inner, slot, True)
        return len(keys) != 0


cdef enum Shown:
    SHOW_KEYS = 0
    SHOW_VALUES = 1
    SHOW_ITEMS = 2


@cython.final
@cython.no_gc_clear
cdef class MapIterator:
    """Keys, values or pairs of one map, in insertion order; RuntimeError at the next step after it has changed."""

    cdef MapTableHandle handle
    cdef CoreKey key
    cdef object owner                    # keeps `key.data` valid
    cdef int shown
    cdef ThreadPlace place               # its slot is valid while `calls` stands still
    cdef object map_key                  # of the entry that was visited last, canonical
    cdef uint64_t calls
    cdef uint64_t rollbacks
    cdef uint64_t turn                   # of the context when the iterator was made
    cdef bint is_cleaned                 # all of its entries have expired and were removed
    cdef bint is_registered
    cdef PyObject *newer                 # of the handle's open iterators; borrowed
    cdef PyObject *older

    def __cinit__(self, MapTableHandle handle not None, int shown):
        begin_access(handle)
        self.handle = handle
        self.shown = shown
        self.key = handle.context.key
        self.owner = handle.context.key_owner
        begin_thread(&self.place, handle.table, handle.slot)
        self.calls = NEVER
        self.rollbacks = handle.core.rollbacks
        self.turn = handle.context.turn
        if handle.ttl:
            self.older = handle.iterators
            if self.older != NULL:
                (<MapIterator>self.older).newer = <PyObject *>self
            handle.iterators = <PyObject *>self
            self.is_registered = True

    def __dealloc__(self):
        if self.is_registered:
            if self.newer != NULL:
                (<MapIterator>self.newer).older = self.older
            else:
                self.handle.iterators = self.older
            if self.older != NULL:
                (<MapIterator>self.older).newer = self.newer

    def __iter__(self):
        return self

    cdef Table *table(self) noexcept:
        return self.handle.plain_entries if self.key.namespace == 0 else self.handle.spaced_entries

    cdef StateTable entries(self):
        return (self.handle.plain_map if self.key.namespace == 0 else self.handle.spaced_map).entries

    def __next__(self):
        cdef uint32_t slot
        if self.handle.ttl:
            return self.next_with_ttl()
        slot = self.step()
        if slot == 0:
            raise StopIteration
        return self.visit(slot)

    cdef uint32_t step(self) except? 0:
        """The slot of the entry to visit next; 0 at the end."""
        if self.calls != self.handle.core.calls and not self.find_place():
            return 0
        return next_in_thread(&self.place, self.table()) if self.place.anchor else 0

    cdef bint find_place(self) except -1:
        """Find the last visited entry again; False if there is nothing to continue with."""
        cdef MapTableHandle handle = self.handle
        cdef Table *heads = handle.plain_table if self.key.namespace == 0 else handle.spaced_table
        cdef StateTable entries
        cdef CoreKey inner
        cdef object _owner
        cdef uint32_t head_slot
        if handle.core.closed:
            raise ClosedError("the backend of this iterator is closed")
        if handle.core.inside:
            handle.core.refuse()
        if handle.core.rollbacks != self.rollbacks:
            raise RuntimeError("the state was rolled back while it was iterated")
        head_slot = find_key(heads, &self.key)
        if self.is_cleaned and head_slot == 0:
            return False
        if self.is_cleaned or not is_same_map(&self.place, heads, head_slot):
            raise RuntimeError("the state was changed while it was iterated")
        if head_slot and self.place.sequence:
            entries = self.entries()
            memset(&inner, 0, sizeof(CoreKey))
            _owner = handle.keys_codec.split_canonical(self.map_key, &inner)
            if not find_again(&self.place, entries.table, entries.map_or_null(self.key.group), &inner):
                raise RuntimeError("the state was changed while it was iterated")
        self.calls = handle.core.calls
        return head_slot != 0

    cdef object visit(self, uint32_t slot):
        """Make an entry the last visited one, and return it in the iterator's form."""
        cdef MapTableHandle handle = self.handle
        cdef Table *table = self.table()
        cdef Entry *entry = entry_at(table.core, slot)
        cdef StateTable entries
        cdef CoreKey inner
        cdef object _owner, key = key_object(table, entry), value = None
        self.map_key = key
        visit_entry(&self.place, table, slot)
        self.calls = handle.core.calls
        if self.shown == SHOW_KEYS or is_null(table, entry):
            pass
        elif likely(handle.codec.form <= TYPE_BOOL):
            value = load_number(handle.codec.form, value_of(table, entry))
        else:
            entries = self.entries()
            memset(&inner, 0, sizeof(CoreKey))
            inner.group = self.key.group
            if handle.codec.form == FORM_OBJECT:
                _owner = handle.keys_codec.split_canonical(key, &inner)
                entries.rehash_map_key(&inner, self.place.anchor)
            value = handle.load_entry(entries, &inner, slot)
        return self.show(key, value)

    cdef object show(self, object canonical, object value):
        cdef CoreKey inner
        cdef object _owner, key = canonical
        if self.shown == SHOW_VALUES:
            return value
        if unlikely(self.handle.keys_codec.form != KEY_NUMBER):
            memset(&inner, 0, sizeof(CoreKey))
            _owner = self.handle.keys_codec.split_canonical(canonical, &inner)
            key = self.handle.keys_codec.key_of(inner.number, inner.data, inner.length)
        return key if self.shown == SHOW_KEYS else (key, value)

    cdef object next_with_ttl(self):
        """Continue if reads may remove or renew entries: the iterator's key must then be the current one."""
        cdef object saved = None
        if self.handle.core.inside:
            self.handle.core.refuse()
        begin_call(self.handle.core)
        try:
            if self.handle.context.turn != self.turn:
                saved = self.handle.context._save_key()
                self.handle.context.return_to(&self.key, self.owner)
            try:
                return self.next_unexpired(self.step())
            finally:
                if saved is not None and not self.handle.core.closed:
                    self.handle.context._restore_key(saved)
        finally:
            end_call(self.handle.core)

    cdef object next_unexpired(self, uint32_t slot):
        cdef MapTableHandle handle = self.handle
        cdef StateTable entries
        cdef Table *table
        cdef CoreKey inner
        cdef object _owner, key, value = None
        if slot == 0:
            raise StopIteration              # a state that was always empty lacks a table
        entries = self.entries()
        table = entries.table
        while slot:
            key = key_object(table, entry_at(table.core, slot))
            memset(&inner, 0, sizeof(CoreKey))
            _owner = handle.keys_codec.split_canonical(key, &inner)
            slot = handle.find_entry(&inner)
            if not handle.entry_expired(table, slot):
                if handle.refreshes:
                    handle.renew_entry(&inner, &slot)
                return self.visit(slot)
            if not is_dead(handle, timestamp_at(table, slot)):
                self.map_key = key
                visit_entry(&self.place, table, slot)
                self.calls = handle.core.calls
                slot = self.step()
                continue
            if handle.shows_expired and self.shown != SHOW_KEYS:
                value = handle.load_entry(entries, &inner, slot)
                slot = handle.find_entry(&inner)
            if slot:
                handle.remove_entry(&inner, slot, True)
                handle.expired_on_read += 1
            self.calls = NEVER           # the entry before is the one that was visited last, or there is none
            if handle.shows_expired:
                return self.show(key, value)
            slot = self.step()
        raise StopIteration
