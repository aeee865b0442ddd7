"""What RocksDB calls on its own threads: the filter that drops what has expired, and the operator that merges lists.

Nothing here touches Python. Compactions go on while Python is busy, and until the database is closed, be it as late as
the end of the interpreter. So what callbacks use is C memory with a count of its users:

    ExpiryRules (Python) ----+
    filter factory (RocksDB) +--> Rules ---> Clock <--- CommittedClock (Python)
    merge operator (RocksDB) +
    a filter for each compaction, with a copy of the layout and of now

RocksDB drops a factory and an operator with the last database, iterator or set of options that needs it, and the
rules go with the last of all. A filter belongs to one compaction and one thread: it copies layout and time when it
begins, and again after `query_every` entries.

How values are in memory (little-endian):

    value, map entry    one timestamp of eight bytes, `timestamp_offset` bytes from the start
    fixed list          elements of `element_bytes`, each with its timestamp `timestamp_offset` bytes from its start
    variable list       elements, each with four bytes of length in front that do not count themselves; the timestamp
                        lies `timestamp_offset` bytes from the start of the element, behind the length

Merging lists puts operands one behind the other, so an operand is any number of elements. Where there is a time to
live, merging drops elements that have expired: a compaction shows its filter no operands, only values. So a list may
become empty in a merge, and a merge cannot remove its key: empty bytes are not a list. Readers take them for
that, and the next compaction drops them.

Compaction filters are not told about snapshots or open batches. So `now` is the time of the last commit: state that
has expired by then stays expired after any rollback.
"""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport INT64_MIN, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, drop
from statebackend._core.rocksdb.binding.library cimport (
    api, flag_t, live, need_library, rocksdb_filter_context_t, rocksdb_filter_t, rocksdb_filters_t, rocksdb_merger_t,
)
from statebackend._core.tables.expiry cimport is_expired

from statebackend.errors import UsageError

cdef extern from *:
    """
    #include <pthread.h>
    #include <stdint.h>
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "timestamps and lengths are read as little-endian"
    #endif
    static inline int64_t sb_load(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void sb_store(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline int64_t sb_add(int64_t *p, int64_t v) { return __atomic_add_fetch(p, v, __ATOMIC_ACQ_REL); }
    """
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes) noexcept nogil
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept nogil
    int pthread_mutex_destroy(pthread_mutex_t *mutex) noexcept nogil
    int64_t sb_load(const int64_t *number) noexcept nogil
    void sb_store(int64_t *number, int64_t value) noexcept nogil
    int64_t sb_add(int64_t *number, int64_t by) noexcept nogil

cdef enum Kind:
    KIND_VALUE
    KIND_MAP_ENTRY
    KIND_FIXED_LIST
    KIND_VARIABLE_LIST

cdef dict _KINDS = {
    "value": KIND_VALUE, "map_entry": KIND_MAP_ENTRY, "fixed_list": KIND_FIXED_LIST,
    "variable_list": KIND_VARIABLE_LIST,
}
cdef tuple _COUNTERS = (
    "compactions", "seen", "dropped_values", "dropped_elements", "rewritten_lists", "dropped_in_merges", "unreadable",
)

cdef struct Layout:
    int kind
    bint expires                      # else nothing is dropped but empty lists
    int64_t ttl
    uint32_t timestamp_offset
    uint32_t element_bytes
    uint64_t query_every

cdef struct Counters:                 # atomic, in the order of _COUNTERS
    int64_t compactions
    int64_t seen
    int64_t dropped_values
    int64_t dropped_elements
    int64_t rewritten_lists
    int64_t dropped_in_merges
    int64_t unreadable

cdef struct Rules:
    int64_t refs                      # atomic
    pthread_mutex_t lock              # guards `layout` and `clock`, which change as a whole
    Layout layout
    Clock *clock
    Counters counters

cdef struct Filter:
    Rules *rules
    Layout layout                     # as it was when the filter looked last
    int64_t now
    uint64_t left                     # entries until it looks again
    Bytes kept                        # the list that RocksDB is about to copy


# ------------------------------------------------------------------------------- memory of the callbacks

cdef void clock_drop(Clock *clock) noexcept nogil:
    if sb_add(&clock.refs, -1) == 0:
        free(clock)


cdef void rules_drop(void *state) noexcept nogil:
    """Also the destructor of factories and merge operators."""
    cdef Rules *rules = <Rules *>state
    if sb_add(&rules.refs, -1) == 0:
        clock_drop(rules.clock)
        pthread_mutex_destroy(&rules.lock)
        free(rules)
        sb_add(&live.rules, -1)


cdef void filter_drop(void *state) noexcept nogil:
    cdef Filter *filter = <Filter *>state
    rules_drop(filter.rules)
    drop(&filter.kept)
    free(filter)


cdef void merged_drop(void *_state, const char *merged, size_t _size) noexcept nogil:
    free(<void *>merged)


cdef const char *filter_name(void *_state) noexcept nogil:
    return "statebackend.expiry"


cdef const char *merger_name(void *_state) noexcept nogil:
    return "statebackend.lists"


cdef void look(Rules *rules, Layout *layout, int64_t *now) noexcept nogil:
    pthread_mutex_lock(&rules.lock)
    layout[0] = rules.layout
    now[0] = sb_load(&rules.clock.now)
    pthread_mutex_unlock(&rules.lock)


# --------------------------------------------------------------------------------------------- elements

cdef inline int64_t timestamp_at(const char *data) noexcept nogil:
    cdef int64_t timestamp
    memcpy(&timestamp, data, 8)
    return timestamp


cdef int64_t element_size(const Layout *layout, const char *data, size_t left) noexcept nogil:
    """Of the first element, with the length in front of it; -1 if these bytes do not begin with one."""
    cdef uint32_t n
    if layout.kind == KIND_FIXED_LIST:
        return layout.element_bytes if layout.element_bytes <= left else -1
    if left < 4:
        return -1
    memcpy(&n, data, 4)
    return 4 + <int64_t>n if n <= left - 4 and n >= <uint64_t>layout.timestamp_offset + 8 else -1


cdef int64_t count_expired(const Layout *layout, int64_t now, const char *data, size_t size,
                           int64_t *elements) noexcept nogil:
    """How many elements of a list have expired, of how many; -1 if the bytes are not a list."""
    cdef int64_t n, expired = 0
    cdef size_t at = 0
    cdef size_t front = layout.timestamp_offset + (4 if layout.kind == KIND_VARIABLE_LIST else 0)
    elements[0] = 0
    while at < size:
        n = element_size(layout, data + at, size - at)
        if n < 0:
            return -1
        elements[0] += 1
        expired += is_expired(timestamp_at(data + at + front), layout.ttl, now)
        at += n
    return expired


cdef bint append_live(const Layout *layout, int64_t now, const char *data, size_t size, Bytes *to) noexcept nogil:
    """Copy the elements of a list that have not expired; `count_expired` has read it before."""
    cdef int64_t n
    cdef size_t at = 0, since = 0
    cdef size_t front = layout.timestamp_offset + (4 if layout.kind == KIND_VARIABLE_LIST else 0)
    while at < size:
        n = element_size(layout, data + at, size - at)
        if is_expired(timestamp_at(data + at + front), layout.ttl, now):
            if not append(to, data + since, at - since):
                return False
            since = at + n
        at += n
    return append(to, data + since, at - since)


# ------------------------------------------------------------------------------------ RocksDB calls these

cdef rocksdb_filter_t *make_filter(void *state, rocksdb_filter_context_t *_context) noexcept nogil:
    """Make the filter of one compaction; without memory, none: the compaction drops nothing then."""
    cdef Rules *rules = <Rules *>state
    cdef Filter *filter = <Filter *>calloc(1, sizeof(Filter))
    if filter == NULL:
        return NULL
    sb_add(&rules.refs, 1)
    filter.rules = rules
    sb_add(&rules.counters.compactions, 1)
    return api.compactionfilter_create(filter, filter_drop, filter_entry, filter_name)


cdef flag_t filter_entry(void *state, int _level, const char *_key, size_t _key_size, const char *value, size_t size,
                         char **new_value, size_t *new_size, flag_t *is_changed) noexcept nogil:
    """Say whether an entry goes; of a list, some elements may."""
    cdef Filter *filter = <Filter *>state
    cdef Rules *rules = filter.rules
    cdef Layout *layout = &filter.layout
    cdef int64_t expired, elements
    if filter.left == 0:
        look(rules, layout, &filter.now)
        filter.left = layout.query_every
    filter.left -= 1
    sb_add(&rules.counters.seen, 1)
    if layout.kind == KIND_FIXED_LIST or layout.kind == KIND_VARIABLE_LIST:
        if size == 0:
            return 1
        if not layout.expires:
            return 0
        expired = count_expired(layout, filter.now, value, size, &elements)
        if expired < 0:
            sb_add(&rules.counters.unreadable, 1)
            return 0
        if expired == 0:
            return 0
        if expired == elements:
            sb_add(&rules.counters.dropped_elements, expired)
            return 1
        filter.kept.size = 0
        if not append_live(layout, filter.now, value, size, &filter.kept):
            return 0
        sb_add(&rules.counters.dropped_elements, expired)
        sb_add(&rules.counters.rewritten_lists, 1)
        new_value[0] = filter.kept.data
        new_size[0] = filter.kept.size
        is_changed[0] = 1
        return 0
    if not layout.expires:
        return 0
    if size < <size_t>layout.timestamp_offset + 8:
        sb_add(&rules.counters.unreadable, 1)
        return 0
    if not is_expired(timestamp_at(value + layout.timestamp_offset), layout.ttl, filter.now):
        return 0
    sb_add(&rules.counters.dropped_values, 1)
    return 1


cdef char *merge(Rules *rules, const char *first, size_t first_size, const char **operands, const size_t *sizes,
                 int n, flag_t *is_merged, size_t *new_size) noexcept nogil:
    """One list of all; RocksDB reports operands that cannot be merged as corruption, and loses nothing."""
    cdef Layout layout
    cdef Bytes merged
    cdef int64_t now, expired, elements, dropped = 0
    cdef size_t total = first_size, size
    cdef const char *data
    cdef int i
    is_merged[0] = 0
    new_size[0] = 0
    look(rules, &layout, &now)
    for i in range(n):
        total += sizes[i]
    merged.data = <char *>malloc(total or 1)
    merged.size = 0
    merged.room = total
    if merged.data == NULL:
        return NULL
    for i in range(-1, n):
        data = first if i < 0 else operands[i]
        size = first_size if i < 0 else sizes[i]
        if layout.expires:
            expired = count_expired(&layout, now, data, size, &elements)
            if expired < 0:
                sb_add(&rules.counters.unreadable, 1)
                free(merged.data)
                return NULL
            dropped += expired
            if expired:
                append_live(&layout, now, data, size, &merged)
                continue
        append(&merged, data, size)
    sb_add(&rules.counters.dropped_in_merges, dropped)
    is_merged[0] = 1
    new_size[0] = merged.size
    return merged.data


cdef char *merge_into(void *state, const char *_key, size_t _key_size, const char *value, size_t size,
                      const char **operands, const size_t *sizes, int n, flag_t *is_merged,
                      size_t *new_size) noexcept nogil:
    return merge(<Rules *>state, value, size if value != NULL else 0, operands, sizes, n, is_merged, new_size)


cdef char *merge_operands(void *state, const char *_key, size_t _key_size, const char **operands,
                          const size_t *sizes, int n, flag_t *is_merged, size_t *new_size) noexcept nogil:
    return merge(<Rules *>state, NULL, 0, operands, sizes, n, is_merged, new_size)


# ------------------------------------------------------------------------------------------ from Python

@cython.final
cdef class CommittedClock:
    """The time that decides expiry: the last commit's. At first, nothing has expired."""

    def __cinit__(self):
        self.clock = <Clock *>malloc(sizeof(Clock))
        if self.clock == NULL:
            raise MemoryError
        self.clock.refs = 1
        self.clock.now = INT64_MIN

    def __dealloc__(self):
        if self.clock != NULL:
            clock_drop(self.clock)

    @property
    def now(self):
        """Milliseconds; running compactions see a new one within `query_every` entries."""
        return sb_load(&self.clock.now)

    @now.setter
    def now(self, int64_t now):
        sb_store(&self.clock.now, now)


@cython.final
cdef class ExpiryRules:
    """What expires in a column family, and how lists are merged there; may be changed while the database is in use.

    `kind` is ``"value"``, ``"map_entry"``, ``"fixed_list"`` or ``"variable_list"``; `ttl` in milliseconds, None if
    nothing expires.
    """

    def __cinit__(self, CommittedClock clock not None, kind not None, *, ttl=None, timestamp_offset=0, element_bytes=0,
                  query_every=1000):
        cdef Layout layout = _layout(kind, ttl, timestamp_offset, element_bytes, query_every)
        self.rules = <Rules *>calloc(1, sizeof(Rules))
        if self.rules == NULL:
            raise MemoryError
        if pthread_mutex_init(&self.rules.lock, NULL):
            free(self.rules)
            self.rules = NULL
            raise MemoryError
        self.rules.refs = 1
        self.rules.layout = layout
        self.rules.clock = clock.clock
        sb_add(&clock.clock.refs, 1)
        self.clock = clock
        sb_add(&live.rules, 1)

    def __dealloc__(self):
        if self.rules != NULL:
            rules_drop(self.rules)

    def configure(self, kind not None, *, ttl=None, timestamp_offset=0, element_bytes=0, query_every=1000):
        """Change all at once. Running compactions see it within their `query_every` entries, merges at once."""
        cdef Layout layout = _layout(kind, ttl, timestamp_offset, element_bytes, query_every)
        with nogil:
            pthread_mutex_lock(&self.rules.lock)
            self.rules.layout = layout
            pthread_mutex_unlock(&self.rules.lock)

    def follow(self, CommittedClock clock not None):
        """Go by another clock from now on."""
        cdef Clock *before
        sb_add(&clock.clock.refs, 1)
        with nogil:
            pthread_mutex_lock(&self.rules.lock)
            before, self.rules.clock = self.rules.clock, clock.clock
            pthread_mutex_unlock(&self.rules.lock)
        clock_drop(before)
        self.clock = clock

    def counters(self):
        """Say what callbacks have done since these rules were made.

        ``compactions`` begun; entries ``seen`` by them; ``dropped_values``, map entries among them;
        ``dropped_elements`` of lists, by compactions; ``rewritten_lists``, that have lost some and not all;
        ``dropped_in_merges``, again by each read of a list that no compaction has merged yet; ``unreadable``: kept
        because their bytes do not fit the layout.
        """
        cdef int64_t *numbers = &self.rules.counters.compactions
        return {name: sb_load(&numbers[i]) for i, name in enumerate(_COUNTERS)}

    cdef rocksdb_filters_t *make_filters(self) except NULL:
        """A factory for one set of options, to which it belongs then."""
        need_library()
        sb_add(&self.rules.refs, 1)
        return api.compactionfilterfactory_create(self.rules, rules_drop, make_filter, filter_name)

    cdef rocksdb_merger_t *make_merger(self) except NULL:
        """A merge operator for one set of options, to which it belongs then."""
        need_library()
        sb_add(&self.rules.refs, 1)
        return api.mergeoperator_create(self.rules, rules_drop, merge_into, merge_operands, merged_drop, merger_name)


cdef Layout _layout(kind, ttl, timestamp_offset, element_bytes, query_every) except *:
    cdef Layout layout
    memset(&layout, 0, sizeof(layout))
    if kind not in _KINDS:
        raise UsageError(f"{kind!r} is no layout of values", hint=f"use one of {', '.join(_KINDS)}")
    layout.kind = _KINDS[kind]
    if not 0 <= timestamp_offset < 1 << 31:
        raise UsageError("timestamp_offset must be in range(2**31)")
    if not 1 <= query_every < 1 << 63:
        raise UsageError("query_every must be at least 1")
    if ttl is not None and not 0 < ttl < 1 << 63:
        raise UsageError("ttl must be positive milliseconds, or None")
    needed = timestamp_offset + 8 if ttl is not None else 1
    if layout.kind == KIND_FIXED_LIST and not needed <= element_bytes < 1 << 31:
        raise UsageError("elements of this size do not hold their timestamp", detail=f"{element_bytes} bytes")
    layout.expires = ttl is not None
    layout.ttl = ttl or 0
    layout.timestamp_offset = timestamp_offset
    layout.element_bytes = element_bytes if layout.kind == KIND_FIXED_LIST else 0
    layout.query_every = query_every
    return layout
