"""The later steps of looking ahead; `look_ahead.pxd` explains their purpose."""

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy, memset

from statebackend._core.memory.arena cimport address, ref_ahead
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, ListChunk, ListHead, Table, blob_hash, chain_head, entry_at, find_int, hash_blob_key,
    hash_int_key, namespace_of, value_of)
from statebackend._core.memory.platform cimport prefetch


cdef void note_other_map_key(Visit *visit, Table *entries, const CoreKey *key, uint32_t turn) noexcept nogil:
    """Note a map key that differs from the last one: it takes the place of the one that has not come for longest."""
    cdef MapKey *noted
    cdef uint32_t i, oldest = 0
    if visit.entries != entries:
        visit.entries = entries
        memset(visit.map_keys, 0, sizeof(visit.map_keys))
    if entries.layout.key_is_blob and key.length > MAP_KEY_BYTES:
        return
    for i in range(MAP_KEYS):
        noted = &visit.map_keys[i]
        if is_map_key(noted, entries, key):
            noted.comes_again |= noted.turn != turn
            noted.turn = turn
            visit.last_map_key = i
            return
        if turn - noted.turn > turn - visit.map_keys[oldest].turn:
            oldest = i
    noted = &visit.map_keys[oldest]
    noted.number, noted.turn, noted.comes_again = key.number, turn, False
    if entries.layout.key_is_blob:
        noted.number = <int64_t>key.length
        memcpy(noted.bytes, key.data, key.length)
    visit.last_map_key = oldest


cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil:
    """Prefetch the data behind entries that have arrived."""
    cdef Coming *far = coming_in(ahead, CHAINS_AHEAD)
    cdef Coming *near = coming_in(ahead, VALUES_AHEAD)
    cdef Coming *nearer = coming_in(ahead, PARTS_AHEAD)
    cdef Coming *nearest = coming_in(ahead, RESTS_AHEAD)
    cdef uint32_t i
    cdef Visit *visit
    for i in range(ahead.n_visits):
        visit = &ahead.visits[i]
        if visit.table.layout.key_is_blob:
            if far != NULL:
                ask_for_key(visit.table, far.group, far.hash, far.number)
            if near != NULL:
                ask_for_second_key(visit.table, near)
        elif visit.reach != REACH_ENTRY and far != NULL:
            ask_for_second(visit.table, far.group, far.hash, far.number, namespace)
        if visit.reach == REACH_ENTRY:
            continue
        if near != NULL:
            follow_value(visit, near, namespace, ahead.turn + VALUES_AHEAD)
        if visit.reach == REACH_BLOB:
            continue
        if nearer != NULL:
            follow_part(visit, nearer, namespace, ahead.turn + PARTS_AHEAD)
        if nearest != NULL:
            follow_rest(visit, nearest, namespace, ahead.turn + RESTS_AHEAD)


cdef uint32_t find_hash(Table *table, CowMap *map, uint32_t namespace, uint32_t hash) noexcept nogil:
    """The first entry of a byte key with this hash, most probably the one; its bytes may not have arrived. 0: none."""
    cdef uint32_t slot = chain_head(table.core, map, hash)
    while slot and (blob_hash(entry_at(table.core, slot))[0] != hash
                    or namespace_of(table, entry_at(table.core, slot)) != namespace):
        slot = entry_at(table.core, slot).next
    return slot


cdef char *found_value(Visit *visit, Coming *key, uint32_t namespace) noexcept nogil:
    cdef CowMap *map = visit.table.maps[key.group - visit.table.first_group]
    cdef uint32_t slot = 0, hash = key.hash & visit.table.hash_mask
    if map != NULL:
        if visit.table.layout.key_is_blob:
            slot = find_hash(visit.table, map, namespace, hash)
        else:
            slot = find_int(visit.table, map, key.number, namespace, hash)
    return value_of(visit.table, entry_at(visit.table.core, slot)) if slot else NULL


cdef void expect_entries(Visit *visit, TurnEntries *part, uint32_t turn) noexcept nogil:
    """Hash the map keys that are probably looked up in a turn."""
    cdef Table *entries = visit.entries
    cdef MapKey *key
    cdef uint32_t i
    part.n = 0
    for i in range(MAP_KEYS):
        key = &visit.map_keys[i]
        if is_expected(key, turn):
            part.numbers[part.n] = key.number
            if entries.layout.key_is_blob:
                part.hashes[part.n] = hash_blob_key(entries, key.bytes, key.number, part.anchor)
            else:
                part.hashes[part.n] = hash_int_key(entries, key.number, part.anchor)
            part.n += 1


cdef void follow_value(Visit *visit, Coming *key, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value = found_value(visit, key, namespace)
    cdef TurnEntries *part
    cdef uint32_t anchor, i
    if visit.reach == REACH_MAP_ENTRY:
        if value != NULL:
            anchor = (<uint32_t *>value)[0]
        else:                            # the key will be new, and those before it are taken to be
            anchor = ref_ahead(visit.table.core.blobs, sizeof(Anchor), VALUES_AHEAD)
        if anchor:
            part = &visit.parts[turn & (PARTS - 1)]
            part.anchor, part.turn = anchor, turn
            expect_entries(visit, part, turn)
            for i in range(part.n):
                ask_for_bucket(visit.entries, key.group, part.hashes[i])
    elif value == NULL:
        return
    elif visit.reach == REACH_BLOB:
        prefetch((<void **>value)[0])
    elif visit.reach == REACH_LIST:
        prefetch((<ListHead *>value).tail)
        if (<ListHead *>value).tail_used < (<ListHead *>value).length:
            visit.parts[turn & (PARTS - 1)].turn = turn      # there are chunks before it
    else:
        prefetch(address(visit.table.core.arena, (<uint32_t *>value)[0]))


cdef void follow_part(Visit *visit, Coming *key, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value
    cdef ListChunk *chunk
    cdef uint32_t first, i
    cdef TurnEntries *part = &visit.parts[turn & (PARTS - 1)]
    if visit.reach == REACH_MAP_ENTRY:
        for i in range(part.n if part.turn == turn else 0):
            ask_for_entry(visit.entries, key.group, part.hashes[i])
        return
    if visit.reach == REACH_LIST and part.turn != turn:
        return
    value = found_value(visit, key, namespace)
    if value == NULL:
        return
    if visit.reach == REACH_LIST:
        chunk = (<ListHead *>value).tail
        if chunk != NULL:
            prefetch(chunk.prev)
        return
    first = (<Anchor *>address(visit.table.core.arena, (<uint32_t *>value)[0])).first
    if first:
        # Entries that were put one after the other mostly lie so.
        for i in range(LINES):
            prefetch(<char *>entry_at(visit.table.core, first) + i * LINE_BYTES)


cdef void follow_rest(Visit *visit, Coming *key, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value
    cdef ListChunk *chunk
    cdef uint32_t i
    cdef TurnEntries *part = &visit.parts[turn & (PARTS - 1)]
    if visit.reach == REACH_MAP_ENTRY:
        for i in range(part.n if part.turn == turn else 0):
            if visit.entries.layout.key_is_blob:
                ask_for_key(visit.entries, key.group, part.hashes[i], part.numbers[i])
            else:
                ask_for_second(visit.entries, key.group, part.hashes[i], part.numbers[i], part.anchor)
    elif visit.reach == REACH_LIST and part.turn == turn:
        value = found_value(visit, key, namespace)
        if value != NULL:
            chunk = (<ListHead *>value).tail
            if chunk != NULL and chunk.prev != NULL:
                prefetch(chunk.prev.prev)
