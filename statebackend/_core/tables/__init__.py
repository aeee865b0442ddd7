"""Copy-on-write maps, and the tables of states that are made of them.

`cow_map` is the map of one key group; its `.pxd` has the drawing and the rules, and `invariants` checks them.
`state_core` owns what the tables of a backend share: versions, marks, snapshots. `state_table` is one state,
`map_table` one map state, `lists` the values of list states. `expiry_sweep` finds what has expired; `reductions` and
`accumulators` say what a stored value becomes when another is added.

Handles and batches change these tables too, so their common needs are once, inline, in a `.pxd`: `entry_update`
puts a value into an entry, `values` converts numbers, bytes and references from Python and back, `map_table.pxd` walks
over the entries of one key.
"""
