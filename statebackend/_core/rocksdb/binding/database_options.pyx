"""Settings of databases and column families, and the memory that all databases of a process share.

Plain settings go to RocksDB under its own names, as text that it checks itself. Only what is an object needs its
own function: cache, write buffer manager, filter policy, callbacks. RocksDB copies options and counts what
is in them, so options and budgets may go before the databases that were opened with them.
"""

cimport cython
from libc.stdint cimport uint64_t

from statebackend._core.rocksdb.binding.callbacks cimport ExpiryRules
from statebackend._core.rocksdb.binding.library cimport (
    api, check, is_forked, live, need_library, rocksdb_options_t, rocksdb_policy_t, rocksdb_table_t,
)

from statebackend.errors import UsageError

cdef enum:
    TWO_LEVEL_INDEX = 2               # of the C API: an index of partitions

SMALLEST_LIMIT = 4 << 20
"""The smallest budget, in bytes: a block of a memtable, 1 MB, must fit the share of the write buffers."""


@cython.final
cdef class MemoryBudget:
    """The block cache and the write buffers of all databases that are opened with it: `limit` bytes together.

    Write buffers are charged to the cache, and so are index and filter blocks. They may pass their share by half
    before RocksDB flushes them; the shares are such that all of it stays within the limit. Blocks that iterators hold
    may come on top, and writes while flushes are behind: who has written a batch asks `is_overdrawn`, and
    flushes. (RocksDB's own stall waits forever for buffers of a database without writes.)
    """

    def __cinit__(self, limit not None, *, double write_buffer_ratio=0.5):
        cdef uint64_t capacity, buffers
        need_library()
        if not SMALLEST_LIMIT <= limit < 1 << 62:
            raise UsageError("the memory limit is too small", detail=f"{limit} bytes",
                             hint=f"use at least {SMALLEST_LIMIT} bytes")
        if not 0 < write_buffer_ratio < 1:
            raise UsageError("write_buffer_ratio lies between 0 and 1")
        self.limit = limit
        # Buffers reach 1.5 times their share: 1.5 b = r limit, and the cache has what is left next to that half.
        buffers = int(2 * self.limit * write_buffer_ratio / 3)
        capacity = self.limit - buffers // 2
        self.cache = api.cache_create_lru(capacity)
        live.budgets += 1
        self.manager = api.write_buffer_manager_create_with_cache(buffers, self.cache, False)

    def __dealloc__(self):
        if self.cache == NULL or is_forked:
            return
        api.write_buffer_manager_destroy(self.manager)
        api.cache_destroy(self.cache)
        live.budgets -= 1

    cdef size_t write_buffers(self) noexcept nogil:
        """The share of the write buffers."""
        return api.write_buffer_manager_buffer_size(self.manager)

    cdef bint is_overdrawn(self) noexcept nogil:
        """True while write buffers have more than the half above their share: flushes do not keep pace."""
        cdef size_t share = self.write_buffers()
        return api.write_buffer_manager_memory_usage(self.manager) > share + share // 2

    def usage(self):
        """Say in bytes what the databases use of the ``cache``, ``pinned`` and ``write_buffers`` among it.

        With the shares, ``cache_capacity`` and ``write_buffer_capacity``.
        """
        need_library()
        return {
            "cache": api.cache_get_usage(self.cache),
            "pinned": api.cache_get_pinned_usage(self.cache),
            "write_buffers": api.write_buffer_manager_memory_usage(self.manager),
            "cache_capacity": api.cache_get_capacity(self.cache),
            "write_buffer_capacity": api.write_buffer_manager_buffer_size(self.manager),
        }


@cython.final
cdef class Options:
    """Options of a database, or of a column family; each ignores the other's.

    `settings` have RocksDB's names and values, such as ``{"compression": "kLZ4Compression"}``. Index and filter
    blocks are in the cache, in partitions unless `partitioned` is false; the top of each, and all blocks of the
    newest files, stay there. `rules` give a column family its filter, and its merge operator with `is_list`.
    """

    def __cinit__(self, settings=None, *, MemoryBudget budget=None, ExpiryRules rules=None, bint is_list=False,
                  threads=None, block_size=None, double bloom_bits=0, bint partitioned=True):
        cdef rocksdb_options_t *base
        cdef char *error = NULL
        cdef bytes text = _text_of(settings or {})
        need_library()
        if is_list and rules is None:
            raise UsageError("a list needs rules: they say how its elements lie")
        if threads is not None and not 1 <= threads <= 1024:
            raise UsageError("threads must lie between 1 and 1024")
        if block_size is not None and not 1 << 10 <= block_size <= 1 << 28:
            raise UsageError("block_size must lie between 1 KB and 256 MB")
        if not 0 <= bloom_bits <= 100:
            raise UsageError("bloom_bits must lie between 0 and 100")
        self.options = api.options_create()
        live.options += 1
        base = api.options_create()
        if threads is not None:
            api.options_increase_parallelism(base, threads)
        api.get_options_from_string(base, text, self.options, &error)
        api.options_destroy(base)
        check(error, "settings")
        self.budget = budget
        if budget is not None:
            api.options_set_write_buffer_manager(self.options, budget.manager)
        self.set_table(budget, block_size or 0, bloom_bits, partitioned)
        if rules is not None:
            api.options_set_compaction_filter_factory(self.options, rules.make_filters())
            if is_list:
                api.options_set_merge_operator(self.options, rules.make_merger())

    cdef int set_table(self, MemoryBudget budget, size_t block_size, double bloom_bits, bint partitioned) except -1:
        cdef rocksdb_table_t *table = api.block_based_options_create()
        cdef rocksdb_policy_t *policy
        api.block_based_options_set_cache_index_and_filter_blocks(table, True)
        api.block_based_options_set_cache_index_and_filter_blocks_with_high_priority(table, True)
        api.block_based_options_set_pin_l0_filter_and_index_blocks_in_cache(table, True)
        api.block_based_options_set_pin_top_level_index_and_filter(table, True)
        if block_size:
            api.block_based_options_set_block_size(table, block_size)
        if bloom_bits:
            policy = api.filterpolicy_create_bloom_full(bloom_bits)
            api.block_based_options_set_filter_policy(table, policy)
        if partitioned:
            api.block_based_options_set_index_type(table, TWO_LEVEL_INDEX)
            api.block_based_options_set_partition_filters(table, bloom_bits > 0)
        if budget is not None:
            api.block_based_options_set_block_cache(table, budget.cache)
        api.options_set_block_based_table_factory(self.options, table)
        api.block_based_options_destroy(table)
        return 0

    def __dealloc__(self):
        if self.options == NULL or is_forked:
            return
        api.options_destroy(self.options)
        live.options -= 1


cdef bytes _text_of(settings):
    """Settings in RocksDB's notation."""
    parts = []
    for name, value in settings.items():
        if isinstance(value, bool):
            value = "true" if value else "false"
        text = f"{name}={value}"
        if any(c in text for c in ";\0\n"):
            raise UsageError("a setting has a character that it cannot have", detail=f"setting {name!r}",
                             code="USAGE.DATABASE_OPTION")
        parts.append(text)
    return ";".join(parts).encode()
