"""Enumeration of a state: its keys and their namespaces, and the namespaces of the current key."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp

from statebackend._core.memory.arena cimport Blob, blob_data
from statebackend._core.tables.cow_map cimport (
    CoreKey, CowMap, Entry, Table, Walk, begin_walk, entry_at, find, hash_key, key_object, map_size, namespace_of,
    next_entry)
from statebackend._core.handles.table_handle cimport WANT_ALIVE, TableHandle


cdef tuple entries_of(TableHandle handle, bint all_namespaces, uint32_t number):
    """Collect the canonical keys, and as many namespace numbers, of what has something unexpired."""
    cdef list keys = []
    cdef list namespaces = []
    handle.core.enter()
    try:
        if all_namespaces or number == 0:
            gather(handle, handle.plain.table, True, 0, keys, namespaces)
        if handle.spaced is not None and (all_namespaces or number != 0):
            gather(handle, handle.spaced.table, all_namespaces, number, keys, namespaces)
    finally:
        handle.core.leave()
    return keys, namespaces


cdef int gather(TableHandle handle, Table *table, bint all_namespaces, uint32_t number, list keys,
                list namespaces) except -1:
    # Keys are ints and bytes, which start no garbage collection: nothing else runs during the walk.
    cdef uint32_t g, slot, ns
    cdef Entry *entry
    cdef Walk walk
    for g in range(table.n_maps):
        begin_walk(table.maps[g], &walk)
        slot = next_entry(table.core, &walk)
        while slot:
            entry = entry_at(table.core, slot)
            ns = namespace_of(table, entry)
            if (all_namespaces or ns == number) and (handle.ttl == 0 or handle.has_any(table, entry, WANT_ALIVE)):
                keys.append(key_object(table, entry))
                namespaces.append(ns)
            slot = next_entry(table.core, &walk)
    return 0


cdef list numbers_of_key(TableHandle handle):
    """Collect the numbers of the namespaces other than VOID in which the current key has an entry.

    Asks for each namespace of the backend, or looks at each entry of the key group, whichever is less.
    """
    cdef list found = []
    cdef CowMap *map
    cdef Table *table = handle.spaced_table
    cdef CoreKey *key = &handle.context.key
    cdef CoreKey at
    cdef list names = handle.core.namespaces.names
    cdef uint32_t ns
    if table == NULL:
        return found
    map = table.maps[key.group - table.first_group]
    if map == NULL:
        return found
    if <uint64_t>len(names) > map_size(map):
        collect_namespaces(table, map, key, found)
        return found
    at = key[0]
    for ns in range(1, <uint32_t>len(names)):
        at.namespace = ns
        at.hash = hash_key(table, &at, ns)
        if find(table, map, &at):
            found.append(ns)
    return found


cdef int collect_namespaces(Table *table, CowMap *map, CoreKey *key, list found) except -1:
    """Collect the namespaces of a key from the entries of its key group."""
    cdef uint32_t slot
    cdef Entry *entry
    cdef Blob *blob
    cdef Walk walk
    begin_walk(map, &walk)
    slot = next_entry(table.core, &walk)
    while slot:
        entry = entry_at(table.core, slot)
        if table.layout.key_is_blob:
            blob = <Blob *>entry.key
            if blob.length == key.length and memcmp(blob_data(blob), key.data, key.length) == 0:
                found.append(namespace_of(table, entry))
        elif entry.key == key.number:
            found.append(namespace_of(table, entry))
        slot = next_entry(table.core, &walk)
    return 0
