"""Prefetches memory that the next keys will need, before they are set.

Keys come in lists, and key objects that were made one after another mostly lie one after another in memory. So this
code watches the distance between the objects that are set as keys, as a processor's prefetcher does with addresses.
If the distance was the same twice, there is probably a key several such distances further on. Bytes there, if they
are on the same page of memory as the current key and so readable, count as a key if they look like an `int`. The
guess costs a few nanoseconds, and affects only what is fetched.

The code follows a guessed key one step at a time, so that each step finds what the one before has prefetched:

    BUCKETS_AHEAD keys before its turn    its bucket is asked for
    ENTRIES_AHEAD                         the first entry in the bucket
    VALUES_AHEAD                          what the entry refers to: bytes, a list's last chunk, a bucket of map entries
    PARTS_AHEAD                           what is behind that: an entry of the map

This happens in the tables in which the last key was looked up. For a map, it expects the last map key again.
"""

from libc.stdint cimport int64_t, intptr_t, uint32_t, uintptr_t

from statebackend._core.tables.cow_map cimport BucketTable, CowMap, Table, active_table, bucket, entry_at
from statebackend._core.memory.platform cimport prefetch

cdef extern from *:
    """
    #define SB_PEEKED 40
    /* The number of an `int` that may lie at an address. Safe whatever lies there, if SB_PEEKED bytes can be read. */
    static inline int sb_peek_int(uintptr_t at, int64_t *out) {
        const PyLongObject *number = (const PyLongObject *)at;
        uint64_t value = 0;
        uintptr_t digits;
        int negative;
        const digit *first;
        if (Py_TYPE((PyObject *)number) != &PyLong_Type) return 0;
    #if PY_VERSION_HEX >= 0x030C0000
        digits = number->long_value.lv_tag >> 3;
        negative = (number->long_value.lv_tag & 3) == 2;
        first = number->long_value.ob_digit;
    #else
        digits = (uintptr_t)Py_ABS(Py_SIZE(number));
        negative = Py_SIZE(number) < 0;
        first = number->ob_digit;
    #endif
        if (digits > 3 || PyLong_SHIFT != 30) return 0;
        while (digits--) value = value << 30 | first[digits];
        *out = (int64_t)(negative ? 0 - value : value);
        return 1;
    }
    """
    enum: PEEKED "SB_PEEKED"
    bint peek_int "sb_peek_int"(uintptr_t at, int64_t *out) noexcept nogil

cdef enum:
    PAGE_OF_MEMORY = 4096                # the smallest there is
    BUCKETS_AHEAD = 8
    ENTRIES_AHEAD = 4
    VALUES_AHEAD = 3
    PARTS_AHEAD = 2
    GUESSES = 16                         # a power of two, more than BUCKETS_AHEAD
    VISITS = 4                           # tables to follow; a record that uses more is expensive anyway

cdef enum Reach:
    # The next thing that a lookup reads after it has found the entry.
    REACH_ENTRY = 0                      # nothing
    REACH_BLOB = 1
    REACH_LIST = 2
    REACH_THREAD = 3                     # a map's entries from the first one
    REACH_MAP_ENTRY = 4                  # one entry of a map, by an integer key

cdef struct Visit:
    Table *table
    Table *entries                       # of a map state
    int64_t map_key
    int reach

cdef struct Guess:
    uintptr_t at                         # address of the key; 0: none
    int64_t number
    uint32_t group
    uint32_t hash

cdef struct LookAhead:
    uintptr_t key_at                     # address of the last key
    intptr_t stride                      # its distance from the key before
    uint32_t turn
    Guess guesses[GUESSES]               # by the turn at which they were made
    # The lookups for the last key that had any.
    Visit visits[VISITS]
    uint32_t n_visits
    bint is_complete                     # the key has changed since: the next lookup starts anew

cdef inline Visit *note_visit(LookAhead *ahead, Table *table, int reach) noexcept nogil:
    """Note that the current key's lookup is in this table; NULL if there are too many."""
    cdef uint32_t i
    if ahead.is_complete:
        ahead.is_complete = False
        ahead.n_visits = 0
    for i in range(ahead.n_visits):
        if ahead.visits[i].table == table:
            return &ahead.visits[i]
    if table == NULL or ahead.n_visits == VISITS:
        return NULL
    ahead.n_visits += 1
    ahead.visits[ahead.n_visits - 1].table = table
    ahead.visits[ahead.n_visits - 1].reach = reach
    return &ahead.visits[ahead.n_visits - 1]

cdef inline void note_map_entry(LookAhead *ahead, Table *heads, Table *entries, int64_t map_key) noexcept nogil:
    """Note that a map's entry is looked up for the current key."""
    cdef Visit *visit = note_visit(ahead, heads, REACH_MAP_ENTRY)
    if visit != NULL:
        visit.reach = REACH_MAP_ENTRY
        visit.entries = entries
        visit.map_key = map_key

cdef inline uint32_t *head_of(Table *table, uint32_t group, uint32_t hash) noexcept nogil:
    """The bucket of a hash; NULL if there is none."""
    cdef CowMap *map = table.maps[group - table.first_group]
    cdef BucketTable *buckets
    if map == NULL:
        return NULL
    buckets = active_table(map, hash)
    return bucket(table.core, buckets, hash & (buckets.capacity - 1))

cdef inline void ask_for_bucket(Table *table, uint32_t group, uint32_t hash) noexcept nogil:
    cdef uint32_t *head = head_of(table, group, hash & table.hash_mask)
    if head != NULL:
        prefetch(head)

cdef inline void ask_for_entry(Table *table, uint32_t group, uint32_t hash) noexcept nogil:
    cdef uint32_t *head = head_of(table, group, hash & table.hash_mask)
    if head != NULL and head[0]:
        prefetch(entry_at(table.core, head[0]))

cdef inline Guess *guess_of(LookAhead *ahead, int keys) noexcept nogil:
    """The guess for the key this many turns from now, made when it was BUCKETS_AHEAD; NULL if there is none."""
    cdef Guess *guess = &ahead.guesses[(ahead.turn - (BUCKETS_AHEAD - keys)) & (GUESSES - 1)]
    return guess if guess.at == ahead.key_at + keys * ahead.stride else NULL

cdef inline bint peek(LookAhead *ahead, Guess *guess) noexcept nogil:
    """Read the key that probably lies BUCKETS_AHEAD; False if nothing there looks like one."""
    cdef uintptr_t at = ahead.key_at + BUCKETS_AHEAD * ahead.stride
    guess.at = 0
    if (at ^ ahead.key_at) >= PAGE_OF_MEMORY or at % PAGE_OF_MEMORY > PAGE_OF_MEMORY - PEEKED \
            or not peek_int(at, &guess.number):
        return False
    guess.at = at
    return True

cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil
