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
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from collections.abc import Mapping

from statebackend._core.memory.arena cimport address
from statebackend._core.codecs.codecs cimport FORM_OBJECT, FORM_STRING, MAX_STORED, KeyCodec
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, Entry, Table, Thread, before_operation, entry_at, find, find_stored, hash_of, hash_stored,
    key_object, namespace_of, payload_of, payload_ref, slot_for_write, thread_of, value_of)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.handles.base_handle cimport NEVER, WANT_ALIVE, WANT_EXPIRED, find_key
from statebackend._core.handles.handle cimport Handle
from statebackend._core.handles.look_ahead cimport REACH_THREAD, note_map_entry, note_part
from statebackend._core.tables.map_table cimport MapTable
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.state_core cimport Mark
from statebackend._core.tables.state_table cimport StateTable, is_null

from statebackend.errors import ClosedError, MemoryLimitError, SerializationError, SerializationTypeError


cdef object ABSENT = object()            # in place of a value


cdef class MapHandle(Handle):
    """A map for a key, in insertion order; `keys_codec` encodes the map keys."""

    def __init__(self, *arguments, KeyCodec keys_codec not None, **options):
        self.keys_codec = keys_codec
        Handle.__init__(self, *arguments, **options)
        self.reach = REACH_THREAD

    cdef int adopt_table(self, object made, bint is_spaced) except -1:
        cdef MapTable map = made
        if is_spaced:
            self.spaced_map = map
        else:
            self.plain_map = map
        return Handle.adopt_table(self, map.heads, is_spaced)

    cdef MapTable map_here(self):
        return self.plain_map if self.context.key.namespace == 0 else self.spaced_map

    cdef uint32_t anchor_here(self) noexcept:
        return (<uint32_t *>value_of(self.table, entry_at(self.table.core, self.slot)))[0]

    cdef void expect_after(self, object key) noexcept:
        """Guess the map keys that come after this one."""
        if self.keys_codec.is_int and self.table != NULL:
            note_part(&self.context.ahead, self.table, self.reach, <uintptr_t><PyObject *>key)

    cdef object split_map_key(self, object key, CoreKey *inner):
        memset(inner, 0, sizeof(CoreKey))
        try:
            return self.keys_codec.split(key, inner)
        except SerializationError as error:
            raise error.at(f"map key of {self.codec.where}") from None

    cdef uint32_t find_entry(self, CoreKey *inner) except? 0:
        """The slot of a map entry of the current key, 0 if it is absent. Runs no Python."""
        cdef StateTable entries
        cdef Table *table
        cdef CowMap *map
        if self.stamp != self.core.calls:
            self.find_here()
        if self.table != NULL and self.keys_codec.is_int:
            note_map_entry(&self.context.ahead, self.table, self.map_here().entries.table, inner.number)
        if self.slot == 0:
            return 0
        entries = self.map_here().entries
        table = entries.table
        inner.group = self.context.key.group
        map = table.maps[inner.group - table.first_group]
        if unlikely(map.secondary.capacity != 0
                    or map.seen_version < self.core.core.highest_required_snapshot_version):
            self.core.calls += 1         # entries may move; heads do not
            self.stamp = self.core.calls
            if not before_operation(&table.lane, table, map):
                self.no_memory()
        entries.rehash_map_key(inner, self.anchor_here())
        return find(table, map, inner)

    cdef bint entry_expired(self, Table *table, uint32_t slot) except -1:
        return is_expired((<int64_t *>payload_of(table, entry_at(table.core, slot)))[0], self.ttl,
                          self.context.time())

    cdef object load_entry(self, StateTable entries, CoreKey *inner, uint32_t slot):
        """The value of an entry. A deserialiser may run anything."""
        cdef Table *table = entries.table
        cdef object value
        if is_null(table, entry_at(table.core, slot)):
            return None
        if self.codec.form == FORM_OBJECT:
            self.core.inside += 1
            try:
                slot = entries._unshare(entries.map_or_null(inner.group), slot, inner)
                value = <object>(<PyObject **>value_of(table, entry_at(table.core, slot)))[0]
                self.core.calls += 1     # the entry may have moved
            finally:
                self.core.leave()
            if self.watcher is not None:
                self.watcher.note(self, value, self.keys_codec.canonical(inner), written=False)
            return value
        return self.codec.load(value_of(table, entry_at(table.core, slot)))

    cdef int renew_entry(self, CoreKey *inner, uint32_t *slot) except -1:
        """Stamp an entry with the current time."""
        cdef StateTable entries = self.map_here().entries
        cdef Table *table = entries.table
        cdef bint kept = False
        cdef int64_t now = self.context.time()
        cdef uint32_t renewed
        if (<int64_t *>payload_of(table, entry_at(table.core, slot[0])))[0] == now:
            return 0
        renewed = slot_for_write(&table.lane, table, entries.map_or_null(inner.group), slot[0], inner.hash, &kept)
        if renewed == 0:
            self.no_memory()
        if kept:
            payload_ref(table, payload_of(table, entry_at(table.core, renewed)))
        (<int64_t *>payload_of(table, entry_at(table.core, renewed)))[0] = now
        if renewed != slot[0]:
            self.core.calls += 1
            self.stamp = self.core.calls
            slot[0] = renewed
        return 0

    cdef int remove_entry(self, CoreKey *inner, uint32_t slot, bint is_cleanup) except -1:
        """Remove an entry of the current key; with an expired one, iterators do not notice."""
        cdef CoreKey at = self.context.key       # a finaliser may make another key current
        cdef object _owner = self.context.key_owner
        if self.watcher is not None:
            self.watcher.forget(self, self.keys_codec.canonical(inner))
            if self.stamp != self.core.calls:
                slot = self.find_entry(inner)
                if slot == 0:
                    return 0
                at = self.context.key
        return self.unlink_entry(self.map_here(), &at, self.slot, inner, slot, is_cleanup)

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
        cdef object _dropped = None      # ends with this call, when the table is whole again
        self.core.inside += 1
        try:
            if self.codec.form == FORM_OBJECT:
                _dropped = <object>(<PyObject **>value_of(table, entry_at(table.core, slot)))[0]
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
                    if each.anchor == ref and is_last:
                        each.is_cleaned = True
                    elif each.anchor == ref and each.sequence == thread.sequence:
                        each.sequence, each.map_key = before, map_key
                    open_one = each.older
        finally:
            self.core.leave()
        return 0

    cdef object read_entry(self, object key, bint only_look):
        """The value, or ABSENT; `only_look` leaves the value out.

        It removes an expired entry, and returns it this once if it may be seen. It renews the rest if reads do so.
        """
        cdef CoreKey inner
        cdef object _owner, value = None
        cdef uint32_t slot
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if self.stamp != self.core.calls:
            self.find_here()
        self.expect_after(key)
        _owner = self.split_map_key(key, &inner)
        slot = self.find_entry(&inner)
        if slot == 0:
            return ABSENT
        if self.ttl:
            if self.entry_expired(self.map_here().entries.table, slot):
                self.expired_on_read += 1
                if self.shows_expired:
                    if not only_look:
                        value = self.load_entry(self.map_here().entries, &inner, slot)
                        slot = self.find_entry(&inner)
                    if slot and self.entry_expired(self.map_here().entries.table, slot):
                        self.remove_entry(&inner, slot, True)
                    return value
                self.remove_entry(&inner, slot, True)
                return ABSENT
            if self.refreshes:
                self.renew_entry(&inner, &slot)
        if not only_look:
            value = self.load_entry(self.map_here().entries, &inner, slot)
        return value

    cdef int make_map(self) except -1:
        """Make tables and maps for the current key, if need be. May run Python."""
        if self.map == NULL:
            self.make_room()
        self.map_here().entries.map_for(self.context.key.group)
        return 0

    cdef int put_prepared(self, CoreKey *inner, object value) except -1:
        """Set one entry to a prepared value, or to None. Runs no Python before it is done."""
        cdef char stored[MAX_STORED]
        cdef char *source = stored
        cdef MapTable map
        cdef StateTable entries
        cdef Table *table
        cdef uint32_t slot, written
        cdef bint kept = False
        cdef int64_t now = self.context.time() if self.ttl else 0
        cdef object _dropped = None
        if self.stamp != self.core.calls:
            self.find_here()
        self.make_map()
        map = self.map_here()
        entries = map.entries
        table = entries.table
        slot = self.find_entry(inner)
        if slot and self.ttl and self.entry_expired(table, slot):
            self.remove_entry(inner, slot, False)        # an expired entry does not keep its place
            self.find_here()
            self.make_map()
            map = self.map_here()
            entries = map.entries
            table = entries.table
            slot = self.find_entry(inner)        # a finaliser may have put one
        if value is None and self.codec.form != FORM_OBJECT:
            (<void **>stored)[0] = NULL
            source = stored if table.layout.off_null == 0 else NULL
        else:
            self.codec.store_prepared(self.core, value, stored)
        if slot == 0:
            return self.add_entry(map, inner, source, now)
        written = slot_for_write(&table.lane, table, entries.map_or_null(inner.group), slot, inner.hash, &kept)
        if written == 0:
            if source != NULL:
                self.codec.drop(self.core, source)
            self.no_memory()
        if not kept and self.codec.form >= FORM_STRING:
            _dropped = entries._let_go(written)
        entries._fill(written, source, now)
        if written != slot:
            self.core.calls += 1
            self.stamp = self.core.calls
        return 0

    cdef int add_entry(self, MapTable map, CoreKey *inner, char *source, int64_t now) except -1:
        """Add an absent entry; the table owns its stored form afterwards, also if this raises."""
        inner.group = self.context.key.group
        try:
            map.fill_entry(&self.context.key, self.slot, inner, source, now)
        except BaseException as error:
            if source != NULL:
                self.codec.drop(self.core, source)
            raise self.named(error)
        self.core.calls += 1
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
        """Set the value of a key; a new key goes to the end. O(1) expected, whatever the size of the map."""
        cdef CoreKey inner
        cdef object _owner, prepared
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if self.stamp != self.core.calls:
            self.find_here()
        self.expect_after(key)
        _owner = self.split_map_key(key, &inner)
        prepared = None if value is None else self.codec.prepared(value)
        self.put_prepared(&inner, prepared)
        if self.watcher is not None and value is not None:
            self.watcher.note(self, value, self.keys_codec.canonical(&inner))

    def __setitem__(self, key, value):
        self.put(key, value)

    def put_all(self, entries):
        """Put all entries; if one of them is refused, put none. O(entries)."""
        cdef CoreKey inner
        cdef object _owner
        cdef list keys = []
        cdef list values = []
        cdef Py_ssize_t i
        cdef Mark mark
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if self.stamp != self.core.calls:
            self.find_here()
        if not isinstance(entries, Mapping):
            raise SerializationTypeError(
                f"put_all does not take a {type(entries).__name__}",
                code="SERIALIZATION.NULL" if entries is None else None, detail=self.codec.where, hint="give a dict")
        for key, value in entries.items():
            _owner = self.split_map_key(key, &inner)
            keys.append(self.keys_codec.canonical(&inner))
            values.append(None if value is None else self.codec.prepared(value))
        if not keys:
            return
        mark = self.core.mark()
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
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if self.stamp != self.core.calls:
            self.find_here()
        _owner = self.split_map_key(key, &inner)
        slot = self.find_entry(&inner)
        if slot == 0:
            return False
        is_hidden = (self.ttl and not self.shows_expired
                     and self.entry_expired(self.map_here().entries.table, slot))
        self.remove_entry(&inner, slot, is_hidden)
        return not is_hidden

    def is_empty(self):
        """Return True if there is no entry that a read would return; never changes anything."""
        return not self.exists()

    cdef bint has_any(self, Table *table, Entry *entry, int wanted) except -1:
        cdef Table *entries
        cdef Anchor *anchor
        cdef uint32_t slot
        cdef bint is_hinted
        cdef int64_t now
        if self.ttl == 0:
            return wanted == WANT_ALIVE
        now = self.context.time()        # notes a clock that was set back
        entries = self.plain_map.entries.table if table == self.plain_table else self.spaced_map.entries.table
        anchor = <Anchor *>address(table.core.arena, (<uint32_t *>value_of(table, entry))[0])
        is_hinted = anchor.alive_from != 0 and anchor.setbacks == <uint32_t>self.context.setbacks
        slot = anchor.alive_from if is_hinted and wanted == WANT_ALIVE else anchor.first
        while slot:
            if is_expired((<int64_t *>payload_of(entries, entry_at(entries.core, slot)))[0], self.ttl, now) == (
                    wanted == WANT_EXPIRED):
                break
            slot = thread_of(entries, entry_at(entries.core, slot)).next
        if wanted == WANT_ALIVE:
            anchor.alive_from = slot if slot else anchor.last
            anchor.setbacks = <uint32_t>self.context.setbacks
        return slot != 0

    def keys(self):
        """The keys, in insertion order."""
        return MapIterator.__new__(MapIterator, self, 0)

    def __iter__(self):
        return MapIterator.__new__(MapIterator, self, 0)

    def values(self):
        """The values, in insertion order of their keys."""
        return MapIterator.__new__(MapIterator, self, 1)

    def items(self):
        """Pairs of key and value, in insertion order."""
        return MapIterator.__new__(MapIterator, self, 2)

    def _tables(self):
        found = [self.plain_map.heads, self.plain_map.entries]
        return found if self.spaced_map is None else [*found, self.spaced_map.heads, self.spaced_map.entries]

    # --- removing ---

    cdef int remove_here(self) except -1:
        cdef CoreKey at = self.context.key       # a finaliser may make another key current
        cdef object _owner = self.context.key_owner
        try:
            self.map_here().clear_at(&at)
        except MemoryLimitError as error:
            raise self.named(error)
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
        if self.stamp != self.core.calls:
            self.find_here()
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

    cdef MapHandle handle
    cdef CoreKey key
    cdef object owner                    # keeps `key.data` valid
    cdef int shown
    cdef uint32_t anchor                 # of the map, 0 if there was none
    cdef uint64_t stamp                  # of that anchor: another anchor may later occupy its place
    cdef uint32_t modifications          # as the anchor had them
    cdef uint32_t slot                   # of the entry that was visited last; valid while `calls` stands still
    cdef uint64_t sequence               # of that entry, 0 before the first step
    cdef object map_key                  # of that entry, canonical
    cdef uint64_t calls
    cdef uint64_t rollbacks
    cdef uint64_t turn                   # of the context when the iterator was made
    cdef bint is_cleaned                 # all of its entries have expired and were removed
    cdef bint is_registered
    cdef PyObject *newer                 # of the handle's open iterators; borrowed
    cdef PyObject *older

    def __cinit__(self, MapHandle handle not None, int shown):
        if handle.cleanup_size:
            handle.clean_some(handle.cleanup_size)
        if handle.stamp != handle.core.calls:
            handle.find_here()
        self.handle = handle
        self.shown = shown
        self.key = handle.context.key
        self.owner = handle.context.key_owner
        if handle.slot:
            self.anchor = handle.anchor_here()
            self.modifications = self.anchor_of(self.anchor).modifications
            self.stamp = self.anchor_of(self.anchor).next_sequence >> 32
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

    cdef Anchor *anchor_of(self, uint32_t ref) noexcept:
        return <Anchor *>address(&self.handle.core.arena.core, ref)

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
        cdef Table *table
        if self.calls != self.handle.core.calls and not self.find_place():
            return 0
        if self.sequence == 0:
            return self.anchor_of(self.anchor).first if self.anchor else 0
        table = self.entries().table
        return thread_of(table, entry_at(table.core, self.slot)).next

    cdef bint find_place(self) except -1:
        """Find the last visited entry again; False if there is nothing to continue with."""
        cdef MapHandle handle = self.handle
        cdef Table *heads = handle.plain_table if self.key.namespace == 0 else handle.spaced_table
        cdef StateTable entries
        cdef Table *table
        cdef CoreKey inner
        cdef object _owner
        cdef uint32_t found, slot
        if handle.core.closed:
            raise ClosedError("the backend of this iterator is closed")
        if handle.core.rollbacks != self.rollbacks:
            raise RuntimeError("the state was rolled back while it was iterated")
        found = find_key(heads, &self.key)
        if found:
            found = (<uint32_t *>value_of(heads, entry_at(heads.core, found)))[0]
        if self.is_cleaned and found == 0:
            return False
        if (self.is_cleaned or found != self.anchor
                or (found and (self.anchor_of(found).modifications != self.modifications
                               or self.anchor_of(found).next_sequence >> 32 != self.stamp))):
            raise RuntimeError("the state was changed while it was iterated")
        self.calls = handle.core.calls
        if found == 0:
            return False
        if self.sequence == 0:
            return True
        entries = self.entries()
        table = entries.table
        memset(&inner, 0, sizeof(CoreKey))
        _owner = handle.keys_codec.split_canonical(self.map_key, &inner)
        entries.rehash_map_key(&inner, found)
        slot = find(entries.table, entries.map_or_null(self.key.group), &inner)
        if slot and thread_of(table, entry_at(table.core, slot)).sequence == self.sequence:
            self.slot = slot
            return True
        raise RuntimeError("the state was changed while it was iterated")

    cdef object visit(self, uint32_t slot):
        """Make an entry the last visited one, and return it in the iterator's form."""
        cdef StateTable entries = self.entries()
        cdef Table *table = entries.table
        cdef CoreKey inner
        cdef object _owner, key, value = None
        key = key_object(table, entry_at(table.core, slot))
        self.map_key = key
        self.sequence = thread_of(table, entry_at(table.core, slot)).sequence
        self.slot = slot
        self.calls = self.handle.core.calls
        if self.shown != SHOW_KEYS:
            memset(&inner, 0, sizeof(CoreKey))
            inner.group = self.key.group
            if self.handle.codec.form == FORM_OBJECT:
                _owner = self.handle.keys_codec.split_canonical(key, &inner)
                entries.rehash_map_key(&inner, self.anchor)
            value = self.handle.load_entry(entries, &inner, slot)
            if self.shown == SHOW_VALUES:
                return value
        return self.show(key, value)

    cdef object show(self, object canonical, object value):
        cdef CoreKey inner
        cdef object _owner, key
        memset(&inner, 0, sizeof(CoreKey))
        if self.shown == SHOW_VALUES:
            return value
        _owner = self.handle.keys_codec.split_canonical(canonical, &inner)
        key = self.handle.keys_codec.key_of(inner.number, inner.data, inner.length)
        return key if self.shown == SHOW_KEYS else (key, value)

    cdef object next_with_ttl(self):
        """Continue if reads may remove or renew entries: the iterator's key must then be the current one."""
        cdef object saved = None
        if self.handle.context.turn != self.turn:
            saved = self.handle.context._save_key()
            self.handle.context.return_to(&self.key, self.owner)
        try:
            return self.next_unexpired(self.step())
        finally:
            if saved is not None and not self.handle.core.closed:
                self.handle.context._restore_key(saved)

    cdef object next_unexpired(self, uint32_t slot):
        cdef MapHandle handle = self.handle
        cdef StateTable entries
        cdef Table *table
        cdef CoreKey inner
        cdef object _owner, key, value = None
        if slot == 0:
            raise StopIteration              # a state that nothing was ever put into has no table yet
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
