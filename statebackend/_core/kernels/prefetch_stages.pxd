"""The stages of a block of rows of one map: the memory that its rows need is prefetched, so that cache misses
overlap."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.kernels.batch_kernels cimport Batch, namespace_at
from statebackend._core.memory.arena cimport Blob, blob_data, unit_at
from statebackend._core.memory.platform cimport hash_int, likely, prefetch, prefetch_write, same_bytes, unlikely
from statebackend._core.tables.cow_map cimport PAGE_BUCKETS, PAGE_SHIFT, CowMap, Entry, PageRef, Table, blob_hash
from statebackend._core.tables.reductions cimport OP_GET, OP_READ, Operation

cdef struct BlockStages:
    # What the stages have found so far for the rows of a block.
    uint32_t hashes[32]
    uint32_t *buckets[32]
    uint32_t heads[32]                   # what the buckets held then
    uint32_t refs[32]                    # the entry that a row has come to in its chain
    Entry *entries[32]                   # the same; NULL behind the end
    uint32_t primary_capacity            # of the map then
    uint32_t secondary_capacity
    uint32_t nowhere                     # an empty bucket, for pages that do not exist

cdef inline void come_to(BlockStages *staged, uint32_t i, char **extents, uint32_t ref) noexcept nogil:
    staged.refs[i] = ref
    staged.entries[i] = <Entry *>unit_at(extents, ref) if ref else NULL

cdef inline void prefetch_entry(BlockStages *staged, uint32_t i, uint32_t last_byte) noexcept nogil:
    if staged.entries[i] != NULL:
        prefetch(staged.entries[i])
        prefetch(<char *>staged.entries[i] + last_byte)

cdef inline void prefetch_key(Entry *entry, uint32_t length) noexcept nogil:
    """Ask for the bytes of an entry's key, which should be so many; they may be on two cache lines."""
    prefetch(<char *>entry.key)
    prefetch(blob_data(<Blob *>entry.key) + length - 1)

cdef inline void stage_rows(Batch *batch, CowMap *map, int64_t at, uint32_t n, Operation op, bint is_blob,
                            uint32_t width, BlockStages *staged) noexcept nogil:
    """Ask for the buckets, then for the first entries, then for the second ones where the first has another key."""
    cdef Table *table = batch.table
    cdef char **extents = table.core.arena.extents
    cdef const int64_t *keys = batch.sorted_keys + at
    cdef const uint32_t *rows = batch.sorted_rows + at
    cdef uint32_t hash_mask = table.hash_mask, mask = map.primary.capacity - 1
    cdef uint32_t moved = map.rehash_index, mask_of_moved = map.secondary.capacity - 1
    cdef uint32_t last_byte = table.layout.off_value + width - 1
    cdef uint64_t seed = table.seed
    cdef PageRef *pages = map.primary.pages
    cdef uint32_t i, index, ref
    cdef Entry *entry
    staged.primary_capacity, staged.secondary_capacity = map.primary.capacity, map.secondary.capacity
    staged.nowhere = 0
    for i in range(n):
        if is_blob:
            staged.hashes[i] = batch.sorted_hashes[at + i]
            prefetch(batch.key_data + keys[i])
            prefetch(batch.key_data + keys[i] + batch.sorted_lengths[at + i] - 1)
        else:
            staged.hashes[i] = hash_int(keys[i], namespace_at(batch, at + i), seed) & hash_mask
        index = staged.hashes[i] & mask
        if unlikely(moved != 0) and index < moved:
            index = staged.hashes[i] & mask_of_moved
            ref = map.secondary.pages[index >> PAGE_SHIFT].ref
        else:
            ref = pages[index >> PAGE_SHIFT].ref
        staged.buckets[i] = &staged.nowhere
        if likely(ref != 0):
            staged.buckets[i] = <uint32_t *>unit_at(extents, ref) + (index & (PAGE_BUCKETS - 1))
        prefetch(staged.buckets[i])
        if op == OP_GET and width > 8 and batch.out != NULL:
            prefetch_write(batch.out + width * (batch.first + rows[i]))
            prefetch_write(batch.out + width * (batch.first + rows[i] + 1) - 1)
        if op != OP_GET and op != OP_READ:
            if batch.value_offsets == NULL:
                prefetch(batch.values + width * (batch.first + rows[i]))
                if width > 8:
                    prefetch(batch.values + width * (batch.first + rows[i] + 1) - 1)
            else:
                prefetch(batch.value_offsets + batch.first + rows[i])
            if batch.nulls != NULL:
                prefetch(batch.nulls + batch.first + rows[i])
    for i in range(n):
        staged.heads[i] = staged.buckets[i][0]
        come_to(staged, i, extents, staged.heads[i])
        prefetch_entry(staged, i, last_byte)
    for i in range(n):
        # One row in three finds another key at the head of its chain: ask for the next entry.
        entry = staged.entries[i]
        if entry != NULL and ((blob_hash(entry)[0] != staged.hashes[i]) if is_blob else (entry.key != keys[i])):
            come_to(staged, i, extents, entry.next)
            prefetch_entry(staged, i, last_byte)
        elif is_blob and entry != NULL:
            prefetch_key(entry, batch.sorted_lengths[at + i])
    if is_blob:
        for i in range(n):
            entry = staged.entries[i]
            if entry != NULL and staged.refs[i] != staged.heads[i] and blob_hash(entry)[0] == staged.hashes[i]:
                prefetch_key(entry, batch.sorted_lengths[at + i])

cdef inline bint is_key(Entry *entry, int64_t number, const char *data, uint32_t length, uint32_t hash,
                        uint32_t off_ns, uint32_t ns, bint is_blob) noexcept nogil:
    cdef Blob *blob
    if is_blob:
        if blob_hash(entry)[0] != hash:
            return False
        blob = <Blob *>entry.key
        if blob.length != length or not same_bytes(blob_data(blob), data, length):
            return False
    elif entry.key != number:
        return False
    return off_ns == 0 or (<uint32_t *>(<char *>entry + off_ns))[0] == ns
