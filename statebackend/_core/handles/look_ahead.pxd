"""Prefetches memory that the next keys will need, before they are set.

Keys come in lists, and key objects that were made one after another mostly lie one after another in memory. So this
code watches the distance between the objects that are set as keys, as a processor's prefetcher does with addresses.
If the distance was the same twice, there is probably a key several such distances further on. Now and then a key of
another size lies elsewhere, which does not disturb that. Bytes there, if they
are on the same page of memory as the current key and so readable, count as a key if they look like an `int`. The
guess costs a few nanoseconds, and affects only what is fetched. (Of a key that becomes bytes, hashes that were made
ahead are used if its bytes are those that were guessed.) From the next page the system copies, if it can be read: all
keys that are probably set from there at once.

While the entries of all tables that a key was looked up in fit in a processor's cache, nothing of this happens.

The code follows a guessed key one step at a time, so that each step finds what the one before has prefetched:

    BUCKETS_AHEAD keys before its turn    its bucket is asked for
    ENTRIES_AHEAD                         the first entry in the bucket
    CHAINS_AHEAD                          the second one, if the first is of another key
    VALUES_AHEAD                          what the entry refers to: bytes, a list's last chunk, a bucket of map entries
    PARTS_AHEAD                           what is behind that: an entry of the map, the chunk before the last
    RESTS_AHEAD                           and one more: the second entry in that bucket, the next chunk

Keys that become bytes have the bytes of the key in the place of the second entry and the value: CHAINS_AHEAD, those of
the first entry in the bucket are asked for if its hash is the same, else the second entry; VALUES_AHEAD, the bytes of
that. What lies behind an entry is followed by its hash alone. `key_shape.pyx` tells how such keys are read.

This happens in the tables in which the last key was looked up. For a map, a map key that is a number is guessed in the
same way, while the call has one in its hands. Without a guess, those of the last four different map keys are expected
that have come more than once lately, be they numbers or bytes: maps mostly have the same few keys. A key that has no
map yet will have an anchor whose place is known, so that the bucket is known in which its first entry will come.
"""

from libc.stdint cimport int64_t, intptr_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp

from statebackend._core.memory.arena cimport Blob, blob_data
from statebackend._core.tables.cow_map cimport (
    BucketTable, CoreKey, CowMap, Entry, Table, active_table, blob_hash, bucket, entry_at, namespace_of)
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
    GUESS_BYTES = 64                     # the longest canonical form that is guessed, of keys that become bytes
    GUESSES = 16                         # a power of two, more than BUCKETS_AHEAD
    PART_GUESSES = 8                     # the same, more than VALUES_AHEAD + 1
    MAP_KEYS = 4                         # different map keys that may be expected at a time
    MAP_KEY_BYTES = 32                   # the longest of those that are bytes
    MAP_KEY_TURNS = 32                   # one that has not come for so many turns is not expected
    VISITS = 4                           # tables to follow; a record that uses more is expensive anyway
    NEAR_BYTES = 524288                  # entries that stay in the cache of a processor core: nothing need be fetched

cdef enum Reach:
    # The next thing that a lookup reads after it has found the entry.
    REACH_ENTRY = 0                      # nothing
    REACH_BLOB = 1
    REACH_LIST = 2
    REACH_THREAD = 3                     # a map's entries from the first one
    REACH_MAP_ENTRY = 4                  # one entry of a map

cdef struct MapKey:
    int64_t number                       # of those that are bytes: how many
    char bytes[MAP_KEY_BYTES]
    uint32_t turn                        # in which it was looked up last
    bint comes_again                     # it was looked up for another key before that

cdef struct PartGuess:
    int64_t number                       # a map key
    uint32_t turn                        # in which it is expected
    uint32_t hash_turn                   # in which what follows is expected; of lists: one of several chunks
    uint32_t anchor                      # of the map
    uint32_t n                           # how many entries of it are expected
    int64_t numbers[MAP_KEYS]            # of their map keys
    uint32_t hashes[MAP_KEYS]            # of the entries

cdef struct Visit:
    Table *table
    Table *entries                       # of a map state
    MapKey map_keys[MAP_KEYS]            # the last that differ, in no order
    uint32_t last_map_key                # which of them came last
    int reach
    uintptr_t part_at                    # address of the last map key; the object may be gone
    intptr_t part_stride                 # its distance from the one before
    PartGuess parts[PART_GUESSES]        # by the turn for which they were made

cdef struct Guess:
    uintptr_t at                         # address of the key; 0: none
    int64_t number                       # of keys that become bytes: how many
    uint32_t group
    uint32_t hash
    uint32_t namespace                   # with which that was made

cdef struct LookAhead:
    uintptr_t key_at                     # address of the last key of the run
    intptr_t stride                      # from one of its keys to the next
    uint32_t turn
    uintptr_t other_at                   # address of the last key that lay elsewhere
    intptr_t other_stride                # its distance from the one of that kind before
    uint32_t others                      # how many of them there were since the last key of the run
    Guess guesses[GUESSES]               # by the turn at which they were made
    char bytes[GUESSES][GUESS_BYTES]     # canonical forms, likewise
    # The lookups for the last key that had any.
    Visit visits[VISITS]
    uint32_t n_visits
    bint is_complete                     # the key has changed since: the next lookup starts anew
    bint is_wide                         # not all of what they look at stays in a processor's cache

cdef inline bint goes_on(LookAhead *ahead, uintptr_t at) noexcept nogil:
    """Return True if a key is the next one of the run."""
    if at - ahead.key_at != <uintptr_t>ahead.stride:
        return False
    ahead.key_at = at
    ahead.others = 0
    ahead.turn += 1
    return True

cdef inline bint begins_run(LookAhead *ahead, uintptr_t at) noexcept nogil:
    """Take note of a key that is not the next one of the run; return whether another run is taken to begin with it.

    Ints of different sizes lie in runs of their own. So a key or two that lie elsewhere do not end the run, unless
    the second is as far from the first as keys of the run are: then the run goes on in another place.
    """
    cdef intptr_t stride = <intptr_t>(at - ahead.other_at)
    ahead.others += 1
    if (ahead.others > 1 and stride == ahead.stride) or (ahead.others > 2 and stride == ahead.other_stride):
        ahead.other_at, ahead.other_stride = ahead.key_at, ahead.stride
        ahead.key_at, ahead.stride, ahead.others = at, stride, 0
        ahead.turn += 1
        return True
    ahead.other_at, ahead.other_stride = at, stride
    return False

cdef inline bint is_wide(Table *table) noexcept nogil:
    return <uint64_t>table.lane.entries * table.layout.stride > NEAR_BYTES

cdef inline Visit *note_visit(LookAhead *ahead, Table *table, int reach) noexcept nogil:
    """Note that the current key's lookup is in this table; NULL if there are too many."""
    cdef uint32_t i
    if ahead.is_complete:
        ahead.is_complete = False
        ahead.is_wide = False
        ahead.n_visits = 0
    for i in range(ahead.n_visits):
        if ahead.visits[i].table == table:
            return &ahead.visits[i]
    if table == NULL or ahead.n_visits == VISITS:
        return NULL
    ahead.n_visits += 1
    # What lies behind an entry is not counted, so then it is taken to be much.
    ahead.is_wide |= reach != REACH_ENTRY or is_wide(table)
    ahead.visits[ahead.n_visits - 1].table = table
    ahead.visits[ahead.n_visits - 1].reach = reach
    return &ahead.visits[ahead.n_visits - 1]

cdef inline bint is_map_key(MapKey *noted, Table *entries, const CoreKey *key) noexcept nogil:
    if entries.layout.key_is_blob:
        return (key.length <= MAP_KEY_BYTES and noted.number == <int64_t>key.length
                and memcmp(noted.bytes, key.data, key.length) == 0)
    return noted.number == key.number

cdef inline void note_map_entry(Visit *visit, Table *entries, const CoreKey *key, uint32_t turn) noexcept nogil:
    """Note that a map's entry is looked up for the key of this turn."""
    cdef MapKey *last = &visit.map_keys[visit.last_map_key]
    visit.reach = REACH_MAP_ENTRY
    if visit.entries == entries and is_map_key(last, entries, key):
        last.comes_again |= last.turn != turn
        last.turn = turn
    else:
        note_other_map_key(visit, entries, key, turn)

cdef void note_other_map_key(Visit *visit, Table *entries, const CoreKey *key, uint32_t turn) noexcept nogil

cdef inline bint can_peek(uintptr_t at, uintptr_t near) noexcept nogil:
    """Return True if all that `peek_int` reads at an address is on the page of an object that is there."""
    return (at ^ near) < PAGE_OF_MEMORY and at % PAGE_OF_MEMORY <= PAGE_OF_MEMORY - PEEKED

cdef inline void note_part(LookAhead *ahead, Visit *visit, uintptr_t at) noexcept nogil:
    """Note the object that a map's integer key is; it is alive, so what is near it can be read now."""
    cdef PartGuess *part
    cdef intptr_t stride
    if not LOOKS_AHEAD or visit.part_at == at:
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

cdef inline void ask_for_second(Table *table, uint32_t group, uint32_t hash, int64_t key,
                                uint32_t namespace) noexcept nogil:
    """Ask for the second entry in a bucket, if the first one, which has arrived, is of another integer key."""
    cdef uint32_t *head = head_of(table, group, hash & table.hash_mask)
    cdef Entry *entry
    if head != NULL and head[0]:
        entry = entry_at(table.core, head[0])
        if entry.next and (entry.key != key or namespace_of(table, entry) != namespace):
            prefetch(entry_at(table.core, entry.next))

cdef inline void ask_for_bytes(Blob *blob, int64_t length) noexcept nogil:
    """Ask for the bytes of a key; they may lie on two cache lines."""
    prefetch(blob)
    prefetch(blob_data(blob) + length - 1)

cdef inline void ask_for_key(Table *table, uint32_t group, uint32_t key_hash, int64_t length) noexcept nogil:
    """Ask for the bytes of the first key in a bucket if it has the same hash, else for the second entry."""
    cdef uint32_t hash = key_hash & table.hash_mask
    cdef uint32_t *head = head_of(table, group, hash)
    cdef Entry *entry
    if head != NULL and head[0]:
        entry = entry_at(table.core, head[0])
        if blob_hash(entry)[0] == hash:
            ask_for_bytes(<Blob *>entry.key, length)
        elif entry.next:
            prefetch(entry_at(table.core, entry.next))

cdef inline void ask_for_second_key(Table *table, Guess *guess) noexcept nogil:
    """The same for the second key, which has arrived, if the first one has another hash."""
    cdef uint32_t hash = guess.hash & table.hash_mask
    cdef uint32_t *head = head_of(table, guess.group, hash)
    cdef Entry *entry
    if head != NULL and head[0]:
        entry = entry_at(table.core, head[0])
        if blob_hash(entry)[0] != hash and entry.next:
            entry = entry_at(table.core, entry.next)
            if blob_hash(entry)[0] == hash:
                ask_for_bytes(<Blob *>entry.key, guess.number)

cdef inline Guess *guess_of(LookAhead *ahead, int keys) noexcept nogil:
    """The guess for the key this many turns from now, made when it was BUCKETS_AHEAD; NULL if there is none."""
    cdef Guess *guess = &ahead.guesses[(ahead.turn - (BUCKETS_AHEAD - keys)) & (GUESSES - 1)]
    return guess if guess.at == ahead.key_at + keys * ahead.stride else NULL

cdef inline bint peek(LookAhead *ahead, Guess *guess) noexcept nogil:
    """Read the key that probably lies BUCKETS_AHEAD; False if nothing there looks like one."""
    cdef uintptr_t at = ahead.key_at + BUCKETS_AHEAD * ahead.stride
    if not can_peek(at, ahead.key_at):
        return peek_beyond(ahead, guess, at)
    guess.at = 0
    if not peek_int(at, &guess.number):
        return False
    guess.at = at
    return True

cdef bint peek_beyond(LookAhead *ahead, Guess *guess, uintptr_t at) noexcept nogil
cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil
