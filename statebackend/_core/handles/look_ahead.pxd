"""Prefetches memory that the next keys will need, before they are set.

Keys come in lists, and key objects that were made one after another mostly lie one after another in memory. So this
code watches the distance between the objects that are set as keys, as a processor's prefetcher does with addresses.
If the distance was the same twice, there is probably a key several such distances further on. Bytes there, if they
are on the same page of memory as the current key and so readable, count as a key if they look like an `int`. The
guess costs a few nanoseconds, and affects only what is fetched.

The code follows a guessed key one step at a time, so that each step finds what the one before has prefetched:

    BUCKETS_AHEAD keys before its turn    its bucket is asked for
    ENTRIES_AHEAD                         the first entry in the bucket
    CHAINS_AHEAD                          the second one, if the first is of another key
    VALUES_AHEAD                          what the entry refers to: bytes, a list's last chunk, a bucket of map entries
    PARTS_AHEAD                           what is behind that: an entry of the map, the chunk before the last
    RESTS_AHEAD                           and one more: the second entry in that bucket, the next chunk

This happens in the tables in which the last key was looked up. For a map, the map key is guessed in the same way, while
the call has one in its hands; without a guess, the last map key is expected again. A key that has no map yet will
have an anchor whose place is known, so that the bucket is known in which its first entry will come.
"""

from libc.stdint cimport int64_t, intptr_t, uint32_t, uintptr_t

from statebackend._core.tables.cow_map cimport (
    BucketTable, CowMap, Entry, Table, active_table, bucket, entry_at, hash_of)
from statebackend._core.memory.platform cimport prefetch

cdef extern from *:
    """
    /* Whether this build looks ahead. Not under a sanitizer: it would report the read of memory that is no object's.
       Not on free-threaded Python: another thread may write there meanwhile, and no lock keeps it from that. */
    #ifdef __has_feature
    #define SB_HAS_FEATURE(name) __has_feature(name)
    #else
    #define SB_HAS_FEATURE(name) 0
    #endif
    #if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_HWADDRESS__) || defined(__SANITIZE_THREAD__) \
            || SB_HAS_FEATURE(address_sanitizer) || SB_HAS_FEATURE(hwaddress_sanitizer) \
            || SB_HAS_FEATURE(memory_sanitizer) || SB_HAS_FEATURE(thread_sanitizer) \
            || defined(Py_GIL_DISABLED) || PyLong_SHIFT != 30 \
            || (defined(STATEBACKEND_LOOK_AHEAD) && !STATEBACKEND_LOOK_AHEAD)
    #define SB_LOOKS_AHEAD 0
    #else
    #define SB_LOOKS_AHEAD 1
    #endif

    #if PY_VERSION_HEX >= 0x030C0000
    #define SB_DIGITS_OFFSET offsetof(PyLongObject, long_value.ob_digit)
    #else
    #define SB_DIGITS_OFFSET offsetof(PyLongObject, ob_digit)
    #endif
    #define SB_MOST_DIGITS 3
    /* An `int` of 64 bits ends here. Nothing behind is read. */
    #define SB_PEEKED (SB_DIGITS_OFFSET + SB_MOST_DIGITS * sizeof(digit))
    _Static_assert(SB_MOST_DIGITS * PyLong_SHIFT >= 64 || !SB_LOOKS_AHEAD, "too few digits for 64 bits");
    _Static_assert(offsetof(PyObject, ob_type) + sizeof(PyTypeObject *) <= SB_DIGITS_OFFSET,
                   "the type lies behind what may be read");
    _Static_assert(SB_PEEKED <= 64, "an int is larger than this code expects");

    /* The number of an `int` that may lie at an address. Safe whatever lies there, if SB_PEEKED bytes can be read. The
       number of digits is read once: a thread that needs no GIL may write there between two reads. */
    static inline int sb_peek_int(uintptr_t at, int64_t *out) {
    #if SB_LOOKS_AHEAD
        const PyLongObject *number = (const PyLongObject *)at;
        uint64_t value = 0;
        uintptr_t digits;
        int negative;
        const digit *first = (const digit *)(at + SB_DIGITS_OFFSET);
        if (Py_TYPE((PyObject *)number) != &PyLong_Type) return 0;
    #if PY_VERSION_HEX >= 0x030C0000
        uintptr_t tag = __atomic_load_n(&number->long_value.lv_tag, __ATOMIC_RELAXED);
        digits = tag >> 3;
        negative = (tag & 3) == 2;
    #else
        Py_ssize_t size = __atomic_load_n(&number->ob_base.ob_size, __ATOMIC_RELAXED);
        negative = size < 0;
        digits = negative ? 0 - (uintptr_t)size : (uintptr_t)size;
    #endif
        if (digits > SB_MOST_DIGITS) return 0;
        while (digits--) value = value << PyLong_SHIFT | first[digits];
        *out = (int64_t)(negative ? 0 - value : value);
        return 1;
    #else
        (void)at;
        (void)out;
        return 0;
    #endif
    }
    """
    const bint LOOKS_AHEAD "SB_LOOKS_AHEAD"
    const int PEEKED "SB_PEEKED"
    bint peek_int "sb_peek_int"(uintptr_t at, int64_t *out) noexcept nogil

cdef enum:
    PAGE_OF_MEMORY = 4096                # the smallest there is
    BUCKETS_AHEAD = 8
    ENTRIES_AHEAD = 5
    CHAINS_AHEAD = 4
    VALUES_AHEAD = 3
    PARTS_AHEAD = 2
    RESTS_AHEAD = 1
    GUESSES = 16                         # a power of two, more than BUCKETS_AHEAD
    PART_GUESSES = 8                     # the same, more than VALUES_AHEAD + 1
    VISITS = 4                           # tables to follow; a record that uses more is expensive anyway

cdef enum Reach:
    # The next thing that a lookup reads after it has found the entry.
    REACH_ENTRY = 0                      # nothing
    REACH_BLOB = 1
    REACH_LIST = 2
    REACH_THREAD = 3                     # a map's entries from the first one
    REACH_MAP_ENTRY = 4                  # one entry of a map, by an integer key

cdef struct PartGuess:
    int64_t number                       # a map key
    uint32_t turn                        # in which it is expected
    uint32_t hash                        # of the map's entry
    uint32_t hash_turn                   # in which that is expected

cdef struct Visit:
    Table *table
    Table *entries                       # of a map state
    int64_t map_key
    int reach
    uintptr_t part_at                    # address of the last map key; the object may be gone
    intptr_t part_stride                 # its distance from the one before
    PartGuess parts[PART_GUESSES]        # by the turn for which they were made

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

cdef inline bint can_peek(uintptr_t at, uintptr_t near) noexcept nogil:
    """Return True if all that `peek_int` reads at an address is on the page of an object that is there."""
    return (at ^ near) < PAGE_OF_MEMORY and at % PAGE_OF_MEMORY <= PAGE_OF_MEMORY - PEEKED

cdef inline void note_part(LookAhead *ahead, Table *heads, int reach, uintptr_t at) noexcept nogil:
    """Note the object that a map's integer key is; it is alive, so what is near it can be read now."""
    cdef Visit *visit = note_visit(ahead, heads, reach)
    cdef PartGuess *part
    cdef intptr_t stride
    if not LOOKS_AHEAD or visit == NULL or visit.part_at == at:
        return
    stride = <intptr_t>(at - visit.part_at)
    visit.part_at = at
    if stride != visit.part_stride:
        visit.part_stride = stride
        return
    at += (VALUES_AHEAD + 1) * stride
    part = &visit.parts[(ahead.turn + VALUES_AHEAD + 1) & (PART_GUESSES - 1)]
    if can_peek(at, visit.part_at) and peek_int(at, &part.number):
        part.turn = ahead.turn + VALUES_AHEAD + 1

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

cdef inline void ask_for_second(Table *table, uint32_t group, uint32_t hash) noexcept nogil:
    """Ask for the second entry in a bucket, if the first one, which has arrived, has another hash."""
    cdef uint32_t *head = head_of(table, group, hash & table.hash_mask)
    cdef Entry *entry
    if head != NULL and head[0]:
        entry = entry_at(table.core, head[0])
        if entry.next and hash_of(table, entry) != hash & table.hash_mask:
            prefetch(entry_at(table.core, entry.next))

cdef inline Guess *guess_of(LookAhead *ahead, int keys) noexcept nogil:
    """The guess for the key this many turns from now, made when it was BUCKETS_AHEAD; NULL if there is none."""
    cdef Guess *guess = &ahead.guesses[(ahead.turn - (BUCKETS_AHEAD - keys)) & (GUESSES - 1)]
    return guess if guess.at == ahead.key_at + keys * ahead.stride else NULL

cdef inline bint peek(LookAhead *ahead, Guess *guess) noexcept nogil:
    """Read the key that probably lies BUCKETS_AHEAD; False if nothing there looks like one."""
    cdef uintptr_t at = ahead.key_at + BUCKETS_AHEAD * ahead.stride
    guess.at = 0
    if not can_peek(at, ahead.key_at) or not peek_int(at, &guess.number):
        return False
    guess.at = at
    return True

cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil
