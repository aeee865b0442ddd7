"""Append-only logs in chunks from the arena: undo journals and lists of memory that awaits reclaiming.

A record ends with an 8-byte trailer that tells its size, so a log is read from its end: undo goes backwards by nature,
and reclaiming does not depend on the order.
"""

from libc.stdint cimport uint16_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport ArenaCore
from statebackend._core.memory.platform cimport unlikely

cdef enum:
    FIRST_CHUNK_ORDER = 9
    LARGEST_CHUNK_ORDER = 16

cdef struct LogChunk:
    LogChunk *prev
    LogChunk *next
    uint32_t ref                         # of this run in the arena
    uint32_t order
    uint32_t used                        # bytes of records
    uint32_t capacity
    uint32_t until                       # version of the newest snapshot that may need what is here, 0: none does

cdef struct Log:
    LogChunk *first
    LogChunk *last
    uint64_t records                     # 0 without a chunk; too many where chunks were forgotten, else exact
    uint64_t held                        # how many records came that own slots or references; 0: none is there
    uint32_t until                       # of the chunks that it grows by: the newest snapshot when it was begun

cdef inline char *chunk_data(LogChunk *chunk) noexcept nogil:
    return <char *>chunk + sizeof(LogChunk)

cdef bint log_grow(ArenaCore *arena, Log *log, uint64_t size) noexcept nogil
cdef void log_drop_last_chunk(ArenaCore *arena, Log *log) noexcept nogil
cdef void log_clear(ArenaCore *arena, Log *log) noexcept nogil
cdef void log_append(ArenaCore *arena, Log *target, Log *source) noexcept nogil

cdef inline bint log_reserve(ArenaCore *arena, Log *log, uint64_t size) noexcept nogil:
    """Make room for `size` consecutive bytes; False without memory."""
    if unlikely(log.last == NULL or log.last.used + size > log.last.capacity):
        return log_grow(arena, log, size)
    return True

cdef inline char *log_take(Log *log, uint32_t size) noexcept nogil:
    """The next `size` reserved bytes, as one record."""
    cdef char *room = chunk_data(log.last) + log.last.used
    log.last.used += size
    log.records += 1
    return room

cdef inline uint64_t log_last_trailer(Log *log) noexcept nogil:
    return (<uint64_t *>(chunk_data(log.last) + log.last.used - 8))[0]

cdef inline void log_pop(ArenaCore *arena, Log *log, uint32_t size) noexcept nogil:
    log.last.used -= size
    log.records -= 1
    if log.last.used == 0:
        log_drop_last_chunk(arena, log)

cdef inline bint log_empty(ArenaCore *arena, Log *log) noexcept nogil:
    """Return True if no record is left; drops last chunks that were reserved and not used."""
    while log.last != NULL and log.last.used == 0:
        log_drop_last_chunk(arena, log)
    return log.last == NULL
