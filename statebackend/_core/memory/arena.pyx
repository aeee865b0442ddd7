"""The memory of a heap backend: extents, runs and blobs. `arena.pxd` describes the layout."""

import mmap

import numpy as np

cimport cython
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from statebackend._core.memory.extents cimport (
    extent_keep, extent_take, extent_unmap, kept_drop, kept_extents, spare_take, spares_drop,
)
from statebackend._core.memory.platform cimport (
    add_i64, ctz, load_ptr, prefetch_write, spin_lock, spin_unlock, try_lock, unlikely)

cdef extern from "Python.h":
    int PyTraceMalloc_Track(unsigned int domain, uintptr_t ptr, size_t size) nogil
    int PyTraceMalloc_Untrack(unsigned int domain, uintptr_t ptr) nogil

cdef enum:
    FREE_MARK = 0x80
    EXTENTS_PER_SPARE = 32
    IDLE_EXTENTS = 16                    # 32 MB: the undo log of a batch of two million rows
    EXTENTS_BEFORE_SPARE = 8
    TRACE_DOMAIN = 0x53420001

cdef Probe the_probe
memset(&the_probe, 0, sizeof(Probe))

_COUNTER_NAMES = ("extents", "runs", "blobs", "entries", "snapshots", "directories", "blocks", "objects")

# Block sizes of blobs: steps of 8 up to 128 and of 16 up to 256, then four steps to every doubling.
_CLASS_SIZES = [*range(16, 129, 8), *range(144, 257, 16)] + [
    320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096]
cdef uint32_t class_size[SIZE_CLASSES]
cdef uint8_t class_of[513]            # by eighths of a size
cdef int _i
for _i in range(SIZE_CLASSES):
    class_size[_i] = _CLASS_SIZES[_i]
for _i in range(LARGEST_CLASS // 8 + 1):
    class_of[_i] = next(c for c, size in enumerate(_CLASS_SIZES) if size >= 8 * _i)


def live_counters():
    """Count the objects that the compiled core holds, process-wide, by kind; only the checked build counts."""
    return {name: the_probe.counters[i] for i, name in enumerate(_COUNTER_NAMES)}


def is_checked_build():
    """Return True for the build with bounds checks, invariants and counters (`make debug`)."""
    return bool(CHECKED)


def extents_kept():
    """How many extents of arenas that ended are kept for the next one."""
    return kept_extents()


# --- runs: a buddy system ------------------------------------------------------------------------
#
# A free block carries `next` and `prev` refs in its first 8 bytes and its order, with FREE_MARK, in
# the byte map of its extent. The buddy of a block of order o is the block at its offset xor 2^o.

cdef inline uint8_t *order_byte(ArenaCore *arena, uint32_t ref) noexcept nogil:
    return arena.orders[ref >> EXTENT_UNITS_SHIFT] + ((ref & EXTENT_UNITS_MASK) >> (MIN_ORDER - UNIT_SHIFT))


cdef inline void push_free(ArenaCore *arena, uint32_t ref, int order) noexcept nogil:
    cdef uint32_t *links = <uint32_t *>address(arena, ref)
    cdef uint32_t head = arena.free_head[order], tail = arena.free_tail[order]
    if head == 0 or ref < head:
        links[0] = head
        links[1] = 0
        if head:
            (<uint32_t *>address(arena, head))[1] = ref
        else:
            arena.free_tail[order] = ref
        arena.free_head[order] = ref
    else:
        links[0] = 0
        links[1] = tail
        (<uint32_t *>address(arena, tail))[0] = ref
        arena.free_tail[order] = ref
    arena.nonempty |= 1u << order
    order_byte(arena, ref)[0] = <uint8_t>(order | FREE_MARK)


cdef inline void unlink_free(ArenaCore *arena, uint32_t ref, int order) noexcept nogil:
    cdef uint32_t *links = <uint32_t *>address(arena, ref)
    if links[1]:
        (<uint32_t *>address(arena, links[1]))[0] = links[0]
    else:
        arena.free_head[order] = links[0]
        if links[0] == 0:
            arena.nonempty &= ~(1u << order)
    if links[0]:
        (<uint32_t *>address(arena, links[0]))[1] = links[1]
    else:
        arena.free_tail[order] = links[1]


# --- extents -------------------------------------------------------------------------------------
#
# This code runs in the middle of operations, also on threads without the GIL: it neither makes Python objects nor runs
# Python. (While tracemalloc traces, it takes the GIL itself and records a place in the program.)

cdef inline uint32_t most_extents(Budget *budget) noexcept nogil:
    # Extent 0 does not exist, and the last is left out: no ref behind its last unit may wrap around.
    return budget.probe.most_extents or MAX_EXTENTS - 2


cdef bint add_extent(ArenaCore *arena) noexcept nogil:
    """Make one more extent; False without memory. The arena's lock must not be held."""
    cdef Budget *budget = arena.budget
    cdef uint32_t number, wanted = 0
    cdef uint8_t *orders
    cdef char *base = NULL
    cdef bint is_full
    if budget.limit and budget.used + EXTENT_BYTES > budget.limit:
        budget.refused = REFUSED_BY_LIMIT
        return False
    orders = <uint8_t *>calloc(EXTENT_BYTES >> MIN_ORDER, 1)
    if orders == NULL:
        return False
    if arena.live + 1 >= EXTENTS_BEFORE_SPARE:
        # A fraction of the existing ones, because maps of the same size grow at the same time.
        wanted = 1 + (arena.live + 1) // EXTENTS_PER_SPARE
        base = spare_take(&arena.spares, wanted)
    if base == NULL:
        base = extent_take()
    if base == NULL:
        free(orders)
        return False
    # Registered before it is usable: another lane could give it back at once.
    PyTraceMalloc_Track(TRACE_DOMAIN, <uintptr_t>base, EXTENT_BYTES)
    spin_lock(&arena.lock)
    number = arena.lowest
    while number < arena.top and arena.extents[number] != NULL:
        number += 1
    arena.lowest = number
    # Another lane may have taken the rest below the limit.
    is_full = number > most_extents(budget)
    if is_full or (budget.limit and budget.used + EXTENT_BYTES > budget.limit):
        budget.refused = REFUSED_BY_REFS if is_full else REFUSED_BY_LIMIT
        spin_unlock(&arena.lock)
        PyTraceMalloc_Untrack(TRACE_DOMAIN, <uintptr_t>base)
        extent_unmap(base)
        free(orders)
        return False
    arena.extents[number] = base
    arena.orders[number] = orders
    if number == arena.top:
        arena.top += 1
    arena.live += 1
    arena.idle += 1
    push_free(arena, number << EXTENT_UNITS_SHIFT, MAX_ORDER)
    add_i64(&budget.used, EXTENT_BYTES)
    spin_unlock(&arena.lock)
    count(budget.probe, LIVE_EXTENTS, 1)
    return True


cdef bint hand_over(ArenaCore *arena, char *base) noexcept nogil:
    """Leave an extent to the arrays that expose it, if there are any. The caller holds the lock."""
    cdef LentExtent **link = &arena.lent
    while link[0] != NULL:
        if link[0].base == base:
            link[0].is_dropped = True
            link[0] = link[0].next
            return True
        link = &link[0].next
    return False


cdef void drop_extent(ArenaCore *arena, uint32_t number, bint is_kept) noexcept nogil:
    """Give back, or keep, an extent whose only block is on no list any more. The caller must not hold the lock."""
    cdef char *base = arena.extents[number]
    cdef uint8_t *orders = arena.orders[number]
    cdef bint is_lent
    PyTraceMalloc_Untrack(TRACE_DOMAIN, <uintptr_t>base)
    spin_lock(&arena.lock)
    arena.extents[number] = NULL
    arena.orders[number] = NULL
    if number < arena.lowest:
        arena.lowest = number
    arena.live -= 1
    is_lent = hand_over(arena, base)
    spin_unlock(&arena.lock)
    add_i64(&arena.budget.used, -<int64_t>EXTENT_BYTES)
    count(arena.budget.probe, LIVE_EXTENTS, -1)
    free(orders)
    if is_lent:
        return
    if is_kept:
        extent_keep(base)
    else:
        extent_unmap(base)


cdef bint drop_idle_extent(ArenaCore *arena, bint is_kept) noexcept nogil:
    """Give back, or keep, an extent in which nothing is; False if there is none. The caller must not hold the lock."""
    cdef uint32_t ref
    spin_lock(&arena.lock)
    ref = arena.free_head[MAX_ORDER]
    if ref:
        unlink_free(arena, ref, MAX_ORDER)
        arena.idle -= 1
    spin_unlock(&arena.lock)
    if ref == 0:
        return False
    drop_extent(arena, ref >> EXTENT_UNITS_SHIFT, is_kept)
    return True


cdef void give_back_unused(ArenaCore *arena) noexcept nogil:
    """Give back half of the extents that were not used since the last time."""
    cdef uint32_t n = (arena.least_idle + 1) // 2
    while n and drop_idle_extent(arena, False):
        n -= 1
    arena.least_idle = arena.idle


cdef uint32_t run_alloc(ArenaCore *arena, int order) noexcept nogil:
    """A run of 2^order bytes, not zeroed; 0 without memory."""
    cdef uint32_t mask, ref, right
    cdef int at, larger
    cdef bint added
    if order < MIN_ORDER:
        order = MIN_ORDER
    if unlikely(injected_failure(arena.budget)):
        return 0
    spin_lock(&arena.lock)
    mask = arena.nonempty >> order
    while unlikely(mask == 0):
        spin_unlock(&arena.lock)
        added = add_extent(arena)
        spin_lock(&arena.lock)
        mask = arena.nonempty >> order
        if not added and mask == 0:      # and no other lane has made one meanwhile
            spin_unlock(&arena.lock)
            return 0
    # The lowest block that is large enough, not the smallest: so the rest after a peak gathers in few extents.
    at = order + ctz(mask)
    ref = arena.free_head[at]
    larger = at + 1
    mask = arena.nonempty >> larger
    while mask:
        larger += ctz(mask)
        if arena.free_head[larger] < ref:
            at = larger
            ref = arena.free_head[at]
        larger += 1
        mask = arena.nonempty >> larger
    unlink_free(arena, ref, at)
    if at == MAX_ORDER:
        arena.idle -= 1
        if arena.idle < arena.least_idle:
            arena.least_idle = arena.idle
    while at > order:
        at -= 1
        right = ref + (1u << (at - UNIT_SHIFT))
        push_free(arena, right, at)
    order_byte(arena, ref)[0] = <uint8_t>order
    arena.run_bytes += <int64_t>1 << order
    spin_unlock(&arena.lock)
    count(arena.budget.probe, LIVE_RUNS, 1)
    return ref


cdef void run_free(ArenaCore *arena, uint32_t ref, int order) noexcept nogil:
    """Give a run back. Extents that become whole go back to the system, except some that the next batch can use."""
    cdef uint32_t buddy, extent = 0
    if order < MIN_ORDER:
        order = MIN_ORDER
    count(arena.budget.probe, LIVE_RUNS, -1)
    spin_lock(&arena.lock)
    arena.run_bytes -= <int64_t>1 << order
    while order < MAX_ORDER:
        buddy = ref ^ (1u << (order - UNIT_SHIFT))
        if order_byte(arena, buddy)[0] != (order | FREE_MARK):
            break
        unlink_free(arena, buddy, order)
        ref &= buddy
        order += 1
    push_free(arena, ref, order)
    if order == MAX_ORDER:
        arena.idle += 1
        if arena.idle > IDLE_EXTENTS + arena.live // 8:
            unlink_free(arena, ref, MAX_ORDER)
            arena.idle -= 1
            extent = ref >> EXTENT_UNITS_SHIFT
    spin_unlock(&arena.lock)
    if extent:
        drop_extent(arena, extent, False)


# --- blobs: slabs of size classes ------------------------------------------------------------------
#
# A slab is a run of 32 KB, aligned to its size, so that a block finds its slab by masking its address. Blocks above the
# largest class come from the C heap. Each slab belongs to a heap, under whose lock it is while several threads work. A
# heap without room takes a slab from another one before it makes a new one, so all can use memory that one lane has
# freed.

cdef enum:
    SLAB_HEADER = 64


cdef inline Slab *slab_of(void *block) noexcept nogil:
    return <Slab *>(<uintptr_t>block & ~<uintptr_t>(SLAB_BYTES - 1))


cdef inline bint is_full(Slab *slab) noexcept nogil:
    return slab.free_offset == 0 and slab.fresh_offset + class_size[slab.size_class] > SLAB_BYTES


cdef inline void unlink_slab(Slab *slab) noexcept nogil:
    if slab.prev != NULL:
        slab.prev.next = slab.next
    else:
        slab.heap.partial[slab.size_class] = slab.next
    if slab.next != NULL:
        slab.next.prev = slab.prev


cdef inline void link_slab(BlobHeap *heap, Slab *slab) noexcept nogil:
    """Let blocks be cut from a slab next; but first from one that is at hand and more than half empty.

    While much is freed, new blocks then gather in few slabs, and the others go back.
    """
    cdef Slab *first = heap.partial[slab.size_class]
    slab.heap = heap
    slab.prev = NULL
    slab.next = first
    if first != NULL and 2 * first.used * class_size[slab.size_class] < SLAB_BYTES:
        slab.prev = first
        slab.next = first.next
        first.next = slab
    else:
        heap.partial[slab.size_class] = slab
    if slab.next != NULL:
        slab.next.prev = slab


cdef void lock_both(BlobHeap *held, BlobHeap *other) noexcept nogil:
    """Lock `other` too, waiting for it; `held` is let go meanwhile, or two lanes could wait for each other."""
    spin_unlock(&held.lock)
    spin_lock(&min(held, other).lock)
    spin_lock(&max(held, other).lock)


cdef bint take_slab(BlobHeap *heap, uint32_t which) noexcept nogil:
    """Take over a slab with room from another heap; False if there is none.

    The caller holds the lock of `heap`, which may be let go meanwhile.

    A heap in use keeps one slab of a class, or two of them would take it from each other in turn.
    """
    cdef BlobHeap *other
    cdef Slab *slab
    cdef bint is_shared = heap.arena.is_shared
    cdef int i
    for i in range(MAX_LANES):
        other = &heap.arena.heaps[i]
        if other == heap or load_ptr(&other.partial[which]) == NULL:
            continue
        if is_shared and not try_lock(&other.lock):
            lock_both(heap, other)
            if heap.partial[which] != NULL:          # meanwhile a block of a full slab was freed
                spin_unlock(&other.lock)
                return True
        slab = other.partial[which]
        if is_shared and slab != NULL:
            slab = slab.next
        if slab != NULL:
            unlink_slab(slab)
            link_slab(heap, slab)
        if is_shared:
            spin_unlock(&other.lock)
        if slab != NULL:
            return True
    return False


cdef bint make_slab(BlobHeap *heap, uint32_t which) noexcept nogil:
    """Cut a new slab; False without memory. The caller holds the lock of `heap`, which is let go meanwhile."""
    cdef bint is_shared = heap.arena.is_shared
    cdef uint32_t ref
    cdef Slab *slab
    if is_shared:
        spin_unlock(&heap.lock)
    ref = run_alloc(heap.arena, SLAB_ORDER)
    if is_shared:
        spin_lock(&heap.lock)
    if ref == 0:
        return False
    slab = <Slab *>address(heap.arena, ref)
    slab.ref = ref
    slab.size_class = which
    slab.used = 0
    slab.free_offset = 0
    slab.fresh_offset = SLAB_HEADER
    link_slab(heap, slab)
    return True


cdef void *block_alloc(BlobHeap *heap, uint64_t size) noexcept nogil:
    """A block of at least `size` bytes, aligned to 8; NULL without memory."""
    cdef uint32_t which, width, offset
    cdef bint is_shared = heap.arena.is_shared, has_room
    cdef Slab *slab
    if size > LARGEST_CLASS:
        return raw_alloc(heap.arena.budget, size)
    which = class_of[(size + 7) >> 3]
    width = class_size[which]
    if is_shared:
        spin_lock(&heap.lock)
    if unlikely(heap.partial[which] == NULL):
        has_room = take_slab(heap, which) or make_slab(heap, which)
    else:
        has_room = not injected_failure(heap.arena.budget)
    if unlikely(not has_room):
        if is_shared:
            spin_unlock(&heap.lock)
        return NULL
    slab = heap.partial[which]
    offset = slab.free_offset
    if offset:
        slab.free_offset = (<uint32_t *>(<char *>slab + offset))[0]
        # Freed blocks are in no order: ask for the one that the next call will take.
        prefetch_write(<char *>slab + slab.free_offset)
    else:
        offset = slab.fresh_offset
        slab.fresh_offset += width
    slab.used += 1
    if is_full(slab):
        unlink_slab(slab)
    heap.bytes += width
    if is_shared:
        spin_unlock(&heap.lock)
    count(heap.arena.budget.probe, LIVE_BLOBS, 1)
    return <char *>slab + offset


cdef uint32_t ref_ahead(BlobHeap *heap, uint64_t size, uint32_t n) noexcept nogil:
    """The ref that the block will have which is allocated after `n` others of that size; 0 if that is not plain."""
    cdef Slab *slab = heap.partial[class_of[(size + 7) >> 3]]
    cdef uint32_t offset
    if slab == NULL:
        return 0
    if n == 0 and slab.free_offset:
        return slab.ref + (slab.free_offset >> UNIT_SHIFT)
    offset = slab.fresh_offset + n * class_size[slab.size_class]
    if slab.free_offset or offset + class_size[slab.size_class] > SLAB_BYTES:
        return 0
    return slab.ref + (offset >> UNIT_SHIFT)


cdef inline BlobHeap *lock_heap_of(Slab *slab) noexcept nogil:
    """The heap of a slab, locked. Until it is, another heap may take the slab over."""
    cdef BlobHeap *heap
    while True:
        heap = <BlobHeap *>load_ptr(&slab.heap)
        spin_lock(&heap.lock)
        if slab.heap == heap:
            return heap
        spin_unlock(&heap.lock)


cdef void block_free(BlobHeap *heap, void *block, uint64_t size) noexcept nogil:
    """Give a block back to the slab that it is from; `heap` is any of the arena."""
    cdef Slab *slab
    cdef bint is_shared = heap.arena.is_shared, was_full
    if size > LARGEST_CLASS:
        raw_free(heap.arena.budget, block, size)
        return
    count(heap.arena.budget.probe, LIVE_BLOBS, -1)
    slab = slab_of(block)
    heap = lock_heap_of(slab) if is_shared else slab.heap
    was_full = is_full(slab)
    (<uint32_t *>block)[0] = slab.free_offset
    slab.free_offset = <uint32_t>(<char *>block - <char *>slab)
    slab.used -= 1
    heap.bytes -= class_size[slab.size_class]
    if was_full:
        link_slab(heap, slab)
    if slab.used == 0:
        unlink_slab(slab)
    else:
        slab = NULL
    if is_shared:
        spin_unlock(&heap.lock)
    if slab != NULL:
        run_free(heap.arena, slab.ref, SLAB_ORDER)


cdef void ask_for_block(void *block) noexcept nogil:
    """Prefetch what `block_free` will write; harmless whatever the address is."""
    prefetch_write(block)
    prefetch_write(slab_of(block))


cdef Blob *blob_new(BlobHeap *heap, const char *data, uint64_t length) noexcept nogil:
    """A blob with one reference that holds a copy of `data`; NULL without memory."""
    cdef Blob *blob
    blob = <Blob *>block_alloc(heap, length + sizeof(Blob))
    if blob == NULL:
        return NULL
    blob.refs = 1
    blob.length = <uint32_t>length
    memcpy(blob_data(blob), data, length)
    return blob


cdef bint is_same_class(uint64_t one, uint64_t other) noexcept nogil:
    """Return True if blocks of two sizes come from slabs, and from the same ones."""
    return one <= LARGEST_CLASS and other <= LARGEST_CLASS and class_of[(one + 7) >> 3] == class_of[(other + 7) >> 3]


cdef void blob_free(BlobHeap *heap, Blob *blob) noexcept nogil:
    block_free(heap, blob, <uint64_t>blob.length + sizeof(Blob))


cdef bint make_room(Budget *budget, int64_t size) noexcept nogil:
    """Give idle extents back until so many bytes more stay below the limit; if they never would, none."""
    cdef int64_t idle = <int64_t>budget.arena.idle * EXTENT_BYTES
    while budget.used + size > budget.limit:
        if budget.used + size - idle > budget.limit or not drop_idle_extent(budget.arena, False):
            budget.refused = REFUSED_BY_LIMIT
            return False
        idle -= EXTENT_BYTES
    return True


cdef void *raw_alloc(Budget *budget, uint64_t size) noexcept nogil:
    """Memory of the C heap, not zeroed, counted against the budget; NULL if there is none."""
    cdef void *block
    if unlikely(injected_failure(budget)):
        return NULL
    if budget.limit and budget.used + <int64_t>size > budget.limit and not make_room(budget, <int64_t>size):
        return NULL
    block = PyMem_RawMalloc(size)
    if block != NULL:
        add_i64(&budget.used, <int64_t>size)
        count(budget.probe, LIVE_BLOCKS, 1)
    return block


cdef void *raw_shrink(Budget *budget, void *block, uint64_t size, uint64_t smaller) noexcept nogil:
    """The first bytes of a block, in place where the C heap can do that: pages go, and nothing is copied."""
    cdef void *rest = PyMem_RawRealloc(block, smaller)
    add_i64(&budget.used, <int64_t>smaller - <int64_t>size)
    return block if rest == NULL else rest


cdef void raw_free(Budget *budget, void *block, uint64_t size) noexcept nogil:
    if block != NULL:
        add_i64(&budget.used, -<int64_t>size)
        count(budget.probe, LIVE_BLOCKS, -1)
        PyMem_RawFree(block)


cdef int check_slabs(ArenaCore *arena) except -1:
    """Verify that the slabs with room belong to their heap and class, and that their blocks add up."""
    cdef BlobHeap *heap
    cdef Slab *slab
    cdef Slab *last
    cdef uint32_t which, offset, freed
    cdef int number
    cdef int64_t held = 0, in_slabs = 0
    for number in range(MAX_LANES):
        heap = &arena.heaps[number]
        held += heap.bytes
        assert heap.lock == 0, f"heap {number}: locked"
        for which in range(32):
            slab, last = heap.partial[which], NULL
            while slab != NULL:
                assert slab.heap == heap and slab.size_class == which, f"heap {number}: a slab of another list"
                assert slab.prev == last, f"heap {number}: links of slabs differ"
                assert <char *>slab == address(arena, slab.ref), f"heap {number}: a slab with another ref"
                assert slab.used and not is_full(slab), f"heap {number}: a slab that is empty or full is listed"
                freed, offset = 0, slab.free_offset
                while offset and freed < SLAB_BYTES:     # a block freed twice makes a circle
                    freed += 1
                    offset = (<uint32_t *>(<char *>slab + offset))[0]
                assert slab.fresh_offset == SLAB_HEADER + (slab.used + freed) * class_size[which], "lost blocks"
                in_slabs += <int64_t>slab.used * class_size[which]
                slab, last = slab.next, slab
    assert in_slabs <= held, "bytes of blobs do not add up"
    return 0


@cython.final
@cython.no_gc                            # otherwise a collection could drop the extents before what lives in them
cdef class Arena:
    """The extents of one backend and the blobs in them; everything else in the core borrows from it."""

    def __cinit__(self):
        memset(&self.core, 0, sizeof(ArenaCore))
        memset(self.blobs, 0, sizeof(self.blobs))
        self.core.extents = <char **>calloc(MAX_EXTENTS, sizeof(char *))
        self.core.orders = <uint8_t **>calloc(MAX_EXTENTS, sizeof(uint8_t *))
        if self.core.extents == NULL or self.core.orders == NULL:
            raise MemoryError("no memory for the directory of an arena")
        self.core.top = self.core.lowest = 1     # extent 0 does not exist, so that ref 0 can mean NIL
        self.budget.probe = &the_probe
        self.budget.arena = &self.core
        self.core.budget = &self.budget
        self.core.heaps = self.blobs
        for heap in range(MAX_LANES):
            self.blobs[heap].arena = &self.core

    def __dealloc__(self):
        cdef uint32_t number
        spares_drop(&self.core.spares, True)
        if self.core.extents != NULL and self.core.orders != NULL:
            for number in range(1, self.core.top):
                if self.core.extents[number] != NULL:
                    drop_extent(&self.core, number, True)
        free(self.core.extents)
        free(self.core.orders)

    def memory(self):
        """The extents as numpy arrays of bytes, each valid as long as it is kept. O(extents), copies nothing.

        An array still shows the memory of an extent that the arena has given back.
        """
        cdef uint32_t number = 1
        cdef ExtentMemory extent
        found = []
        while number < self.core.top:
            extent = ExtentMemory.__new__(ExtentMemory)
            extent.arena = self
            if extent.lend(number):
                found.append(np.asarray(extent))
            number += 1
        return found

    def usage(self):
        """Bytes of extents, in runs, in blobs; the total used; of extents made ahead; of working memory."""
        cdef int64_t blob_bytes = 0
        cdef int heap
        for heap in range(MAX_LANES):
            blob_bytes += self.blobs[heap].bytes
        return {
            "extent_bytes": <int64_t>self.core.live * EXTENT_BYTES,
            "run_bytes": self.core.run_bytes,
            "blob_bytes": blob_bytes,
            "used_bytes": self.budget.used,
            "spare_bytes": <int64_t>self.core.spares.n * EXTENT_BYTES,
            "scratch_bytes": len(self.scratch_memory) if self.scratch_memory is not None else 0,
        }

    def scratch(self, size):
        """Working memory for a batch, kept for the next one. Its contents are undefined."""
        if self.scratch_memory is None or len(self.scratch_memory) < size:
            self.scratch_memory = _map_bytes(-(-size // EXTENT_BYTES) * EXTENT_BYTES)
        return self.scratch_memory

    def trim(self):
        """Give the working memory of batches, empty extents, and the rest of ended arenas, back to the system."""
        self.scratch_memory = None
        spares_drop(&self.core.spares, False)
        kept_drop()
        while drop_idle_extent(&self.core, False):
            pass

    cdef void leave(self) noexcept:
        """Give back unused memory, some of it to the arenas that come."""
        self.scratch_memory = None
        spares_drop(&self.core.spares, True)
        while drop_idle_extent(&self.core, True):
            pass

    def set_limit(self, limit):
        """Refuse to grow beyond `limit` bytes; 0 removes the limit."""
        self.budget.limit = limit

    def _check(self):
        """Verify that free blocks and used blocks tile every extent, and that no two free buddies lie apart."""
        cdef uint32_t number, at, step
        cdef uint8_t mark
        cdef int order
        cdef int64_t used = 0
        free_blocks = set()
        for number in range(1, self.core.top):
            if self.core.extents[number] == NULL:
                continue
            at = 0
            while at < EXTENT_BYTES >> MIN_ORDER:
                mark = self.core.orders[number][at]
                order = mark & 0x7F
                assert MIN_ORDER <= order <= MAX_ORDER, f"extent {number}: no block begins at {at}"
                step = 1u << (order - MIN_ORDER)
                assert at % step == 0, f"extent {number}: block at {at} is not aligned"
                if mark & FREE_MARK:
                    free_blocks.add((number, at, order))
                else:
                    used += <int64_t>1 << order
                at += step
        for number, at, order in free_blocks:
            if order < MAX_ORDER:
                assert (number, at ^ (1 << (order - MIN_ORDER)), order) not in free_blocks, "unmerged buddies"
        assert used == self.core.run_bytes, "run bytes do not add up"
        listed = set()
        for order in range(MIN_ORDER, MAX_ORDER + 1):
            at = self.core.free_head[order]
            assert (at != 0) == bool(self.core.nonempty >> order & 1), f"order {order}: wrong summary bit"
            last = 0
            while at:
                assert (<uint32_t *>address(&self.core, at))[1] == last, f"order {order}: links of the list differ"
                last = at
                listed.add((at >> EXTENT_UNITS_SHIFT,
                            (at & EXTENT_UNITS_MASK) >> (MIN_ORDER - UNIT_SHIFT), order))
                at = (<uint32_t *>address(&self.core, at))[0]
            assert self.core.free_tail[order] == last, f"order {order}: wrong end of the list"
        assert listed == free_blocks, "free lists and block maps differ"
        assert self.core.idle == sum(order == MAX_ORDER for _, _, order in listed), "idle extents do not add up"
        check_slabs(&self.core)


@cython.final
@cython.no_gc                            # as the arena that it keeps
cdef class ExtentMemory:
    """An extent, for the numpy arrays that expose it; made by `Arena.memory`."""

    cdef bint lend(self, uint32_t number) except -1:
        """Take hold of an extent; False if there is none with that number."""
        cdef ArenaCore *core = &self.arena.core
        cdef LentExtent *fresh = <LentExtent *>malloc(sizeof(LentExtent))
        cdef LentExtent *lent
        if fresh == NULL:
            raise MemoryError("no memory to show an extent")
        spin_lock(&core.lock)
        if core.extents[number] != NULL:
            lent = core.lent
            while lent != NULL and lent.base != core.extents[number]:
                lent = lent.next
            if lent == NULL:
                fresh.base, fresh.arrays, fresh.is_dropped = core.extents[number], 0, False
                fresh.next = core.lent
                core.lent = lent = fresh
                fresh = NULL
            lent.arrays += 1
            self.lent = lent
        spin_unlock(&core.lock)
        free(fresh)
        return self.lent != NULL

    def __dealloc__(self):
        cdef ArenaCore *core
        cdef LentExtent **link
        cdef bint is_last
        if self.lent == NULL:
            return
        core = &self.arena.core
        spin_lock(&core.lock)
        self.lent.arrays -= 1
        is_last = self.lent.arrays == 0
        if is_last and not self.lent.is_dropped:
            link = &core.lent
            while link[0] != self.lent:
                link = &link[0].next
            link[0] = self.lent.next
        spin_unlock(&core.lock)
        if is_last:
            if self.lent.is_dropped:
                extent_unmap(self.lent.base)
            free(self.lent)

    @property
    def __array_interface__(self):
        """The array interface, which numpy reads."""
        if self.lent == NULL:
            raise TypeError("no extent")
        return {"data": (<uintptr_t>self.lent.base, False), "shape": (EXTENT_BYTES,), "typestr": "|u1", "version": 3}


def _map_bytes(size):
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass                         # a kernel without huge pages: use ordinary ones
    return np.frombuffer(mapping, dtype=np.uint8)
