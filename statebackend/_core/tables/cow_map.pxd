"""The copy-on-write map: Flink's CopyOnWriteStateMap with entries in an arena.

    CowMap                     bucket pages                  entries (arena)
    +-----------+             +-----------+            +------+---------+-----+---------+
    | primary   |--pages----->| 4096 refs |----------->| next | version | key | payload |
    | secondary |--pages--+   +-----------+            +------+---------+-----+---------+
    | rehash at |         |   +-----------+               |
    +-----------+         +-->| 4096 refs |               v  the next entry of the bucket, 0 at the end
                              +-----------+

One map holds one key group of one state. A bucket is a ref of the first entry of its chain. While the
map grows, buckets below `rehash_index` have moved to the secondary table, which is twice as large; every
operation moves at least four more entries.

A map that has lost half of its entries becomes smaller, step by step, between operations (`shrink_maps`). The same
rehash moves its buckets to a secondary table that is smaller. Then its live entries move from the runs that it has,
which are `old` from then on, to new ones. An old run takes no new entry. When no slot of the old runs is in use, they
go.

Versions. `Core.state_version` counts snapshots, marks, and calls that tell which keys they touch. An entry carries the
version at which it was made or last written; a bucket page carries the version at which it was made. While a snapshot S
is needed:

    entry.version < S    the entry belongs to S as well: it is cloned before its link or payload changes,
                         together with the entries before it in its chain (`own_entry`)
    page.version < S     the page belongs to S as well: it is copied before a bucket in it changes
    map.seen_version < S S has not taken this map's page directory yet: that happens before the map
                         changes in any way (`see_snapshots`), or when S comes to read it

    and while a mark M is open:
    entry.version < M    the payload is appended to the journal before it changes

`journal_version` is greater than every needed snapshot's version, because `snapshot` begins a new journal segment
when marks are open. So a clone that is made without being written gets version `journal_version - 1`: new enough
for every snapshot, old enough for its payload to be journalled when it is written.

Objects that their reader may change have a second version, Flink's stateVersion: when the object became the live
map's own. A clone takes it over, because it shares the object; a read copies the object when it is older than the
newest needed snapshot or mark.

Invariants, verified by `check_map` (of 5, that slots add up and cover the entries):

 1. An entry is in the chain of the bucket that its hash selects, in the active table of that bucket.
 2. No two live entries have the same key and namespace.
 3. size = primary_size + secondary_size = number of entries in chains.
 4. Buckets below `rehash_index` are read from the secondary table only; buckets of the secondary table whose
    source has not moved yet are empty.
 5. used = slots in chains + slots held by journals and snapshots; `old_used` of them are in the first `n_old` runs.
    The rest of the map's runs is free (marked by version FREE_SLOT) or beyond `fresh`. Free slots, except in old
    runs, are kept in blocks: the first slot of a block names the next block and FREE_BLOCK slots more, in the
    first block `free_in_block`. So several can be asked for ahead.
 6. Threads of map states: prev and next agree, sequence numbers rise, anchor ends agree; an anchor says
    whose it is, and is empty when its key has been removed. Its hint names one of its entries.
 7. Chunks of a list hold as many elements as its head counts. Where elements expire, links lead from each chunk to the
    next newer one; the first live element is where the head says, and the head tells the oldest and the newest
    timestamp of live elements, and whether these are in order.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.memory.arena cimport (
    LIVE_ENTRIES, UNIT_SHIFT, ArenaCore, Blob, BlobHeap, address, blob_data, count)
from statebackend._core.memory.journal cimport Log, LogChunk, chunk_data, log_append
from statebackend._core.memory.platform cimport (
    add_i64, hash_bytes, hash_int, likely, prefetch, prefetch_write, unlikely)
from statebackend._core.tables.objects cimport Objects

cdef enum:
    MINIMUM_CAPACITY = 4
    MAXIMUM_CAPACITY = 1 << 30
    MIN_TRANSFERRED_PER_INCREMENTAL_REHASH = 4
    MAX_BUCKETS_PER_INCREMENTAL_REHASH = 32
    PAGE_SHIFT = 12                      # 4096 buckets, 16 KB
    PAGE_BUCKETS = 1 << 12
    FREE_SLOT = 0xFFFFFFFF
    FRESH_AHEAD = 8                      # units between the next fresh slot and the prefetch with it
    FREE_BLOCK = 4                       # free slots that the first one of a block names
    LAST_VERSION = 0xFFFFFF00

cdef enum ValueKind:
    VALUE_FIXED = 0                      # `value_width` bytes in the entry
    VALUE_BLOB = 1                       # Blob *
    VALUE_OBJECT = 2                     # PyObject *, a reference of the entry's own; see `objects.pxd`
    VALUE_LIST = 3                       # ListHead, or ExpiringHead if elements have timestamps
    VALUE_ANCHOR = 4                     # uint32 ref of the Anchor of a map state's key

# Who holds a retired slot, and when it goes. A slot retires when it leaves its chain: its key was removed, or a clone
# replaced it. Until it goes it counts as used, and keeps its key and its payload.
#
#   who holds it           why                                       where it goes from there
#   ---------------------  ----------------------------------------  ------------------------------------------------
#   Segment.log            a mark may be rolled back to              rollback: a removed slot back into its chain, a
#                                                                    replaced one to `carried`. release: to `dead`
#   Lane.own_journal       the same, of a worker of a batch call     at the end of the call: to the newest segment
#   Lane.undo              no mark is open, but the call may fail    it succeeds: to `dead`, or to `waiting` where a
#                                                                    snapshot needs most of them. It fails: as rollback
#   MapTable.clear_at,     the call may fail, with or without marks  it succeeds: to the newest segment, or to `dead`
#   its `removed`                                                    if no mark is open. It fails: as rollback
#   Journal.carried        an undo is not over, or older records     when it is over: to the newest segment, or to
#                          name the same slots                       `dead` if no mark is open
#   Journal.dead           unused, but yet to be freed   `drain`: free, or to the `retired` of the newest
#                                                                    snapshot that sees it
#   Journal.waiting        as `dead`, and a snapshot is there        when a snapshot ends: to `dead`
#   Lane.retired           a snapshot needs it; of a worker          at the end of the call: to Snapshot.retired
#   Snapshot.retired       the snapshot or an older one needs it     when it ends: to `garbage`
#   Core.garbage           an older snapshot, or no user              `drain`: as of `dead`
#
# Every log knows the newest snapshot that was there when its records were made (`LogChunk.until`). Newer ones never see
# what it names. A live entry that a shrinking map moves leaves a retired slot too, if a journal or a snapshot has it.
#
# Free is `slot_free`: it drops what the slot owns and gives the slot to the map's next insert or clone. Bucket pages
# that a copy has replaced go through the last three rows; the runs of a map that was emptied, or became smaller, begin
# at the last.

cdef enum RecordOp:
    # Trailers: op << 56 | table of the journal << 48 | key group << 32 | slot.
    RECORD_WRITE = 1                     # the payload as it was
    RECORD_INSERT = 2
    RECORD_REMOVE = 3                    # the slot stays allocated, the journal holds it
    RECORD_MOVED = 4                     # a slot that a clone replaced, and the clone's
    RECORD_COPIED = 5                    # as WRITE, but the present entry is a mere copy: not dirty
    RETIRED_SLOT = 6                     # in lists of memory to reclaim: table pointer, then trailer
    RETIRED_RUN = 7                      # a bucket page or a stretch of entries: its order in place of the group
    RECORD_BYTES = 8                     # bytes as they were, which lay in a blob of the entry's that has others now
    RECORD_REPLACED = 9                  # as MOVED, and the clone was written: the payload is in the replaced slot

cdef struct Layout:
    uint32_t stride                      # bytes from entry to entry, a multiple of 8
    uint32_t off_namespace               # 0: no namespace number in the entry
    uint32_t off_thread                  # 0: no thread
    uint32_t off_value_version           # 0: values are never shared with readers
    uint32_t off_payload                 # timestamp, where there is one, then value
    uint32_t payload_width
    uint32_t off_value
    uint32_t value_width
    uint32_t off_null                    # of map values that may be None: a byte that says so; 0: none. A blob is NULL
    uint8_t key_is_blob
    uint8_t has_timestamp
    uint8_t value_kind

cdef struct Entry:
    uint32_t next
    uint32_t version
    int64_t key                          # or Blob *, then its hash behind it

cdef struct Thread:
    # Links an entry of a map state into its key's entries, in insertion order. Only `sequence` belongs to
    # snapshots; prev and next describe the live map and are neither copied nor journalled.
    uint64_t sequence
    uint32_t prev
    uint32_t next

cdef struct Anchor:
    # The fixed point of one key's thread; the entry of the key holds its ref, which also is the namespace of
    # the threaded entries. It never moves while the key exists in the map, a journal or a snapshot.
    uint32_t first
    uint32_t last
    uint64_t next_sequence               # begins with its own stamp: no other entry ever had the same
    uint32_t refs
    uint32_t modifications
    # The key whose thread this is, in the form of its entry; the anchor holds its own reference to a blob.
    int64_t key
    uint32_t namespace
    uint32_t group
    # Where entries expire: a hint for `exists`, kept right by each clone or unlink of the entry. All entries before
    # this one have expired while the count of setbacks of the clock ends in these bits; 0: nothing is known. An expired
    # entry stays so until it is removed, as a put then appends another one; an undo that brings entries back forgets.
    uint32_t alive_from
    uint32_t setbacks

cdef struct PageRef:
    uint32_t ref                         # 0: a page of empty buckets
    uint32_t version

cdef struct BucketTable:
    uint32_t capacity                    # 0: no table
    uint32_t n_pages
    PageRef *pages                       # &single when there is one page
    PageRef single
    uint32_t size

cdef struct Directory:
    # A snapshot's view of one map: the pages at its moment. Covers all snapshots low..high.
    Directory *older                     # of the same map
    Directory *next                      # of the same snapshot
    CowMap *map
    uint32_t low
    uint32_t high
    uint32_t size
    uint32_t rehash_index
    uint32_t primary_capacity
    uint32_t secondary_capacity
    uint32_t primary_pages
    uint32_t secondary_pages
    # refs of the primary's pages, then of the secondary's, follow

cdef enum Shrinking:
    SHRINK_NOT = 0
    SHRINK_NOTED = 1                     # among the core's `sparse` maps
    SHRINK_BEGUN = 2                     # and `begin_shrinking` has looked at it

cdef struct CowMap:
    BucketTable primary
    BucketTable secondary
    uint32_t rehash_index
    uint32_t threshold
    uint32_t seen_version                # newest snapshot whose directory was taken
    uint32_t group
    uint32_t free_slot                   # first slot of the first block of freed slots
    uint32_t free_in_block               # slots that it names
    uint32_t fresh                       # next slot of the newest run that was never used
    uint32_t fresh_end
    uint32_t used
    uint64_t *runs                       # ref << 8 | order
    uint32_t n_runs
    uint32_t runs_capacity
    Directory *directories
    uint64_t modifications
    uint64_t run_bytes
    # How it becomes smaller.
    uint32_t slots                       # of the runs that are not old
    uint32_t sparse_below                # with fewer used slots it is too large; 0: it is small, or being shrunk
    uint32_t n_old                       # runs, the first ones, whose live entries move to the others
    uint32_t old_used
    uint64_t old_bytes                   # of those runs
    uint64_t *old_runs                   # the same, in the order of their refs
    uint32_t old_run                     # where that goes on: the run, and the slot, 0 for the run's first
    uint32_t old_slot
    uint32_t shrinking                   # SHRINK_NOT, or how far it has come
    CowMap *next_sparse                  # of the core's maps that are to be shrunk
    Table *table

cdef struct Segment:
    uint32_t version                     # first version whose changes it holds
    uint32_t joined                      # it was several: an entry may have more than one record in it
    Log log

cdef struct Journal:
    # The changes to up to two tables since the oldest mark, in the order of time.
    Segment *segments
    uint32_t n_segments
    uint32_t n_dropped                   # the first ones, whose logs are gone
    uint32_t capacity
    Table *tables[2]
    Log carried                          # MOVED records that an unfinished undo has set aside
    Log dead                             # records no rollback can reach, to be reclaimed
    Log waiting                          # as `dead`, of slots that a snapshot needs: not looked at before one ends
    Journal *next                        # of the backend
    Journal *next_filled                 # of those with something that a rollback or a snapshot may need
    Journal *next_dying                  # of those with something in `dead`
    uint32_t is_filled                   # it is among these
    uint32_t is_dying                    # likewise

cdef struct Snapshot:
    uint32_t version
    uint32_t released                    # may be set by any thread
    Snapshot *older
    Snapshot *newer
    Log retired                          # slots and pages that it needs, or may need
    Directory *directories
    Directory *last_directory

cdef struct Walk:
    # Over the live entries of a map, bucket by bucket; good while the map does not change.
    CowMap *map
    BucketTable *buckets                 # NULL: there is nothing more
    uint32_t index                       # the next bucket
    uint32_t slot                        # the next entry of the chain; 0: go on with the next bucket

cdef struct Moves:
    # While an undo runs: the slots that a clone has replaced, and by which; a hash table of pairs.
    uint32_t *pairs
    uint64_t capacity
    uint64_t n
    uint64_t absorbed                    # records of the undo's `carried` that it has taken note of
    uint32_t floor                       # of the oldest mark that is undone: its records name no entry that is older

cdef struct Core:
    # The part that all maps of a backend share.
    int64_t stamps                       # returned so far, by `new_stamp`
    ArenaCore *arena
    BlobHeap *blobs                      # by lane
    uint32_t state_version
    uint32_t is_touching                 # a call looks at versions to know which entries it has written
    uint32_t highest_required_snapshot_version
    uint32_t journal_version             # 0: no mark is open
    Snapshot *newest
    Snapshot *oldest
    Snapshot *holder                     # what `holder_of` found last, for this version; until the snapshots change
    uint32_t holder_until
    uint32_t directory_lock              # guards `directories` of all maps
    Log garbage
    Directory *dead_directories
    Table *dead_lists                    # tables with chunks of dropped lists that await reclaiming
    Journal *journals
    Journal *filled_journals             # with anything in segments, `carried` or `waiting`; some may be empty by now
    Journal *dying_journals              # with anything in `dead`
    uint32_t iterators                   # over tables: as long as there are any, no map shrinks
    uint32_t is_loading                  # nor while changes are not journalled
    CowMap *sparse                       # maps that are to be shrunk; `sparse_last` the last of them
    CowMap *sparse_last
    uint32_t keeps_maps                  # the backend ends: no map is shrunk any more
    uint32_t pending                     # `drain` has something to do; set by any thread
    uint32_t any_released                # a snapshot was released, so `drain` looks at all; set before `pending`
    Objects objects
    Moves moves
    uint64_t undone                      # counts undos: after one, old entries may be back
    uint64_t seed
    Table *tables                        # all of the backend
    int64_t *namespace_refs              # by number: entries that carry it, and pins
    uint32_t namespace_capacity
    uint32_t busy                        # nesting of `busy_thread`'s calls, not to be disturbed; see `wait_for_others`
    unsigned long busy_thread

cdef struct Lane:
    # The logs of one thread of a batch kernel; calls outside kernels use lane 0 of the table.
    Core *core
    BlobHeap *blobs                      # that it allocates from
    Log *override                        # where records go while an undo runs
    Log undo                             # inside a batch call: records that no journal takes
    Log own_journal                      # of lanes above 0: joins the newest segment after the call
    Log retired                          # of lanes above 0: joins the newest snapshot's list after the call
    uint32_t keep_undo
    uint32_t is_worker
    int64_t entries                      # inserted minus removed, not yet added to the table
    uint64_t copied_entries              # clones made for snapshots
    uint64_t copied_pages
    uint64_t moved_entries               # by incremental rehash
    uint64_t relocated_entries           # to other slots, by maps that became smaller

cdef struct Table:
    Core *core
    Layout layout
    CowMap **maps
    uint32_t n_maps
    uint32_t first_group
    uint32_t initial_capacity
    uint32_t hash_mask                   # all ones, but in tests that force collisions
    uint64_t seed
    Journal *journal
    uint32_t journal_index
    Table *anchors                       # of threaded entries: the table of their keys
    uint32_t element_width               # of lists: bytes per element, timestamp included
    uint32_t element_value_width
    uint8_t element_kind                 # ValueKind of list elements
    uint8_t element_has_timestamp
    Lane lane
    Table *next                          # of the backend
    ListChunk *dead_chunks               # of lists that were dropped, linked by `next_dead`
    Table *next_dead_lists

cdef struct CoreKey:
    # A key, split and hashed, as every operation on a table needs it.
    int64_t number
    const char *data
    uint64_t length
    uint32_t namespace
    uint32_t hash
    uint32_t group

cdef struct Insertion:
    # An entry that is about to be linked in: every step that could fail is done.
    uint32_t slot
    uint32_t *link
    Blob *blob
    Log *log

cdef struct ListHead:
    ListChunk *tail
    uint64_t length                      # of lists that expire, with the dead elements at the front
    uint32_t tail_used
    uint32_t stamp                       # of this list: with the length it tells whether the list has changed

cdef struct ExpiringHead:
    # The head of a list whose elements expire. Expired elements at the front are dead: it stays in the chunks until a
    # rewrite, but no reader sees it. The rest is called live, even if some of it has expired since.
    ListHead list
    uint64_t dead                        # elements before the first live one
    ListChunk *first                     # the chunk of the first live element, and its place there
    uint32_t first_index
    uint32_t is_ordered                  # no live element is older than one before it
    int64_t oldest                       # timestamp of a live element
    int64_t newest

cdef struct ListChunk:
    ListChunk *prev
    uint32_t refs
    uint32_t prev_used                   # elements of `prev` that belong to this list
    uint32_t used                        # elements written, by whichever list reached furthest
    uint32_t capacity
    # the link of `next_chunk_of` follows in lists that expire, then the elements

cdef inline ListChunk **next_dead(ListChunk *chunk) noexcept nogil:
    """The link of an unused chunk, in place of `refs` and `prev_used`: it takes no more memory."""
    return <ListChunk **>&chunk.refs

cdef inline ListChunk **next_chunk_of(ListChunk *chunk) noexcept nogil:
    """The newer chunk, of lists that expire. Right for every chunk of a live list but its tail, wrong elsewhere.

    An append sets it when it begins a new chunk behind the tail of a live list. Another list that has both chunks as
    they were before is older or younger. An older one would have to lose elements at its end to become a list with
    this tail. Only an undo does that, and it forgets everything younger than the restored state. A list that is
    replaced or rewritten gets its own chunks, and no other key ever has them. So the link that an append sets again
    was only of use to lists that are frozen: snapshots' lists, which are read from the tail back.
    """
    return <ListChunk **>(<char *>chunk + sizeof(ListChunk))

cdef inline uint64_t chunk_header(Table *table) noexcept nogil:
    """The bytes of a chunk before its elements."""
    return sizeof(ListChunk) + 8 * <uint64_t>table.element_has_timestamp

cdef inline char *elements_of(Table *table, ListChunk *chunk) noexcept nogil:
    return <char *>chunk + chunk_header(table)

cdef inline int64_t element_timestamp(const char *element) noexcept nogil:
    """The timestamp that an element begins with. Elements are at any address."""
    cdef int64_t timestamp
    memcpy(&timestamp, element, sizeof(timestamp))
    return timestamp

cdef inline void stamp_element(char *element, int64_t timestamp) noexcept nogil:
    memcpy(element, &timestamp, sizeof(timestamp))

cdef inline uint64_t chunk_bytes(Table *table, ListChunk *chunk) noexcept nogil:
    return chunk_header(table) + <uint64_t>chunk.capacity * table.element_width

cdef inline uint64_t dead_elements(Table *table, ListHead *head) noexcept nogil:
    """The elements at the front of a list that no reader sees."""
    return (<ExpiringHead *>head).dead if table.element_has_timestamp else 0

cdef inline uint64_t live_elements(Table *table, ListHead *head) noexcept nogil:
    return head.length - dead_elements(table, head)

# --- entries ---------------------------------------------------------------------------------------

cdef inline Entry *entry_at(Core *core, uint32_t slot) noexcept nogil:
    return <Entry *>address(core.arena, slot)

cdef inline int64_t new_stamp(Core *core) noexcept nogil:
    """A number that no list or map of the backend has had before; the numbers repeat after 2^32 others."""
    return add_i64(&core.stamps, 1)

cdef inline uint32_t *blob_hash(Entry *entry) noexcept nogil:
    return <uint32_t *>(<char *>entry + 16)

cdef inline uint32_t namespace_of(Table *table, Entry *entry) noexcept nogil:
    if table.layout.off_namespace == 0:
        return 0
    return (<uint32_t *>(<char *>entry + table.layout.off_namespace))[0]

cdef inline void count_namespace(Table *table, uint32_t ns, int64_t change) noexcept nogil:
    # Below an anchor the field holds the anchor's number, which is not a namespace.
    if table.layout.off_namespace != 0 and table.anchors == NULL and ns < table.core.namespace_capacity:
        add_i64(&table.core.namespace_refs[ns], change)

cdef inline Thread *thread_of(Table *table, Entry *entry) noexcept nogil:
    return <Thread *>(<char *>entry + table.layout.off_thread)

cdef inline uint32_t value_version(Table *table, Entry *entry) noexcept nogil:
    """The version at which an entry's object became its own; 0 where values are never shared."""
    if table.layout.off_value_version == 0:
        return 0
    return (<uint32_t *>(<char *>entry + table.layout.off_value_version))[0]

cdef inline void set_value_version(Table *table, Entry *entry, uint32_t version) noexcept nogil:
    if table.layout.off_value_version:
        (<uint32_t *>(<char *>entry + table.layout.off_value_version))[0] = version

cdef inline char *payload_of(Table *table, Entry *entry) noexcept nogil:
    return <char *>entry + table.layout.off_payload

cdef inline char *value_of(Table *table, Entry *entry) noexcept nogil:
    return <char *>entry + table.layout.off_value

cdef inline Anchor *head_anchor(Table *heads, uint32_t slot) noexcept nogil:
    """The anchor that the entry of a map state's key holds."""
    return <Anchor *>address(heads.core.arena, (<uint32_t *>value_of(heads, entry_at(heads.core, slot)))[0])

cdef inline uint32_t hash_int_key(Table *table, int64_t key, uint32_t ns) noexcept nogil:
    return hash_int(key, ns, table.seed) & table.hash_mask

cdef inline uint32_t hash_blob_key(Table *table, const char *data, uint64_t length, uint32_t ns) noexcept nogil:
    return hash_bytes(<const unsigned char *>data, length, table.seed + ns) & table.hash_mask

cdef inline uint32_t hash_key(Table *table, const CoreKey *key, uint32_t ns) noexcept nogil:
    if table.layout.key_is_blob:
        return hash_blob_key(table, key.data, key.length, ns)
    return hash_int_key(table, key.number, ns)

cdef inline uint32_t hash_stored(Table *table, int64_t key, uint32_t ns) noexcept nogil:
    """`hash_key` for a key as entries and anchors hold it."""
    if table.layout.key_is_blob:
        return hash_blob_key(table, blob_data(<Blob *>key), (<Blob *>key).length, ns)
    return hash_int_key(table, key, ns)

cdef inline uint32_t hash_of(Table *table, Entry *entry) noexcept nogil:
    if table.layout.key_is_blob:
        return blob_hash(entry)[0]
    return hash_int_key(table, entry.key, namespace_of(table, entry))

# --- buckets ---------------------------------------------------------------------------------------

cdef inline BucketTable *active_table(CowMap *map, uint32_t hash) noexcept nogil:
    """The table that holds the bucket of `hash` now: Flink's selectActiveTable."""
    if likely((hash & (map.primary.capacity - 1)) >= map.rehash_index):
        return &map.primary
    return &map.secondary

cdef inline uint32_t *bucket(Core *core, BucketTable *table, uint32_t index) noexcept nogil:
    """The bucket; NULL if its page was never needed."""
    cdef uint32_t ref = table.pages[index >> PAGE_SHIFT].ref
    if ref == 0:
        return NULL
    return (<uint32_t *>address(core.arena, ref)) + (index & (PAGE_BUCKETS - 1))

cdef inline uint32_t map_size(CowMap *map) noexcept nogil:
    return map.primary.size + map.secondary.size

cdef inline void begin_walk(CowMap *map, Walk *walk) noexcept nogil:
    """Begin a walk over a map, which may be NULL."""
    walk.map = map
    walk.buckets = NULL
    walk.slot = 0
    if map != NULL and map_size(map) != 0:
        walk.buckets = &map.primary
        walk.index = map.rehash_index    # buckets below it have moved, their remains are stale

cdef inline uint32_t next_entry(Core *core, Walk *walk) noexcept nogil:
    """The next live entry, 0 after the last."""
    cdef uint32_t slot = walk.slot
    cdef uint32_t *head
    while slot == 0:
        if walk.buckets == NULL:
            return 0
        if walk.index == walk.buckets.capacity:
            walk.buckets = &walk.map.secondary if walk.buckets == &walk.map.primary else NULL
            walk.index = 0
            continue
        head = bucket(core, walk.buckets, walk.index)
        walk.index += 1
        slot = head[0] if head != NULL else 0
    walk.slot = entry_at(core, slot).next
    return slot

cdef inline uint32_t chain_head(Core *core, CowMap *map, uint32_t hash) noexcept nogil:
    cdef BucketTable *table = active_table(map, hash)
    cdef uint32_t *where = bucket(core, table, hash & (table.capacity - 1))
    return where[0] if where != NULL else 0

cdef inline uint32_t find_int(Table *table, CowMap *map, int64_t key, uint32_t ns, uint32_t hash) noexcept nogil:
    """The live entry of an integer key, 0 if there is none. Changes nothing."""
    cdef Core *core = table.core
    cdef uint32_t slot = chain_head(core, map, hash), off = table.layout.off_namespace
    cdef Entry *entry
    while slot:
        entry = entry_at(core, slot)
        if entry.key == key and (off == 0 or (<uint32_t *>(<char *>entry + off))[0] == ns):
            return slot
        slot = entry.next
    return 0

cdef uint32_t find_blob(Table *table, CowMap *map, const char *data, uint64_t length,
                        uint32_t ns, uint32_t hash) noexcept nogil

cdef inline uint32_t find(Table *table, CowMap *map, const CoreKey *key) noexcept nogil:
    """The live entry of a key, 0 if there is none. Changes nothing."""
    if table.layout.key_is_blob:
        return find_blob(table, map, key.data, key.length, key.namespace, key.hash)
    return find_int(table, map, key.number, key.namespace, key.hash)

cdef inline uint32_t find_stored(Table *table, CowMap *map, int64_t key, uint32_t ns, uint32_t hash) noexcept nogil:
    """`find` for a key as entries and anchors hold it."""
    cdef Blob *blob
    if table.layout.key_is_blob:
        blob = <Blob *>key
        return find_blob(table, map, blob_data(blob), blob.length, ns, hash)
    return find_int(table, map, key, ns, hash)

cdef inline bint is_live(Table *table, CowMap *map, uint32_t slot) noexcept nogil:
    """Return True if a slot is the one that a look-up of its key finds: not free, retired or held by a journal."""
    cdef Entry *entry = entry_at(table.core, slot)
    if entry.version == FREE_SLOT:
        return False
    return find_stored(table, map, entry.key, namespace_of(table, entry), hash_of(table, entry)) == slot

# --- operations --------------------------------------------------------------------------------------
# Those that return bint or a slot return False or 0 if memory ran out; then nothing has changed.

cdef CowMap *map_new(Table *table, uint32_t group) noexcept nogil
cdef void map_clear_storage(Table *table, CowMap *map) noexcept nogil
cdef void presize(Table *table, CowMap *map, uint64_t entries) noexcept nogil
cdef uint32_t capacity_for(Table *table, uint64_t entries) noexcept nogil
cdef bint see_snapshots(Core *core, CowMap *map) noexcept nogil
cdef void rehash_step(Lane *lane, Table *table, CowMap *map) noexcept nogil
cdef void rehash_some(Lane *lane, Table *table, CowMap *map, uint32_t operations) noexcept nogil
cdef void begin_rehash(Core *core, CowMap *map, uint32_t capacity) noexcept nogil
cdef uint32_t insert(Lane *lane, Table *table, CowMap *map, int64_t key, const char *data, uint64_t length,
                     uint32_t ns, uint32_t hash) noexcept nogil
cdef bint remove(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash) noexcept nogil
cdef bint prepare_insert(Lane *lane, Table *table, CowMap *map, const char *data, uint64_t length,
                         uint32_t hash, Insertion *ready) noexcept nogil
cdef void abandon_insert(Table *table, CowMap *map, Insertion *ready) noexcept nogil
cdef uint32_t finish_insert(Lane *lane, Table *table, CowMap *map, int64_t key, uint32_t ns, uint32_t hash,
                            Insertion *ready) noexcept nogil
cdef bint reserve_records(Lane *lane, Table *table) noexcept nogil
cdef bint prepare_remove(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash) noexcept nogil
cdef uint32_t own_entry(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash) noexcept nogil
cdef bint keep_payload(Lane *lane, Table *table, CowMap *map, uint32_t slot, RecordOp op,
                       bint *kept) noexcept nogil
cdef bint keep_bytes(Lane *lane, Table *table, CowMap *map, uint32_t slot) noexcept nogil
cdef void payload_ref(Table *table, char *payload) noexcept nogil
cdef void payload_drop(Table *table, char *payload) noexcept nogil
cdef void slot_free(Table *table, CowMap *map, uint32_t slot) noexcept nogil
cdef uint32_t anchor_new(Lane *lane) noexcept nogil
cdef void name_anchor(Table *table, CowMap *map, uint32_t head_slot, uint32_t ref) noexcept nogil
cdef void drop_anchor(Table *table, uint32_t ref) noexcept nogil
cdef void append_thread(Table *table, uint32_t slot) noexcept nogil
cdef void end_snapshot(Core *core, Snapshot *snapshot) noexcept nogil
cdef void drop_list(Table *table, ListChunk *tail) noexcept nogil
cdef bint segment_for_writing(Core *core, Journal *journal, Log **log) noexcept nogil
cdef void forget_empty_journals(Core *core) noexcept nogil
cdef object key_object(Table *table, Entry *entry)
cdef void forget_moves(Core *core) noexcept nogil
cdef void drain(Core *core, int64_t budget) noexcept nogil
cdef void wait_for_others(Core *core) noexcept
cdef bint undo_log(Journal *journal, Log *log, uint64_t down_to, Log *carried) noexcept nogil
cdef void drop_written(Core *core, Journal *journal, Log *log) noexcept nogil
cdef void reclaim_log(Core *core, Journal *journal, Log *log, int64_t *budget) noexcept nogil

cdef inline uint64_t trailer(int op, Table *table, uint32_t group, uint32_t slot) noexcept nogil:
    return (<uint64_t>op << 56) | (<uint64_t>table.journal_index << 48) | (<uint64_t>group << 32) | slot

cdef struct BytesEnd:
    # The end of RECORD_BYTES. Before it are the timestamp, where there is one, and the bytes, up to a multiple of 8.
    uint32_t length
    uint32_t width                       # of the whole record
    uint64_t trailer

cdef inline uint32_t record_width(Table *table, const char *end) noexcept nogil:
    """Bytes of the record of a journal that ends there, its trailer included."""
    cdef int op = <int>((<const uint64_t *>(end - 8))[0] >> 56)
    if op == RECORD_BYTES:
        return (<const BytesEnd *>end - 1).width
    if op == RECORD_WRITE or op == RECORD_COPIED:
        return 8 + ((table.layout.payload_width + 7) & ~7u)
    return 16 if op == RECORD_MOVED or op == RECORD_REPLACED else 8

cdef struct RecordCursor:
    # A place in the records of a journal. Valid while none is appended and none taken away.
    Journal *journal
    uint32_t version
    uint32_t segment                     # the segment that the place is in
    LogChunk *chunk                      # NULL before the first record and after the last
    uint32_t at                          # bytes of the chunk's records that are still to come
    bint moves                           # a record that was passed says that an entry of the table has moved
    # The record that `next_change` has come to.
    int op
    uint32_t group
    uint32_t slot                        # still holds its key, also if a clone replaced it or it was removed
    char *payload                        # as it was; of RECORD_WRITE only

cdef inline void begin_records(Journal *journal, uint32_t version, RecordCursor *cursor) noexcept nogil:
    """Begin before the newest of the records that were made since a version."""
    cursor.journal = journal
    cursor.version = version
    cursor.segment = journal.n_segments
    cursor.chunk = NULL
    cursor.at = 0
    cursor.moves = False

cdef inline bint next_chunk(RecordCursor *cursor) noexcept nogil:
    """Go to the next older chunk that has records; False after the oldest."""
    while cursor.at == 0:
        if cursor.chunk != NULL:
            cursor.chunk = cursor.chunk.prev
        elif cursor.segment == 0 or cursor.journal.segments[cursor.segment - 1].version < cursor.version:
            return False
        else:
            cursor.segment -= 1
            cursor.chunk = cursor.journal.segments[cursor.segment].log.last
        if cursor.chunk != NULL:
            cursor.at = cursor.chunk.used
    return True

cdef inline bint next_change(RecordCursor *cursor, Table *table) noexcept nogil:
    """Go to the next older record of a change to a table, past entries that merely moved; False after the oldest."""
    cdef uint64_t last
    cdef Table *owner
    while cursor.at != 0 or next_chunk(cursor):
        last = (<uint64_t *>(chunk_data(cursor.chunk) + cursor.at - 8))[0]
        cursor.op = <int>(last >> 56)
        owner = cursor.journal.tables[(last >> 48) & 0xFF]
        cursor.at -= record_width(owner, chunk_data(cursor.chunk) + cursor.at)
        if owner == table and cursor.op == RECORD_MOVED:
            cursor.moves = True
        elif owner == table and cursor.op != RECORD_COPIED:
            cursor.group = <uint32_t>(last >> 32) & 0xFFFF
            cursor.slot = <uint32_t>last
            cursor.payload = chunk_data(cursor.chunk) + cursor.at
            return True
    return False

cdef inline uint64_t count_records(Journal *journal, uint32_t version) noexcept nogil:
    """The number of records since a version, also of entries that merely moved. O(segments)."""
    cdef uint32_t i = journal.n_segments
    cdef uint64_t n = 0
    while i > 0 and journal.segments[i - 1].version >= version:
        i -= 1
        n += journal.segments[i].log.records
    return n

cdef inline bint record_log(Lane *lane, Table *table, Log **log) noexcept nogil:
    """Choose the log for records of inserts, removals and moves; `log` is NULL if they are not needed."""
    log[0] = NULL
    if lane.override != NULL:
        log[0] = lane.override
    elif lane.core.journal_version:
        if lane.is_worker:
            log[0] = &lane.own_journal
        else:
            return segment_for_writing(lane.core, table.journal, log)
    elif lane.keep_undo:
        log[0] = &lane.undo
    return True

cdef inline bint is_journal_empty(const Journal *journal) noexcept nogil:
    """Return True if a journal has nothing, apart from dead records."""
    return journal.n_segments == 0 and journal.carried.last == NULL and journal.waiting.last == NULL

cdef inline void note_filled(Core *core, Journal *journal) noexcept nogil:
    """Note a journal that is about to get something: only what is noted is looked at again."""
    if not journal.is_filled:
        journal.is_filled = True
        journal.next_filled = core.filled_journals
        core.filled_journals = journal

cdef inline void let_die(Core *core, Journal *journal, Log *log) noexcept nogil:
    """Leave the records of a log, which no rollback can reach any more, to `drain`."""
    if log.last == NULL:
        return
    log_append(core.arena, &journal.dead, log)
    if not journal.is_dying:
        journal.is_dying = True
        journal.next_dying = core.dying_journals
        core.dying_journals = journal

cdef inline uint32_t unwritten_version(Core *core) noexcept nogil:
    # A call that wants its touched keys finds them by their version. So a mere copy gets an older one.
    return core.journal_version - 1 if core.journal_version else core.state_version - core.is_touching

cdef bint is_old(CowMap *map, uint32_t slot) noexcept nogil
cdef bint add_run(Table *table, CowMap *map) noexcept nogil

cdef inline uint32_t *free_refs(Entry *entry) noexcept nogil:
    return <uint32_t *>&entry.key

cdef inline void open_free_block(Core *core, CowMap *map) noexcept nogil:
    """Begin the next block of free slots. They lie anywhere, so prefetch them and the block after it."""
    cdef Entry *block = entry_at(core, map.free_slot)
    cdef int i
    map.free_in_block = FREE_BLOCK
    for i in range(FREE_BLOCK):
        prefetch_write(entry_at(core, free_refs(block)[i]))
    if block.next:
        prefetch(entry_at(core, block.next))

cdef inline uint32_t slot_alloc(Table *table, CowMap *map) noexcept nogil:
    cdef uint32_t slot = map.free_slot
    if slot:
        if map.free_in_block:
            map.free_in_block -= 1
            slot = free_refs(entry_at(table.core, slot))[map.free_in_block]
        else:
            map.free_slot = entry_at(table.core, slot).next
            if map.free_slot:
                open_free_block(table.core, map)
    else:
        if unlikely(map.fresh == map.fresh_end):
            if not add_run(table, map):
                return 0
        slot = map.fresh
        map.fresh += table.layout.stride >> UNIT_SHIFT
        if map.fresh + FRESH_AHEAD < map.fresh_end:
            prefetch_write(entry_at(table.core, map.fresh + FRESH_AHEAD))
    map.used += 1
    count(table.core.arena.budget.probe, LIVE_ENTRIES, 1)
    return slot

cdef inline bint before_operation(Lane *lane, Table *table, CowMap *map) noexcept nogil:
    """Begin an operation on a map: take its directory for new snapshots, move a few entries."""
    if unlikely(map.seen_version < lane.core.highest_required_snapshot_version):
        if not see_snapshots(lane.core, map):
            return False
    if unlikely(map.secondary.capacity != 0):
        rehash_step(lane, table, map)
    return True

cdef inline uint32_t slot_for_write(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash,
                                    bint *kept) noexcept nogil:
    """Make a live entry writable: clone it if a snapshot has it, journal it if a mark needs it.

    `kept` is set if a journal now owns the old payload and its references: the writer must not drop it. 0 if memory
    ran out.
    """
    cdef Core *core = lane.core
    cdef Entry *entry = entry_at(core, slot)
    kept[0] = False
    if unlikely(entry.version < core.highest_required_snapshot_version):
        slot = own_entry(lane, table, map, slot, hash)
        if unlikely(slot == 0):
            return 0
        entry = entry_at(core, slot)
    if entry.version < core.journal_version or lane.keep_undo:
        if unlikely(not keep_payload(lane, table, map, slot, RECORD_WRITE, kept)):
            return 0
    entry.version = core.state_version
    set_value_version(table, entry, core.state_version)
    return slot

cdef inline uint32_t slots_of_run(Table *table, uint64_t run, uint32_t *end) noexcept nogil:
    """The first slot of a run of entries, in the form of `CowMap.runs`; `end` is the slot behind the last."""
    cdef uint32_t slot = <uint32_t>(run >> 8)
    cdef uint32_t slots = <uint32_t>((<uint64_t>1 << (run & 0xFF)) // table.layout.stride)
    end[0] = slot + slots * (table.layout.stride >> UNIT_SHIFT)
    return slot

cdef inline uint32_t first_of_run(Table *table, CowMap *map, uint64_t run, uint32_t *end) noexcept nogil:
    """The first slot of a run of entries; `end` is the slot behind the last that was ever used."""
    cdef uint32_t slot = slots_of_run(table, map.runs[run], end)
    if map.fresh_end == end[0]:
        end[0] = map.fresh
    return slot
