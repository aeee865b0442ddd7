"""Verification of maps; see `invariants.pyx`."""

from statebackend._core.tables.cow_map cimport CowMap, Table

cdef object check_map(Table *table, CowMap *map)
