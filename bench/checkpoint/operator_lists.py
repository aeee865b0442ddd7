"""What a snapshot and a restore of a list of operator state cost, by the type of its elements."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pyarrow as pa

import statebackend as sb
from bench.checkpoint.costs import store_in, values_of

#: Types of elements by how their values are made.
KINDS = {"inline": "bigint", "arena": "string", "struct": "struct<a:bigint,b:string>"}


def union_list(n: int, layout: str, samples: int, folder: str | None) -> dict[str, float]:
    """Million elements a second of a snapshot, committed, and of a restore, until the list can be asked for."""
    descriptor = sb.ListStateDescriptor("list", KINDS[layout])
    numbers = np.random.default_rng(7).integers(-(2**62), 2**62, n)
    values = values_of(layout, numbers)
    heap = sb.create_backend("heap")
    written, restored = [], []
    with store_in(folder) as store, heap.create_operator_backend() as operator:
        state = operator.get_union_list_state(descriptor)
        state.update(pa.array(values))
        for each in range(samples):
            start = time.perf_counter()
            pending = operator.snapshot(each, store, incremental=False)
            checkpoint = store.commit(each, [pending.result()])
            written.append(time.perf_counter() - start)
        for _ in range(samples):
            start = time.perf_counter()
            again = heap.create_operator_backend(restore=checkpoint)
            found = again.get_union_list_state(descriptor)
            restored.append(time.perf_counter() - start)
            assert found.view().kept == state.view().kept
            again.close()
    return {
        "write": n / statistics.median(written) / 1e6,
        "restore": n / statistics.median(restored) / 1e6,
    }
