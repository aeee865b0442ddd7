"""RocksDB's C API as a table of function pointers, filled from the library that `load` opens.

No header of RocksDB is there when we compile: the declarations are our own, of the functions that we use, as RocksDB
8.9 and later have them. The names are RocksDB's, without the prefix. All errors come as strings from malloc, through
a last argument `char **error`: `check` makes exceptions of them.

Who owns what, as the C API has it:

    options          copied by whoever takes them: may go at once. Objects set into them with a destructor (filter
                     factories, merge operators, filter policies) belongs to them from then on, and lives for as long
                     as a database needs it
    cache, manager   counted by RocksDB: our handle may go before the databases
    read options     an iterator reads its bounds in them: they go after it
    families         their handles go before the database
    base iterators   belong to the iterator over a batch that is made of them
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from *:
    """
    #define SB_TYPE(name) typedef struct rocksdb_##name##_t rocksdb_##name##_t;
    typedef struct rocksdb_t rocksdb_t;
    SB_TYPE(options) SB_TYPE(table) SB_TYPE(cache) SB_TYPE(manager) SB_TYPE(policy) SB_TYPE(family) SB_TYPE(read)
    SB_TYPE(write) SB_TYPE(flush) SB_TYPE(compact) SB_TYPE(wait) SB_TYPE(slice) SB_TYPE(iterator) SB_TYPE(batch)
    SB_TYPE(checkpoint) SB_TYPE(files) SB_TYPE(filter) SB_TYPE(filters) SB_TYPE(filter_context) SB_TYPE(merger)
    SB_TYPE(consumers) SB_TYPE(usage) SB_TYPE(environment) SB_TYPE(file_writer) SB_TYPE(ingest)
    """
    ctypedef struct rocksdb_t
    ctypedef struct rocksdb_options_t
    ctypedef struct rocksdb_table_t
    ctypedef struct rocksdb_cache_t
    ctypedef struct rocksdb_manager_t
    ctypedef struct rocksdb_policy_t
    ctypedef struct rocksdb_family_t
    ctypedef struct rocksdb_read_t
    ctypedef struct rocksdb_write_t
    ctypedef struct rocksdb_flush_t
    ctypedef struct rocksdb_compact_t
    ctypedef struct rocksdb_wait_t
    ctypedef struct rocksdb_slice_t
    ctypedef struct rocksdb_iterator_t
    ctypedef struct rocksdb_batch_t
    ctypedef struct rocksdb_checkpoint_t
    ctypedef struct rocksdb_files_t
    ctypedef struct rocksdb_filter_t
    ctypedef struct rocksdb_filters_t
    ctypedef struct rocksdb_filter_context_t
    ctypedef struct rocksdb_merger_t
    ctypedef struct rocksdb_consumers_t
    ctypedef struct rocksdb_usage_t
    ctypedef struct rocksdb_environment_t
    ctypedef struct rocksdb_file_writer_t
    ctypedef struct rocksdb_ingest_t

ctypedef unsigned char flag_t          # what the C API takes for a truth value

ctypedef flag_t (*filter_call_t)(void *state, int level, const char *key, size_t key_size, const char *value,
                                 size_t size, char **new_value, size_t *new_size, flag_t *is_changed) noexcept nogil
ctypedef rocksdb_filter_t *(*filters_call_t)(void *state, rocksdb_filter_context_t *context) noexcept nogil
ctypedef char *(*full_merge_t)(void *state, const char *key, size_t key_size, const char *value, size_t size,
                               const char **operands, const size_t *sizes, int n, flag_t *is_merged,
                               size_t *new_size) noexcept nogil
ctypedef char *(*partial_merge_t)(void *state, const char *key, size_t key_size, const char **operands,
                                  const size_t *sizes, int n, flag_t *is_merged, size_t *new_size) noexcept nogil
ctypedef void (*free_merged_t)(void *state, const char *value, size_t size) noexcept nogil
ctypedef void (*destructor_t)(void *state) noexcept nogil
ctypedef const char *(*name_t)(void *state) noexcept nogil

cdef struct Api:
    void (*free)(void *memory) noexcept nogil

    # options
    rocksdb_options_t *(*options_create)() noexcept nogil
    void (*options_destroy)(rocksdb_options_t *options) noexcept nogil
    void (*get_options_from_string)(const rocksdb_options_t *base, const char *text, rocksdb_options_t *made,
                                    char **error) noexcept nogil
    void (*options_set_create_if_missing)(rocksdb_options_t *options, flag_t yes) noexcept nogil
    void (*options_set_create_missing_column_families)(rocksdb_options_t *options, flag_t yes) noexcept nogil
    void (*options_increase_parallelism)(rocksdb_options_t *options, int threads) noexcept nogil
    void (*options_set_compaction_filter_factory)(rocksdb_options_t *options, rocksdb_filters_t *) noexcept nogil
    void (*options_set_merge_operator)(rocksdb_options_t *options, rocksdb_merger_t *merger) noexcept nogil
    void (*options_set_write_buffer_manager)(rocksdb_options_t *options, rocksdb_manager_t *) noexcept nogil
    void (*options_set_block_based_table_factory)(rocksdb_options_t *options, rocksdb_table_t *) noexcept nogil
    rocksdb_table_t *(*block_based_options_create)() noexcept nogil
    void (*block_based_options_destroy)(rocksdb_table_t *table) noexcept nogil
    void (*block_based_options_set_block_size)(rocksdb_table_t *table, size_t size) noexcept nogil
    void (*block_based_options_set_partition_filters)(rocksdb_table_t *table, flag_t yes) noexcept nogil
    void (*block_based_options_set_index_type)(rocksdb_table_t *table, int index_type) noexcept nogil
    void (*block_based_options_set_filter_policy)(rocksdb_table_t *table, rocksdb_policy_t *policy) noexcept nogil
    void (*block_based_options_set_block_cache)(rocksdb_table_t *table, rocksdb_cache_t *cache) noexcept nogil
    void (*block_based_options_set_cache_index_and_filter_blocks)(rocksdb_table_t *, flag_t) noexcept nogil
    void (*block_based_options_set_cache_index_and_filter_blocks_with_high_priority)(rocksdb_table_t *,
                                                                                     flag_t) noexcept nogil
    void (*block_based_options_set_pin_l0_filter_and_index_blocks_in_cache)(rocksdb_table_t *, flag_t) noexcept nogil
    void (*block_based_options_set_pin_top_level_index_and_filter)(rocksdb_table_t *, flag_t) noexcept nogil
    rocksdb_policy_t *(*filterpolicy_create_bloom_full)(double bits_per_key) noexcept nogil

    # memory
    rocksdb_cache_t *(*cache_create_lru)(size_t capacity) noexcept nogil
    void (*cache_destroy)(rocksdb_cache_t *cache) noexcept nogil
    size_t (*cache_get_capacity)(const rocksdb_cache_t *cache) noexcept nogil
    size_t (*cache_get_usage)(const rocksdb_cache_t *cache) noexcept nogil
    size_t (*cache_get_pinned_usage)(const rocksdb_cache_t *cache) noexcept nogil
    rocksdb_manager_t *(*write_buffer_manager_create_with_cache)(size_t size, const rocksdb_cache_t *cache,
                                                                 flag_t allow_stall) noexcept nogil
    void (*write_buffer_manager_destroy)(rocksdb_manager_t *manager) noexcept nogil
    size_t (*write_buffer_manager_memory_usage)(rocksdb_manager_t *manager) noexcept nogil
    size_t (*write_buffer_manager_buffer_size)(rocksdb_manager_t *manager) noexcept nogil
    rocksdb_consumers_t *(*memory_consumers_create)() noexcept nogil
    void (*memory_consumers_add_db)(rocksdb_consumers_t *consumers, rocksdb_t *db) noexcept nogil
    void (*memory_consumers_destroy)(rocksdb_consumers_t *consumers) noexcept nogil
    rocksdb_usage_t *(*approximate_memory_usage_create)(rocksdb_consumers_t *, char **error) noexcept nogil
    void (*approximate_memory_usage_destroy)(rocksdb_usage_t *usage) noexcept nogil
    uint64_t (*approximate_memory_usage_get_mem_table_total)(rocksdb_usage_t *usage) noexcept nogil
    uint64_t (*approximate_memory_usage_get_mem_table_unflushed)(rocksdb_usage_t *usage) noexcept nogil
    uint64_t (*approximate_memory_usage_get_mem_table_readers_total)(rocksdb_usage_t *usage) noexcept nogil

    # callbacks
    rocksdb_filter_t *(*compactionfilter_create)(void *state, destructor_t destructor, filter_call_t call,
                                                 name_t name) noexcept nogil
    rocksdb_filters_t *(*compactionfilterfactory_create)(void *state, destructor_t destructor, filters_call_t call,
                                                         name_t name) noexcept nogil
    rocksdb_merger_t *(*mergeoperator_create)(void *state, destructor_t destructor, full_merge_t full,
                                              partial_merge_t partial, free_merged_t free,
                                              name_t name) noexcept nogil

    # databases
    rocksdb_t *(*open_column_families)(const rocksdb_options_t *options, const char *path, int n,
                                       const char **names, const rocksdb_options_t **family_options,
                                       rocksdb_family_t **families, char **error) noexcept nogil
    void (*close)(rocksdb_t *db) noexcept nogil
    void (*cancel_all_background_work)(rocksdb_t *db, flag_t wait) noexcept nogil
    char **(*list_column_families)(const rocksdb_options_t *options, const char *path, size_t *n,
                                   char **error) noexcept nogil
    void (*list_column_families_destroy)(char **names, size_t n) noexcept nogil
    rocksdb_family_t *(*create_column_family)(rocksdb_t *db, const rocksdb_options_t *options, const char *name,
                                              char **error) noexcept nogil
    void (*drop_column_family)(rocksdb_t *db, rocksdb_family_t *family, char **error) noexcept nogil
    void (*column_family_handle_destroy)(rocksdb_family_t *family) noexcept nogil

    # reads
    rocksdb_read_t *(*readoptions_create)() noexcept nogil
    void (*readoptions_destroy)(rocksdb_read_t *options) noexcept nogil
    void (*readoptions_set_iterate_lower_bound)(rocksdb_read_t *options, const char *key, size_t n) noexcept nogil
    void (*readoptions_set_iterate_upper_bound)(rocksdb_read_t *options, const char *key, size_t n) noexcept nogil
    void (*readoptions_set_fill_cache)(rocksdb_read_t *options, flag_t yes) noexcept nogil
    rocksdb_slice_t *(*get_pinned_cf)(rocksdb_t *db, const rocksdb_read_t *options, rocksdb_family_t *family,
                                      const char *key, size_t n, char **error) noexcept nogil
    const char *(*pinnableslice_value)(const rocksdb_slice_t *slice, size_t *n) noexcept nogil
    void (*pinnableslice_destroy)(rocksdb_slice_t *slice) noexcept nogil
    void (*batched_multi_get_cf)(rocksdb_t *db, const rocksdb_read_t *options, rocksdb_family_t *family, size_t n,
                                 const char **keys, const size_t *sizes, rocksdb_slice_t **values, char **errors,
                                 flag_t is_sorted) noexcept nogil

    # iterators
    rocksdb_iterator_t *(*create_iterator_cf)(rocksdb_t *db, const rocksdb_read_t *options,
                                              rocksdb_family_t *family) noexcept nogil
    void (*iter_destroy)(rocksdb_iterator_t *iterator) noexcept nogil
    flag_t (*iter_valid)(const rocksdb_iterator_t *iterator) noexcept nogil
    void (*iter_seek)(rocksdb_iterator_t *iterator, const char *key, size_t n) noexcept nogil
    void (*iter_next)(rocksdb_iterator_t *iterator) noexcept nogil
    const char *(*iter_key)(const rocksdb_iterator_t *iterator, size_t *n) noexcept nogil
    const char *(*iter_value)(const rocksdb_iterator_t *iterator, size_t *n) noexcept nogil
    void (*iter_get_error)(const rocksdb_iterator_t *iterator, char **error) noexcept nogil

    # writes
    rocksdb_write_t *(*writeoptions_create)() noexcept nogil
    void (*writeoptions_destroy)(rocksdb_write_t *options) noexcept nogil
    void (*writeoptions_set_sync)(rocksdb_write_t *options, flag_t yes) noexcept nogil
    void (*writeoptions_disable_WAL)(rocksdb_write_t *options, int yes) noexcept nogil
    void (*delete_range_cf)(rocksdb_t *db, const rocksdb_write_t *options, rocksdb_family_t *family,
                            const char *start, size_t start_size, const char *end, size_t end_size,
                            char **error) noexcept nogil
    void (*write)(rocksdb_t *db, const rocksdb_write_t *options, rocksdb_batch_t *batch, char **error) noexcept nogil
    rocksdb_batch_t *(*writebatch_create)() noexcept nogil
    void (*writebatch_destroy)(rocksdb_batch_t *batch) noexcept nogil
    void (*writebatch_clear)(rocksdb_batch_t *batch) noexcept nogil
    int (*writebatch_count)(rocksdb_batch_t *batch) noexcept nogil
    const char *(*writebatch_data)(rocksdb_batch_t *batch, size_t *n) noexcept nogil
    void (*writebatch_put_cf)(rocksdb_batch_t *batch, rocksdb_family_t *family, const char *key, size_t key_size,
                              const char *value, size_t size) noexcept nogil
    void (*writebatch_merge_cf)(rocksdb_batch_t *batch, rocksdb_family_t *family, const char *key, size_t key_size,
                                const char *value, size_t size) noexcept nogil
    void (*writebatch_delete_cf)(rocksdb_batch_t *batch, rocksdb_family_t *family, const char *key,
                                 size_t key_size) noexcept nogil
    void (*writebatch_delete_range_cf)(rocksdb_batch_t *batch, rocksdb_family_t *family, const char *start,
                                       size_t start_size, const char *end, size_t end_size) noexcept nogil

    # files
    rocksdb_flush_t *(*flushoptions_create)() noexcept nogil
    void (*flushoptions_destroy)(rocksdb_flush_t *options) noexcept nogil
    void (*flush_cfs)(rocksdb_t *db, const rocksdb_flush_t *options, rocksdb_family_t **families, int n,
                      char **error) noexcept nogil
    rocksdb_compact_t *(*compactoptions_create)() noexcept nogil
    void (*compactoptions_destroy)(rocksdb_compact_t *options) noexcept nogil
    void (*compactoptions_set_exclusive_manual_compaction)(rocksdb_compact_t *options, flag_t yes) noexcept nogil
    void (*compactoptions_set_bottommost_level_compaction)(rocksdb_compact_t *options, flag_t how) noexcept nogil
    void (*compact_range_cf_opt)(rocksdb_t *db, rocksdb_family_t *family, rocksdb_compact_t *options,
                                 const char *start, size_t start_size, const char *end,
                                 size_t end_size) noexcept nogil
    void (*set_options_cf)(rocksdb_t *db, rocksdb_family_t *family, int n, const char *const *names,
                           const char *const *values, char **error) noexcept nogil
    void (*delete_file_in_range_cf)(rocksdb_t *db, rocksdb_family_t *family, const char *start, size_t start_size,
                                    const char *end, size_t end_size, char **error) noexcept nogil
    rocksdb_checkpoint_t *(*checkpoint_object_create)(rocksdb_t *db, char **error) noexcept nogil
    void (*checkpoint_create)(rocksdb_checkpoint_t *checkpoint, const char *path, uint64_t log_size_for_flush,
                              char **error) noexcept nogil
    void (*checkpoint_object_destroy)(rocksdb_checkpoint_t *checkpoint) noexcept nogil
    const rocksdb_files_t *(*livefiles)(rocksdb_t *db) noexcept nogil
    void (*livefiles_destroy)(const rocksdb_files_t *files) noexcept nogil
    int (*livefiles_count)(const rocksdb_files_t *files) noexcept nogil
    const char *(*livefiles_column_family_name)(const rocksdb_files_t *files, int at) noexcept nogil
    const char *(*livefiles_name)(const rocksdb_files_t *files, int at) noexcept nogil
    int (*livefiles_level)(const rocksdb_files_t *files, int at) noexcept nogil
    size_t (*livefiles_size)(const rocksdb_files_t *files, int at) noexcept nogil
    const char *(*livefiles_smallestkey)(const rocksdb_files_t *files, int at, size_t *n) noexcept nogil
    const char *(*livefiles_largestkey)(const rocksdb_files_t *files, int at, size_t *n) noexcept nogil
    uint64_t (*livefiles_entries)(const rocksdb_files_t *files, int at) noexcept nogil
    uint64_t (*livefiles_deletions)(const rocksdb_files_t *files, int at) noexcept nogil
    rocksdb_environment_t *(*envoptions_create)() noexcept nogil
    void (*envoptions_destroy)(rocksdb_environment_t *options) noexcept nogil
    rocksdb_file_writer_t *(*sstfilewriter_create)(const rocksdb_environment_t *environment,
                                                   const rocksdb_options_t *options) noexcept nogil
    void (*sstfilewriter_open)(rocksdb_file_writer_t *writer, const char *path, char **error) noexcept nogil
    void (*sstfilewriter_put)(rocksdb_file_writer_t *writer, const char *key, size_t key_size, const char *value,
                              size_t size, char **error) noexcept nogil
    void (*sstfilewriter_file_size)(rocksdb_file_writer_t *writer, uint64_t *size) noexcept nogil
    void (*sstfilewriter_finish)(rocksdb_file_writer_t *writer, char **error) noexcept nogil
    void (*sstfilewriter_destroy)(rocksdb_file_writer_t *writer) noexcept nogil
    rocksdb_ingest_t *(*ingestexternalfileoptions_create)() noexcept nogil
    void (*ingestexternalfileoptions_set_move_files)(rocksdb_ingest_t *options, flag_t yes) noexcept nogil
    void (*ingestexternalfileoptions_destroy)(rocksdb_ingest_t *options) noexcept nogil
    void (*ingest_external_file_cf)(rocksdb_t *db, rocksdb_family_t *family, const char *const *paths, size_t n,
                                    const rocksdb_ingest_t *options, char **error) noexcept nogil
    char *(*property_value_cf)(rocksdb_t *db, rocksdb_family_t *family, const char *name) noexcept nogil
    int (*property_int_cf)(rocksdb_t *db, rocksdb_family_t *family, const char *name, uint64_t *out) noexcept nogil
    rocksdb_wait_t *(*wait_for_compact_options_create)() noexcept nogil
    void (*wait_for_compact_options_destroy)(rocksdb_wait_t *options) noexcept nogil
    void (*wait_for_compact)(rocksdb_t *db, rocksdb_wait_t *options, char **error) noexcept nogil

cdef struct Live:                     # objects that hold memory of RocksDB
    int64_t databases
    int64_t families
    int64_t iterators
    int64_t batches
    int64_t pinned                    # values of the block cache that are being read
    int64_t options
    int64_t budgets
    int64_t table_files
    int64_t rules                     # of callbacks, those that only RocksDB still holds among them: atomic

cdef Api api                          # filled by `load`, constant afterwards
cdef bint is_loaded
cdef bint is_forked                   # this process is a fork of one that had loaded the library
cdef Live live                        # changed with the GIL, except for `rules`

cdef int need_library() except -1     # that it is loaded, and not by the parent of a fork

cdef int check(char *error, str where) except -1
