"""The compiled heart of the package: keyed state in memory, with marks, snapshots and batches.

The rooms, from the ground up. A module imports from the rooms below its own and from its own room. The one exception:
a core makes its own snapshots, so it loads `snapshots` late.

    +----------------+-----------------+------------------------+
    |  snapshots     |  kernels        |  handles               |
    |  a reader's    |  many keys in   |  one record at a time: |
    |  side; changes |  one call, no   |  the current key, and  |
    |  since a mark  |  GIL, threads   |  a class per state     |
    +----------------+-----------------+------------------------+
    |  codecs     Python objects to stored bytes, and back      |
    +-----------------------------------------------------------+
    |  tables     StateCore: the versions of one backend        |
    |             StateTable, MapTable: one state               |
    |             CowMap: one key group of one state            |
    +-----------------------------------------------------------+
    |  memory     extents, runs, blobs; logs                    |
    +-----------------------------------------------------------+

The backend on RocksDB uses `codecs`, and the key, namespace and time of `handles`. It has three rooms,
`rocksdb/binding`, `rocksdb/overlay` and `rocksdb/handles`: see `rocksdb/__init__.py`.

Five modules are at the door, below all rooms, because they know no state: `key_groups` hashes keys as Spark does,
`crc32c` sums files, `row_digest` hashes columns, `wall_clock` reads the machine's clock as seldom as possible, `pulse`
exchanges signs of life between processes.

Start with `tables/cow_map.pxd`. It draws the map, states its invariants and declares every struct. `tables/invariants`
checks them: that is what `_check()` runs.

One update, from the handle to the map:

    backend.set_current_key(key)     KeyContext converts and hashes the key once, for all states, and increments
                                     `StateCore.calls`: handles forget the slots that they remember
    value.update(5)                  ValueHandle, in `handles/single_handle.pyx`
      find_here                      in `handles/table_handle.pyx`: picks the table of the namespace and the map of the
                                     key group, lets a growing map move a few entries, and finds the slot; skipped
                                     while the slot is remembered
      codec.store                    makes the stored form; other values go through its serializer
      write_value                    in `tables/entry_update.pxd`: makes the entry, or clones it if a snapshot needs it
                                     and journals it if a mark does; then the stored form goes in, and the time of now,
                                     where values expire

Everything that can run out of memory comes before the change, and the change cannot fail. So an operation that raises
has changed nothing.

One batch, through `kernels/batch_kernels.pyx`:

    count      every lane (a thread) takes a range of rows and computes their key groups
    scatter    every lane orders its rows by key group; rows of one group keep their order
    apply      every lane takes a range of key groups and goes over their rows in blocks of 32: it asks for the
               buckets, asks for the entries, then operates
    settle     if one row failed, everything is undone, in reverse order; else the lanes' logs join the core's

A batch makes no Python object between `count` and `settle`, and threads share no map.

Three words that come up everywhere:

    mark       A point to roll back to. `StateCore.mark` increments the version. From then on, the first write to an
               older entry puts the old value into the journal and then writes in place. `rollback` replays the
               journal backwards. The journal also says what has changed since: an incremental checkpoint reads that.
    snapshot   A moment that another thread can read. `StateCore.snapshot` increments the version and copies
               nothing. Afterwards, an entry or a bucket page that the snapshot needs is copied before it changes.
    retired    A slot is retired when it leaves the live map (a clone replaced it, or its key was removed) while a
    slot       journal or a snapshot still needs it. It keeps its key and its value until they let it go. The table
               in `cow_map.pxd` says who holds it, and when it goes.

Where something new goes:

    a value type    Its row goes into `types/layout.py`, the one table of types; docs/internals/entry.md lists the other
                    files. Here it needs a number in `TypeCode` of `tables/values.pxd`. A time also needs its
                    conversions in `codecs/type_codec.pyx`. With the number of TYPE_OTHER it is stored as its
                    serializer's bytes, and nothing here changes. Only a value that owns memory in a new way needs a
                    ValueKind in `cow_map.pxd`, with its cases in `payload_ref`, `payload_drop` and `put_value`.
    a handle        A module in `handles`, with a class that derives from `Handle`, or from `SingleHandle` if there is
                    one value for a key; `handles/__init__.py` lists the modules. The heap backend then gives it its own
                    face in `backends/heap`.
    a kernel        A module in `kernels`, with a `BlockFunction`: it takes up to 32 rows and their maps. Sorting,
                    threads and undoing come from `BatchCall`; see `batch_kernels.pxd`.

`setup.py` finds each new module. A function that is used once per record and needed by other modules is a `cdef inline`
in a `.pxd`.
"""
