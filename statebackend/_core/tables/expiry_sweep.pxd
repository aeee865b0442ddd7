"""Finds what has expired: a few slots at a time, or where it is due; see `expiry_sweep.pyx`."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport Budget
from statebackend._core.tables.cow_map cimport (
    CowMap, Entry, Table)

cdef enum:
    SLOTS_PER_ENTRY = 8                  # slots that a step looks at for each entry that it is asked for
    STRETCH_SHIFT = 5                    # buckets of a stretch: 32, of about 24 entries
    MAX_FOUND = 64

cdef struct Sweep:
    # The place where the incremental cleanup of a state continues, and its knowledge.
    uint32_t map                         # index among the table's maps
    uint32_t run
    uint32_t slot                        # where it goes on in that run
    uint32_t run_end                     # the slot behind the run
    uint64_t run_word                    # the map's word for the run when it was begun; 0: it was not
    bint is_under_way                    # true during a round
    int64_t began                        # the time when it did
    int64_t oldest                       # timestamp that was seen on this round and has not expired
    uint64_t copies                      # of entries of the state, made before it
    bint has_moved                       # entries may lie elsewhere than before
    bint is_sure                         # this round has left nothing older than `oldest` behind
    # The previous round: nothing is older than `bound` while these two stay as they are.
    int64_t bound
    uint64_t undone                      # of the core
    uint64_t setbacks                    # of the clock

cdef struct Stretches:
    # The knowledge about one map.
    int64_t oldest                       # nothing in the map is older
    int64_t *bounds                      # the same by stretch of buckets
    uint32_t n
    uint32_t capacity                    # of the primary buckets when the bounds were made

cdef int64_t oldest_in(Table *table, Entry *entry, int64_t *elements) noexcept nogil
cdef uint32_t sweep(Table *table, Sweep *at, int64_t ttl, int64_t now, int64_t *entries, int64_t *slots,
                    CowMap **map) noexcept nogil

cdef class ExpiryIndex:
    cdef Table *table
    cdef object owner                    # the StateTable, whose core the memory is counted to
    cdef Budget *budget
    cdef Stretches *maps
    cdef uint32_t n_maps
    cdef int64_t oldest                  # nothing in the table is older
    cdef uint64_t undone                 # of the core, and setbacks of the clock, when that was found
    cdef uint64_t setbacks
    cdef int64_t rest                    # what is written later is taken to be no older
    cdef uint32_t at                     # the map that is looked at
    cdef uint32_t stretch                # of that map
    cdef uint32_t capacity               # its capacity when its first stretch was looked at; 0: not begun
    cdef int64_t map_oldest              # of the stretches before
    cdef int64_t next_oldest             # of the maps before it
    cdef readonly uint64_t looks         # counts the looks at stretches
    cdef int begin(self, uint64_t setbacks, int64_t rest) except -1
    cdef int found(self, int64_t ttl, int64_t now, uint32_t *slots, CowMap **map) noexcept
    cdef bint fit(self, Stretches *known, CowMap *map) noexcept
    cdef int look_at(self, Stretches *known, CowMap *map, uint32_t stretch, int64_t ttl, int64_t now,
                     uint32_t *slots) noexcept
