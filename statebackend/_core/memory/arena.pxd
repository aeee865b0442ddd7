"""Memory of a backend: 2 MB extents, a buddy system of runs in them, and blobs for variable-length data.

    extent   2 MB of zeroed memory, aligned to 2 MB so that one huge page can hold it
    run      a power of two of bytes (256 B to 2 MB), aligned to its own size: pages of buckets, stretches of
             entries, chunks of journals, slabs of blobs
    ref      a 32-bit number for an 8-byte unit in an extent; 0 is NIL. Entries and bucket pages are named by
             refs, which halves the size of every link; one arena reaches 32 GB.
    blob     a counted byte string, cut from slabs of its size class

Runs come and go under a spin lock, because the threads of a batch kernel share the arena. Each thread has its own
heap of blobs. A blob goes back to the slab that it is from, from any thread. The system gives and takes
extents in the middle of operations, so this happens without Python, in which finalisers and signal handlers would run.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

from statebackend._core.memory.extents cimport EXTENT_BYTES, Spares
from statebackend._core.memory.platform cimport add_i64, copy_bytes

cdef enum:
    UNIT_SHIFT = 3                       # refs count units of 8 bytes
    EXTENT_UNITS_SHIFT = 18
    EXTENT_UNITS_MASK = (1 << 18) - 1
    MAX_EXTENTS = 1 << 14
    MIN_ORDER = 8
    MAX_ORDER = 21
    SLAB_ORDER = 15
    SLAB_BYTES = 1 << 15
    LARGEST_CLASS = 4096
    SIZE_CLASSES = 39                    # of blocks in slabs
    MAX_LANES = 16                       # threads of a batch kernel, and heaps of blobs

cdef enum Counter:
    """Counters of live objects, process-wide; the checked build counts, and the tests expect zero after each test."""
    LIVE_EXTENTS = 0
    LIVE_RUNS = 1
    LIVE_BLOBS = 2
    LIVE_ENTRIES = 3
    LIVE_SNAPSHOTS = 4
    LIVE_DIRECTORIES = 5
    LIVE_BLOCKS = 6
    LIVE_OBJECTS = 7                     # references to objects of users

cdef struct Probe:
    # One per process. Counts allocations down; from the one that reaches zero up to `fail_until`, they fail.
    int64_t fail_in
    int64_t fail_until
    uint32_t most_extents                # of one arena; 0: as many as refs can name
    int64_t counters[8]

cdef enum Refusal:
    REFUSED_BY_SYSTEM = 0
    REFUSED_BY_LIMIT = 1                 # `max_bytes`
    REFUSED_BY_REFS = 2                  # the arena has as many extents as refs can name

cdef struct ArenaCore
cdef struct BlobHeap

cdef struct Budget:
    # Bytes of a backend's arena, and of the C heap next to it. `limit` 0 means none.
    int64_t used
    int64_t limit
    uint32_t refused                     # a Refusal: why memory was last refused
    Probe *probe
    ArenaCore *arena                     # its idle extents make room under the limit

cdef struct LentExtent:
    # An extent that numpy arrays expose. It stays mapped until the last of them is gone.
    LentExtent *next                     # of the arena
    char *base
    uint32_t arrays
    uint32_t is_dropped                  # by the arena: it is no longer in its list

cdef struct ArenaCore:
    char **extents                       # extent number -> base, NULL where free; never moves
    uint8_t **orders                     # extent number -> per 256 bytes: order of the block that begins there
    uint32_t top                         # extents below this number have been used
    uint32_t lowest                      # the lowest free number is not below it
    uint32_t live
    uint32_t idle                        # extents that are one whole free block
    uint32_t least_idle                  # the fewest there were since `give_back_unused` looked
    uint32_t nonempty                    # bit i: free_head[i] is not NIL
    uint32_t free_head[22]               # by order: mostly the lowest free block, so that few extents hold what is left
    uint32_t free_tail[22]
    uint32_t lock
    int64_t run_bytes
    Budget *budget
    Spares spares
    LentExtent *lent
    BlobHeap *heaps                      # MAX_LANES of them
    uint32_t is_shared                   # true while several threads work: heaps take their locks

cdef struct Slab:
    Slab *next                           # slabs of the class with room, in no order
    Slab *prev
    BlobHeap *heap                       # whose it is; changes under the locks of both heaps
    uint32_t ref                         # of this slab
    uint32_t size_class
    uint32_t used
    uint32_t free_offset                 # first freed block, 0 for none
    uint32_t fresh_offset                # blocks from here on were never used

cdef struct BlobHeap:
    # The slabs that one lane allocates from, the first's also outside batches.
    ArenaCore *arena
    Slab *partial[SIZE_CLASSES]
    uint32_t lock                        # guards the heap's slabs, their headers included
    int64_t bytes                        # allocated here minus freed here: only the sum over all heaps says something
    char apart[64]                       # no other heap's fields share a cache line with these

cdef struct Blob:
    uint32_t refs
    uint32_t length
    # `length` bytes follow

cdef extern from *:
    """
    #ifdef STATEBACKEND_DEBUG
    #define SB_CHECKED 1
    #define sb_count(probe, which, change) __atomic_add_fetch(&(probe)->counters[which], (change), __ATOMIC_RELAXED)
    #else
    #define SB_CHECKED 0
    #define sb_count(probe, which, change) ((void)0)
    #endif
    """
    void count "sb_count"(Probe *probe, int which, int64_t change) noexcept nogil
    const int CHECKED "SB_CHECKED"

cdef inline bint injected_failure(Budget *budget) noexcept nogil:
    cdef Probe *probe = budget.probe
    if probe.fail_in <= probe.fail_until:
        return False
    return add_i64(&probe.fail_in, -1) <= 0

cdef inline char *address(ArenaCore *arena, uint32_t ref) noexcept nogil:
    return arena.extents[ref >> EXTENT_UNITS_SHIFT] + (<uint64_t>(ref & EXTENT_UNITS_MASK) << UNIT_SHIFT)

cdef inline char *unit_at(char **extents, uint32_t ref) noexcept nogil:
    """As `address`, for an arena whose extents are at hand."""
    return extents[ref >> EXTENT_UNITS_SHIFT] + (<uint64_t>(ref & EXTENT_UNITS_MASK) << UNIT_SHIFT)

cdef inline char *blob_data(Blob *blob) noexcept nogil:
    return <char *>blob + sizeof(Blob)

cdef void give_back_unused(ArenaCore *arena) noexcept nogil
cdef uint32_t run_alloc(ArenaCore *arena, int order) noexcept nogil
cdef void run_free(ArenaCore *arena, uint32_t ref, int order) noexcept nogil
cdef Blob *blob_new(BlobHeap *heap, const char *data, uint64_t length) noexcept nogil
cdef void blob_free(BlobHeap *heap, Blob *blob) noexcept nogil
cdef bint is_same_class(uint64_t one, uint64_t other) noexcept nogil
cdef void *block_alloc(BlobHeap *heap, uint64_t size) noexcept nogil
cdef uint32_t ref_ahead(BlobHeap *heap, uint64_t size, uint32_t n) noexcept nogil
cdef void ask_for_block(void *block) noexcept nogil
cdef void block_free(BlobHeap *heap, void *block, uint64_t size) noexcept nogil
cdef inline uint32_t block_ref(void *block) noexcept nogil:
    # Of a block from a slab only: not larger than LARGEST_CLASS.
    cdef Slab *slab = <Slab *>(<uintptr_t>block & ~<uintptr_t>(SLAB_BYTES - 1))
    return slab.ref + <uint32_t>((<char *>block - <char *>slab) >> UNIT_SHIFT)

cdef void *raw_alloc(Budget *budget, uint64_t size) noexcept nogil
cdef void *raw_shrink(Budget *budget, void *block, uint64_t size, uint64_t smaller) noexcept nogil
cdef void raw_free(Budget *budget, void *block, uint64_t size) noexcept nogil

cdef inline void blob_drop(BlobHeap *heap, Blob *blob) noexcept nogil:
    blob.refs -= 1
    if blob.refs == 0:
        blob_free(heap, blob)

cdef inline bint blob_takes(const Blob *blob, uint64_t length) noexcept nogil:
    """Return True if the blob has one owner, and a block that would be the right one for so many bytes too."""
    cdef uint64_t size = length + sizeof(Blob), own = <uint64_t>blob.length + sizeof(Blob)
    if blob.refs != 1:
        return False
    return (size + 7) >> 3 == (own + 7) >> 3 and size <= LARGEST_CLASS or is_same_class(size, own)

cdef inline void blob_set(Blob *blob, const char *data, uint64_t length) noexcept nogil:
    """Overwrite a blob that `blob_takes` was asked about."""
    copy_bytes(blob_data(blob), data, length)
    blob.length = <uint32_t>length

cdef class Arena:
    cdef ArenaCore core
    cdef BlobHeap blobs[16]              # by lane
    cdef Budget budget
    cdef object scratch_memory           # see `scratch`
    cdef void leave(self) noexcept

cdef class ExtentMemory:
    cdef Arena arena                     # the arena whose list may hold `lent`
    cdef LentExtent *lent
    cdef bint lend(self, uint32_t number) except -1
