"""Renews entries on read; kernels of map states use it too."""

from libc.stdint cimport int64_t, uint32_t

from statebackend._core.tables.cow_map cimport CowMap, Lane, Table

cdef bint renew(Lane *lane, Table *table, CowMap *map, uint32_t slot, uint32_t hash, int64_t now) noexcept nogil
