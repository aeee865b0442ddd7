"""Snapshots from the reader's side: the entries of key groups, at the moment of the snapshot.

A reader touches what the live map never changes while the snapshot lives: its own copy of the page directories,
the pages named there, the entries in their chains, blobs and list elements. It does not touch the versions, which a
clone's retirement may overtake, nor the threads of map states, which describe the live map.
"""

import numpy as np

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp

from statebackend._core.memory.arena cimport Blob, address, blob_data
from statebackend._core.tables.cow_map cimport (
    PAGE_BUCKETS, PAGE_SHIFT, Core, CowMap, Directory, Entry, Table, blob_hash, entry_at, hash_blob_key, hash_int_key,
    namespace_of, see_snapshots)
from statebackend._core.snapshots.entry_rows cimport Moment, new_rows
from statebackend._core.memory.platform cimport load_ptr, load_u32, prefetch, spin_lock, spin_unlock, store_u32
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.state_table cimport StateTable

from statebackend.errors import ClosedError, KeyGroupError, UsageError

cdef enum:
    AHEAD = 16                           # entries are prefetched this many rows ahead


@cython.final
@cython.no_gc_clear                      # its end is told to the owner
cdef class SnapshotView(Moment):
    """The tables as they were at one moment; read and released on any thread, once released it is gone.

    Reading takes the page directories of maps that were not touched since, and copies rows out; it never
    blocks the mutating thread for longer than a directory takes to copy.
    """

    def __cinit__(self, StateCore owner not None):
        self.snapshot = owner.open_snapshot()
        self.owner = owner

    def __dealloc__(self):
        self._release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()

    @property
    def version(self):
        """The version of the snapshot, 0 once it is released."""
        return self.snapshot.version if self.snapshot != NULL else 0

    def release(self):
        """Let go. Idempotent, on any thread; the mutating side reclaims step by step.

        While another thread reads, it is that thread's call that lets go, at its end.
        """
        self.released = True
        if self.readers == 0:
            self._release()

    cdef void _release(self) noexcept:
        if self.snapshot == NULL:
            return
        store_u32(&self.snapshot.released, 1)
        store_u32(&self.owner.core.any_released, 1)
        store_u32(&self.owner.core.pending, 1)
        self.snapshot = NULL
        if self.owner.closed:
            self.owner.after_close()

    cdef int begin_reading(self) except -1:
        # Both flags change with the GIL held only.
        if self.released or self.snapshot == NULL:
            raise ClosedError("the snapshot was released")
        self.readers += 1
        return 0

    cdef void end_reading(self) noexcept:
        self.readers -= 1
        if self.released and self.readers == 0:
            self._release()

    cdef Directory *_directory(self, StateTable table, uint32_t group) except? NULL:
        cdef CowMap *map
        cdef Directory *directory
        cdef uint32_t version
        if table.owner is not self.owner:
            raise UsageError("the table belongs to another backend")
        if group - table.table.first_group >= table.table.n_maps:
            raise KeyGroupError("the key group is not part of the table", detail=f"key group {group}")
        map = <CowMap *>load_ptr(&table.table.maps[group - table.table.first_group])
        if map == NULL:
            return NULL
        version = self.snapshot.version
        if load_u32(&map.seen_version) < version and not see_snapshots(&self.owner.core, map):
            self.owner.out_of_memory()
        spin_lock(&self.owner.core.directory_lock)
        directory = map.directories
        while directory != NULL and not (directory.low <= version <= directory.high):
            directory = directory.older
        spin_unlock(&self.owner.core.directory_lock)
        return directory

    def group_sizes(self, StateTable table not None):
        """The number of entries that the table had in each of its key groups."""
        cdef uint32_t i
        cdef Directory *directory
        cdef int64_t[::1] sizes
        self.begin_reading()             # first of all: after it, the table's memory is there
        try:
            sizes = np.zeros(table.table.n_maps, dtype=np.int64)
            for i in range(table.table.n_maps):
                directory = self._directory(table, table.table.first_group + i)
                if directory != NULL:
                    sizes[i] = directory.size
            return np.asarray(sizes)
        finally:
            self.end_reading()

    def rows(self, StateTable table not None, uint32_t first, uint32_t last):
        """The entries of the key groups from `first` to `last`, in ascending order of groups. O(entries there)."""
        cdef Directory *directory
        cdef uint64_t[::1] rows
        cdef uint64_t n = 0
        cdef uint32_t group
        cdef list found = []
        self.begin_reading()
        try:
            for group in range(first, last + 1):
                directory = self._directory(table, group)
                if directory != NULL and directory.size:
                    found.append((group, directory.size, <uint64_t><uintptr_t>directory))
                    n += directory.size
            addresses = np.empty(n + 1, dtype=np.uint64)
            rows = addresses
            n = 0
            for _, _, place in found:
                directory = <Directory *><uintptr_t><uint64_t>place
                with nogil:
                    collect_entries(&self.owner.core, directory, &rows[n])
                n += directory.size
        finally:
            self.end_reading()
        groups = np.repeat(np.array([group for group, _, _ in found], dtype=np.int64),
                           np.array([size for _, size, _ in found], dtype=np.int64))
        return new_rows(table, self, addresses[:n], groups, np.ones(n, dtype=np.bool_))

    def find(self, StateTable table not None, keys, groups, uint32_t namespace=0):
        """Find the entries of canonical keys, int64 or (offsets, bytes), given the key group of each. O(keys).

        Returns the found entries as rows, in the order of the keys, and which keys were found.
        """
        cdef Table *t = table.table
        cdef bint is_blob = t.layout.key_is_blob
        cdef const int64_t[::1] group = np.ascontiguousarray(groups, dtype=np.int64)
        cdef int64_t n = group.shape[0], i
        cdef const int64_t[::1] numbers
        cdef const uint8_t[::1] data
        cdef uint64_t[::1] rows
        cdef uint64_t[::1] places
        cdef const char *start
        if is_blob:
            numbers = np.ascontiguousarray(keys[0], dtype=np.int64)
            data = np.append(np.frombuffer(keys[1], dtype=np.uint8), np.uint8(0))
            start = <const char *>&data[0]
        else:
            numbers = np.ascontiguousarray(keys, dtype=np.int64)
            start = NULL
        found = np.zeros(n, dtype=np.uint64)
        self.begin_reading()
        try:
            directories = np.zeros(t.n_maps, dtype=np.uint64)
            for each in np.unique(groups):
                directories[each - t.first_group] = <uint64_t><uintptr_t>self._directory(table, each)
            rows, places = found, directories
            with nogil:
                for i in range(n):
                    if is_blob:
                        rows[i] = find_entry(t, <Directory *><uintptr_t>places[group[i] - t.first_group], 0,
                                             start + numbers[i], numbers[i + 1] - numbers[i], namespace)
                    else:
                        rows[i] = find_entry(t, <Directory *><uintptr_t>places[group[i] - t.first_group], numbers[i],
                                             NULL, 0, namespace)
        finally:
            self.end_reading()
        is_found = found != 0
        left = np.asarray(group)[is_found]
        return new_rows(table, self, found[is_found], left, np.ones(len(left), dtype=np.bool_)), is_found


cdef uint64_t find_entry(Table *table, Directory *directory, int64_t number, const char *data, int64_t length,
                         uint32_t ns) noexcept nogil:
    """The address of a key's entry as a directory's pages have it; 0 if there is none. `find` over the past."""
    cdef uint32_t *refs
    cdef uint32_t hash, index, slot, ref
    cdef Entry *entry
    cdef Blob *blob
    if directory == NULL or directory.size == 0:
        return 0
    refs = <uint32_t *>(<char *>directory + sizeof(Directory))
    hash = hash_int_key(table, number, ns) if data == NULL else hash_blob_key(table, data, length, ns)
    index = hash & (directory.primary_capacity - 1)
    if index < directory.rehash_index:
        refs += directory.primary_pages
        index = hash & (directory.secondary_capacity - 1)
    ref = refs[index >> PAGE_SHIFT]
    if ref == 0:
        return 0
    slot = (<uint32_t *>address(table.core.arena, ref))[index & (PAGE_BUCKETS - 1)]
    while slot:
        entry = entry_at(table.core, slot)
        if namespace_of(table, entry) == ns:
            if data == NULL:
                if entry.key == number:
                    return <uint64_t><uintptr_t>entry
            elif blob_hash(entry)[0] == hash:
                blob = <Blob *>entry.key
                if <int64_t>blob.length == length and memcmp(blob_data(blob), data, length) == 0:
                    return <uint64_t><uintptr_t>entry
        slot = entry.next
    return 0


cdef void collect_entries(Core *core, Directory *directory, uint64_t *rows) noexcept nogil:
    """Addresses of all entries that a directory's pages name: the heads of the chains, then the other entries.

    `next_entry` over the past: it touches nothing that the live map changes, on a thread that may not be the map's.
    Each loop writes before it knows if there is an entry, because a processor guesses that badly. So `rows` has room
    for one more.
    """
    cdef uint32_t *refs = <uint32_t *>(<char *>directory + sizeof(Directory))
    cdef uint64_t n = 0, i = 0
    cdef uint32_t slot
    n = collect_heads(core, refs, directory.primary_capacity, directory.rehash_index, rows, n)
    if directory.secondary_capacity:
        n = collect_heads(core, refs + directory.primary_pages, directory.secondary_capacity, 0, rows, n)
    while i < n:
        if i + AHEAD < n:
            prefetch(<void *><uintptr_t>rows[i + AHEAD])
        slot = (<Entry *><uintptr_t>rows[i]).next
        rows[n] = <uint64_t><uintptr_t>entry_at(core, slot)
        n += slot != 0
        i += 1


cdef uint64_t collect_heads(Core *core, uint32_t *refs, uint32_t capacity, uint32_t begin, uint64_t *rows,
                            uint64_t n) noexcept nogil:
    cdef uint32_t index = begin, end, slot
    cdef uint32_t *page
    while index < capacity:
        end = min(capacity, (index | (PAGE_BUCKETS - 1)) + 1)
        if refs[index >> PAGE_SHIFT] != 0:
            page = <uint32_t *>address(core.arena, refs[index >> PAGE_SHIFT])
            while index < end:
                slot = page[index & (PAGE_BUCKETS - 1)]
                rows[n] = <uint64_t><uintptr_t>entry_at(core, slot)
                n += slot != 0
                index += 1
        index = end
    return n
