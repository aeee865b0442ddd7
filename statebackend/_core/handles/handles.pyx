"""The scalar handles of the heap backend: value, reducing, aggregating and folding states.

    KeyContext  key, hash, group, namespace, now          StateCore.calls
        |                                                        |
    Handle  --- plain, spaced: the tables --- map --- slot, valid while `stamp` == calls

A handle looks its key up once and remembers the slot. Whatever could move or free an entry increments
`StateCore.calls`: another key or namespace, marks, snapshots, batches, reads that move entries of a growing map. Plain
reads and writes in place do not. So `value()` and then `update()` search once, whatever other states do in between.

Entries of the namespace VOID are in a table without namespace numbers. The first write to another namespace makes a
second table, for all others.

Order of work. Whatever may run the user's code (serializers, functions, finalisers) runs before anything of the core
has changed, or after all of it has. Afterwards the handle finds its slot again if the count of calls has changed. While
references to objects are dropped, the core counts one more call `inside`, so a finaliser that closes the backend does
not tear it down halfway.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from statebackend._core.memory.arena cimport CHECKED, Blob, blob_data
from statebackend._core.codecs.codecs cimport (
    FORM_FLOAT, FORM_LONG, FORM_OBJECT, FORM_STRING, MAX_STORED, ValueCodec)
from statebackend._core.tables.cow_map cimport (
    VALUE_LIST, VALUE_OBJECT, CoreKey, CowMap, Entry, Table, Walk, before_operation, begin_walk, entry_at, find,
    hash_key, hash_of, insert, key_object, map_new, map_size, namespace_of, next_entry, payload_drop, payload_of,
    payload_ref, remove, slot_for_write, value_of)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.look_ahead cimport REACH_BLOB, REACH_ENTRY, note_visit
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.sweeping cimport (
    MAX_FOUND, SLOTS_PER_ENTRY, ExpiryIndex, Sweep, is_live, oldest_in, sweep)


@cython.no_gc_clear                      # C pointers into the core must not outlive it
cdef class Handle:
    """The base of all handles; each kind derives from it."""

    def __init__(self, KeyContext context not None, descriptor, ValueCodec codec not None, make_table,
                 int64_t ttl=0, bint refreshes=False, bint shows_expired=False, watcher=None,
                 int64_t cleanup_size=0):
        self.context = context
        self.core = context.core
        self.codec = codec
        self._descriptor = descriptor
        self.make_table = make_table
        self.watcher = watcher
        self.ttl = ttl
        self.refreshes = refreshes
        self.shows_expired = shows_expired
        self.cleanup_size = cleanup_size
        self.walk.bound = INT64_MIN
        self.oldest = INT64_MAX
        self.stamp = NEVER
        self.reach = REACH_BLOB if codec.layout == "bytes" else REACH_ENTRY
        self.adopt_table(make_table(False), False)

    cdef int adopt_table(self, object made, bint is_spaced) except -1:
        cdef StateTable table = made
        if is_spaced:
            self.spaced = table
            self.spaced_table = table.table
        else:
            self.plain = table
            self.plain_table = table.table
        return 0

    @property
    def descriptor(self):
        """The descriptor that declared the state."""
        return self._descriptor

    @property
    def backend(self):
        """The backend that the state belongs to."""
        return self.context

    def _redeclare(self, descriptor):
        """Let a newer descriptor of the same state take effect."""
        self._descriptor = descriptor

    # --- finding ---

    cdef int begin(self) except -1:
        """Begin a call: check that the backend is open and a key is set, and reclaim a little of what waits for it."""
        self.core.enter()
        self.core.leave()
        if self.core.closed:             # a finaliser closed it
            self.core.enter()
        if not self.context.has_key:
            self.context.no_key()
        return 0

    cdef int find_here(self) except -1:
        """Find the current key's entry and remember where it is; does its share of a rehash."""
        cdef Table *table
        cdef CowMap *map = NULL
        cdef uint32_t slot = 0
        cdef CoreKey *key = &self.context.key
        if unlikely(self.core.closed or self.core.core.pending or not self.context.has_key
                    or (CHECKED and self.core.inside)):
            self.begin()
        table = self.plain_table if key.namespace == 0 else self.spaced_table
        note_visit(&self.context.ahead, table, self.reach)
        if likely(table != NULL):
            map = table.maps[key.group - table.first_group]
            if likely(map != NULL):
                if unlikely(map.secondary.capacity != 0
                            or map.seen_version < self.core.core.highest_required_snapshot_version):
                    self.core.calls += 1     # entries may move
                    if not before_operation(&table.lane, table, map):
                        self.no_memory()
                slot = find(table, map, key)
        self.table = table
        self.map = map
        self.slot = slot
        self.stamp = self.core.calls
        return 0

    cdef StateTable here(self):
        return self.plain if self.context.key.namespace == 0 else self.spaced

    cdef int make_room(self) except -1:
        """Make the table and the map for the current key if need be. May run Python; remembers the map anew."""
        cdef CowMap *map
        if self.table == NULL:
            self.make_spaced()
            self.find_here()
        if self.map == NULL:
            map = map_new(self.table, self.context.key.group)
            if map == NULL:
                self.no_memory()
            self.map = map
        return 0

    cdef int make_spaced(self) except -1:
        """Make the table for namespaces if need be. That runs Python, and so perhaps this method."""
        cdef object made = self.make_table(True)
        if self.spaced_table == NULL:
            self.adopt_table(made, True)
        return 0

    cdef int no_memory(self) except -1:
        self.stamp = NEVER
        self.codec.no_memory(self.core)

    # --- removing ---

    cdef int remove_here(self) except -1:
        """Remove the entry that was found."""
        cdef object _dropped = None      # an object ends with this call, when the table is whole again
        cdef uint32_t slot = self.slot
        if self.codec.form == FORM_OBJECT:
            self.core.inside += 1        # whatever a finaliser does, the core stays
            try:
                if self.table.layout.value_kind == VALUE_OBJECT:
                    _dropped = <object>(<PyObject **>value_of(self.table, entry_at(self.table.core, slot)))[0]
                if not remove(&self.table.lane, self.table, self.map, slot,
                              self.context.key.hash):
                    self.no_memory()
                self.stamp = NEVER
            finally:
                self.core.leave()
            return 0
        if not remove(&self.table.lane, self.table, self.map, slot, self.context.key.hash):
            self.no_memory()
        self.core.calls += 1
        self.slot = 0
        self.stamp = self.core.calls
        return 0

    cdef int clear_here(self) except -1:
        """Remove what is stored for the current key and namespace, if anything is."""
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot:
            if self.watcher is not None:
                self.watcher.forget(self)
                if self.stamp != self.core.calls:
                    self.find_here()
                    if self.slot == 0:
                        return 0
            self.remove_here()
        return 0

    def clear(self):
        """Remove what is stored; nothing happens if nothing is. O(1) amortised."""
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        self.clear_here()

    cdef bint has_any(self, Table *table, Entry *entry, int wanted) except -1:
        """Return True if an entry holds something that has, or has not, expired."""
        cdef bint gone = self.ttl != 0 and is_expired((<int64_t *>payload_of(table, entry))[0], self.ttl,
                                                      self.context.time())
        return gone == (wanted == WANT_EXPIRED)

    def exists(self):
        """Return True if a read would return something stored. Copies and changes nothing. O(1) expected."""
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot == 0:
            return False
        if self.ttl == 0 or self.shows_expired:
            return True
        return self.has_any(self.table, entry_at(self.table.core, self.slot), WANT_ALIVE)

    # --- for the backend ---

    cdef bint clean_here(self) except -1:
        """Remove what has expired of the current key's entry; whether something has."""
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot == 0 or self.ttl == 0 or not self.has_any(
                self.table, entry_at(self.table.core, self.slot), WANT_EXPIRED):
            return False
        self.remove_here()
        return True

    # --- cleaning up ---

    cdef StateTable swept(self, bint spaced):
        """The table whose entries expire."""
        return self.spaced if spaced else self.plain

    cdef int clean_some(self, int64_t entries) except -1:
        """Remove some of what has expired, if anything may have."""
        cdef int64_t now
        if self.core.closed or self.core.inside or self.ttl == 0:
            return 0
        now = self.context.time()
        if likely(not is_expired(self.walk.bound, self.ttl, now) and self.walk.undone == self.core.core.undone
                  and self.walk.setbacks == self.context.setbacks):
            return 0
        return self.walk_on(entries, now)

    cdef int walk_on(self, int64_t entries, int64_t now) except -1:
        """Go on with the walk over the entries, over about so many of them, and remove what has expired.

        At most eight times as many slots are looked at, and nothing more than once. A list counts by its length: after
        a long one, accesses look at nothing until it is paid for. What there is no memory for stays.
        """
        cdef int64_t slots = SLOTS_PER_ENTRY * entries
        cdef StateTable of
        cdef CowMap *map = NULL
        cdef uint32_t slot
        cdef int ends = 0
        cdef bint cleaned
        if unlikely(self.debt > 0):
            self.debt -= slots
            return 0
        while entries > 0 and slots > 0 and ends < 2:
            if not self.walk.is_under_way:
                self.begin_round(now)
            of = self.swept(self.walks_spaced)
            slot = sweep(of.table, &self.walk, self.ttl, now, &entries, &slots, &map)
            if self.walk.has_moved:
                self.walk.has_moved = False
                self.core.calls += 1     # whoever remembers a slot looks again
            if slot:
                cleaned = self.clean_slot(self.walks_spaced, map, slot)
                self.expired_by_cleanup += cleaned
                if not cleaned or of.table.layout.value_kind == VALUE_LIST:
                    self.walk.is_sure = False    # something is left, or other elements of the list are
                if self.core.closed:     # a finaliser did
                    return 0
            elif self.walk.map >= of.table.n_maps:
                self.walk.map = self.walk.run = 0
                self.walk.run_word = 0
                self.walks_spaced = not self.walks_spaced and self.spaced is not None
                if not self.walks_spaced:
                    ends += 1
                    self.end_round()
                    if not is_expired(self.walk.bound, self.ttl, now):
                        break            # there is nothing to find
        self.debt = -slots
        self.core.arena.budget.refused = 0
        return 0

    cdef int begin_round(self, int64_t now) except -1:
        cdef Sweep *walk = &self.walk
        walk.map = walk.run = 0
        walk.run_word = 0
        walk.is_under_way = walk.is_sure = True
        walk.began = now
        walk.oldest = INT64_MAX
        walk.bound = INT64_MIN
        walk.copies = self.copies()
        walk.undone = self.core.core.undone
        walk.setbacks = self.context.setbacks
        return 0

    cdef int end_round(self) except -1:
        """The walk has seen all entries: note what it knows."""
        cdef Sweep *walk = &self.walk
        walk.is_under_way = False
        self.oldest = walk.oldest
        if walk.is_sure and walk.copies == self.copies():
            walk.bound = min(walk.oldest, walk.began)    # what was written behind the walk is no older
        else:
            walk.bound = INT64_MIN
        return 0

    cdef uint64_t copies(self) except? 0:
        """Clones of entries that were made so far."""
        cdef uint64_t n = self.swept(False).table.lane.copied_entries
        return n if self.spaced is None else n + self.swept(True).table.lane.copied_entries

    cdef bint clean_slot(self, bint spaced, CowMap *map, uint32_t slot) except -1:
        """Remove what has expired of a live entry that has something expired; False where that cannot be done now."""
        cdef StateTable of = self.swept(spaced)
        cdef Table *table = of.table
        cdef Entry *entry = entry_at(table.core, slot)
        cdef object _dropped = None      # an object ends with this call, when the table is whole again
        cdef bint done
        if self.watcher is not None:     # it has to know which key it is
            return self.clean_key(key_object(table, entry), namespace_of(table, entry))
        self.core.inside += 1            # whatever a finaliser does, the core stays
        try:
            if table.layout.value_kind == VALUE_OBJECT:
                _dropped = <object>(<PyObject **>value_of(table, entry))[0]
            done = remove(&table.lane, table, map, slot, hash_of(table, entry))
            self.core.calls += 1
        finally:
            self.core.leave()
        return done

    cdef bint clean_key(self, object canonical, uint32_t number) except -1:
        """Remove what has expired of a key in a namespace, with that key current meanwhile."""
        cdef object saved = self.context._save_key()
        try:
            self.context.number_namespace(number)
            self.context._key = canonical
            if self.watcher is not None:
                self.watcher.forget(self)
            return self.clean_here()
        except MemoryError:
            return False
        finally:
            if not self.core.closed:
                self.context._restore_key(saved)

    def _clean_some(self, int64_t rows=1, now=None):
        """Clean up as much as this many accesses do, at time `now` if given; looks at no entry twice."""
        cdef int64_t saved = self.context.now
        cdef bint was_known = self.context.now_known
        if self.cleanup_size == 0 or rows == 0:
            return
        if now is None:
            self.clean_some(self.cleanup_size * rows)
            return
        self.context.now, self.context.now_known = now, True
        try:
            self.clean_some(self.cleanup_size * rows)
        finally:
            self.context.now, self.context.now_known = saved, was_known

    def _expire(self, int64_t budget):
        """Remove up to `budget` things that have expired, wherever they are; how many. O(what expires)."""
        cdef int64_t done = 0, now, elements = 0
        cdef ExpiryIndex index
        cdef Table *table
        cdef CowMap *map = NULL
        cdef uint32_t[MAX_FOUND] slots
        cdef int n, i, cleaned
        cdef bint spaced
        self.core.enter()
        self.core.leave()
        if self.ttl == 0 or self.core.closed:
            return 0
        now = self.context.time()
        for spaced in range(2):
            if spaced and self.spaced is None:
                break
            index = self.spaced_index if spaced else self.plain_index
            if index is None:
                index = ExpiryIndex(self.swept(spaced))
                if spaced:
                    self.spaced_index = index
                else:
                    self.plain_index = index
            table = index.table
            index.begin(self.context.setbacks)
            while done < budget:
                n = index.found(self.ttl, now, slots, &map)
                self.core.calls += 1     # looking may have moved entries
                if n < 0:
                    self.core.out_of_memory()
                cleaned = 0
                for i in range(n):
                    # What was cleaned before may have moved it, or run a finaliser that did anything.
                    if is_live(table, map, slots[i]) and is_expired(
                            oldest_in(table, entry_at(table.core, slots[i]), &elements), self.ttl, now):
                        cleaned += self.clean_slot(spaced, map, slots[i])
                    if self.core.closed:
                        return done + cleaned
                    if done + cleaned == budget:
                        break
                if cleaned == 0:
                    break
                done += cleaned
        self.expired_by_cleanup += done
        self.core.arena.budget.refused = 0
        return done

    cdef int forget_bounds(self) except -1:
        """Something with an old timestamp was put in."""
        self.walk.bound = INT64_MIN
        self.walk.is_sure = False
        if self.plain_index is not None:
            self.plain_index.forget()
        if self.spaced_index is not None:
            self.spaced_index.forget()
        return 0

    def _close(self):
        """Give back what belongs to the handle and not to its tables."""
        if self.plain_index is not None:
            self.plain_index.free()
        if self.spaced_index is not None:
            self.spaced_index.free()

    def _count_expired(self, int64_t entries):
        """Entries that a read of many keys has removed."""
        self.expired_on_read += entries

    def _expiry_metrics(self):
        """The expired things so far, by what removed them, and the oldest timestamp of cleanup's last full round."""
        return {"expired_on_read": self.expired_on_read, "expired_by_cleanup": self.expired_by_cleanup,
                "oldest_timestamp": None if self.oldest == INT64_MAX else self.oldest}

    # --- enumeration ---

    def _entries(self, uint32_t number=0, bint all_namespaces=True):
        """Two lists: the canonical keys and namespace numbers of entries with something unexpired. O(entries)."""
        cdef list keys = []
        cdef list namespaces = []
        cdef int wanted = WANT_ALIVE
        self.core.enter()
        try:
            if all_namespaces or number == 0:
                self.gather(self.plain, wanted, keys, namespaces, True, 0)
            if self.spaced is not None and (all_namespaces or number != 0):
                self.gather(self.spaced, wanted, keys, namespaces, all_namespaces, number)
        finally:
            self.core.leave()
        return keys, namespaces

    cdef int gather(self, StateTable of, int wanted, list keys, list namespaces, bint all,
                    uint32_t number) except -1:
        # Keys are ints and bytes, which start no garbage collection: nothing else runs during the walk.
        cdef Table *table = of.table
        cdef uint32_t g, slot, ns
        cdef Entry *entry
        cdef Walk walk
        for g in range(table.n_maps):
            begin_walk(table.maps[g], &walk)
            slot = next_entry(table.core, &walk)
            while slot:
                entry = entry_at(table.core, slot)
                ns = namespace_of(table, entry)
                if (all or ns == number) and (self.ttl == 0 or self.has_any(table, entry, wanted)):
                    keys.append(key_object(table, entry))
                    namespaces.append(ns)
                slot = next_entry(table.core, &walk)
        return 0

    def _count(self):
        """The number of keys and namespaces that have the state, expired ones included. O(1)."""
        return self.plain_table.lane.entries + (self.spaced_table.lane.entries if self.spaced_table != NULL else 0)

    def _numbers_of_key(self):
        """Numbers of the namespaces other than VOID in which the current key has an entry.

        O(namespaces of the backend) or O(entries of the key group), whichever is less.
        """
        cdef list found = []
        cdef CowMap *map
        cdef Table *table = self.spaced_table
        cdef CoreKey *key = &self.context.key
        cdef CoreKey at
        cdef list names = self.core.namespaces.names
        cdef uint32_t ns
        if table == NULL:
            return found
        map = table.maps[key.group - table.first_group]
        if map == NULL:
            return found
        if <uint64_t>len(names) > map_size(map):
            collect_namespaces(table, map, key, found)
            return found
        at = key[0]
        for ns in range(1, <uint32_t>len(names)):
            at.namespace = ns
            at.hash = hash_key(table, &at, ns)
            if find(table, map, &at):
                found.append(ns)
        return found

    def _metrics(self):
        """Bytes, copies made for snapshots, and rehash progress of this state."""
        total = {}
        for table in self._tables():
            for name, figure in table.metrics().items():
                total[name] = total.get(name, 0) + figure
        return {name: total[name] for name in (
            "entry_bytes", "used_slots", "buckets", "rehashing_maps", "rehashed_entries", "copied_entries",
            "copied_pages")}

    def _tables(self):
        """All tables of the state."""
        return [self.plain] if self.spaced is None else [self.plain, self.spaced]

    def _number_for_batch(self, bint makes_table):
        """The number of the current namespace; with `makes_table` there is a table for it afterwards."""
        cdef uint32_t number = self.context.key.namespace
        if makes_table and number and self.spaced_table == NULL:
            self.make_spaced()
        return number

    def _enter_namespace(self, uint32_t number):
        """Make a namespace current by its number."""
        self.context.number_namespace(number)


cdef int collect_namespaces(Table *table, CowMap *map, CoreKey *key, list found) except -1:
    cdef uint32_t slot
    cdef Entry *entry
    cdef Blob *blob
    cdef Walk walk
    begin_walk(map, &walk)
    slot = next_entry(table.core, &walk)
    while slot:
        entry = entry_at(table.core, slot)
        if table.layout.key_is_blob:
            blob = <Blob *>entry.key
            if blob.length == key.length and memcmp(blob_data(blob), key.data, key.length) == 0:
                found.append(namespace_of(table, entry))
        elif entry.key == key.number:
            found.append(namespace_of(table, entry))
        slot = next_entry(table.core, &walk)
    return 0


cdef class SingleHandle(Handle):
    """A state with one value for a key."""

    # --- reading ---

    cdef bint expired_here(self) except -1:
        return is_expired((<int64_t *>payload_of(self.table, entry_at(self.table.core, self.slot)))[0], self.ttl,
                          self.context.time())

    cdef object load_here(self):
        """The object of the entry that was found. A copy of it where a mark or snapshot needs what is there."""
        cdef object value, _owner
        cdef CoreKey at
        if self.codec.form == FORM_OBJECT:
            at, _owner = self.context.key, self.context.key_owner    # copying may make another key current
            self.core.inside += 1
            try:
                self.slot = self.here()._unshare(self.map, self.slot, &at)
                value = <object>(<PyObject **>value_of(self.table, entry_at(self.table.core, self.slot)))[0]
                self.stamp = self.core.calls     # `_unshare` has found the entry anew, if need was
            finally:
                self.core.leave()
            if self.watcher is not None:
                self.watcher.note(self, value, written=False)
            return value
        return self.codec.load(value_of(self.table, entry_at(self.table.core, self.slot)))

    cdef object read(self):
        """The value, or None. An expired one is removed, and returned this once if it may be seen."""
        cdef object value = None
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot == 0:
            return None
        if self.ttl:
            if self.expired_here():
                self.expired_on_read += 1
                if self.shows_expired:
                    value = self.load_here()
                    if self.stamp != self.core.calls:
                        self.find_here()
                if self.slot and self.expired_here():
                    self.remove_here()
                return value
            if self.refreshes:
                value = self.load_here()
                if self.stamp != self.core.calls:
                    self.find_here()
                if self.slot:
                    self.renew()
                return value
        return self.load_here()

    cdef int renew(self) except -1:
        """Stamp the entry that was found with the time of now."""
        cdef bint kept = False
        cdef uint32_t slot
        cdef int64_t now = self.context.time()
        cdef char *payload = payload_of(self.table, entry_at(self.table.core, self.slot))
        if (<int64_t *>payload)[0] == now:
            return 0
        slot = slot_for_write(&self.table.lane, self.table, self.map, self.slot,
                              self.context.key.hash, &kept)
        if slot == 0:
            self.no_memory()
        payload = payload_of(self.table, entry_at(self.table.core, slot))
        if kept:
            payload_ref(self.table, payload)     # what it refers to is the journal's and the entry's now
        (<int64_t *>payload)[0] = now
        self.slot = slot
        return 0

    cdef object unexpired(self):
        """The value that is written on top of: an expired one is never merged into new input."""
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot == 0 or (self.ttl and self.expired_here()):
            return None
        return self.load_here()

    # --- merging namespaces ---

    def _take(self):
        """Remove what the current key has; the value and its timestamp, or None if there is nothing."""
        cdef object value
        cdef int64_t timestamp = 0
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot == 0:
            return None
        if self.ttl:
            timestamp = (<int64_t *>payload_of(self.table, entry_at(self.table.core, self.slot)))[0]
        value = self.load_here()
        self.clear_here()
        return value, timestamp

    def _merge_stored(self, a, b):
        """Merge two values and their timestamps, and stamp the result now; an expired one counts as none."""
        cdef int64_t now = self.context.time() if self.ttl else 0
        cdef bint a_expired = self.ttl != 0 and is_expired(a[1], self.ttl, now)
        cdef bint b_expired = self.ttl != 0 and is_expired(b[1], self.ttl, now)
        if a_expired and b_expired:
            return None
        if a_expired or b_expired:
            return (b if a_expired else a)[0], now
        return self._merged(a[0], b[0]), now

    def _put_stored(self, value, int64_t timestamp):
        """Set the value of the current key, with a timestamp."""
        self.write(value)
        if self.ttl:
            self.forget_bounds()
            if self.stamp != self.core.calls:    # what has noted the value, or ended, may have run anything
                self.find_here()
                if self.slot == 0:
                    return
            (<int64_t *>payload_of(self.table, entry_at(self.table.core, self.slot)))[0] = timestamp

    # --- writing ---

    cdef int write(self, object value) except -1:
        """Set the value of the current key."""
        cdef char stored[MAX_STORED]
        cdef bytes data
        if self.stamp != self.core.calls:
            self.find_here()
        if unlikely(value is None):
            self.codec.refuse_none()
        if unlikely(self.map == NULL):
            self.make_room()
        if likely(self.codec.store_native(self.core, value, stored)):
            return self.write_stored(stored)
        data = self.codec.serialized(value)
        if self.stamp != self.core.calls:        # the serializer may have run anything
            self.find_here()
            if self.map == NULL:
                self.make_room()
        self.codec.store_bytes(self.core, data, stored)
        return self.write_stored(stored)

    cdef int write_stored(self, char *stored) except -1:
        """Put a stored form in; it belongs to the table afterwards, also if this raises."""
        cdef Table *table = self.table
        cdef uint32_t slot = self.slot, hash = self.context.key.hash
        cdef bint kept = False
        cdef char *payload
        cdef char *value
        cdef object _dropped = None      # an object ends with this call, when the table is whole again
        if slot:
            slot = slot_for_write(&table.lane, table, self.map, slot, hash, &kept)
        else:
            slot = insert(&table.lane, table, self.map, self.context.key.number, self.context.key.data,
                          self.context.key.length, self.context.key.namespace, hash)
            kept = True                  # there is nothing to drop
        if unlikely(slot == 0):
            self.codec.drop(self.core, stored)
            self.no_memory()
        payload = payload_of(table, entry_at(table.core, slot))
        value = value_of(table, entry_at(table.core, slot))
        if self.codec.form == FORM_LONG:
            (<int64_t *>value)[0] = (<int64_t *>stored)[0]
        else:
            if self.codec.form >= FORM_STRING and not kept:
                if self.codec.form == FORM_OBJECT:
                    _dropped = <object>(<PyObject **>value)[0]
                payload_drop(table, payload)
            memcpy(value, stored, self.codec.width)
        if self.ttl:
            (<int64_t *>payload)[0] = self.context.time()
        self.slot = slot
        if unlikely(self.watcher is not None):
            self.watcher.note(self, <object>(<PyObject **>stored)[0])
        return 0

    cdef int write_elsewhere(self, CoreKey *at, object owner, object value) except -1:
        """Write for the key that was current when a function was called that has made another one current."""
        cdef object saved = self.context._save_key()
        self.context.return_to(at, owner)
        try:
            return self.write(value)
        finally:
            if not self.core.closed:
                self.context._restore_key(saved)

    cdef object stored_copy(self, ValueCodec codec, object value):
        """A value as it comes back once it is stored: of the declared type, sharing nothing mutable."""
        cdef object prepared = codec.prepared(value)
        cdef char stored[MAX_STORED]
        if prepared is value:
            if codec.form != FORM_FLOAT:
                return value
            codec.store_native(self.core, value, stored)     # rounded to single precision
            return codec.load(stored)
        return codec.deserialized(PyBytes_AS_STRING(prepared), PyBytes_GET_SIZE(prepared))


cdef class ValueHandle(SingleHandle):
    """One value for a key; `default` gives what `value()` of an absent one returns."""

    cdef object default

    def __init__(self, *arguments, **options):
        SingleHandle.__init__(self, *arguments, **options)
        self.default = default_of(self._descriptor)

    def _redeclare(self, descriptor):
        self._descriptor = descriptor
        self.default = default_of(descriptor)

    def value(self):
        """The value; a copy of the default, which may be None, where there is none. O(1) expected."""
        cdef object value
        if likely(self.codec.form == FORM_LONG and self.ttl == 0):
            if self.stamp != self.core.calls:
                self.find_here()
            if likely(self.slot != 0):
                return (<int64_t *>value_of(self.table, entry_at(self.table.core, self.slot)))[0]
            return None if self.default is None else self.default()
        value = self.read()
        if value is None and self.default is not None:
            return self.default()
        return value

    def update(self, value):
        """Set the value; None clears. O(1) expected."""
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if value is None:
            self.clear_here()
        else:
            self.write(value)


cdef object default_of(descriptor):
    return None if descriptor.default_copy() is None else descriptor.default_copy


cdef class AddingHandle(SingleHandle):
    """The shared part of reducing, aggregating and folding states: user functions, which may do anything."""

    cdef object combined(self, object value):
        """Combine the stored value with `value`."""
        raise NotImplementedError

    def add(self, value):
        """Add a value; None clears. If the function raises, nothing has changed. O(1) expected."""
        cdef CoreKey at
        cdef object owner, result
        cdef uint64_t turn
        if self.cleanup_size:
            self.clean_some(self.cleanup_size)
        if value is None:
            self.clear_here()
            return
        if self.stamp != self.core.calls:
            self.find_here()
        at, owner, turn = self.context.key, self.context.key_owner, self.context.turn
        if at.namespace:
            self.core.core.namespace_refs[at.namespace] += 1     # the number stays that namespace's own
        try:
            result = self.combined(value)
            if self.context.turn == turn:
                self.write(result)
            else:
                self.write_elsewhere(&at, owner, result)
        finally:
            if at.namespace:
                self.core.core.namespace_refs[at.namespace] -= 1

    def get(self):
        """The result of the added values; None if none was added. O(1) expected."""
        return self.read()


cdef class ReducingHandle(AddingHandle):
    """One value, into which every added value is reduced."""

    cdef object combined(self, object value):
        cdef object old
        value = self.stored_copy(self.codec, value)
        old = self.unexpired()
        return value if old is None else self._descriptor.reduce(old, value)

    def _merged(self, a, b):
        """Merge two values; that of `a` comes first."""
        return self._descriptor.reduce(a, b)


cdef class AggregatingHandle(AddingHandle):
    """One accumulator, into which every added value goes; `inputs` is the codec of values, or None."""

    def __init__(self, *arguments, ValueCodec inputs=None, **options):
        AddingHandle.__init__(self, *arguments, **options)
        self.inputs = inputs

    def get(self):
        """The result of the accumulator; None where nothing was added. O(1) expected, and the function."""
        cdef object accumulator = self.read()
        return None if accumulator is None else self._descriptor.aggregate.get_result(accumulator)

    cdef object combined(self, object value):
        cdef object function = self._descriptor.aggregate
        cdef object accumulator
        if self.inputs is not None:
            value = self.stored_copy(self.inputs, value)
        accumulator = self.unexpired()
        if accumulator is None:
            accumulator = function.create_accumulator()
        return function.add(value, accumulator)

    def _merged(self, a, b):
        """Merge two accumulators; that of `a` comes first."""
        return self._descriptor.aggregate.merge(a, b)


cdef class FoldingHandle(AddingHandle):
    """One accumulator, moved on by every added value."""

    cdef object combined(self, object value):
        cdef object accumulator = self.unexpired()
        if accumulator is None:
            accumulator = self._descriptor.initial_copy()
        return self._descriptor.fold(accumulator, value)
