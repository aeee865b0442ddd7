"""Opens a librocksdb, once for the process, and turns its errors into exceptions.

`load` binds the library with `dlopen(RTLD_NOW | RTLD_LOCAL)`: other libraries do not see its symbols. The other
direction cannot be had: the dynamic linker keeps one instance of each symbol that C++ calls unique (`STB_GNU_UNIQUE`:
statics of inline functions and templates), in any scope, and lets symbols of the global scope come before the library's
own. Two copies would share such state, and it fits at most one of them. So `load` refuses if another librocksdb is
mapped already.

A fork takes the memory of the library along, but none of its threads, and its locks as they were. So the child of a
process that had loaded the library may not call it: every call raises, and dropped objects stay.
Nor may it run the library's destructors when it ends, which join threads that it does not have: it would hang, or
crash. With glibc it ends in front of them; elsewhere, a child has to end by `os._exit`, as the children of
`multiprocessing` do anyway.
"""

import errno as _errno
import os
import re

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.stdlib cimport free
from libc.string cimport memset

from statebackend.errors import BackendUnavailableError, ClosedError, StoreError, UsageError

cdef extern from *:
    """
    #include <dlfcn.h>
    #include <pthread.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <unistd.h>
    #if defined(__APPLE__)
    #include <mach-o/dyld.h>
    #else
    #include <link.h>
    #endif

    /* The paths of all mapped objects whose file name has "rocksdb" in it, each with its zero; NULL without memory. */
    typedef struct { char *text; size_t size; int failed; } sb_names;

    static void sb_add_name(sb_names *names, const char *path) {
        const char *name = path ? strrchr(path, '/') : NULL;
        size_t n;
        char *text;
        if (!path || names->failed || !strstr(name ? name + 1 : path, "rocksdb")) return;
        n = strlen(path) + 1;
        text = (char *)realloc(names->text, names->size + n);
        if (!text) { names->failed = 1; return; }
        memcpy(text + names->size, path, n);
        names->text = text;
        names->size += n;
    }

    /* The members of Api, each with the name that RocksDB has for it behind the prefix. */
    #define SB_MEMBERS(X) \\
        X(free) X(options_create) X(options_destroy) X(get_options_from_string) X(options_set_create_if_missing) \\
        X(options_set_create_missing_column_families) X(options_increase_parallelism) \\
        X(options_set_compaction_filter_factory) X(options_set_merge_operator) X(options_set_write_buffer_manager) \\
        X(options_set_block_based_table_factory) X(block_based_options_create) X(block_based_options_destroy) \\
        X(block_based_options_set_block_size) X(block_based_options_set_partition_filters) \\
        X(block_based_options_set_index_type) X(block_based_options_set_filter_policy) \\
        X(block_based_options_set_block_cache) X(block_based_options_set_cache_index_and_filter_blocks) \\
        X(block_based_options_set_cache_index_and_filter_blocks_with_high_priority) \\
        X(block_based_options_set_pin_l0_filter_and_index_blocks_in_cache) \\
        X(block_based_options_set_pin_top_level_index_and_filter) X(filterpolicy_create_bloom_full) \\
        X(cache_create_lru) X(cache_destroy) X(cache_get_capacity) X(cache_get_usage) X(cache_get_pinned_usage) \\
        X(write_buffer_manager_create_with_cache) X(write_buffer_manager_destroy) \\
        X(write_buffer_manager_memory_usage) X(write_buffer_manager_buffer_size) X(memory_consumers_create) \\
        X(memory_consumers_add_db) X(memory_consumers_destroy) X(approximate_memory_usage_create) \\
        X(approximate_memory_usage_destroy) X(approximate_memory_usage_get_mem_table_total) \\
        X(approximate_memory_usage_get_mem_table_unflushed) X(approximate_memory_usage_get_mem_table_readers_total) \\
        X(compactionfilter_create) X(compactionfilterfactory_create) X(mergeoperator_create) X(open_column_families) \\
        X(close) X(cancel_all_background_work) X(list_column_families) X(list_column_families_destroy) \\
        X(create_column_family) X(drop_column_family) X(column_family_handle_destroy) X(readoptions_create) \\
        X(readoptions_destroy) X(readoptions_set_iterate_lower_bound) X(readoptions_set_iterate_upper_bound) \\
        X(readoptions_set_fill_cache) X(get_pinned_cf) X(pinnableslice_value) X(pinnableslice_destroy) \\
        X(batched_multi_get_cf) X(create_iterator_cf) X(iter_destroy) X(iter_valid) X(iter_seek) X(iter_next) \\
        X(iter_key) X(iter_value) X(iter_get_error) X(writeoptions_create) X(writeoptions_destroy) \\
        X(writeoptions_set_sync) X(writeoptions_disable_WAL) X(delete_range_cf) X(write) X(writebatch_create) \\
        X(writebatch_destroy) X(writebatch_clear) X(writebatch_count) X(writebatch_data) X(writebatch_put_cf) \\
        X(writebatch_merge_cf) X(writebatch_delete_cf) X(writebatch_delete_range_cf) X(flushoptions_create) \\
        X(flushoptions_destroy) X(flush_cfs) X(compactoptions_create) X(compactoptions_destroy) \\
        X(compactoptions_set_exclusive_manual_compaction) X(compactoptions_set_bottommost_level_compaction) \\
        X(compact_range_cf_opt) X(set_options_cf) X(delete_file_in_range_cf) X(checkpoint_object_create) \\
        X(checkpoint_create) X(checkpoint_object_destroy) X(livefiles) X(livefiles_destroy) X(livefiles_count) \\
        X(livefiles_column_family_name) X(livefiles_name) X(livefiles_level) X(livefiles_size) \\
        X(livefiles_smallestkey) X(livefiles_largestkey) X(livefiles_entries) X(livefiles_deletions) \\
        X(envoptions_create) X(envoptions_destroy) X(sstfilewriter_create) X(sstfilewriter_open) \\
        X(sstfilewriter_put) X(sstfilewriter_file_size) X(sstfilewriter_finish) X(sstfilewriter_destroy) \\
        X(ingestexternalfileoptions_create) X(ingestexternalfileoptions_set_move_files) \\
        X(ingestexternalfileoptions_destroy) X(ingest_external_file_cf) X(property_value_cf) X(property_int_cf) \\
        X(wait_for_compact_options_create) X(wait_for_compact_options_destroy) X(wait_for_compact)
    #define SB_ONCE(member) sb_has_##member,
    #define SB_TAKE(member) \\
        if (!(*(void **)&api_->member = dlsym(library_, "rocksdb_" #member))) \\
            sb_add_name(missing_, "rocksdb_" #member);

    /* Fills a table from a library. The compiler checks that each member is listed, and once. */
    #define sb_fill(api, library, missing) do { \\
        enum { SB_MEMBERS(SB_ONCE) sb_count }; \\
        _Static_assert(sizeof *(api) == sb_count * sizeof(void *), "SB_MEMBERS has not all members of Api"); \\
        __typeof__(api) api_ = (api); \\
        void *library_ = (library); \\
        sb_names *missing_ = (missing); \\
        SB_MEMBERS(SB_TAKE) \\
    } while (0)

    #if defined(__APPLE__)
    static void sb_mapped_names(sb_names *names) {
        for (uint32_t i = 0; i < _dyld_image_count(); i++) sb_add_name(names, _dyld_get_image_name(i));
    }
    #else
    static int sb_visit_object(struct dl_phdr_info *info, size_t size, void *names) {
        (void)size;
        sb_add_name((sb_names *)names, info->dlpi_name);
        return 0;
    }
    static void sb_mapped_names(sb_names *names) { dl_iterate_phdr(sb_visit_object, names); }
    #endif

    /* In a forked child: end in front of the exit functions that are there from before the fork. */
    #if defined(__GLIBC__)
    static void sb_end(int status, void *nothing) {
        (void)nothing;
        fflush(NULL);
        _exit(status);
    }
    static void sb_end_early(void) { (void)on_exit(sb_end, NULL); }
    #else
    static void sb_end_early(void) {}
    #endif

    /* A std::string as libstdc++ returns it: by a hidden address, as any struct of this size. */
    typedef struct { char *text; size_t size; char here[16]; } sb_cxx_string;
    typedef sb_cxx_string (*sb_version_text)(unsigned char with_patch);
    typedef int (*sb_version_number)(void *env, void *class_);

    /* RocksDB's version, for which its C API lacks a function; 0 if it cannot be told. */
    static unsigned int sb_version(void *library) {
        sb_version_number number;
        sb_version_text text;
        *(void **)&number = dlsym(library, "Java_org_rocksdb_RocksDB_version");
        if (number) return (unsigned int)number(NULL, NULL);        /* uses neither argument */
    #if !defined(__APPLE__)
        *(void **)&text = dlsym(library, "_ZN7rocksdb23GetRocksVersionAsStringB5cxx11Eb");
        if (text) {
            sb_cxx_string found = text(1);
            unsigned int parts[3] = {0, 0, 0}, at = 0;
            if (found.size >= sizeof found.here) return 0;          /* such a long one would be on the heap */
            for (size_t i = 0; i < found.size && at < 3; i++) {
                if (found.here[i] == '.') at++;
                else if (found.here[i] < '0' || found.here[i] > '9') return 0;
                else parts[at] = parts[at] * 10 + (unsigned int)(found.here[i] - '0');
            }
            return (parts[0] & 255) << 16 | (parts[1] & 255) << 8 | (parts[2] & 255);
        }
    #else
        (void)text;
    #endif
        return 0;
    }
    """
    ctypedef struct sb_names:
        char *text
        size_t size
        bint failed
    void sb_mapped_names(sb_names *names) noexcept nogil
    void sb_fill(Api *api, void *library, sb_names *missing) noexcept
    void sb_end_early() noexcept nogil
    uint32_t sb_version(void *library) noexcept nogil
    int RTLD_NOW
    int RTLD_LOCAL
    void *RTLD_DEFAULT
    void *dlopen(const char *path, int mode) noexcept
    void *dlsym(void *library, const char *name) noexcept
    char *dlerror() noexcept
    int dlclose(void *library) noexcept
    int pthread_atfork(void (*before)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil) noexcept nogil

OLDEST = (8, 9)
"""The oldest version that `load` takes."""

cdef object _path = None              # of the library that is loaded
cdef uint32_t _version = 0


# ------------------------------------------------------------------------------------------- loading

cdef list _taken(sb_names *names):
    """The names in a list, which is freed."""
    try:
        if names.failed:
            raise MemoryError
        return (<bytes>names.text[:names.size - 1]).split(b"\0") if names.size else []
    finally:
        free(names.text)


def mapped_copies():
    """List the files of all libraries of RocksDB in this process, but the one that `load` has opened."""
    cdef sb_names names
    memset(&names, 0, sizeof(names))
    sb_mapped_names(&names)
    return [path for each in _taken(&names) if not _is_loaded_from(path := os.fsdecode(each))]


def check_no_other_copy():
    """Raise `BackendUnavailableError` if the process has a copy of RocksDB that `load` has not opened."""
    others = mapped_copies()
    if others or not is_loaded and dlsym(RTLD_DEFAULT, b"rocksdb_open") != NULL:
        raise BackendUnavailableError(
            "this process has mapped another copy of RocksDB, and two cannot be kept apart",
            code="BACKEND_UNAVAILABLE.OTHER_LIBRARY", detail=", ".join(others) or "its symbols are global",
            hint="use this backend in a process that does not load the other copy",
        )


cdef bint _is_loaded_from(str path):
    if _path is None:
        return False
    try:
        return path == _path or os.path.samefile(path, _path)
    except OSError:                   # unlinked meanwhile, as the JVM does with its unpacked copy
        return False


def load(path not None):
    """Open the library at `path`, and bind it; again with the same path does nothing.

    Nothing of RocksDB runs before this, apart from its constructors. A process has one library: another path is
    refused.
    """
    global is_loaded, _path, _version, api
    cdef void *library
    cdef sb_names names
    cdef Api table
    cdef uint32_t number
    path = os.path.realpath(os.fsdecode(path))
    where = f"the library {path}"
    if is_loaded:
        need_library()
        if _is_loaded_from(path):
            return
        raise BackendUnavailableError(
            "another RocksDB library is loaded in this process", code="BACKEND_UNAVAILABLE.OTHER_LIBRARY",
            detail=f"{_path}, not {path}", hint="use one library in a process, or start another process",
        )
    check_no_other_copy()
    dlerror()
    library = dlopen(os.fsencode(path), RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        reason = os.fsdecode(dlerror())
        raise BackendUnavailableError(
            "the library of RocksDB cannot be opened", code="BACKEND_UNAVAILABLE.LIBRARY_FILE",
            detail=f"{where}: {reason}", hint=_hint_for(reason),
        )
    memset(&names, 0, sizeof(names))
    sb_fill(&table, library, &names)
    number = sb_version(library)
    try:
        missing = _taken(&names)
        if missing:
            raise BackendUnavailableError(
                "the library of RocksDB lacks functions of its C API", code="BACKEND_UNAVAILABLE.LIBRARY_VERSION",
                detail=f"{where}: {b', '.join(missing).decode()}", hint=f"use RocksDB {_text_of(OLDEST)} or newer",
            )
        if number and (number >> 16, number >> 8 & 255) < OLDEST:
            raise BackendUnavailableError(
                "the library of RocksDB is too old", code="BACKEND_UNAVAILABLE.LIBRARY_VERSION",
                detail=f"{where} has version {_version_text(number)}",
                hint=f"use RocksDB {_text_of(OLDEST)} or newer",
            )
        if pthread_atfork(NULL, NULL, _after_fork_in_child):
            raise MemoryError
    except BaseException:
        dlclose(library)
        raise
    api = table
    _path, _version = path, number
    is_loaded = True


cdef str _hint_for(str reason):
    if "not permitted" in reason or "Permission denied" in reason:
        return "the folder may be mounted noexec; set STATEBACKEND_ROCKSDB_CACHE to a folder that is not"
    return "set STATEBACKEND_ROCKSDB_LIB to a librocksdb for this machine and C library"


cdef str _text_of(tuple version):
    return ".".join(map(str, version))


cdef str _version_text(uint32_t number):
    return f"{number >> 16}.{number >> 8 & 255}.{number & 255}" if number else "unknown"


def loaded_path():
    """The file that `load` has opened; None before."""
    return _path


def version():
    """The version of the library, such as ``"9.8.4"``, or ``"unknown"`` if it does not tell."""
    need_library()
    return _version_text(_version)


def live_counters():
    """Count the objects that hold memory of RocksDB in this process, by kind."""
    return {
        "databases": live.databases, "families": live.families, "iterators": live.iterators,
        "batches": live.batches, "pinned": live.pinned, "options": live.options, "budgets": live.budgets,
        "table_files": live.table_files, "rules": live.rules,
    }


cdef void _after_fork_in_child() noexcept nogil:
    global is_forked
    if not is_forked:
        is_forked = True
        sb_end_early()


cdef int need_library() except -1:
    if is_forked:
        raise UsageError(
            "a process that was forked cannot use RocksDB", code="USAGE.FORKED",
            detail="the process that it comes from had loaded the library",
            hint="start processes with 'spawn' or 'forkserver', or fork before the backend is first used",
        )
    if not is_loaded:
        raise UsageError("the library of RocksDB is not loaded", hint="call load(path) first")
    return 0


# -------------------------------------------------------------------------------------------- errors

cdef int check(char *error, str where) except -1:
    """Raise what a call has complained about, and free it; nothing if it has not."""
    if error == NULL:
        return 0
    try:
        text = (<bytes>error).decode("utf-8", "replace")
    finally:
        api.free(error)
    raise error_of(text, where)


def error_of(str text not None, str where not None):
    """Make the exception for a message of RocksDB's; `where` says what was done, with which database.

    RocksDB begins each message with the name of a status. Its messages name files, and replace keys by a placeholder.
    """
    status, _, rest = text.partition(": ")
    rest = rest.strip() or status
    detail = f"{where}: {rest}"

    def refused(message, *, code, number, hint):
        error = StoreError(message, code=code, detail=detail, hint=hint)
        error.errno = number
        return error

    if "Column family dropped" in status or "column family" in rest.lower() and status == "Invalid argument":
        return UsageError("the column family cannot be used", code="USAGE.COLUMN_FAMILY", detail=detail,
                          hint="use one that the database has, and has not dropped")
    if status in ("Invalid argument", "Not implemented"):
        return UsageError("RocksDB refuses an argument", code="USAGE.DATABASE_OPTION", detail=detail,
                          hint="mend the option or argument that the detail names")
    if status == "Shutdown in progress":
        return ClosedError("the database is being closed", detail=detail)
    # A damaged database complains about a file that is gone in either of two ways.
    if status in ("IO error", "Corruption") and re.search(
        r"No such file or directory|IO error: .*while stat|file is missing|missing files", rest, re.I
    ):
        return refused("a file of the database is missing", code="STORE.DATABASE_LOST_FILE", number=_errno.ENOENT,
                       hint="restore the database from a checkpoint")
    if status == "Corruption":
        return refused("a file of the database is damaged", code="STORE.DATABASE_CORRUPT", number=_errno.EIO,
                       hint="restore the database from a checkpoint; see to the disk")
    if "Too many open files" in rest:
        return refused("the process has too many open files", code="STORE.DATABASE_OPEN_FILES",
                       number=_errno.EMFILE,
                       hint="raise the limit (ulimit -n), then restore the state from a checkpoint")
    if re.search(r"lock hold by current process|While lock file|lock file", rest):
        return refused("the database is in use", code="STORE.DATABASE_LOCKED", number=_errno.EAGAIN,
                       hint="close it where it is open, in this process or another, or use another folder")
    if re.search(r"No space left|NoSpace|File too large|Disk quota", rest + status):
        return refused("there is no room for the files of the database", code="STORE.DATABASE_FULL",
                       number=_errno.ENOSPC, hint="make room on the disk, then restore the state from a checkpoint")
    if status in ("Result incomplete", "Resource busy", "Operation timed out", "Operation aborted",
                  "Operation failed. Try again.", "Merge in progress", "Operation expired"):
        return refused("RocksDB has not done the work", code="STORE.DATABASE_BUSY", number=_errno.EAGAIN,
                       hint="try again")
    return refused("RocksDB cannot go on", code="STORE.DATABASE", number=_errno.EIO,
                   hint="fix the cause, then restore the state from a checkpoint")
