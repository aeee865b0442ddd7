"""The memory in which the compiled core keeps what it stores. Nothing here knows what a state is.

`extents` gets memory from the system, 2 MB at a time. `arena` cuts it into runs and, for bytes of any length, into
blobs; it keeps the memory limit and the live counters. `blob_columns` copies many blobs into one column, `byte_rows`
checks such columns. `journal` keeps append-only logs in such runs. `interpreter.pxd` is for compiled loops that call
the user's functions. `platform.pxd` wraps what compilers and processors bring: hashing, prefetching, atomic counters,
spin locks.
"""
