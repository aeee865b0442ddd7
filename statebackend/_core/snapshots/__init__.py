"""The entries of one moment, and the changes since a mark, as checkpoints read them.

`snapshot_view` reads a snapshot, on any thread, while the live tables go on. `changes` reads the journal. Both give
rows, which are addresses of entries; `entry_rows` turns those into columns.
"""
