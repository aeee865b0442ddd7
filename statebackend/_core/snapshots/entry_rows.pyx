"""Entries as rows, and their columns: full and incremental snapshots are written from them.

Rows are addresses of entries. They are valid as long as their `Moment`: a snapshot's ends with the snapshot, the live
tables' with the next call.
"""

import numpy as np

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from statebackend._core.memory.arena cimport Blob, address
from statebackend._core.tables.cow_map cimport (
    Anchor, CowMap, Entry, ListChunk, ListHead, Table, dead_elements, elements_of, entry_at, find_stored, hash_stored,
    live_elements, namespace_of, thread_of)
from statebackend._core.tables.lists cimport ListCursor, cursor_close, cursor_next, cursor_open
from statebackend._core.memory.platform cimport prefetch
from statebackend._core.tables.objects cimport object_at
from statebackend._core.tables.state_core cimport StateCore, begin_inside
from statebackend._core.tables.state_table cimport StateTable, is_null
from statebackend._core.tables.values cimport CODE_ANCHOR, CODE_BLOB, CODE_LIST, CODE_OBJECT, CODE_RAW

from statebackend._core.memory.blob_columns import blobs_of
from statebackend._core.tables.state_table import DTYPES
from statebackend.errors import UsageError

cdef enum:
    AHEAD = 16                           # rows: memory is asked for so far ahead
    MOST_PARTS = 5                       # of a row: key, namespace, sequence, timestamp, value

#: In place of a type of numpy: the column is of bytes.
cdef object BLOB = bytes


cdef class Moment:
    """A time during which addresses of entries stay valid and their entries do not change."""

    cdef int begin_reading(self) except -1:
        return 0

    cdef void end_reading(self) noexcept:
        pass


@cython.final
cdef class LiveMoment(Moment):
    """The moment of a backend's live tables. It ends when the backend is called again."""

    def __cinit__(self, StateCore owner not None):
        self.owner = owner
        self.calls = owner.calls

    cdef int begin_reading(self) except -1:
        self.owner.occupy()
        if self.owner.closed or self.calls != self.owner.calls:
            self.owner.vacate()
            raise UsageError("the backend has been called since")
        begin_inside(self.owner)
        self.owner.calls += 1            # so that no handle remembers a slot and writes without asking
        self.calls = self.owner.calls
        return 0

    cdef void end_reading(self) noexcept:
        self.owner.inside -= 1
        self.owner.vacate()


@cython.final
cdef class EntryRows:
    """Entries of a table, in ascending order of key groups.

    `groups` holds the key group of each row. `is_live` says if the key is there; where it is not, only the key is read.
    `kept` holds how many elements of each list are left out, because they have not changed; None if none are.
    In rows of `changed_entries`, `was_removed` says which keys were removed since, even if they have come back.
    """

    def __len__(self):
        return len(self.addresses)

    def take(self, rows):
        """Return some of the rows, by number, mask or slice."""
        return new_rows(self.table, self.moment, self.addresses[rows], self.groups[rows], self.is_live[rows],
                        None if self.kept is None else self.kept[rows], self.was_removed[rows])

    def keys(self):
        """Return the columns of keys and namespaces, under the names of `columns`."""
        self.moment.begin_reading()
        try:
            return read_keys(self.table, self.addresses)
        finally:
            self.moment.end_reading()

    def columns(self):
        """Return all columns: a dict of numpy arrays, with an array of Python objects for objects.

        `key` is int64, or (`key_offsets`, `key`) for byte keys; likewise `value`; `namespace`, `timestamp` and
        `sequence` where the table has them. Lists give `list_offsets` and one row an element. Every row has to be live.
        """
        if not self.is_live.all():
            raise UsageError("of what was removed only keys are left")
        self.moment.begin_reading()
        try:
            return read_columns(self.table, self.addresses, self.kept)
        finally:
            self.moment.end_reading()

    def weights(self):
        """Return about how many bytes each live row has next to its parts of fixed width."""
        cdef uint64_t[::1] rows = self.addresses
        cdef int64_t n = rows.shape[0], i
        cdef Table *t = self.table.table
        cdef Blob *blob
        cdef char *value
        cdef int code = self.table.value_code
        cdef bint is_list = code == CODE_LIST, is_blob = code == CODE_BLOB
        cdef bint of_blobs = is_list and self.table.element_code == CODE_BLOB
        cdef int64_t bytes_held = 0
        found = np.zeros(n, dtype=np.int64)
        cdef int64_t[::1] out = found
        self.moment.begin_reading()
        try:
            with nogil:
                for i in range(n):
                    value = <char *><uintptr_t>rows[i] + t.layout.off_value
                    if t.layout.key_is_blob:
                        out[i] = (<Blob *>(<Entry *><uintptr_t>rows[i]).key).length
                    if is_list:
                        out[i] += t.element_width * live_elements(t, <ListHead *>value)
                        if of_blobs:
                            bytes_held = blob_bytes(t, <ListHead *>value)
                            if bytes_held < 0:
                                break
                            out[i] += bytes_held
                    elif is_blob:
                        blob = (<Blob **>value)[0]
                        out[i] += blob.length if blob != NULL else 0
            if bytes_held < 0:
                self.table.owner.out_of_memory()
        finally:
            self.moment.end_reading()
        return found

    def links(self):
        """For entries of a map state, the number of each one's anchor, and of its place in the anchor's order.

        The table of keys holds the same numbers as its values.
        """
        cdef uint64_t[::1] rows = self.addresses
        cdef int64_t n = rows.shape[0], i
        cdef Table *t = self.table.table
        if self.table.anchors is None:
            raise UsageError("these are not entries of a map state")
        anchors, places = np.empty(n, dtype=np.uint32), np.empty(n, dtype=np.uint64)
        cdef uint32_t[::1] anchor = anchors
        cdef uint64_t[::1] place = places
        self.moment.begin_reading()
        try:
            with nogil:
                for i in range(n):
                    anchor[i] = namespace_of(t, <Entry *><uintptr_t>rows[i])
                    place[i] = thread_of(t, <Entry *><uintptr_t>rows[i]).sequence
        finally:
            self.moment.end_reading()
        return anchors, places

    def keys_above(self):
        """For entries of a map state, even removed ones, the columns of the keys and namespaces that they belong to."""
        cdef uint64_t[::1] rows = self.addresses
        cdef int64_t n = rows.shape[0], i
        cdef Table *t = self.table.table
        cdef Anchor *anchor
        if self.table.anchors is None:
            raise UsageError("these are not entries of a map state")
        found, namespaces = np.empty(n, dtype=np.uint64), np.empty(n, dtype=np.uint32)
        cdef uint64_t[::1] anchors = found
        cdef uint32_t[::1] namespace = namespaces
        self.moment.begin_reading()
        try:
            with nogil:
                for i in range(n):
                    anchor = <Anchor *>address(t.core.arena, namespace_of(t, <Entry *><uintptr_t>rows[i]))
                    anchors[i] = <uint64_t><uintptr_t>&anchor.key
                    namespace[i] = anchor.namespace
            columns = gather(anchors, [("key", 0, 8, BLOB if t.anchors.layout.key_is_blob else np.int64)])
        finally:
            self.moment.end_reading()
        if t.anchors.layout.off_namespace:
            columns["namespace"] = namespaces
        return columns

    def heads(self, StateTable heads not None):
        """For entries of a map state, even removed ones, the live entries of their keys; not live if there is none."""
        cdef uint64_t[::1] rows = self.addresses
        cdef int64_t n = rows.shape[0], i
        cdef Table *table = self.table.table
        cdef Anchor *anchor
        cdef uint32_t slot
        found = np.zeros(n, dtype=np.uint64)
        cdef uint64_t[::1] out = found
        if self.table.anchors is not heads or not isinstance(self.moment, LiveMoment):
            raise UsageError("these are not live entries of those keys")
        self.moment.begin_reading()
        try:
            with nogil:
                for i in range(n):
                    if i + AHEAD < n:
                        prefetch(<void *><uintptr_t>rows[i + AHEAD])
                    anchor = <Anchor *>address(table.core.arena, namespace_of(table, <Entry *><uintptr_t>rows[i]))
                    slot = find_head(heads.table, anchor)
                    if slot:
                        out[i] = <uint64_t><uintptr_t>entry_at(table.core, slot)
        finally:
            self.moment.end_reading()
        return new_rows(heads, self.moment, found, self.groups, found != 0)

    def are_among(self, EntryRows others not None):
        """Return for each row if its entry is one of other rows."""
        cdef uint64_t[::1] rows = self.addresses
        cdef uint64_t[::1] wanted = others.addresses
        cdef int64_t n = rows.shape[0], m = wanted.shape[0], i
        cdef int bits = int(2 * m).bit_length()
        found = np.zeros(n, dtype=np.uint8)
        if m == 0:
            return found.view(np.bool_)
        cdef uint8_t[::1] out = found
        cdef uint64_t[::1] table = np.zeros(1 << bits, dtype=np.uint64)
        with nogil:
            for i in range(m):
                table[place_of(table, wanted[i], bits)] = wanted[i]
            for i in range(n):
                out[i] = rows[i] != 0 and table[place_of(table, rows[i], bits)] == rows[i]
        return found.view(np.bool_)


cdef inline uint64_t place_of(uint64_t[::1] table, uint64_t entry, int bits) noexcept nogil:
    """Find the place of an entry in a table of so many bits, or the free one where it belongs."""
    cdef uint64_t place = (entry * <uint64_t>0x9E3779B97F4A7C15) >> (64 - bits)
    while table[place] != 0 and table[place] != entry:
        place = (place + 1) & ((<uint64_t>1 << bits) - 1)
    return place


cdef uint32_t find_head(Table *heads, Anchor *anchor) noexcept nogil:
    """Find the live entry of an anchor's key; 0 if the key was removed or has another anchor by now."""
    return find_owner(heads, anchor) if anchor.first else 0


cdef uint32_t find_owner(Table *heads, Anchor *anchor) noexcept nogil:
    """Find the live entry of the key that an anchor was made for; 0 if none. The key may have another anchor by now."""
    cdef CowMap *map = heads.maps[anchor.group - heads.first_group]
    return find_stored(heads, map, anchor.key, anchor.namespace, hash_stored(heads, anchor.key, anchor.namespace))


cdef EntryRows new_rows(StateTable table, Moment moment, addresses, groups, is_live, kept=None, was_removed=None):
    cdef EntryRows made = EntryRows.__new__(EntryRows)
    made.table = table
    made.moment = moment
    made.addresses = np.ascontiguousarray(addresses)
    made.groups = groups
    made.is_live = is_live
    made.kept = kept
    made.was_removed = ~is_live if was_removed is None else was_removed
    return made


cdef struct Field:
    # A part of entries or of elements, and the column for it.
    uint32_t offset
    uint32_t width
    char *column


cdef dict read_keys(StateTable table, uint64_t[::1] rows):
    """Gather keys and namespaces of entries by address."""
    return gather(rows, key_parts(table.table))


cdef list key_parts(Table *table):
    cdef list parts = [("key", 8, 8, BLOB if table.layout.key_is_blob else np.int64)]
    if table.layout.off_namespace:
        parts.append(("namespace", table.layout.off_namespace, 4, np.uint32))
    return parts


cdef dict read_columns(StateTable table, uint64_t[::1] rows, kept):
    """Gather all columns of entries by address, without the first `kept` elements of each list."""
    cdef Table *t = table.table
    cdef list parts = key_parts(t)
    if t.layout.off_thread:
        parts.append(("sequence", t.layout.off_thread, 8, np.uint64))
    if t.layout.has_timestamp:
        parts.append(("timestamp", t.layout.off_payload, 8, np.int64))
    if table.value_code == CODE_LIST:
        columns = gather(rows, parts)
        gather_lists(table, rows, kept, columns)
        return columns
    parts.append(value_part(t.layout.off_value, table.value_code, t.layout.value_width))
    columns = gather(rows, parts)
    if table.takes_none and table.value_code != CODE_OBJECT and table.value_code != CODE_ANCHOR:
        columns["is_null"] = gather_nulls(t, rows)
    return columns


cdef tuple value_part(uint32_t offset, int code, uint32_t width):
    if code == CODE_BLOB or code == CODE_OBJECT:
        return "value", offset, 8, BLOB if code == CODE_BLOB else object
    if code == CODE_ANCHOR:
        return "value", offset, 4, np.uint32
    return "value", offset, width, None if code == CODE_RAW else DTYPES[code]


cdef dict gather(uint64_t[::1] rows, list parts):
    """Gather parts of entries or elements by their addresses: of each its name, offset, width, and the column's type.

    The type is one of numpy, or `object`; `BLOB` for bytes, as offsets and data; None for rows of raw bytes.
    """
    cdef int64_t n = rows.shape[0]
    cdef int n_fields = 0
    cdef Field fields[MOST_PARTS]
    cdef uint8_t[:, ::1] view
    cdef dict columns = {}
    for name, offset, width, _ in parts:
        columns[name] = np.empty((n, width), dtype=np.uint8)
        if n:
            view = columns[name]
            fields[n_fields].offset, fields[n_fields].width = offset, width
            fields[n_fields].column = <char *>&view[0, 0]
            n_fields += 1
    with nogil:
        gather_fields(rows, n, fields, n_fields)
    found = {}
    for name, _, _, kind in parts:
        column = columns[name]
        if kind is BLOB:
            found[f"{name}_offsets"], found[name] = blobs_of(column.view(np.uint64).ravel())
        elif kind is object:
            found[name] = objects_of(column.view(np.uint64).ravel())
        else:
            found[name] = column if kind is None else column.view(kind).ravel()
    return found


cdef void gather_fields(uint64_t[::1] rows, int64_t n, Field *fields, int n_fields) noexcept nogil:
    """Copy parts of the same rows in one pass over them."""
    cdef int64_t i
    cdef int j
    cdef const char *row
    cdef Field *field
    for i in range(n):
        if i + AHEAD < n:
            prefetch(<void *><uintptr_t>rows[i + AHEAD])
        row = <const char *><uintptr_t>rows[i]
        for j in range(n_fields):
            field = &fields[j]
            if field.width == 8:
                (<uint64_t *>field.column)[i] = (<const uint64_t *>(row + field.offset))[0]
            elif field.width == 4:
                (<uint32_t *>field.column)[i] = (<const uint32_t *>(row + field.offset))[0]
            else:
                memcpy(field.column + i * field.width, row + field.offset, field.width)


cdef object gather_nulls(Table *table, uint64_t[::1] rows):
    cdef uint64_t n = rows.shape[0], i
    out = np.zeros(n, dtype=np.bool_)
    cdef uint8_t[::1] view = out.view(np.uint8)
    with nogil:
        for i in range(n):
            view[i] = is_null(table, <Entry *><uintptr_t>rows[i])
    return out


cdef object objects_of(uint64_t[::1] references):
    cdef int64_t n = references.shape[0], i
    out = np.empty(n, dtype=object)
    for i in range(n):
        out[i] = object_at(<const char *>&references[i])
    return out


cdef int64_t blob_bytes(Table *table, ListHead *head) noexcept nogil:
    """Count the bytes in the elements of a list of blobs; -1 without memory."""
    cdef uint32_t offset = 8 if table.element_has_timestamp else 0
    cdef ListCursor cursor
    cdef Blob *blob
    cdef char *element
    cdef int64_t total = 0
    if not cursor_open(table, head, &cursor):
        return -1
    while True:
        element = cursor_next(table, &cursor)
        if element == NULL:
            break
        blob = (<Blob **>(element + offset))[0]
        total += blob.length if blob != NULL else 0
    cursor_close(&cursor)
    return total


cdef object gather_lists(StateTable table, uint64_t[::1] rows, kept, dict columns):
    """Gather the elements of all lists, one list after another, by the addresses of the elements."""
    cdef Table *t = table.table
    cdef int64_t n = rows.shape[0], i, at, left, used, k, before
    cdef ListHead *head
    cdef ListChunk *chunk
    offsets = np.zeros(n + 1, dtype=np.int64)
    passed = np.zeros(max(n, 1), dtype=np.int64) if kept is None else np.ascontiguousarray(kept)
    cdef int64_t[::1] ends = offsets
    cdef int64_t[::1] skipped = passed
    with nogil:
        for i in range(n):
            head = <ListHead *>(<char *><uintptr_t>rows[i] + t.layout.off_value)
            before = <int64_t>dead_elements(t, head)
            if before < skipped[i]:
                before = skipped[i]
            ends[i + 1] = ends[i] + <int64_t>head.length - before
    addresses = np.empty(offsets[n], dtype=np.uint64)
    cdef uint64_t[::1] elements = addresses
    with nogil:
        for i in range(n):
            head = <ListHead *>(<char *><uintptr_t>rows[i] + t.layout.off_value)
            chunk = head.tail
            used = head.tail_used
            at = ends[i + 1]
            left = at - ends[i]
            while left:
                for k in range(used):
                    if k == left:
                        break
                    elements[at - 1 - k] = <uint64_t><uintptr_t>(
                        elements_of(t, chunk) + (used - 1 - k) * t.element_width)
                at -= used
                left = left - used if left > used else 0
                used = chunk.prev_used
                chunk = chunk.prev
    columns["list_offsets"] = offsets
    parts = [("timestamp", 0, 8, np.int64)] if t.element_has_timestamp else []
    parts.append(value_part(8 if t.element_has_timestamp else 0, table.element_code, t.element_value_width))
    columns.update(gather(elements, parts))
