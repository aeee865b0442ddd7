"""The tables of the compiled core, read one key at a time. For tests only: every build has it, but no wheel.

`StateTable` and `MapTable` are the product's, with more methods. The functions take any table of the product.
"""

from collections import namedtuple

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from statebackend._core.codecs.key_value_codecs cimport KeyCodec
from statebackend._core.codecs.row_maker cimport RowMaker
from statebackend._core.handles.key_shape cimport (
    MOST_PARTS, SHAPE_NONE, KeyShape, bytes_in_row, bytes_of_key, shape_of)
from statebackend._core.handles.look_ahead cimport COMING_BYTES, MAP_KEYS, Visit, is_expected, note_map_entry
from statebackend._core.memory.arena cimport Arena, Probe, address
from statebackend._core.snapshots.entry_rows cimport EntryRows
from statebackend._core.snapshots.snapshot_view cimport SnapshotView
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, Directory, Entry, ListHead, RecordCursor, Table, Walk, begin_records, begin_walk,
    chain_head, entry_at, key_object, map_size, namespace_of, next_change, next_entry, payload_of, thread_of,
    value_of)
from statebackend._core.tables.lists cimport ListCursor, cursor_close, cursor_next, cursor_open
from statebackend._core.tables.map_table cimport MapTable as CoreMapTable, anchor_ref
from statebackend._core.tables.objects cimport object_at
from statebackend._core.tables.state_core cimport CoreMark, StateCore, begin_inside
from statebackend._core.tables.state_table cimport StateTable as CoreTable, is_null
from statebackend._core.tables.values cimport (
    CODE_ANCHOR, CODE_BLOB, CODE_LIST, CODE_OBJECT, CODE_RAW, load_blob, load_number)

from statebackend.errors import KeyGroupError, UsageError

#: One entry as it is at the moment. An object is not copied.
StateEntry = namedtuple("StateEntry", "key namespace slot version value")


cdef Arena _some = Arena()
cdef Probe *the_probe = _some.budget.probe       # one for the process
_some = None


def fail_allocation(n, times=1):
    """Make the `n`-th allocation from now fail, and those after it, `times` in all; 0 stops that."""
    cdef int64_t before = the_probe.fail_in
    the_probe.fail_in = n
    the_probe.fail_until = 1 - times
    return before


def limit_extents(n):
    """Let no arena have more than `n` extents; 0: as many as refs can name. Gives back what held before."""
    cdef uint32_t before = the_probe.most_extents
    the_probe.most_extents = n
    return before


def set_state_version(core, version):
    """Set the version counter of a core, or of its twin."""
    if isinstance(core, StateCore):
        (<StateCore>core).core.state_version = version
    else:
        core.state_version = version


def objects_held(core):
    """Count the references to objects that a core has, or that its twin says it has."""
    return (<StateCore>core).core.objects.held if isinstance(core, StateCore) else core.objects_held()


def bytes_of_short_key(KeyCodec codec not None, key):
    """Return the canonical form of a key, or None if it takes the general way."""
    cdef KeyShape shape
    cdef char out[COMING_BYTES]
    cdef int64_t length
    shape_of(codec, &shape)
    length = bytes_of_key(&shape, <PyObject *>key, out)
    return out[:length] if length else None


cdef object load(const char *value, int code, uint32_t width):
    """Make a Python object of a stored value. Lists and anchors are not values."""
    if code == CODE_BLOB:
        return load_blob(value)
    if code == CODE_OBJECT:
        return object_at(value)
    if code == CODE_RAW:
        return PyBytes_FromStringAndSize(value, width)
    return load_number(code, value)


cdef object load_at(CoreTable table, Entry *entry):
    cdef char *value = value_of(table.table, entry)
    if table.value_code == CODE_LIST:
        return elements_of_list(table, <ListHead *>value)
    if table.value_code == CODE_ANCHOR:
        return (<uint32_t *>value)[0]
    if table.takes_none and is_null(table.table, entry):
        return None
    return load(value, table.value_code, table.table.layout.value_width)


cdef list elements_of_list(CoreTable table, ListHead *head):
    cdef ListCursor cursor
    cdef char *element
    cdef list out = []
    if not cursor_open(table.table, head, &cursor):
        table.owner.out_of_memory()
    try:
        while True:
            element = cursor_next(table.table, &cursor)
            if element == NULL:
                return out
            element += 8 if table.table.element_has_timestamp else 0
            out.append(load(element, table.element_code, table.table.element_value_width))
    finally:
        cursor_close(&cursor)


cdef object seen(CoreTable table, uint32_t slot):
    cdef Entry *entry = entry_at(table.table.core, slot)
    return StateEntry(key_object(table.table, entry), namespace_of(table.table, entry), slot, entry.version,
                      load_at(table, entry))


def entries_of(CoreTable table not None):
    """List the live entries, in no order. Changes nothing."""
    cdef Walk walk
    cdef uint32_t g, slot
    out = []
    table.usable()
    begin_inside(table.owner)
    try:
        for g in range(table.table.n_maps):
            begin_walk(table.table.maps[g], &walk)
            slot = next_entry(table.table.core, &walk)
            while slot:
                out.append(seen(table, slot))
                slot = next_entry(table.table.core, &walk)
        return out
    finally:
        table.owner.leave()


def dirty(CoreTable table not None, CoreMark mark not None):
    """Return the keys inserted, written or removed since `mark`, as a set of (key, namespace)."""
    cdef RecordCursor record
    cdef Entry *entry
    found = set()
    table.owner.require_open(mark)
    table.owner.enter()
    try:
        begin_records(table.table.journal, mark.version, &record)
        while next_change(&record, table.table):
            entry = entry_at(table.table.core, record.slot)
            found.add((key_object(table.table, entry), namespace_of(table.table, entry)))
        return found
    finally:
        table.owner.leave()


def rows_in(SnapshotView view not None, CoreTable table not None):
    """Return all rows of a snapshot as {(key, namespace): value}; lists as lists."""
    cdef EntryRows rows
    cdef uint64_t[::1] addresses
    cdef Py_ssize_t i
    cdef Entry *entry
    cdef uint32_t first
    out = {}
    view.begin_reading()
    try:
        first = table.table.first_group
        rows = view.rows(table, first, first + table.table.n_maps - 1)
        addresses = rows.addresses
        for i in range(addresses.shape[0]):
            entry = <Entry *><uintptr_t>addresses[i]
            out[key_object(table.table, entry), namespace_of(table.table, entry)] = load_at(table, entry)
        return out
    finally:
        view.end_reading()


cdef class StateTable(CoreTable):

    def get(self, key, uint32_t namespace=0):
        """Return the value of a key, or None; a list as a list of its elements.

        An object of a table with `copy_value` is copied at its first read since the newest mark or snapshot.
        """
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        self.owner.enter()
        try:
            slot = self._locate(key, namespace, &k, &map)
            if slot == 0:
                return None
            slot = self._unshare(map, slot, &k)
            return load_at(self, entry_at(self.table.core, slot))
        finally:
            self.owner.leave()

    cdef uint32_t located(self, key, uint32_t namespace) except? 0:
        """The slot of a key, good until the next call, or 0. Copies nothing."""
        cdef CoreKey k
        cdef CowMap *map
        self.owner.enter()
        try:
            return self._locate(key, namespace, &k, &map)
        finally:
            self.owner.leave()

    def contains(self, key, uint32_t namespace=0):
        """Return True if a key is present."""
        return self.located(key, namespace) != 0

    def timestamp(self, key, uint32_t namespace=0):
        """Return the timestamp stored with a key, or None."""
        cdef uint32_t slot = self.located(key, namespace)
        if slot == 0 or not self.table.layout.has_timestamp:
            return None
        return (<int64_t *>payload_of(self.table, entry_at(self.table.core, slot)))[0]

    def __iter__(self):
        return iter(entries_of(self))

    def group_of(self, key):
        """Return the key group of a key."""
        cdef CoreKey k
        self.usable()
        self.split_key(key, 0, &k)
        return k.group

    def chain(self, key, uint32_t namespace=0):
        """Return the live entries in the bucket of a key, head first."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        out = []
        self.usable()
        begin_inside(self.owner)
        try:
            self.split_key(key, namespace, &k)
            map = self.map_or_null(k.group)
            slot = chain_head(self.table.core, map, k.hash) if map != NULL else 0
            while slot:
                out.append(seen(self, slot))
                slot = entry_at(self.table.core, slot).next
            return out
        finally:
            self.owner.leave()

    def map_info(self, uint32_t group):
        """Return sizes, capacities and rehash progress of the map of a key group; None if it was never used."""
        cdef CowMap *map
        cdef Directory *directory
        cdef uint32_t directories = 0
        self.usable()
        if not 0 <= <int64_t>group - self.table.first_group < self.table.n_maps:
            raise KeyGroupError("the key group is not part of the table", detail=f"key group {group}")
        map = self.map_or_null(group)
        if map == NULL:
            return None
        directory = map.directories
        while directory != NULL:
            directories += 1
            directory = directory.older
        return {
            "size": map_size(map),
            "primary_size": map.primary.size, "secondary_size": map.secondary.size,
            "primary_capacity": map.primary.capacity, "secondary_capacity": map.secondary.capacity,
            "rehash_index": map.rehash_index, "threshold": map.threshold, "used_slots": map.used,
            "run_bytes": map.run_bytes, "seen_version": map.seen_version, "directories": directories,
            "modifications": map.modifications,
        }

    def dirty(self, mark):
        return dirty(self, mark)

    def rows_in(self, view):
        return rows_in(view, self)


cdef class MapTable(CoreMapTable):

    def get(self, key, map_key, uint32_t namespace=0):
        """The value of one entry of a key's map, or None."""
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0, slot
        self.owner.enter()
        try:
            slot = self.locate_entry(key, map_key, namespace, &head, &head_slot, &inner, &map)
            if slot == 0:
                return None
            slot = self.entries._unshare(map, slot, &inner)
            return load_at(self.entries, entry_at(self.entries.table.core, slot))
        finally:
            self.owner.leave()

    def contains(self, key, map_key, uint32_t namespace=0):
        """Return True if a key's map has an entry."""
        cdef CoreKey head
        cdef CoreKey inner
        cdef CowMap *map = NULL
        cdef uint32_t head_slot = 0
        self.owner.enter()
        try:
            return self.locate_entry(key, map_key, namespace, &head, &head_slot, &inner, &map) != 0
        finally:
            self.owner.leave()

    def items(self, key, uint32_t namespace=0):
        """List the entries of a key's map in insertion order, as (map key, value)."""
        cdef CoreKey head
        cdef CowMap *map = NULL
        cdef Table *table = self.entries.table
        cdef Entry *entry
        cdef uint32_t slot
        keys = []
        self.owner.enter()
        try:
            slot = self.locate(key, namespace, &head, &map)
            if slot:
                slot = (<Anchor *>address(table.core.arena, anchor_ref(self.heads.table, slot))).first
            while slot:
                entry = entry_at(table.core, slot)
                keys.append(key_object(table, entry))
                slot = thread_of(table, entry).next
        finally:
            self.owner.leave()
        return [(map_key, self.get(key, map_key, namespace)) for map_key in keys]


def map_keys_expected(CoreTable entries not None, looked_up):
    """The map keys that are expected after these, pairs of a turn and a map key, one turn later."""
    cdef Visit visit
    cdef CoreKey at
    cdef uint32_t turn = 0, i
    cdef list found = []
    memset(&visit, 0, sizeof(Visit))
    memset(&at, 0, sizeof(CoreKey))
    for turn, map_key in looked_up:
        if entries.table.layout.key_is_blob:
            at.data, at.length = <const char *><bytes>map_key, len(map_key)
        else:
            at.number = map_key
        note_map_entry(&visit, entries.table, &at, turn)
    for i in range(MAP_KEYS):
        if not is_expected(&visit.map_keys[i], turn + 1):
            continue
        if entries.table.layout.key_is_blob:
            found.append(visit.map_keys[i].bytes[:visit.map_keys[i].number])
        else:
            found.append(visit.map_keys[i].number)
    return sorted(found)


def bytes_of_row_key(RowMaker rows not None, tuple key_columns not None, KeyCodec codec not None, int64_t at):
    """The canonical form of the key in a row as the loop takes it, or None."""
    cdef KeyShape shape
    cdef Py_ssize_t columns[MOST_PARTS]
    cdef char out[COMING_BYTES]
    cdef Py_ssize_t i
    cdef int64_t length
    shape_of(codec, &shape)
    if shape.form == SHAPE_NONE or len(key_columns) != max(shape.n, 1) or not 0 <= at < rows.rows:
        raise UsageError("a row has no such key", detail=f"row {at}")
    for i in range(len(key_columns)):
        columns[i] = key_columns[i]
    length = bytes_in_row(rows, &shape, columns, at, out)
    return out[:length] if length else None
