"""Asking for memory that the next keys will need, before they are set.

Keys come in lists, and key objects that were made one after another mostly lie one after another in memory. So, as a
processor's prefetcher does with addresses, we watch the distance between the objects that are set as keys. When it was
the same twice, there is probably a key at several such distances further on. Bytes there, on the same page of memory as
the key at hand and therefore readable, are taken for a key if they look like an `int`. It is a guess that costs a few
nanoseconds and decides about nothing but what is fetched.

A guessed key is followed step by step, one step at a time, so that each finds what the one before has asked for:

    BUCKETS_AHEAD keys before its turn    its bucket is asked for
    ENTRIES_AHEAD                         the first entry in the bucket
    VALUES_AHEAD                          what the entry refers to: bytes, a list's last chunk, a bucket of map entries
    PARTS_AHEAD                           what is behind that: an entry of the map

in the tables in which something was looked up for the last key. Of a map the key that was looked up last is expected.
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
    VISITS = 4                           # tables that are followed; a record that uses more has cost anyway

cdef enum Reach:
    # What a lookup goes on to when it has found the entry.
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
    uintptr_t at                         # where the key lies; 0: nowhere
    int64_t number
    uint32_t group
    uint32_t hash

cdef struct LookAhead:
    uintptr_t key_at                     # where the last key lay
    intptr_t stride                      # how far from the one before it
    uint32_t turn
    Guess guesses[GUESSES]               # by the turn at which they were made
    # What was looked up for the last key for which something was.
    Visit visits[VISITS]
    uint32_t n_visits
    bint is_complete                     # the key has changed since: the next one begins anew

cdef inline Visit *note_visit(LookAhead *ahead, Table *table, int reach) noexcept nogil:
    """Something is looked up in a table for the current key; NULL if there are too many."""
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
    """A map's entry is looked up for the current key."""
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
    """The guess of the key so many turns from now, as it was made when it was BUCKETS_AHEAD; NULL if there is none."""
    cdef Guess *guess = &ahead.guesses[(ahead.turn - (BUCKETS_AHEAD - keys)) & (GUESSES - 1)]
    return guess if guess.at == ahead.key_at + keys * ahead.stride else NULL

cdef inline bint peek(LookAhead *ahead, Guess *guess) noexcept nogil:
    """Read the key that probably lies BUCKETS_AHEAD; False if nothing looks like one."""
    cdef uintptr_t at = ahead.key_at + BUCKETS_AHEAD * ahead.stride
    guess.at = 0
    if (at ^ ahead.key_at) >= PAGE_OF_MEMORY or at % PAGE_OF_MEMORY > PAGE_OF_MEMORY - PEEKED \
            or not peek_int(at, &guess.number):
        return False
    guess.at = at
    return True

cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil
