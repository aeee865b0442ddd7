"""Prefetches memory that the next keys will need, in a run of keys that is known: `KeyedStateBackend.each`, a row loop.

Each key is followed one step at a time, so that each step finds what the one before has prefetched:

    BUCKETS_AHEAD keys before its turn    its bucket is asked for
    ENTRIES_AHEAD                         the first entry in the bucket
    CHAINS_AHEAD                          the second one, if the first is of another key
    VALUES_AHEAD                          what the entry refers to: bytes, a list's last chunk, a bucket of map entries
    PARTS_AHEAD                           what is behind that: an entry of the map, the chunk before the last
    RESTS_AHEAD                           and one more: the second entry in that bucket, the next chunk

Keys that become bytes have the bytes of the key in the place of the second entry and the value: CHAINS_AHEAD, the bytes
of the first entry in the bucket are asked for if its hash is the same, else the second entry; VALUES_AHEAD, the bytes
of that. The chain behind an entry is followed by its hash alone. Hashes that were made ahead are used if the key has
the expected bytes when it is set.

This happens in the tables in which the last key was looked up. For a map, the last four different map keys are
expected that have come more than once lately: maps mostly have the same few keys. A key without a map will
have an anchor whose place is known, so that the bucket is known in which its first entry will come.

While the entries of all tables that a key was looked up in fit in a processor's cache, nothing of this happens. For a
key outside of a run, only its own buckets are asked for.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp

from statebackend._core.memory.arena cimport Blob, blob_data
from statebackend._core.tables.cow_map cimport (
    BucketTable, CoreKey, CowMap, Entry, Table, active_table, blob_hash, bucket, entry_at, namespace_of)
from statebackend._core.memory.platform cimport prefetch

cdef enum:
    BUCKETS_AHEAD = 12
    ENTRIES_AHEAD = 8
    CHAINS_AHEAD = 6
    VALUES_AHEAD = 5
    PARTS_AHEAD = 3
    RESTS_AHEAD = 1
    COMING_BYTES = 64                    # the longest canonical form that is followed, of keys that become bytes
    COMING = 16                          # a power of two, more than BUCKETS_AHEAD
    PARTS = 8                            # the same, more than VALUES_AHEAD + 1
    MAP_KEYS = 4                         # different map keys that may be expected at a time
    MAP_KEY_BYTES = 32                   # the longest of those that are bytes
    MAP_KEY_TURNS = 32                   # one that has not come for so many turns is not expected
    LINES = 4                            # of a cache, in which the first entries of a map mostly lie
    LINE_BYTES = 64
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

cdef struct TurnEntries:
    uint32_t turn                        # in which it is expected; of lists: one of several chunks
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
    TurnEntries parts[PARTS]             # by their turns

cdef struct Coming:
    uint32_t turn                        # in which the key will be current; 0: none is known
    int64_t number                       # of keys that become bytes: how many
    uint32_t group
    uint32_t hash
    uint32_t namespace                   # with which that was made

cdef struct LookAhead:
    uint32_t turn                        # of the current key of the run
    bint in_run                          # the current key is one of a run
    Coming coming[COMING]                # by their turns
    char bytes[COMING][COMING_BYTES]     # canonical forms, likewise
    # The lookups for the last key that had any.
    Visit visits[VISITS]
    uint32_t n_visits
    bint is_complete                     # the key has changed since: the next lookup starts again
    bint is_wide                         # not all entries that they visit stay in a processor's cache

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

cdef inline bint is_expected(MapKey *key, uint32_t turn) noexcept nogil:
    """Return True if a map key has come more than once, and lately."""
    return key.comes_again and turn - key.turn < MAP_KEY_TURNS

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

cdef inline void ask_for_slot(Table *table, uint32_t slot) noexcept nogil:
    """Ask for an entry; its value, or its namespace already, may be on the next cache line."""
    cdef char *entry = <char *>entry_at(table.core, slot)
    prefetch(entry)
    prefetch(entry + table.layout.stride - 1)

cdef inline void ask_for_entry(Table *table, uint32_t group, uint32_t hash) noexcept nogil:
    cdef uint32_t *head = head_of(table, group, hash & table.hash_mask)
    if head != NULL and head[0]:
        ask_for_slot(table, head[0])

cdef inline void ask_for_second(Table *table, uint32_t group, uint32_t hash, int64_t key,
                                uint32_t namespace) noexcept nogil:
    """Ask for the second entry in a bucket, if the first one, which has arrived, is of another integer key."""
    cdef uint32_t *head = head_of(table, group, hash & table.hash_mask)
    cdef Entry *entry
    if head != NULL and head[0]:
        entry = entry_at(table.core, head[0])
        if entry.next and (entry.key != key or namespace_of(table, entry) != namespace):
            ask_for_slot(table, entry.next)

cdef inline void ask_for_bytes(Blob *blob, int64_t length) noexcept nogil:
    """Ask for the bytes of a key; they may be on two cache lines."""
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
            ask_for_slot(table, entry.next)

cdef inline void ask_for_second_key(Table *table, Coming *key) noexcept nogil:
    """The same for the second key, which has arrived, if the first one has another hash."""
    cdef uint32_t hash = key.hash & table.hash_mask
    cdef uint32_t *head = head_of(table, key.group, hash)
    cdef Entry *entry
    if head != NULL and head[0]:
        entry = entry_at(table.core, head[0])
        if blob_hash(entry)[0] != hash and entry.next:
            entry = entry_at(table.core, entry.next)
            if blob_hash(entry)[0] == hash:
                ask_for_bytes(<Blob *>entry.key, key.number)

cdef inline Coming *coming_in(LookAhead *ahead, int keys) noexcept nogil:
    """The key this many turns from now; NULL if it is not known."""
    cdef Coming *key = &ahead.coming[(ahead.turn + keys) & (COMING - 1)]
    return key if key.turn == ahead.turn + keys else NULL

cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil
