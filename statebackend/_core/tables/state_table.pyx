"""State tables, one operation at a time: keys to values, in one copy-on-write map per key group.

A map state is two tables with one journal: keys to anchors, and (anchor, map key) to values; see `map_table.pyx`.
Batches are in `batch_kernels.pyx`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsLongLong
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from statebackend._core.memory.arena cimport Blob, raw_alloc, raw_free
from statebackend._core.memory.interpreter cimport PyBytes_CheckExact, PyLong_CheckExact
from statebackend._core.tables.cow_map cimport (
    MINIMUM_CAPACITY, PAGE_BUCKETS, RECORD_COPIED, VALUE_ANCHOR, VALUE_BLOB, VALUE_FIXED, VALUE_LIST, VALUE_OBJECT,
    Core, CowMap, Entry, ExpiringHead, Journal, ListHead, Table, Thread, Walk, before_operation, begin_walk, entry_at,
    find, hash_blob_key, hash_int_key, hash_key, keep_payload, key_object, map_new, namespace_of, next_entry,
    own_entry, payload_drop, payload_of, remove, see_snapshots, set_value_version, value_of, wait_for_others)
from statebackend._core.tables.invariants cimport check_map
from statebackend._core.key_groups cimport HashPlan, hash_canonical_bytes, hash_canonical_int, pmod_group
from statebackend._core.tables.lists cimport list_append
from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.objects cimport object_at, take_object
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.values cimport (
    CODE_ANCHOR, CODE_BLOB, CODE_LIST, CODE_OBJECT, CODE_RAW, MAX_BYTES, TYPE_BOOL, TYPE_DOUBLE, TYPE_FLOAT,
    blob_of_value, drop_value, store_number)
from statebackend._core.tables.entry_update cimport write_value

from statebackend.errors import ClosedError, KeyGroupError, SerializationTypeError, UsageError
from statebackend.types.layout import LAYOUTS

#: The code and width of numbers, by the names of their types: "long", "short", "double" and so on.
FIXED_CODES = {name.lower(): (row.code, row.width) for name, row in LAYOUTS.items() if row.is_number}
DTYPES = {row.code: row.dtype for row in LAYOUTS.values() if row.is_number}


def _code_and_width(value):
    """Return the value code, ValueKind and width of a value specification."""
    if value in FIXED_CODES:
        code, width = FIXED_CODES[value]
        return code, VALUE_FIXED, width
    if value == "bytes":
        return CODE_BLOB, VALUE_BLOB, 8
    if value == "object":
        return CODE_OBJECT, VALUE_OBJECT, 8
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 65536:
        return CODE_RAW, VALUE_FIXED, value
    raise UsageError("unknown value layout", detail=repr(value),
                     hint=f"use one of '{' '.join(FIXED_CODES)} bytes object' or a number of bytes")


cdef class StateTable:
    """One state: keys to values, in one copy-on-write map per key group.

    `key` is "int" (64 bits) or "bytes". `value` is one of `FIXED_CODES`, "bytes", "object",
    a number of raw bytes, or ("list", one of these). `plan` says how key groups are computed from keys.
    With `nullable`, values may be None.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> table = StateTable(StateCore(), key="bytes", value=("list", "int"))
    >>> table.append(b"a", 1); table.append(b"a", 2)
    >>> len(table), table.remove(b"a"), table.remove(b"a")
    (1, True, False)
    """

    def __cinit__(self, StateCore owner not None, *, key="int", value="long", max_parallelism=128,
                  key_group_range=None, namespaces=False, timestamps=False, HashPlan plan=None,
                  initial_capacity=64, hash_mask=0xFFFFFFFF, copy_value=None, nullable=False,
                  StateTable anchors=None, bint is_anchor_table=False):
        cdef Table *table
        first, last = (0, max_parallelism - 1) if key_group_range is None else key_group_range
        if not 1 <= max_parallelism <= 32768:
            raise UsageError("max_parallelism must be from 1 to 32768", detail=f"{max_parallelism}")
        if not 0 <= first <= last < max_parallelism:
            raise KeyGroupError("the key-group range does not lie in max_parallelism",
                                detail=f"{first}..{last} of {max_parallelism}")
        if key not in ("int", "bytes"):
            raise UsageError("unknown key layout", detail=repr(key), hint="use 'int' or 'bytes'")
        if (initial_capacity & (initial_capacity - 1)
                or not MINIMUM_CAPACITY <= initial_capacity <= PAGE_BUCKETS):
            raise UsageError(f"initial_capacity must be a power of two from {MINIMUM_CAPACITY} to {PAGE_BUCKETS}",
                             detail=f"{initial_capacity}")
        if owner.closed:
            raise ClosedError("the backend is closed")
        self.owner = owner
        self.max_parallelism = max_parallelism
        self.copy_value = copy_value
        self.takes_none = nullable
        self.anchors = anchors
        self.plan = plan if plan is not None else HashPlan("int64" if key == "int" else "bytes")
        if self.plan.is_int != (key == "int"):
            raise UsageError("the hash plan does not fit the key layout", detail=f"key={key!r}")
        table = <Table *>raw_alloc(&owner.arena.budget, sizeof(Table))
        if table == NULL:
            owner.out_of_memory()
        memset(table, 0, sizeof(Table))
        try:
            self._lay_out(table, key, value, namespaces or anchors is not None, timestamps, is_anchor_table)
            if nullable:
                self._make_nullable(table)
            if owner.closed:             # a finaliser did
                raise ClosedError("the backend is closed")
            table.core = &owner.core
            table.lane.core = &owner.core
            table.lane.blobs = owner.arena.blobs
            table.seed = owner.core.seed
            table.hash_mask = hash_mask
            table.initial_capacity = initial_capacity
            table.first_group = first
            table.n_maps = last - first + 1
            table.maps = <CowMap **>raw_alloc(&owner.arena.budget, table.n_maps * sizeof(CowMap *))
            if table.maps == NULL:
                owner.out_of_memory()
            memset(table.maps, 0, table.n_maps * sizeof(CowMap *))
            if anchors is not None:
                table.anchors = anchors.table
                table.journal = anchors.table.journal
                table.journal_index = 1
            else:
                table.journal = <Journal *>raw_alloc(&owner.arena.budget, sizeof(Journal))
                if table.journal == NULL:
                    raw_free(&owner.arena.budget, table.maps, table.n_maps * sizeof(CowMap *))
                    owner.out_of_memory()
                memset(table.journal, 0, sizeof(Journal))
                table.journal.next = owner.core.journals
                owner.core.journals = table.journal
        except BaseException:
            raw_free(&owner.arena.budget, table, sizeof(Table))
            raise
        table.journal.tables[table.journal_index] = table
        table.next = owner.core.tables
        owner.core.tables = table
        self.table = table

    @property
    def journal(self):
        """A number for its journal, which the two tables of a map state share; see `StateCore.written_since`."""
        return <uintptr_t>self.table.journal

    cdef int _make_nullable(self, Table *table) except -1:
        """Let values be None. Then a blob is NULL, an object is None; a fixed width gets a byte of the payload."""
        cdef uint32_t at
        if self.value_code >= CODE_LIST:
            raise UsageError("lists and anchors are never None")
        if table.layout.value_kind != VALUE_FIXED:
            return 0
        at = table.layout.off_value + table.layout.value_width
        table.layout.off_null = at
        table.layout.payload_width = at + 1 - table.layout.off_payload
        table.layout.stride = (at + 1 + 7) & ~7u
        return 0

    cdef int _lay_out(self, Table *table, key, value, namespaces, timestamps, bint is_anchor_table) except -1:
        """Compute the offsets of an entry's parts; see `Layout`."""
        cdef uint32_t at = 16, width, align
        if is_anchor_table:
            self.value_code, kind, width = CODE_ANCHOR, VALUE_ANCHOR, 4
        elif isinstance(value, tuple):
            if len(value) != 2 or value[0] != "list":
                raise UsageError("unknown value layout", detail=repr(value))
            self.value_code, kind, width = CODE_LIST, VALUE_LIST, sizeof(ListHead)
            if timestamps:
                width = sizeof(ExpiringHead)
            self.element_code, element_kind, element_width = _code_and_width(value[1])
            table.element_kind = element_kind
            table.element_value_width = element_width
            table.element_width = element_width + (8 if timestamps else 0)
        else:
            self.value_code, kind, width = _code_and_width(value)
        table.layout.value_kind = kind
        table.layout.value_width = width
        table.layout.key_is_blob = key == "bytes"
        table.layout.has_timestamp = bool(timestamps) and kind != VALUE_LIST
        table.element_has_timestamp = bool(timestamps) and kind == VALUE_LIST
        if key == "bytes":
            at += 4
        if namespaces:
            table.layout.off_namespace = at
            at += 4
        if self.copy_value is not None and kind != VALUE_OBJECT:
            raise UsageError("only objects are copied", detail=f"value={value!r}", hint="leave copy_value out")
        if self.copy_value is not None:
            table.layout.off_value_version = at
            at += 4
        if self.anchors is not None:
            at = (at + 7) & ~7u
            table.layout.off_thread = at
            at += sizeof(Thread)
        align = 8 if timestamps or width >= 8 else 4 if width >= 4 else 1
        at = (at + align - 1) & ~(align - 1)
        table.layout.off_payload = at
        if table.layout.has_timestamp:
            at += 8
        table.layout.off_value = at
        at += width
        table.layout.payload_width = at - table.layout.off_payload
        table.layout.stride = (at + 7) & ~7u
        return 0

    # --- keys and values ---

    cdef int split_key(self, object key, uint32_t ns, CoreKey *out) except -1:
        """Convert and hash a key. Raises before anything changes."""
        cdef Table *table = self.table
        cdef int32_t spark
        if unlikely(table.anchors != NULL):
            raise UsageError("the entries of a map state are reached through their MapTable only")
        if unlikely(ns != 0 and table.layout.off_namespace == 0):
            raise UsageError("this table has no namespaces", hint="make it with namespaces=True")
        out.namespace = ns
        out.data = NULL
        out.length = 0
        out.number = 0
        if table.layout.key_is_blob:
            if not PyBytes_CheckExact(key):
                raise SerializationTypeError("a key of this table is bytes", detail=f"got {type(key).__name__}")
            out.data = PyBytes_AS_STRING(key)
            out.length = PyBytes_GET_SIZE(key)
            if unlikely(out.length > MAX_BYTES):
                raise OverflowError("a key is larger than 2 GB")
            out.hash = hash_blob_key(table, out.data, out.length, ns)
            spark = hash_canonical_bytes(&self.plan.program, <const uint8_t *>out.data, out.length)
        else:
            if not PyLong_CheckExact(key):
                raise SerializationTypeError("a key of this table is an int", detail=f"got {type(key).__name__}")
            out.number = PyLong_AsLongLong(key)
            out.hash = hash_int_key(table, out.number, ns)
            spark = hash_canonical_int(&self.plan.program, out.number)
        out.group = pmod_group(spark, self.max_parallelism)
        if unlikely(out.group - table.first_group >= table.n_maps):
            raise KeyGroupError(
                "the key belongs to a key group that this backend does not own",
                detail=f"key group {out.group}, own {table.first_group}..{table.first_group + table.n_maps - 1}")
        return 0

    cdef int split_map_key(self, object map_key, uint32_t anchor, uint32_t group, CoreKey *out) except -1:
        """As `split_key`, for a key below an anchor, which is in the anchor's key group."""
        cdef Table *table = self.table
        out.namespace = anchor
        out.group = group
        out.data = NULL
        out.length = 0
        out.number = 0
        if table.layout.key_is_blob:
            if not PyBytes_CheckExact(map_key):
                raise SerializationTypeError("a map key of this table is bytes",
                                             detail=f"got {type(map_key).__name__}")
            out.data = PyBytes_AS_STRING(map_key)
            out.length = PyBytes_GET_SIZE(map_key)
            if unlikely(out.length > MAX_BYTES):
                raise OverflowError("a map key is larger than 2 GB")
        else:
            if not PyLong_CheckExact(map_key):
                raise SerializationTypeError("a map key of this table is an int",
                                             detail=f"got {type(map_key).__name__}")
            out.number = PyLong_AsLongLong(map_key)
        self.rehash_map_key(out, anchor)
        return 0

    cdef void rehash_map_key(self, CoreKey *key, uint32_t anchor) noexcept:
        key.namespace = anchor
        key.hash = hash_key(self.table, key, anchor)

    cdef char *store(self, object value, int code, uint32_t width, char *room) except? NULL:
        """Make the stored form of a value: in `room`, or of raw bytes the value's own bytes. A reference is new."""
        cdef Blob *blob
        if code == CODE_OBJECT:
            take_object(&self.owner.core.objects, value, room)
        elif code == CODE_RAW:
            if not PyBytes_CheckExact(value) or PyBytes_GET_SIZE(value) != width:
                refuse(value, code, width)
            return PyBytes_AS_STRING(value)
        elif code == CODE_BLOB:
            if not PyBytes_CheckExact(value):
                refuse(value, code, width)
            blob = blob_of_value(self.owner.arena.blobs, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
            if blob == NULL:
                self.owner.out_of_memory()
            (<Blob **>room)[0] = blob
        elif not store_number(code, value, room):
            refuse(value, code, width)
        return room

    cdef char *store_own(self, object value, char *room) except? NULL:
        """As `store`, for stored values; NULL for a None."""
        if value is None and self.takes_none and self.value_code != CODE_OBJECT:
            return NULL
        return self.store(value, self.value_code, self.table.layout.value_width, room)

    cdef CowMap *map_for(self, uint32_t group) except NULL:
        cdef CowMap *map = self.table.maps[group - self.table.first_group]
        if unlikely(map == NULL):
            map = map_new(self.table, group)
            if map == NULL:
                self.owner.out_of_memory()
        return map

    cdef CowMap *map_or_null(self, uint32_t group) noexcept:
        return self.table.maps[group - self.table.first_group]

    # --- one key at a time ---

    def put(self, key, value, uint32_t namespace=0, int64_t timestamp=0):
        """Set the value of a key. O(1) expected."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        cdef char room[8]
        cdef char *stored
        cdef Table *table
        self.owner.enter()
        try:
            table = self.table
            if self.value_code >= CODE_LIST:
                raise UsageError("this table holds lists or anchors", hint="use append")
            self.split_key(key, namespace, &k)
            stored = self.store_own(value, room)
            try:
                map = self.map_for(k.group)
                if not before_operation(&table.lane, table, map):
                    self.owner.out_of_memory()
                slot = find(table, map, &k)
                if not write_value(&table.lane, table, map, &k, slot, stored, timestamp):
                    self.owner.out_of_memory()
            except BaseException:
                if stored != NULL:
                    drop_value(table.core, table.layout.value_kind, stored)
                raise
        finally:
            self.owner.leave()

    cdef uint32_t _locate(self, key, uint32_t namespace, CoreKey *k, CowMap **map) except? 0:
        """Find the slot of a key, 0 if it is absent. Does its share of a rehash."""
        self.split_key(key, namespace, k)
        map[0] = self.map_or_null(k.group)
        if map[0] == NULL:
            return 0
        if not before_operation(&self.table.lane, self.table, map[0]):
            self.owner.out_of_memory()
        return find(self.table, map[0], k)

    cdef uint32_t _unshare(self, CowMap *map, uint32_t slot, CoreKey *k) except 0:
        """Give the live map its own copy of an object that a snapshot or a mark still needs as it is."""
        cdef Table *table = self.table
        cdef Core *core = table.core
        cdef Entry *entry
        cdef uint32_t version
        cdef bint kept = False
        cdef object shared, fresh
        if table.layout.off_value_version == 0:
            return slot
        entry = entry_at(core, slot)
        version = (<uint32_t *>(<char *>entry + table.layout.off_value_version))[0]
        if version >= core.highest_required_snapshot_version and version >= core.journal_version:
            return slot
        shared = object_at(value_of(table, entry))
        if shared is None:               # in a map, next to objects that can be copied
            return slot
        fresh = self.copy_value(shared)      # inside the call: nothing changes meanwhile
        if not see_snapshots(core, map):
            self.owner.out_of_memory()
        if entry_at(core, slot).version < core.highest_required_snapshot_version:
            slot = own_entry(&table.lane, table, map, slot, k.hash)
            if slot == 0:
                self.owner.out_of_memory()
        entry = entry_at(core, slot)
        if version < core.journal_version:
            if not keep_payload(&table.lane, table, map, slot, RECORD_COPIED, &kept):
                self.owner.out_of_memory()
        if not kept:
            payload_drop(table, payload_of(table, entry))
        take_object(&core.objects, fresh, value_of(table, entry))
        set_value_version(table, entry, core.state_version)
        return slot

    def remove(self, key, uint32_t namespace=0):
        """Remove a key and return whether it was there. O(1) expected."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        self.owner.enter()
        try:
            if self.value_code == CODE_ANCHOR:
                raise UsageError("the keys of a map state are removed through their MapTable only")
            slot = self._locate(key, namespace, &k, &map)
            if slot == 0:
                return False
            if not remove(&self.table.lane, self.table, map, slot, k.hash):
                self.owner.out_of_memory()
            return True
        finally:
            self.owner.leave()

    # --- lists ---

    def append(self, key, element, uint32_t namespace=0, int64_t timestamp=0):
        """Append an element to the list of a key. O(1) amortised at any length, also under a mark or snapshot too."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        cdef char room[8]
        cdef char *stored
        cdef Table *table
        self.owner.enter()
        try:
            table = self.table
            if self.value_code != CODE_LIST:
                raise UsageError("this table does not hold lists", hint="use put")
            self.split_key(key, namespace, &k)
            stored = self.store(element, self.element_code, table.element_value_width, room)
            try:
                map = self.map_for(k.group)
                if not before_operation(&table.lane, table, map):
                    self.owner.out_of_memory()
                slot = find(table, map, &k)
                if not list_append(&table.lane, table, map, slot, &k, stored, timestamp):
                    self.owner.out_of_memory()
            except BaseException:
                drop_value(table.core, table.element_kind, stored)
                raise
        finally:
            self.owner.leave()

    # --- inspection ---

    cdef int usable(self) except -1:
        if unlikely(self.owner.inside):
            self.owner.refuse()
        if unlikely(self.owner.core.busy):
            wait_for_others(&self.owner.core)
        if self.owner.closed:
            raise ClosedError("the backend is closed")
        return 0

    def __len__(self):
        if self.owner.closed:
            raise ClosedError("the backend is closed")
        wait_for_others(&self.owner.core)
        return self.table.lane.entries

    def keys_of(self, uint32_t group):
        """List the keys in a key group, and the numbers of their namespaces. O(entries there)."""
        cdef Walk walk
        cdef uint32_t slot
        cdef list keys = []
        cdef list namespaces = []
        self.usable()
        if group - self.table.first_group >= self.table.n_maps:
            raise KeyGroupError("the key group is not part of the table", detail=f"key group {group}")
        # Keys are ints and bytes, which start no garbage collection: nothing else runs during the walk.
        begin_walk(self.map_or_null(group), &walk)
        slot = next_entry(self.table.core, &walk)
        while slot:
            keys.append(key_object(self.table, entry_at(self.table.core, slot)))
            namespaces.append(namespace_of(self.table, entry_at(self.table.core, slot)))
            slot = next_entry(self.table.core, &walk)
        return keys, namespaces

    def metrics(self):
        """Return entries, copies made for snapshots and rehash progress of this state, summed over its key groups."""
        cdef uint32_t g
        cdef uint64_t rehashing = 0, maps = 0, used = 0, run_bytes = 0, buckets = 0
        cdef CowMap *map
        self.usable()
        for g in range(self.table.n_maps):
            map = self.table.maps[g]
            if map != NULL:
                maps += 1
                used += map.used
                run_bytes += map.run_bytes
                rehashing += map.secondary.capacity != 0
                buckets += map.primary.capacity + map.secondary.capacity
        return {
            "entries": self.table.lane.entries, "maps": maps, "used_slots": used, "entry_bytes": run_bytes,
            "buckets": buckets, "rehashing_maps": rehashing, "stride": self.table.layout.stride,
            "copied_entries": self.table.lane.copied_entries, "copied_pages": self.table.lane.copied_pages,
            "rehashed_entries": self.table.lane.moved_entries,
        }

    def _check(self):
        """Verify every invariant of every map; AssertionError names what is broken. O(entries)."""
        cdef uint32_t g
        cdef CowMap *map
        self.usable()
        total = 0
        for g in range(self.table.n_maps):
            map = self.table.maps[g]
            if map != NULL:
                total += check_map(self.table, map)
        assert total == self.table.lane.entries, f"{total} entries, counted {self.table.lane.entries}"


cdef int refuse(object value, int code, uint32_t width) except -1:
    """Raise the error for a value that a table does not take."""
    wanted, name = bytes, "bytes" if code == CODE_BLOB else f"{width} bytes"
    if code == TYPE_DOUBLE or code == TYPE_FLOAT:
        wanted, name = float, "a float"
    elif code == TYPE_BOOL:
        wanted, name = bool, "a bool"
    elif code != CODE_RAW and code != CODE_BLOB:
        wanted, name = int, "an int"
    if code != CODE_RAW and type(value) is wanted:
        raise OverflowError(f"the value does not fit in {8 * width} bits")
    raise SerializationTypeError(f"a value of this table is {name}", detail=f"got {type(value).__name__}")
