"""The compiled part of a keyed backend: reads and writes at the current key, at any key, and of many keys.

A scalar call makes no composite key in Python: it copies the place of the current key, which `set_key` has written
once, and puts a map key behind it. `keyed_store.pxd` draws what belongs to whom.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

import numpy as np

from statebackend._core.memory.platform cimport unlikely
from statebackend._core.memory.byte_rows cimport NO_BYTES, check_rows, start_of
from statebackend._core.rocksdb.binding.write_batch cimport WRITE_DELETE, WRITE_MERGE, WRITE_PUT, Write
from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, drop
from statebackend._core.rocksdb.overlay.composite_keys cimport append_escaped, append_group, append_int
from statebackend._core.rocksdb.overlay.composite_keys import place_of
from statebackend._core.rocksdb.binding.database cimport ColumnFamily, Database, PinnedValue, array_of, check_sizes
from statebackend._core.rocksdb.binding.library cimport api, check, live, rocksdb_batch_t, rocksdb_family_t
from statebackend._core.rocksdb.overlay.key_changes cimport KeyChanges
from statebackend._core.rocksdb.overlay.ordered_reads import have_rows, read_many
from statebackend._core.rocksdb.overlay.overlay cimport (
    DONE, NO_MEMORY, TOO_LONG, Change, Layer, Node, Overlay, Written, hash_of, joined, key_of,
    make_buckets, needs_base, put_in_order, resolve)
from statebackend._core.rocksdb.overlay.merging_iterator import MergingIterator

from statebackend._core.rocksdb.overlay.key_changes import CLEARED
from statebackend.errors import UsageError, overlapping_call

cdef enum:
    ROWS_AT_ONCE = 1 << 16
    BYTES_AT_ONCE = 4 << 20           # of a batch as it goes into the database
    UNMARKED_KEYS = 1 << 14           # changed without a mark: then they go into the database, in about 10 ms,
    UNMARKED_BYTES = 4 << 20          # or with so many bytes
    AHEAD = 64                        # keys whose places in the overlay are fetched at once


cdef class Table:
    """A column family, and its number among those whose changes are noted; `KeyedStore.add_table` makes it."""

    def note_namespaces(self):
        self.has_namespaces = True


cdef inline int64_t what_becomes(Table table, Write what, size_t size) noexcept nogil:
    """What becomes of a key, as `KeyChanges` has it."""
    if what != WRITE_MERGE or not table.grows or size == 0:
        return what != WRITE_DELETE
    return -<int64_t>size


cdef int raise_unless(Written written, Table table) except -1:
    """Raise what a write has met that is not done."""
    if written == TOO_LONG:
        raise UsageError("a value is 4 GB or longer", detail=f"column family {table.family.name!r}, in an open batch",
                         hint="deal the elements of a list out to several keys, or to the entries of a map")
    if written == NO_MEMORY:
        raise MemoryError
    return 0


cdef void look_ahead(Layer layer, const int64_t *offsets, const char *keys, Py_ssize_t n,
                     uint32_t *hashes) noexcept nogil:
    """Hash up to AHEAD keys, and let the processor fetch where the overlay has them."""
    cdef Py_ssize_t i
    for i in range(n):
        hashes[i] = hash_of(keys + offsets[i], offsets[i + 1] - offsets[i])
        layer.look_ahead(hashes[i])
    for i in range(n):
        layer.look_closer(hashes[i])


cdef void find_nodes(Layer layer, const int64_t *offsets, const char *keys, Py_ssize_t n, Node **nodes) noexcept nogil:
    """What the overlay has for many keys; NULL where it has nothing."""
    cdef Py_ssize_t i
    cdef uint32_t hashes[AHEAD]
    for i in range(n):
        if i % AHEAD == 0:
            look_ahead(layer, offsets + i, keys, min(AHEAD, n - i), hashes)
        nodes[i] = layer.find_hashed(keys + offsets[i], offsets[i + 1] - offsets[i], hashes[i % AHEAD])


cdef class KeyedStore:
    """Reads and writes of a database, at the current key and elsewhere; `refuse` raises where there is no key.

    Writes are not logged: the database does not survive its process. Single ones stay in the overlay, also without a
    mark, until there are so many that they go into the database together, in order.
    """

    def __cinit__(self):
        memset(&self.place, 0, sizeof(self.place))
        memset(&self.scratch, 0, sizeof(self.scratch))

    def __init__(self, Database database not None, refuse not None):
        self.database, self.refuse = database, refuse
        self.overlay = Overlay()
        self.tables = []
        self.unmarked_keys = UNMARKED_KEYS

    def __dealloc__(self):
        drop(&self.place)
        drop(&self.scratch)

    def add_table(self, ColumnFamily family not None, Py_ssize_t number, *, bint grows=False):
        """Read and write a column family; its changes are noted by this number, unless it is below 0.

        If it `grows`, appended bytes stay as they are, and their number is noted that is.
        """
        cdef Table made = Table.__new__(Table)
        made.family, made.number, made.grows, made.layer = family, number, grows, self.overlay.add_layer()
        self.tables.append(made)
        return made

    def close(self):
        """Let go of the batch and of the current key; the database stays open for its other readers.

        If another thread is inside, it has a moment to leave; if it does not, the batch stays until the store goes.
        """
        self.has_key = False
        if self.overlay.others_leave():
            self.is_batched = self.has_failed = False
            self.overlay.clear()
        self.changes = None

    # ---------------------------------------------------------------------------------- the current place

    cdef int begin_place_of_int(self, uint16_t key_group, int64_t number) except -1:
        """Begin the place of a key; `end_place` must follow. The caller has asked the overlay to `come_in`."""
        self.place.size = 0
        if not append_group(&self.place, key_group) or not append_int(&self.place, number):
            raise MemoryError
        self.key_end = self.place.size
        return 0

    cdef int begin_place_of_bytes(self, uint16_t key_group, const char *data, size_t n) except -1:
        self.place.size = 0
        if not append_group(&self.place, key_group) or not append_escaped(&self.place, data, n):
            raise MemoryError
        self.key_end = self.place.size
        return 0

    cdef int end_place(self, bytes namespace) except -1:
        """Put the encoded namespace behind the key."""
        self.place.size = self.key_end
        if not append_escaped(&self.place, namespace, len(namespace)):
            raise MemoryError
        self.is_spaced = len(namespace) > 0
        return 0

    cdef int need_key(self) except -1:
        self.overlay.begin()             # another thread may be reading the bytes of the place
        if not self.has_key:
            self.refuse()
        return 0

    @property
    def place_here(self):
        """The current key group, key and namespace, as bytes."""
        self.need_key()
        return self.place.data[:self.place.size]

    @property
    def key_prefix(self):
        """The prefix of all keys of the current key, in any namespace."""
        self.need_key()
        return self.place.data[:self.key_end]

    cdef const char *key_here(self, size_t *n) except NULL:
        """The place, good until the key or the namespace changes."""
        self.need_key()
        n[0] = self.place.size
        return self.place.data

    cdef const char *entry_here(self, bint is_int, int64_t number, const char *data, size_t size,
                                size_t *n) except NULL:
        """The place and a map key behind it, in its canonical form; good until the next call."""
        self.need_key()
        self.scratch.size = 0
        if not append(&self.scratch, self.place.data, self.place.size):
            raise MemoryError
        if not (append_int(&self.scratch, number) if is_int else append(&self.scratch, data, size)):
            raise MemoryError
        n[0] = self.scratch.size
        return self.scratch.data

    # -------------------------------------------------------------------------------------- one at a time

    cdef int enter(self, Table table) except -1:
        """Begin to use the overlay: raises where a call of the database would."""
        self.overlay.come_in()
        self.database.handle_of(table.family)
        return 0

    cdef bint find(self, Table table, const char *key, size_t n, PinnedValue *found) except -1:
        """Find what is stored at a composite key; `Database.unpin` must follow if there is something.

        It is good until the next call.
        """
        cdef Node *node
        if self.is_batched:
            self.enter(table)
            node = table.layer.find(key, n)
            if node != NULL:
                if node.newest.what == WRITE_DELETE:
                    return False
                if node.newest.what == WRITE_MERGE:
                    return self.find_joined(table, key, n, node, found)
                found.slice, found.own = NULL, NULL
                found.data, found.size = node.newest.data, node.newest.size
                self.database.pins += 1
                live.pinned += 1
                return True
        return self.find_in_database(table, key, n, found)

    cdef bint find_in_database(self, Table table, const char *key, size_t n, PinnedValue *found) except -1:
        """The same without the overlay. Others stay out meanwhile: they would change the place, where the key lies."""
        self.overlay.come_in()
        self.overlay.is_busy = True
        try:
            return self.database.pin(table.family, key, n, found)
        finally:
            self.overlay.is_busy = False

    cdef bint find_joined(self, Table table, const char *key, size_t n, Node *node, PinnedValue *found) except -1:
        """What the database has, and the elements behind it."""
        cdef Bytes made
        cdef PinnedValue base
        cdef int is_there
        cdef bint has_base
        self.overlay.go_in()
        memset(&made, 0, sizeof(made))
        try:
            has_base = needs_base(node.newest) and self.database.pin(table.family, key, n, &base)
            is_there = resolve(node.newest, base.data if has_base else NULL, base.size if has_base else 0, has_base,
                               &made)
        finally:
            self.overlay.go_out()
        if has_base:
            self.database.unpin(&base)
        if is_there < 0:
            drop(&made)
            raise MemoryError
        found.slice, found.own = NULL, made.data
        found.data, found.size = made.data if made.data != NULL else NO_BYTES, made.size
        self.database.pins += 1
        live.pinned += 1
        return True

    cdef object read(self, Table table, const char *key, size_t n):
        cdef PinnedValue found
        if not self.find(table, key, n, &found):
            return None
        try:
            return found.data[:found.size]
        finally:
            self.database.unpin(&found)

    def get_at(self, Table table not None, bytes key not None):
        return self.read(table, key, len(key))

    cdef int change(self, Table table, Write what, const char *key, size_t n, const char *value,
                    size_t size) except -1:
        cdef KeyChanges noted
        cdef bytes _kept
        check_sizes(n, size)
        self.enter(table)
        if self.overlay.n_marks == 0:
            if unlikely(self.has_failed or self.overlay.n_journal >= self.unmarked_keys
                        or self.gathered >= UNMARKED_BYTES):
                _kept = key[:n]          # a finaliser could make another key current, whose place `key` would be
                key = _kept
                self.flush()
                self.enter(table)
            self.is_batched = True
            self.gathered += n + size
        noted = self.noted_in(table)
        raise_unless(self.overlay.write(table.layer, what, key, n, hash_of(key, n), value, size), table)
        table.version += 1
        if noted is not None and not noted.note(key, n, what_becomes(table, what, size)):
            raise MemoryError
        return 0

    cdef KeyChanges noted_in(self, Table table):
        """Where changes of a table are noted, or None; raises while another thread is inside."""
        cdef KeyChanges noted
        if self.changes is None or table.number < 0:
            return None
        noted = <KeyChanges>self.changes[table.number]
        if unlikely(noted.is_busy):
            raise overlapping_call()
        return noted

    def put_at(self, Table table not None, bytes key not None, bytes value not None):
        self.change(table, WRITE_PUT, key, len(key), value, len(value))

    def merge_at(self, Table table not None, bytes key not None, bytes operand not None):
        self.change(table, WRITE_MERGE, key, len(key), operand, len(operand))

    def delete_at(self, Table table not None, bytes key not None):
        self.change(table, WRITE_DELETE, key, len(key), NULL, 0)

    # --------------------------------------------------------------------------------------- many at once

    def get_many(self, Table table not None, const int64_t[::1] offsets not None, const uint8_t[::1] keys not None):
        """Read many composite keys: whether each was found, and the values as offsets and bytes."""
        cdef Py_ssize_t i, n, asked = 0
        cdef Bytes data, wanted
        cdef Node **nodes
        cdef const char *start
        cdef const char *base
        cdef int is_there = 1
        cdef int64_t[::1] end, wanted_end, base_end
        cdef uint8_t[::1] mark, base_mark
        cdef const uint8_t[::1] base_data
        if not self.is_batched or table.layer.rows.n == 0:
            return read_many(table.family, offsets, keys)
        n = check_rows(offsets, keys, "keys")
        start = start_of(keys)
        is_found, ends, wanted_ends = np.zeros(n, np.bool_), np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
        mark, end, wanted_end = is_found.view(np.uint8), ends, wanted_ends
        memset(&data, 0, sizeof(data))
        memset(&wanted, 0, sizeof(wanted))
        self.enter(table)                # right before `go_in`: nothing in between lets another thread come in
        self.overlay.go_in()
        nodes = <Node **>malloc((n or 1) * sizeof(Node *))
        try:
            if nodes == NULL:
                raise MemoryError
            # What the overlay does not tell by itself is asked of the database at once.
            with nogil:
                find_nodes(table.layer, &offsets[0], start, n, nodes)
                for i in range(n):
                    if nodes[i] == NULL or needs_base(nodes[i].newest):
                        if not append(&wanted, start + offsets[i], offsets[i + 1] - offsets[i]):
                            is_there = -1
                            break
                        asked += 1
                        wanted_end[asked] = wanted.size
            if is_there < 0:
                raise MemoryError
            base_found, base_ends, base_values = read_many(
                table.family, wanted_ends[:asked + 1], array_of(wanted.data, wanted.size))
            base_mark, base_end, base_data = base_found.view(np.uint8), base_ends, base_values
            base = start_of(base_data)
            asked = 0
            with nogil:
                for i in range(n):
                    if nodes[i] == NULL:
                        is_there = 0
                        if base_mark[asked]:
                            is_there = 1 if append(&data, base + base_end[asked],
                                                   base_end[asked + 1] - base_end[asked]) else -1
                        asked += 1
                    elif needs_base(nodes[i].newest):
                        is_there = resolve(nodes[i].newest, base + base_end[asked],
                                           base_end[asked + 1] - base_end[asked], base_mark[asked], &data)
                        asked += 1
                    else:
                        is_there = resolve(nodes[i].newest, NULL, 0, False, &data)
                    if is_there < 0:
                        break
                    mark[i] = is_there
                    end[i + 1] = data.size
            if is_there < 0:
                raise MemoryError
            return is_found, ends, array_of(data.data, data.size)
        finally:
            self.overlay.go_out()
            free(nodes)
            drop(&data)
            drop(&wanted)

    cdef int change_rows(self, Table table, Write what, const int64_t[::1] offsets, const uint8_t[::1] keys,
                         const int64_t[::1] value_offsets, const uint8_t[::1] values,
                         const uint8_t[::1] nulls) except -1:
        """Write many composite keys, in the batch, and remove the keys of nulls; an error leaves some of them
        written."""
        cdef KeyChanges noted
        cdef Py_ssize_t i, n = check_rows(offsets, keys, "keys")
        cdef const char *start = start_of(keys)
        cdef const char *data = start_of(values)
        cdef bint is_noted, has_nulls = nulls is not None
        cdef size_t size, key_size
        cdef uint32_t hashes[AHEAD]
        cdef Write each
        cdef Written written = DONE
        if check_rows(value_offsets, values, "values") != n or has_nulls and nulls.shape[0] != n:
            raise UsageError("there are not as many values as keys")
        if self.overlay.n_marks == 0:
            raise UsageError("many keys are written in a batch", hint="open a mark first")
        self.enter(table)
        noted = self.noted_in(table)
        table.version += 1
        is_noted = noted is not None
        self.overlay.go_in()
        if is_noted:
            noted.go_in()
        with nogil:
            if not make_buckets(&table.layer.rows, n) or is_noted and not noted.make_room(n):
                written = NO_MEMORY
            for i in range(n if written == DONE else 0):
                if i % AHEAD == 0:
                    look_ahead(table.layer, &offsets[i], start, min(AHEAD, n - i), hashes)
                each = WRITE_DELETE if has_nulls and nulls[i] else what
                size = 0 if each == WRITE_DELETE else value_offsets[i + 1] - value_offsets[i]
                key_size = offsets[i + 1] - offsets[i]
                written = self.overlay.write(table.layer, each, start + offsets[i], key_size, hashes[i % AHEAD],
                                             data + value_offsets[i], size)
                if written != DONE:
                    break
                if is_noted and not noted.note(start + offsets[i], key_size, what_becomes(table, each, size)):
                    written = NO_MEMORY
                    break
        if is_noted:
            noted.go_out()
        self.overlay.go_out()
        return raise_unless(written, table)

    def put_many(self, Table table not None, const int64_t[::1] offsets not None, const uint8_t[::1] keys not None,
                 const int64_t[::1] value_offsets not None, const uint8_t[::1] values not None,
                 const uint8_t[::1] nulls=None):
        """Write the values of many composite keys, in the batch; remove the keys of nulls."""
        self.change_rows(table, WRITE_PUT, offsets, keys, value_offsets, values, nulls)

    def merge_many(self, Table table not None, const int64_t[::1] offsets not None, const uint8_t[::1] keys not None,
                   const int64_t[::1] value_offsets not None, const uint8_t[::1] values not None):
        """Append to the lists of many composite keys, in the batch."""
        self.change_rows(table, WRITE_MERGE, offsets, keys, value_offsets, values, None)

    def delete_many(self, Table table not None, const int64_t[::1] offsets not None, const uint8_t[::1] keys not None):
        self.change_rows(table, WRITE_DELETE, offsets, keys, offsets, keys, None)

    def have_rows(self, Table table not None, const int64_t[::1] offsets not None,
                  const uint8_t[::1] prefixes not None):
        """Say of many prefixes whether the table has a key that begins with it."""
        cdef Layer layer = table.layer if self.is_batched and table.layer.rows.n else None
        self.enter(table)
        self.overlay.go_in()
        try:
            return have_rows(table.family, layer, offsets, prefixes)
        finally:
            self.overlay.go_out()

    # ---------------------------------------------------------------------------------------------- walks

    def walk(self, Table table not None, bytes prefix not None, bytes start=None):
        """Return a walk over pairs of key and value that begin with a prefix, from `start` on, in order."""
        cdef Layer layer = table.layer if self.is_batched else None
        return MergingIterator(table.family, layer, prefix, start, overlay=self.overlay)

    def frozen(self, Table table not None):
        """Return a copy of the batch's changes in a table, or None if it has changed nothing. O(changes)."""
        if not self.is_batched or table.layer.rows.n == 0:
            return None
        self.enter(table)
        self.overlay.go_in()
        try:
            return table.layer.frozen()
        finally:
            self.overlay.go_out()

    def rows(self, Table table not None, bytes prefix not None, bytes start=None, Py_ssize_t most=1 << 62):
        """Return up to `most` pairs of key and value that begin with a prefix, from `start` on, in order."""
        cdef list found = [], more
        with self.walk(table, prefix, start) as walk:
            while len(found) < most:
                more = walk.rows(min(most - len(found), ROWS_AT_ONCE))
                if not more:
                    break
                found += more
        return found

    def delete_all(self, Table table not None, bytes prefix not None):
        """Remove all keys that begin with a prefix; return how many there were."""
        cdef bytes key
        cdef list keys
        with self.walk(table, prefix) as walk:
            keys = [key for key, _ in walk]
        for key in keys:
            self.change(table, WRITE_DELETE, key, len(key), NULL, 0)
        return len(keys)

    def note_cleared(self, Table table not None, bytes place not None):
        """Note that a map is cleared as a whole, also what is found no longer; its rows are still to be removed."""
        cdef KeyChanges noted = self.noted_in(table)
        if noted is not None and not noted.note(place, len(place) - 1, CLEARED):
            raise MemoryError

    def count(self, Table table not None, bint is_int, bint by_place, bint is_list, Py_ssize_t most):
        """Count keys, or with `by_place` places that have any, up to `most`; more than that is `most` + 1.

        Of lists, no bytes are none.
        """
        cdef Py_ssize_t n = 0
        cdef bytes key, value, place = None
        with self.walk(table, b"") as walk:
            for key, value in walk:
                if not by_place or place is None or not key.startswith(place):
                    n += not is_list or len(value) > 0
                    if by_place:
                        place = key[:place_of(key, is_int)]
                if n > most:
                    break
        return n

    # ---------------------------------------------------------------------------------------------- marks

    def set_changes(self, list changes):
        """Note changes in these from now on, one for each table by its number; nowhere for None."""
        self.changes = changes

    def mark(self):
        """Open a point to roll back to: from the first on, writes go into the overlay. Return its number. O(1)."""
        point = self.overlay.mark()
        self.is_batched = True
        return point

    def roll_back(self, point not None):
        """Take back what was written since a mark, which stays. O(what is undone)."""
        self.overlay.roll_back(point)
        for table in self.tables:
            (<Table>table).version += 1

    def release(self, point not None):
        """End a mark and keep what was written; after the last one, `flush`. O(1)."""
        self.overlay.release(point)

    def flush(self):
        """Without a mark, write what the overlay has into the database, in order, some megabytes at a time.

        If that fails, the overlay has what is not written: reads see it, and the next write tries again first.
        """
        if self.overlay.n_marks:
            raise UsageError("the batch has marks to go back to", hint="release them first")
        if not self.is_batched:
            return
        self.has_failed = True
        for table in self.tables:
            if (<Table>table).layer.rows.n:
                self.flush_table(table)
        self.has_failed = False
        self.gathered = 0
        if self.overlay.n_marks == 0 and len(self.overlay) == 0:  # another thread may have come in between
            self.overlay.clear()
            self.is_batched = False

    @property
    def has_marks(self):
        """True while there is a mark to go back to."""
        return self.overlay.n_marks > 0

    cdef int flush_table(self, Table table) except -1:
        cdef Database database = self.database
        cdef rocksdb_family_t *handle
        cdef rocksdb_batch_t *batch
        cdef char *error = NULL
        cdef Layer layer = table.layer
        cdef Node *node
        cdef Change *change
        cdef Py_ssize_t taken
        cdef size_t nbytes
        cdef bint is_done
        self.enter(table)
        handle = database.handle_of(table.family)
        self.overlay.go_in()
        with nogil:
            is_done = put_in_order(&layer.rows)
        self.overlay.go_out()
        if not is_done:
            raise MemoryError
        while layer.rows.n:
            database.enter()
            self.overlay.go_in()
            with nogil:
                batch = api.writebatch_create()
                node, taken, nbytes = layer.rows.first[0], 0, 0
                while node != NULL and nbytes < BYTES_AT_ONCE:
                    change = joined(node.newest) if node.newest.what == WRITE_MERGE else node.newest
                    is_done = change != NULL
                    if not is_done:
                        break
                    if change.what == WRITE_PUT:
                        api.writebatch_put_cf(batch, handle, key_of(node), node.size, change.data, change.size)
                    elif change.what == WRITE_MERGE:
                        api.writebatch_merge_cf(batch, handle, key_of(node), node.size, change.data, change.size)
                    else:
                        api.writebatch_delete_cf(batch, handle, key_of(node), node.size)
                    nbytes += node.size + change.size
                    taken += 1
                    if change != node.newest:
                        free(change)
                    node = node.next[0]
                if is_done:
                    api.write(database.db, database.how(False, False), batch, &error)
                api.writebatch_destroy(batch)
                while is_done and error == NULL and taken:
                    self.overlay.remove_first(&layer.rows)
                    taken -= 1
            self.overlay.go_out()
            database.leave()
            if not is_done:
                raise MemoryError
            if error != NULL:
                check(error, database.where("writing a batch"))
            self.overlay.go_in()         # a finaliser that closes would wait for this thread
            try:
                database.keep_to_budget()
            finally:
                self.overlay.go_out()
        return 0
