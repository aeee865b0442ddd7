"""The scalar calls of a keyed backend on RocksDB.

`current_key` sets the key, namespace and time. `family_handle` has the common part of all handles;
`single_family_handles`, `list_family_handle` and `map_family_handle` have the calls of each kind of state.
`value_layouts` says which bytes are stored.
"""
