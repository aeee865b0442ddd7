"""The later steps of looking ahead; `look_ahead.pxd` explains their purpose."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uintptr_t

from statebackend._core.memory.arena cimport address
from statebackend._core.tables.cow_map cimport Anchor, CowMap, ListHead, entry_at, find_int, hash_int_key, value_of
from statebackend._core.memory.platform cimport prefetch


cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil:
    """Prefetch the data behind entries that have arrived."""
    cdef Guess *near = guess_of(ahead, VALUES_AHEAD)
    cdef Guess *nearest = guess_of(ahead, PARTS_AHEAD)
    cdef uint32_t i
    cdef Visit *visit
    for i in range(ahead.n_visits):
        visit = &ahead.visits[i]
        if visit.reach == REACH_ENTRY:
            continue
        if near != NULL:
            follow_value(visit, near, namespace)
        if nearest != NULL and visit.reach >= REACH_THREAD:
            follow_part(visit, nearest, namespace)


cdef char *found_value(Visit *visit, Guess *guess, uint32_t namespace) noexcept nogil:
    cdef CowMap *map = visit.table.maps[guess.group - visit.table.first_group]
    cdef uint32_t slot = 0
    if map != NULL:
        slot = find_int(visit.table, map, guess.number, namespace, guess.hash & visit.table.hash_mask)
    return value_of(visit.table, entry_at(visit.table.core, slot)) if slot else NULL


cdef void follow_value(Visit *visit, Guess *guess, uint32_t namespace) noexcept nogil:
    cdef char *value = found_value(visit, guess, namespace)
    cdef uint32_t anchor
    if value == NULL:
        return
    if visit.reach == REACH_BLOB:
        prefetch((<void **>value)[0])
    elif visit.reach == REACH_LIST:
        prefetch((<ListHead *>value).tail)
    else:
        anchor = (<uint32_t *>value)[0]
        if visit.reach == REACH_THREAD:
            prefetch(address(visit.table.core.arena, anchor))
        else:
            ask_for_bucket(visit.entries, guess.group, hash_int_key(visit.entries, visit.map_key, anchor))


cdef void follow_part(Visit *visit, Guess *guess, uint32_t namespace) noexcept nogil:
    cdef char *value = found_value(visit, guess, namespace)
    cdef uint32_t anchor, first
    if value == NULL:
        return
    anchor = (<uint32_t *>value)[0]
    if visit.reach == REACH_MAP_ENTRY:
        ask_for_entry(visit.entries, guess.group, hash_int_key(visit.entries, visit.map_key, anchor))
        return
    first = (<Anchor *>address(visit.table.core.arena, anchor)).first
    if first:
        prefetch(entry_at(visit.table.core, first))


def _number_at(something):
    """The number that looking ahead sees in an object, or None. For tests.

    >>> _number_at(-5), _number_at("-5")
    (-5, None)
    """
    cdef int64_t number
    return number if peek_int(<uintptr_t><PyObject *>something, &number) else None
