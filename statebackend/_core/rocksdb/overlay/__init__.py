"""The changes of an open batch in front of a database, and reads of both together.

`composite_keys` says which bytes keys have. `overlay` holds the changes since each open mark, sorted by `key_order`.
`key_changes` notes which keys have changed since the last snapshot. `merging_iterator` and `ordered_reads` read overlay
and database in the order of keys, `sorted_rows` sorts and selects rows, and `keyed_store` reads and writes both.
"""
