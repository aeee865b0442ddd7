"""Ours: two reducing states, and a checkpoint after each batch."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

import statebackend as sb

__all__ = ["FORMS"]


class ReducingStates:
    def __init__(self, folder: str | None, threads: int) -> None:
        checkpoint, self.batch = None, 0
        if folder is not None:
            store = sb.CheckpointStore(folder)
            self.store = store.open_for_writing(key_type="bigint", max_parallelism=128)
            checkpoint = None if store.latest() is None else store.open_latest()
        backend = sb.create_backend("heap", threads=threads)
        self.keyed = backend.create_keyed_backend("bigint", restore=checkpoint)
        self.total = self.keyed.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", "bigint"))
        self.count = self.keyed.get_reducing_state(sb.ReducingStateDescriptor("count", "sum", "bigint"))

    def fill(self, keys: pa.Array, sums: pa.Array) -> None:
        self.add(keys, sums)

    def add(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        ones = np.ones(len(keys), dtype=np.int64)
        changed, totals, _ = self.total.add_many(keys, values, return_changed=True)
        counts = self.count.add_many(keys, ones, return_changed=True).values
        return pa.table({"k": changed, "s": totals, "n": counts})

    def save(self) -> None:
        self.batch += 1
        self.store.commit(self.batch, [self.keyed.snapshot(self.batch, self.store).result()])

    def contents(self, keys: pa.Array) -> pa.Table:
        if self.keyed.num_entries() != 2 * len(keys):
            raise AssertionError("the states have another number of keys")
        return pa.table({"k": keys, "s": self.total.get_many(keys), "n": self.count.get_many(keys)})


#: By durability.
FORMS = {False: {"two states": ReducingStates}, True: {"delta and commit": ReducingStates}}
