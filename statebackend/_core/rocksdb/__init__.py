"""RocksDB, bound at run time, and the compiled half of the backend on it; importing it loads no library.

`library` opens it, has its functions in a table, and makes exceptions of its errors. `callbacks` is what it calls
back: the filter of compactions and the merging of lists. `options` has settings and the memory that databases share.
`database`, `batches` and `iterators` are its objects, with rules for who goes before whom. `buffers.pxd` has bytes that
grow.

On these stand the scalar calls of a keyed backend. `composite_keys` and `value_layouts` say what bytes are stored;
`held` is what was read, while it is decoded. `overlay` is what an open batch has changed, `walks` go over it and the
database together. `store` reads and writes both; `current_key` sets the key, and `base_handle`, `single_handles`,
`list_handle` and `map_handle` are what users call.
"""
