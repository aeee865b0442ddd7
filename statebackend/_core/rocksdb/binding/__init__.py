"""RocksDB, bound at run time: its objects, without any knowledge of states; importing it loads no library.

`library` opens RocksDB, has its functions in a table, and makes exceptions of its errors. `callbacks` has the functions
that RocksDB calls: the filter of compactions and the merge of lists. `database_options` has settings and the memory
that databases share. `database`, `write_batch`, `iterators` and `table_files` are its objects, with rules for the order
in which they close. `buffers.pxd` has bytes that grow.
"""
