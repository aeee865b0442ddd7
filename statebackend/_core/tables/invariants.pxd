"""Verification of maps and logs; see `invariants.pyx`."""

from statebackend._core.tables.cow_map cimport Core, CowMap, Table

cdef object check_map(Table *table, CowMap *map)
cdef object check_logs(Core *core)
