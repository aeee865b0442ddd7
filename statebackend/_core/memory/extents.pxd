"""Extents: 2 MB of memory each, and the thread that makes some ahead; see `extents.pyx`."""

from libc.stdint cimport uint32_t

cdef enum:
    EXTENT_BYTES = 1 << 21
    MAX_SPARES = 16                      # extents made ahead for one arena
    MAX_KEPT = 16                        # extents of arenas that ended, for the next one

cdef struct Spares:
    # The extents that the thread has made for one arena. Guarded by the lock of `extents.pyx`.
    Spares *next                         # next of those that want more
    uint32_t wanted
    uint32_t n
    uint32_t is_waiting                  # true while among those that want more
    char *extents[16]

cdef char *extent_take() noexcept nogil
cdef char *extent_map() noexcept nogil
cdef void extent_keep(char *extent) noexcept nogil
cdef void extent_unmap(char *extent) noexcept nogil
cdef uint32_t kept_extents() noexcept nogil
cdef void kept_drop() noexcept nogil
cdef char *spare_take(Spares *spares, uint32_t wanted) noexcept nogil
cdef void spares_drop(Spares *spares, bint are_kept) noexcept nogil
