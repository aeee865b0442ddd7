"""The later steps of looking ahead; `look_ahead.pxd` explains their purpose."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, intptr_t, uint32_t, uintptr_t
from libc.string cimport memset

from statebackend._core.memory.arena cimport address, ref_ahead
from statebackend._core.tables.cow_map cimport (
    Anchor, CowMap, ListChunk, ListHead, Table, entry_at, find_int, hash_int_key, value_of)
from statebackend._core.memory.platform cimport prefetch


cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil:
    """Prefetch the data behind entries that have arrived."""
    cdef Guess *far = guess_of(ahead, CHAINS_AHEAD)
    cdef Guess *near = guess_of(ahead, VALUES_AHEAD)
    cdef Guess *nearer = guess_of(ahead, PARTS_AHEAD)
    cdef Guess *nearest = guess_of(ahead, RESTS_AHEAD)
    cdef uint32_t i
    cdef Visit *visit
    for i in range(ahead.n_visits):
        visit = &ahead.visits[i]
        if visit.reach == REACH_ENTRY:
            continue
        if far != NULL:
            ask_for_second(visit.table, far.group, far.hash)
        if near != NULL:
            follow_value(visit, near, namespace, ahead.turn + VALUES_AHEAD)
        if visit.reach == REACH_BLOB:
            continue
        if nearer != NULL:
            follow_part(visit, nearer, namespace, ahead.turn + PARTS_AHEAD)
        if nearest != NULL:
            follow_rest(visit, nearest, namespace, ahead.turn + RESTS_AHEAD)


cdef char *found_value(Visit *visit, Guess *guess, uint32_t namespace) noexcept nogil:
    cdef CowMap *map = visit.table.maps[guess.group - visit.table.first_group]
    cdef uint32_t slot = 0
    if map != NULL:
        slot = find_int(visit.table, map, guess.number, namespace, guess.hash & visit.table.hash_mask)
    return value_of(visit.table, entry_at(visit.table.core, slot)) if slot else NULL


cdef void follow_value(Visit *visit, Guess *guess, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value = found_value(visit, guess, namespace)
    cdef PartGuess *part
    cdef uint32_t anchor
    if visit.reach == REACH_MAP_ENTRY:
        if value != NULL:
            anchor = (<uint32_t *>value)[0]
        else:                            # the key will be new, and those before it are taken to be
            anchor = ref_ahead(visit.table.core.blobs, sizeof(Anchor), VALUES_AHEAD)
        if anchor:
            part = &visit.parts[turn & (PART_GUESSES - 1)]
            part.hash = hash_int_key(visit.entries, part.number if part.turn == turn else visit.map_key, anchor)
            part.hash_turn = turn
            ask_for_bucket(visit.entries, guess.group, part.hash)
    elif value == NULL:
        return
    elif visit.reach == REACH_BLOB:
        prefetch((<void **>value)[0])
    elif visit.reach == REACH_LIST:
        prefetch((<ListHead *>value).tail)
    else:
        prefetch(address(visit.table.core.arena, (<uint32_t *>value)[0]))


cdef void follow_part(Visit *visit, Guess *guess, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value
    cdef ListChunk *chunk
    cdef uint32_t first
    cdef PartGuess *part = &visit.parts[turn & (PART_GUESSES - 1)]
    if visit.reach == REACH_MAP_ENTRY:
        if part.hash_turn == turn:
            ask_for_entry(visit.entries, guess.group, part.hash)
        return
    value = found_value(visit, guess, namespace)
    if value == NULL:
        return
    if visit.reach == REACH_LIST:
        chunk = (<ListHead *>value).tail
        if chunk != NULL:
            prefetch(chunk.prev)
        return
    first = (<Anchor *>address(visit.table.core.arena, (<uint32_t *>value)[0])).first
    if first:
        prefetch(entry_at(visit.table.core, first))


cdef void follow_rest(Visit *visit, Guess *guess, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value
    cdef ListChunk *chunk
    cdef PartGuess *part = &visit.parts[turn & (PART_GUESSES - 1)]
    if visit.reach == REACH_MAP_ENTRY:
        if part.hash_turn == turn:
            ask_for_second(visit.entries, guess.group, part.hash)
    elif visit.reach == REACH_LIST:
        value = found_value(visit, guess, namespace)
        if value != NULL:
            chunk = (<ListHead *>value).tail
            if chunk != NULL and chunk.prev != NULL:
                prefetch(chunk.prev.prev)


def looks_ahead():
    """Return True for a build that guesses the next keys; see `look_ahead.pxd` for those that do not."""
    return bool(LOOKS_AHEAD)


def _peeked_bytes():
    """How many bytes of an object looking ahead may read. For tests."""
    return PEEKED


def _number_at(something):
    """The number that looking ahead sees in an object, or None. For tests.

    >>> _number_at(-5), _number_at("-5")
    (-5, None)
    """
    cdef int64_t number
    return number if peek_int(<uintptr_t><PyObject *>something, &number) else None


def _number_ahead(key_at, stride):
    """The number that looking ahead sees from a key at an address, at this distance from the one before. For tests."""
    cdef LookAhead ahead
    memset(&ahead, 0, sizeof(LookAhead))
    ahead.key_at = key_at
    ahead.stride = stride
    return ahead.guesses[0].number if peek(&ahead, &ahead.guesses[0]) else None


def _map_key_ahead(uintptr_t last_at, intptr_t stride):
    """The map key that looking ahead sees from one at an address, at this distance from those before. For tests."""
    cdef LookAhead ahead
    cdef PartGuess *part = &ahead.visits[0].parts[VALUES_AHEAD + 1]
    cdef int i
    memset(&ahead, 0, sizeof(LookAhead))
    for i in range(3):
        note_part(&ahead, <Table *>&ahead, REACH_MAP_ENTRY, last_at - (2 - i) * stride)
    return part.number if part.turn == VALUES_AHEAD + 1 else None
