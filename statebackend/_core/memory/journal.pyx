"""The slow paths of the logs; `journal.pxd` explains their purpose."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.memory.arena cimport ArenaCore, address, run_alloc, run_free
from statebackend._core.memory.platform cimport unlikely


cdef bint log_grow(ArenaCore *arena, Log *log, uint64_t size) noexcept nogil:
    """Append a chunk with room for at least `size` bytes. Chunks grow with the log up to 64 KB."""
    cdef uint32_t order = FIRST_CHUNK_ORDER, ref
    cdef LogChunk *chunk
    if log.last != NULL:
        order = log.last.order + 2
        if order > LARGEST_CHUNK_ORDER:
            order = LARGEST_CHUNK_ORDER
    while (<uint64_t>1 << order) < size + sizeof(LogChunk):
        order += 1
    ref = run_alloc(arena, order)
    if unlikely(ref == 0):
        return False
    chunk = <LogChunk *>address(arena, ref)
    chunk.ref = ref
    chunk.order = order
    chunk.used = 0
    chunk.capacity = (1u << order) - sizeof(LogChunk)
    chunk.until = log.until
    chunk.next = NULL
    chunk.prev = log.last
    if log.last != NULL:
        log.last.next = chunk
    else:
        log.first = chunk
    log.last = chunk
    return True


cdef void log_drop_last_chunk(ArenaCore *arena, Log *log) noexcept nogil:
    """Drop the newest chunk, with its records, if it has any: they must own nothing."""
    cdef LogChunk *chunk = log.last
    log.last = chunk.prev
    if log.last != NULL:
        log.last.next = NULL
    else:
        log.first = NULL
        log.records = log.held = 0       # also where chunks were dropped with uncounted records
    run_free(arena, chunk.ref, chunk.order)


cdef void log_clear(ArenaCore *arena, Log *log) noexcept nogil:
    """Forget all records, without freeing what they own."""
    while log.last != NULL:
        log_drop_last_chunk(arena, log)
    log.records = log.held = 0


cdef void log_append(ArenaCore *arena, Log *target, Log *source) noexcept nogil:
    """Move all records of `source` behind the records of `target`. O(1); the records of one chunk may move into the
    last chunk."""
    cdef LogChunk *only
    if target.last != NULL and target.last.used == 0:
        log_drop_last_chunk(arena, target)
    if source.last != NULL and source.last.used == 0:
        log_drop_last_chunk(arena, source)
    if source.first == NULL:
        return
    only = source.last
    target.until = source.until          # what follows is newer
    if (target.last != NULL and source.first == source.last and target.last.until == only.until
            and only.used <= target.last.capacity - target.last.used):
        # Short logs share chunks, or many of them would take much more memory than their records.
        memcpy(chunk_data(target.last) + target.last.used, chunk_data(only), only.used)
        target.last.used += only.used
        target.records += source.records
        target.held += source.held
        log_drop_last_chunk(arena, source)
        source.records = source.held = 0
        return
    source.first.prev = target.last
    if target.last != NULL:
        target.last.next = source.first
    else:
        target.first = source.first
    target.last = source.last
    target.records += source.records
    target.held += source.held
    source.held = 0
    source.first = source.last = NULL
    source.records = 0
