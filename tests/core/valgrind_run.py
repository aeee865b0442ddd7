"""A short model run for memory checkers; not a test of its own.

Memcheck, on a release build (options of the interpreter come first, its own allocator is put aside):

    PYTHONMALLOC=malloc PYTHONPATH=tests:tests/support:. valgrind --suppressions=tests/core/valgrind.supp \\
        --error-exitcode=9 python tests/core/valgrind_run.py

AddressSanitizer, on a build made with CFLAGS and LDFLAGS "-fsanitize=address -fno-omit-frame-pointer":

    ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$(gcc -print-file-name=libasan.so) PYTHONMALLOC=malloc \\
        PYTHONPATH=tests:tests/support:. python tests/core/valgrind_run.py

Both see the arena's extents as single blocks: accesses beyond an extent, to a dropped one and to freed
C-heap blocks (page directories, snapshot directories, list chunks above 4 KB, journal segments) are found,
overruns inside are not.
"""

from __future__ import annotations

import argparse
import random

import numpy as np
from map_model import Layout, MapModel

from statebackend._core.kernels import batch_kernels

LAYOUTS = [
    Layout("long"),
    Layout("byte", "bytes"),
    Layout("bytes", "bytes", True, True),
    Layout("object"),
    Layout("copied", "bytes"),
    Layout(5, namespaces=True),
    Layout(200),
    Layout("double", timestamps=True),
    Layout(("list", "long")),
    Layout(("list", "bytes"), "bytes", True, True),
    Layout(("list", "object")),
    Layout(("list", 200)),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2_000, help="actions for each layout")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    for layout in LAYOUTS:
        model = MapModel(
            layout,
            seed=rng.getrandbits(32),
            keys=80,
            max_parallelism=2,
            initial_capacity=4,
            starve=rng.random() < 0.5,
        )
        try:
            model.run(options.steps, options.steps // 4)
            model.finish()
        except BaseException:
            print(model)
            raise
        # Dropped with marks and snapshots open.
        model = MapModel(layout, seed=rng.getrandbits(32), keys=80, max_parallelism=2)
        model.run(options.steps // 4)
        del model
        print(layout, "done", flush=True)
    # A table of many pages and several extents, grown, copied for a snapshot, emptied.
    model = MapModel(Layout("long"), seed=options.seed, keys=100, max_parallelism=1, starve=False)
    keys = np.arange(150_000)
    batch_kernels.update_many(model.table, keys, keys, threads=2)
    view = model.core.snapshot()
    batch_kernels.update_many(model.table, keys, -keys, threads=2)
    assert sorted(view.rows(model.table, 0, 0).columns()["value"].tolist()) == keys.tolist()
    view.release()
    batch_kernels.remove_many(model.table, keys, threads=2)
    model.finish()
    print("done")


if __name__ == "__main__":
    main()
