"""One RocksDB database: opening, scalar and vectorised access, files, closing.

Every call asks `enter` first: whether the process is a fork, and the database open. Then it lets go of the GIL for
one call of RocksDB's. `close` refuses new calls, waits for those that other threads are in, and destroys what is left
in the order that RocksDB wants. A database that is still open when the interpreter ends is closed by an exit function,
before RocksDB's own threads and statics go.
"""

import atexit
import os
import re
import weakref

cimport cython
import numpy as np
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport usleep

from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.rocksdb.binding.buffers cimport BESIDE_ROW, Bytes, append, drop
from statebackend._core.rocksdb.binding.library cimport (
    api, check, is_forked, live, need_library, rocksdb_batch_t, rocksdb_checkpoint_t, rocksdb_compact_t,
    rocksdb_consumers_t, rocksdb_family_t, rocksdb_files_t, rocksdb_flush_t, rocksdb_iterator_t,
    rocksdb_options_t, rocksdb_read_t, rocksdb_slice_t, rocksdb_t, rocksdb_usage_t, rocksdb_wait_t, rocksdb_write_t,
)
from statebackend._core.rocksdb.binding.database_options cimport Options

from statebackend.errors import ClosedError, StoreError, UsageError

cdef enum:
    KEYS_AT_ONCE = 512                # of a multi_get: so many values are pinned at a time
    PATIENCE = 2_000                  # times that closing waits 0.1 ms before it ends compactions
    FORCE_BOTTOMMOST = 3              # of the C API: compact the last level too, but nothing twice

cdef object _open = weakref.WeakSet()


@atexit.register
def _close_all():
    for database in list(_open):
        (<Database>database).close_at_exit()


@cython.final
@cython.no_gc                         # its iterators are linked from it: it goes when the last of them has
cdef class Database:
    """A database in the folder `path`, made if there is none.

    `families` maps names of column families to their `Options`; those that are not there are made. Families that the
    folder has next to them are opened with `others`, and refused without. One process at a time can have it open.
    """

    def __init__(self, path not None, Options options not None, families=None, *, Options others=None,
                 bint create=True):
        cdef char *error = NULL
        cdef rocksdb_t *db
        cdef const char **names
        cdef const rocksdb_options_t **made
        cdef rocksdb_family_t **handles
        cdef const char *folder
        cdef int i, n
        need_library()
        if self.path is not None:
            raise UsageError("a database is opened once")
        encoded = _c_string(os.fsencode(path), "path")
        self.path = os.fsdecode(path)
        self.names = {}
        self.budget = options.budget
        wanted = {"default": options, **(families or {})}
        for name in _existing_families(self.path, options):
            if name not in wanted:
                if others is None:
                    raise UsageError("the database has a column family that was not asked for",
                                     code="USAGE.COLUMN_FAMILY", detail=self.where(f"column family {name!r}"),
                                     hint="name it, or pass options for others")
                wanted[name] = others
        kept = [_c_string(name.encode(), "name of a column family") for name in wanted]
        for each in wanted.values():
            if not isinstance(each, Options):
                raise UsageError("a column family is opened with Options")
        n = len(kept)
        names = <const char **>malloc(n * sizeof(char *))
        made = <const rocksdb_options_t **>malloc(n * sizeof(void *))
        handles = <rocksdb_family_t **>calloc(n, sizeof(void *))
        try:
            if names == NULL or made == NULL or handles == NULL:
                raise MemoryError
            for i, (name, each) in enumerate(zip(kept, wanted.values(), strict=True)):
                names[i] = <const char *><bytes>name
                made[i] = (<Options>each).options
            api.options_set_create_if_missing(options.options, create)
            api.options_set_create_missing_column_families(options.options, True)
            folder = encoded
            with nogil:
                db = api.open_column_families(options.options, folder, n, names, made, handles, &error)
            check(error, self.where("opening"))
            self.db = db
            live.databases += 1
            for i, name in enumerate(wanted):
                self.names[name] = <size_t>self.add_family(handles[i])
        except BaseException:
            if self.db != NULL:
                self.close_now()
            raise
        finally:
            free(<void *>names)
            free(<void *>made)
            free(handles)
        self.reads = api.readoptions_create()
        for i in range(4):
            self.writes[i] = api.writeoptions_create()
            api.writeoptions_set_sync(self.writes[i], i & 1)
            api.writeoptions_disable_WAL(self.writes[i], i >> 1)
        _open.add(self)

    def __dealloc__(self):
        cdef Family *family
        self.close_now()
        while self.families != NULL:
            family = self.families
            self.families = family.next
            free(family)

    # ------------------------------------------------------------------------------------- who is inside

    cdef int enter(self) except -1:
        """Begin a call of RocksDB's; nothing between this and `leave` may raise."""
        if is_forked or self.db == NULL or self.is_closing:
            self.refuse()
        self.calls += 1
        return 0

    cdef void leave(self) noexcept:
        self.calls -= 1

    cdef int refuse(self) except -1:
        need_library()
        raise ClosedError("the database is closed", detail=self.path)

    cdef str where(self, str doing):
        return f"{doing}, database {self.path}"

    cdef rocksdb_family_t *handle_of(self, ColumnFamily family) except NULL:
        if is_forked or self.db == NULL or self.is_closing:
            self.refuse()
        if family.database is not self:
            raise UsageError("the column family is of another database", code="USAGE.COLUMN_FAMILY",
                             detail=self.where(f"column family {family.name!r}"))
        if family.family.is_dropped:
            raise UsageError("the column family has been dropped", code="USAGE.COLUMN_FAMILY",
                             detail=self.where(f"column family {family.name!r}"))
        return family.family.handle

    cdef rocksdb_write_t *how(self, bint sync, bint wal) noexcept nogil:
        return self.writes[(1 if sync else 0) + (0 if wal else 2)]

    # ------------------------------------------------------------------------------------------- closing

    def close(self):
        """Close the database and its objects; again does nothing. Waits for calls of other threads.

        Compactions that take longer than a moment are ended; their input stays.

        Rows written without a log is flushed. Raises if a value is being read in place. In a forked child, forgets
        the database and leaves its memory as it is.
        """
        if self.pins and not is_forked and self.db != NULL:
            raise UsageError("a value of the database is being read", detail=self.path,
                             hint="do not close the database while it decodes a value")
        self.close_at_exit()

    cdef void close_at_exit(self) noexcept:
        cdef int waited = 0
        if is_forked:
            self.db = NULL
            return
        if self.is_closing:
            while self.db != NULL:    # another thread is at it
                with nogil:
                    usleep(100)
            return
        self.is_closing = True
        while self.calls:
            waited += 1
            with nogil:
                usleep(100)
                if waited == PATIENCE:
                    api.cancel_all_background_work(self.db, False)
        self.close_now()

    cdef void close_now(self) noexcept:
        """What `close` does without a thread inside; without the process that opened the database, nothing."""
        cdef rocksdb_t *db = self.db
        cdef Family *family = self.families
        cdef int i
        if db == NULL or is_forked:
            return
        self.is_closing = True
        self.drop_iterators(NULL)
        while self.calls:                # other threads let go of theirs
            with nogil:
                usleep(100)
        while family != NULL:
            if family.handle != NULL:
                api.column_family_handle_destroy(family.handle)
                family.handle = NULL
                live.families -= 1
            family = family.next
        with nogil:
            api.close(db)
        if self.reads != NULL:
            api.readoptions_destroy(self.reads)
            self.reads = NULL
        for i in range(4):
            if self.writes[i] != NULL:
                api.writeoptions_destroy(self.writes[i])
                self.writes[i] = NULL
        live.databases -= 1
        self.db = NULL

    @property
    def is_closed(self):
        """Whether the database is closed, or belongs to the process that this one was forked from."""
        return self.db == NULL or self.is_closing or is_forked

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()

    # ----------------------------------------------------------------------------------------- iterators

    cdef void link(self, Link *link) noexcept:
        link.previous = NULL
        link.next = self.links
        if self.links != NULL:
            self.links.previous = link
        self.links = link
        link.is_linked = True
        live.iterators += 1

    cdef void unlink(self, Link *link) noexcept:
        """Destroy an iterator and its objects."""
        cdef rocksdb_iterator_t *iterator = link.iterator
        if not link.is_linked or is_forked:
            return
        if link.previous != NULL:
            link.previous.next = link.next
        else:
            self.links = link.next
        if link.next != NULL:
            link.next.previous = link.previous
        link.is_linked = False
        link.iterator = NULL
        self.calls += 1                  # it uses the database until it is gone
        with nogil:
            api.iter_destroy(iterator)
            api.readoptions_destroy(link.options)
        self.calls -= 1
        link.options = NULL
        live.iterators -= 1

    cdef void drop_iterators(self, Family *family) noexcept:
        """Destroy the iterators of a family; all of them without one."""
        cdef Link *link = self.links
        while link != NULL:
            if family == NULL or link.family == family:
                self.unlink(link)
                link = self.links     # the list may have changed while the GIL was gone
            else:
                link = link.next

    # ----------------------------------------------------------------------------------- column families

    cdef Family *add_family(self, rocksdb_family_t *handle) except NULL:
        cdef Family *family = <Family *>calloc(1, sizeof(Family))
        if family == NULL:
            api.column_family_handle_destroy(handle)
            raise MemoryError
        family.handle = handle
        family.next = self.families
        self.families = family
        live.families += 1
        return family

    def column_family(self, str name not None):
        cdef ColumnFamily found
        if is_forked or self.db == NULL or self.is_closing:
            self.refuse()
        if name not in self.names:
            raise UsageError("the database has no such column family", code="USAGE.COLUMN_FAMILY",
                             detail=self.where(f"column family {name!r}"), hint="create it first")
        found = ColumnFamily.__new__(ColumnFamily)
        found.database = self
        found.name = name
        found.family = <Family *><size_t>self.names[name]
        return found

    def column_families(self):
        """List the names of the column families, in the order in which they were opened or made."""
        if is_forked or self.db == NULL or self.is_closing:
            self.refuse()
        return list(self.names)

    def create_column_family(self, str name not None, Options options not None):
        """Make a column family, and return it. Written to disk at once."""
        cdef char *error = NULL
        cdef rocksdb_family_t *handle
        cdef bytes encoded = _c_string(name.encode(), "name of a column family")
        cdef const char *text = encoded
        if name in self.names:
            raise UsageError("the database has a column family of this name", code="USAGE.COLUMN_FAMILY",
                             detail=self.where(f"column family {name!r}"))
        self.enter()
        with nogil:
            handle = api.create_column_family(self.db, options.options, text, &error)
        self.leave()
        check(error, self.where("creating a column family"))
        self.names[name] = <size_t>self.add_family(handle)
        self.reap()
        return self.column_family(name)

    def drop_column_family(self, ColumnFamily family not None):
        """Drop a column family: its rows are gone, and iterators over it are closed. The default one stays."""
        cdef char *error = NULL
        cdef rocksdb_family_t *handle = self.handle_of(family)
        self.enter()
        with nogil:
            api.drop_column_family(self.db, handle, &error)
        self.leave()
        check(error, self.where(f"dropping column family {family.name!r}"))
        family.family.is_dropped = True
        self.names.pop(family.name, None)
        self.reap()

    def set_option(self, ColumnFamily family not None, str name not None, value not None):
        """Change a setting of a column family that is open; RocksDB refuses those that it cannot change."""
        cdef char *error = NULL
        cdef rocksdb_family_t *handle = self.handle_of(family)
        cdef bytes key = _c_string(name.encode(), "name of a setting")
        cdef bytes text = _c_string(str(value).encode(), "value of a setting")
        cdef const char *k = key
        cdef const char *v = text
        self.enter()
        with nogil:
            api.set_options_cf(self.db, handle, 1, &k, &v, &error)
        self.leave()
        check(error, self.where(f"setting {name} of column family {family.name!r}"))

    cdef void reap(self) noexcept:
        """Destroy the handles of dropped families, unless a thread may be using one: then the next time."""
        cdef Family *family = self.families
        if self.calls or self.pins or self.is_closing:
            return
        while family != NULL:
            if family.is_dropped and family.handle != NULL:
                self.drop_iterators(family)
                if self.calls or self.pins or self.is_closing:
                    return
                api.column_family_handle_destroy(family.handle)
                family.handle = NULL
                live.families -= 1
            family = family.next

    # -------------------------------------------------------------------------------------- one at a time

    cdef bint pin(self, ColumnFamily family, const char *key, size_t n, PinnedValue *found) except -1:
        """Find a value and keep it where it is until `unpin`, which must follow if there is one."""
        cdef char *error = NULL
        cdef rocksdb_family_t *handle = self.handle_of(family)
        cdef rocksdb_slice_t *slice
        self.enter()
        with nogil:
            slice = api.get_pinned_cf(self.db, self.reads, handle, key, n, &error)
        self.leave()
        if slice == NULL:
            if error != NULL:
                check(error, self.where(f"reading column family {family.name!r}"))
            return False
        found.slice = slice
        found.own = NULL
        found.data = api.pinnableslice_value(slice, &found.size)
        self.pins += 1
        live.pinned += 1
        return True

    cdef void unpin(self, PinnedValue *found) noexcept:
        self.pins -= 1
        live.pinned -= 1
        if is_forked:
            return
        if found.slice != NULL:
            api.pinnableslice_destroy(found.slice)
        free(found.own)

    def get(self, ColumnFamily family not None, bytes key not None):
        cdef PinnedValue found
        if not self.pin(family, key, len(key), &found):
            return None
        try:
            return found.data[:found.size]
        finally:
            self.unpin(&found)

    def delete_range(self, ColumnFamily family not None, bytes start not None, bytes end not None, *,
                     bint sync=False, bint wal=True):
        """Remove the keys from `start` up to `end`, which stays. O(1): one marker, that reads and compactions heed."""
        cdef char *error = NULL
        cdef rocksdb_family_t *handle = self.handle_of(family)
        cdef const char *a = start
        cdef const char *b = end
        cdef size_t n = len(start), m = len(end)
        self.enter()
        with nogil:
            api.delete_range_cf(self.db, self.how(sync, wal), handle, a, n, b, m, &error)
        self.leave()
        check(error, self.where(f"writing column family {family.name!r}"))

    # --------------------------------------------------------------------------------------- many at once

    def multi_get(self, ColumnFamily family not None, const int64_t[::1] offsets not None,
                  const uint8_t[::1] keys not None, *, bint is_sorted=False):
        """Read many keys, without an object for each: key `i` is ``keys[offsets[i]:offsets[i + 1]]``.

        Returns whether each was found, offsets of values, and their bytes, as arrays; missing keys have none.
        `is_sorted` promises keys in order, which saves sorting them.
        """
        cdef Py_ssize_t n = check_rows(offsets, keys, "keys")
        cdef rocksdb_family_t *handle
        cdef char *error = NULL
        cdef Bytes data
        cdef Py_ssize_t at = 0
        cdef int64_t[::1] ends
        cdef uint8_t[::1] marks
        cdef bint is_done = True
        cdef const char *data_of_keys = start_of(keys)
        found = np.zeros(n, np.bool_)
        value_offsets = np.zeros(n + 1, np.int64)
        if n == 0:
            self.handle_of(family)
            return found, value_offsets, np.empty(0, np.uint8)
        ends = value_offsets
        marks = found.view(np.uint8)
        handle = self.handle_of(family)
        memset(&data, 0, sizeof(data))
        self.enter()
        with nogil:
            while at < n and is_done and error == NULL:
                is_done = read_block(self.db, self.reads, handle, &offsets[at],
                                     data_of_keys,
                                     min(n - at, KEYS_AT_ONCE), &marks[at], &ends[at], &data, is_sorted, &error)
                at += KEYS_AT_ONCE
        self.leave()
        try:
            check(error, self.where(f"reading column family {family.name!r}"))
            if not is_done:
                raise MemoryError
            return found, value_offsets, array_of(data.data, data.size)
        finally:
            drop(&data)

    # ---------------------------------------------------------------------------------------------- files

    def flush(self, families=None):
        """Write the memtables of these column families, or of all, to files; returns when that is done."""
        cdef char *error = NULL
        cdef rocksdb_flush_t *options
        cdef rocksdb_family_t **handles
        cdef int i, n
        chosen = [self.column_family(name) for name in self.names] if families is None else list(families)
        n = len(chosen)
        handles = <rocksdb_family_t **>malloc((n or 1) * sizeof(void *))
        if handles == NULL:
            raise MemoryError
        try:
            for i in range(n):
                handles[i] = self.handle_of(chosen[i])
            self.enter()
            with nogil:
                options = api.flushoptions_create()
                api.flush_cfs(self.db, options, handles, n, &error)
                api.flushoptions_destroy(options)
            self.leave()
        finally:
            free(handles)
        check(error, self.where("flushing"))

    cdef int keep_to_budget(self) except -1:
        """After a batch: if the write buffers of the budget have too much, and much of it is this database's, flush it.

        Never raises: the batch is written. A flush that has failed fails the next write.
        """
        if self.budget is not None and self.budget.is_overdrawn():
            try:
                if self.memory()["unflushed"] > self.budget.write_buffers():
                    self.flush()
            except Exception:
                pass
        return 0

    def compact(self, ColumnFamily family not None, bytes start=None, bytes end=None):
        """Compact the keys from `start` to `end`, all if they are None, on all levels: the filter sees each of them."""
        cdef rocksdb_family_t *handle = self.handle_of(family)
        cdef rocksdb_compact_t *options
        cdef const char *a = NULL
        cdef const char *b = NULL
        cdef size_t n = 0, m = 0
        if start is not None:
            a, n = start, len(start)
        if end is not None:
            b, m = end, len(end)
        before = self.background_errors()
        self.enter()
        with nogil:
            options = api.compactoptions_create()
            api.compactoptions_set_bottommost_level_compaction(options, FORCE_BOTTOMMOST)
            api.compactoptions_set_exclusive_manual_compaction(options, False)
            api.compact_range_cf_opt(self.db, handle, options, a, n, b, m)
            api.compactoptions_destroy(options)
        self.leave()
        # The C API keeps the outcome of a compaction to itself; a failure in the background stops all writes.
        if self.background_errors() != before:
            self.raise_background_error(f"compacting column family {family.name!r}")

    cdef object background_errors(self):
        """How often work in the background has failed; RocksDB counts that for all families in the default one."""
        return self.int_property("rocksdb.background-errors", self.column_family("default"))

    cdef int raise_background_error(self, str doing) except -1:
        """Ask RocksDB why it has stopped: a write of nothing is refused with the reason."""
        cdef char *error = NULL
        cdef rocksdb_batch_t *batch
        self.enter()
        with nogil:
            batch = api.writebatch_create()
            api.write(self.db, self.writes[0], batch, &error)
            api.writebatch_destroy(batch)
        self.leave()
        check(error, self.where(doing))
        raise StoreError("work in the background of the database has failed", code="STORE.DATABASE",
                         detail=self.where(doing), hint="its log, the file LOG in the folder, says why")

    def delete_files_in_range(self, ColumnFamily family not None, bytes start=None, bytes end=None):
        """Remove the files whose keys all lie from `start` to `end`, both included; other keys there stay.

        For keys that have been removed, or that are not read: it does not ask whether older files have older values.
        """
        cdef char *error = NULL
        cdef rocksdb_family_t *handle = self.handle_of(family)
        cdef const char *a = NULL
        cdef const char *b = NULL
        cdef size_t n = 0, m = 0
        if start is not None:
            a, n = start, len(start)
        if end is not None:
            b, m = end, len(end)
        self.enter()
        with nogil:
            api.delete_file_in_range_cf(self.db, handle, a, n, b, m, &error)
        self.leave()
        check(error, self.where(f"removing files of column family {family.name!r}"))

    def checkpoint(self, path not None):
        """Make a database in a new folder that is this one as it is now: flushes, then links files, or copies them.

        The folder must not exist, and the one that it is to be in must. The copy can be opened like any other.
        """
        cdef char *error = NULL
        cdef rocksdb_checkpoint_t *checkpoint
        cdef bytes encoded = _c_string(os.fsencode(path), "path")
        cdef const char *folder = encoded
        self.enter()
        with nogil:
            checkpoint = api.checkpoint_object_create(self.db, &error)
            if checkpoint != NULL:
                api.checkpoint_create(checkpoint, folder, 0, &error)
                api.checkpoint_object_destroy(checkpoint)
        self.leave()
        check(error, self.where(f"making a checkpoint in {os.fsdecode(path)}"))

    def live_files(self):
        """List the files with data: name, column family, level, bytes, first and last key, entries, deletions."""
        cdef const rocksdb_files_t *files
        cdef int i
        self.enter()
        with nogil:
            files = api.livefiles(self.db)
        self.leave()
        try:
            return [_file_at(files, i) for i in range(api.livefiles_count(files))]
        finally:
            api.livefiles_destroy(files)

    def wait_for_compactions(self):
        """Return when nothing is left to flush or to compact."""
        cdef char *error = NULL
        cdef rocksdb_wait_t *options
        self.enter()
        with nogil:
            options = api.wait_for_compact_options_create()
            api.wait_for_compact(self.db, options, &error)
            api.wait_for_compact_options_destroy(options)
        self.leave()
        check(error, self.where("waiting for compactions"))

    # ----------------------------------------------------------------------------------------- properties

    def property(self, str name not None, ColumnFamily family not None):
        """Return one of RocksDB's properties as text; None if it has none of this name."""
        cdef rocksdb_family_t *handle
        cdef bytes encoded = _c_string(name.encode(), "name of a property")
        cdef const char *text = encoded
        cdef char *value
        handle = self.handle_of(family)
        self.enter()
        with nogil:
            value = api.property_value_cf(self.db, handle, text)
        self.leave()
        if value == NULL:
            return None
        try:
            return (<bytes>value).decode("utf-8", "replace")
        finally:
            api.free(value)

    def int_property(self, str name not None, ColumnFamily family not None):
        """Return one of RocksDB's properties as a number; None if it has none of this name."""
        cdef rocksdb_family_t *handle
        cdef bytes encoded = _c_string(name.encode(), "name of a property")
        cdef const char *text = encoded
        cdef uint64_t number = 0
        cdef int failed
        handle = self.handle_of(family)
        self.enter()
        with nogil:
            failed = api.property_int_cf(self.db, handle, text, &number)
        self.leave()
        return None if failed else number

    def statistics(self, ColumnFamily family not None):
        """Say how a column family is: entries (an estimate), bytes and files by level, compactions, stalls."""
        found = {name: self.int_property(f"rocksdb.{text}", family) for name, text in _STATISTICS.items()}
        levels = int(self.property("rocksdb.num-levels", family) or 7)
        found["background_errors"] = self.background_errors()
        found["files_by_level"] = [
            int(self.property(f"rocksdb.num-files-at-level{level}", family) or 0) for level in range(levels)
        ]
        return found

    def memory(self):
        """Say in bytes what the database holds next to the block cache: memtables, those unflushed, table readers."""
        cdef char *error = NULL
        cdef rocksdb_consumers_t *consumers
        cdef rocksdb_usage_t *usage
        self.enter()
        with nogil:
            consumers = api.memory_consumers_create()
            api.memory_consumers_add_db(consumers, self.db)
            usage = api.approximate_memory_usage_create(consumers, &error)
            api.memory_consumers_destroy(consumers)
        self.leave()
        check(error, self.where("measuring memory"))
        found = {
            "memtables": api.approximate_memory_usage_get_mem_table_total(usage),
            "unflushed": api.approximate_memory_usage_get_mem_table_unflushed(usage),
            "table_readers": api.approximate_memory_usage_get_mem_table_readers_total(usage),
        }
        api.approximate_memory_usage_destroy(usage)
        return found


cdef dict _STATISTICS = {
    "estimated_keys": "estimate-num-keys",
    "live_data_bytes": "estimate-live-data-size",
    "sst_bytes": "total-sst-files-size",
    "memtable_bytes": "cur-size-all-mem-tables",
    "table_reader_bytes": "estimate-table-readers-mem",
    "pending_compaction_bytes": "estimate-pending-compaction-bytes",
    "running_compactions": "num-running-compactions",
    "running_flushes": "num-running-flushes",
    "is_write_stopped": "is-write-stopped",
    "delayed_write_rate": "actual-delayed-write-rate",
}


@cython.final
@cython.no_gc
cdef class ColumnFamily:
    """A column family of a database; `Database.column_family` makes it, and it keeps the database."""

    def __init__(self):
        raise TypeError("Database.column_family makes it")

    def __repr__(self):
        return f"ColumnFamily({self.name!r})"


# ------------------------------------------------------------------------------------------------ helpers

cdef bint read_block(rocksdb_t *db, const rocksdb_read_t *reads, rocksdb_family_t *family, const int64_t *offsets,
                     const char *data, Py_ssize_t n, uint8_t *found, int64_t *ends, Bytes *out, bint is_sorted,
                     char **error) noexcept nogil:
    """Read up to KEYS_AT_ONCE keys; False without memory."""
    cdef const char *keys[KEYS_AT_ONCE]
    cdef size_t sizes[KEYS_AT_ONCE]
    cdef rocksdb_slice_t *values[KEYS_AT_ONCE]
    cdef char *errors[KEYS_AT_ONCE]
    cdef Py_ssize_t i
    cdef size_t size
    cdef const char *value
    cdef bint is_done = True
    memset(sizes, 0, sizeof(sizes))   # the compiler does not see that n of them are set
    for i in range(n):
        keys[i] = data + offsets[i]
        sizes[i] = offsets[i + 1] - offsets[i]
    api.batched_multi_get_cf(db, reads, family, n, keys, sizes, values, errors, is_sorted)
    for i in range(n):
        if errors[i] != NULL:
            if error[0] == NULL:
                error[0] = errors[i]
            else:
                api.free(errors[i])
        if values[i] != NULL:
            value = api.pinnableslice_value(values[i], &size)
            found[i] = 1
            is_done = is_done and append(out, value, size)
            api.pinnableslice_destroy(values[i])
        ends[i + 1] = out.size
    return is_done


cdef int check_sizes(Py_ssize_t n, Py_ssize_t size) except -1:
    """Raise if a key and a value are too long for a memtable, which would write past the memory it takes for them."""
    if n + size + BESIDE_ROW > <Py_ssize_t>1 << 32:
        raise UsageError("a key or value is 4 GB or longer")
    return 0


cdef object array_of(const char *data, size_t size):
    cdef uint8_t[::1] target
    made = np.empty(size, np.uint8)
    if size:
        target = made
        memcpy(&target[0], data, size)
    return made


cdef dict _file_at(const rocksdb_files_t *files, int at):
    cdef size_t first, last
    cdef const char *smallest = api.livefiles_smallestkey(files, at, &first)
    cdef const char *largest = api.livefiles_largestkey(files, at, &last)
    return {
        "name": os.fsdecode(<bytes>api.livefiles_name(files, at)).lstrip("/"),
        "family": (<bytes>api.livefiles_column_family_name(files, at)).decode("utf-8", "replace"),
        "level": api.livefiles_level(files, at),
        "bytes": api.livefiles_size(files, at),
        "smallest": <bytes>smallest[:first],
        "largest": <bytes>largest[:last],
        "entries": api.livefiles_entries(files, at),
        "deletions": api.livefiles_deletions(files, at),
    }


cdef bytes _c_string(bytes text, str what):
    if b"\0" in text:
        raise UsageError(f"a {what} cannot have a zero byte")
    return text


cdef list _existing_families(str path, Options options):
    """The column families that a folder has; none if it holds no database."""
    cdef char *error = NULL
    cdef char **names
    cdef size_t n, i
    cdef bytes encoded = os.fsencode(path)
    cdef const char *folder = encoded
    try:
        files = os.listdir(path)
    except FileNotFoundError:
        return []
    except OSError as reason:
        raise StoreError.of(reason, f"opening, database {path}", code="STORE.DATABASE") from reason
    if "CURRENT" not in files:
        # RocksDB would make a new database there, and the rows of the files would be silently gone.
        left = sorted(name for name in files if re.fullmatch(r"MANIFEST-\d+|\d+\.(sst|log|blob)", name))
        if left:
            lost = StoreError("a file of the database is missing", code="STORE.DATABASE_LOST_FILE",
                              detail=f"opening, database {path}: no CURRENT beside {left[0]}",
                              hint="restore the database from a checkpoint")
            lost.errno = 2
            raise lost
        return []
    with nogil:
        names = api.list_column_families(options.options, folder, &n, &error)
    try:
        check(error, f"opening, database {path}")
        return [(<bytes>names[i]).decode() for i in range(n)]
    finally:
        api.list_column_families_destroy(names, n)


def families_in(path not None, Options options not None):
    """List the names of the column families of a database that need not be open; none without a database."""
    need_library()
    return _existing_families(os.fsdecode(path), options)
