"""A short run of everything for memory checkers; not a test of its own.

    PYTHONMALLOC=malloc PYTHONPATH=tests:tests/support:. valgrind --suppressions=tests/core/valgrind.supp \\
        --error-exitcode=9 python tests/rocksdb/valgrind_run.py

The library of RocksDB is optimised code of others: what memcheck says of it alone is not ours.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from rocks import (
    CommittedClock,
    Database,
    ExpiryRules,
    Iterator,
    MemoryBudget,
    Options,
    WriteBatch,
    element,
    find_library,
    live_counters,
    load,
    rows,
)

import statebackend as sb
from statebackend.checkpoint.keyed import ExpiredAt
from statebackend.testing import ManualClock


def main() -> None:
    load(find_library().path)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2):
            use(Path(folder, str(turn)))
            use_backend(Path(folder, f"backend {turn}"))
    gc.collect()
    print(live_counters())


def use(path: Path) -> None:
    clock, budget = CommittedClock(), MemoryBudget(8 << 20)
    values = ExpiryRules(clock, "value", ttl=100, query_every=3)
    lists = ExpiryRules(clock, "variable_list", ttl=100, query_every=3)
    families = {
        "values": Options(budget=budget, rules=values, bloom_bits=10),
        "lists": Options(budget=budget, rules=lists, is_list=True),
    }
    db = Database(path, Options(threads=2), families)
    a, b = db.column_family("values"), db.column_family("lists")
    keys = [b"%03d" % i for i in range(300)]
    batch = WriteBatch(db)
    batch.put_many(a, *rows(keys), *rows([i.to_bytes(8, "little") + b"x" * i for i in range(300)]))
    batch.merge_many(b, *rows(keys), *rows([element(i, b"y" * i) for i in range(300)]))
    batch.write()
    iterator = Iterator(b, prefix=b"1")
    iterator.seek_to_first()
    assert len(iterator.read_many(1_000)[0]) == 101
    batch.merge(b, b"000", element(1_000, b"last"))
    batch.write()
    clock.now = 250
    db.flush()
    for family in (a, b, b):  # what merging has emptied goes with the second
        db.compact(family)
    found, _, _ = db.multi_get(a, *rows(keys))
    assert found.sum() == 149
    assert len(list(Iterator(b))) == 150
    db.checkpoint(path.with_name(f"{path.name}-copy"))
    db.drop_column_family(a)
    left = Iterator(b)
    left.seek_to_first()
    db.close()
    Database(path, Options(), others=Options(rules=lists, is_list=True)).close()


def use_backend(folder: Path) -> None:
    """Scalar and vectorised calls of a keyed backend, below marks, taken back, and written."""
    folder.mkdir()
    clock = ManualClock(0)
    backend = sb.create_backend("rocksdb", local_dir=folder, memory_limit=8 << 20)
    with backend.create_keyed_backend(str, clock=clock) as keyed:
        config = sb.StateTtlConfig(100, update_type=sb.StateTtlConfig.UpdateType.OnReadAndWrite)
        value = keyed.get_value_state(sb.ValueStateDescriptor("v", str).enable_time_to_live(config))
        tags = keyed.get_list_state(sb.ListStateDescriptor("l", str).enable_time_to_live(config))
        seen = keyed.get_map_state(sb.MapStateDescriptor("m", str, "struct<a:bigint,b:string>"))
        total = keyed.get_reducing_state(sb.ReducingStateDescriptor("r", "sum", int))
        outer = keyed.mark()
        for turn in range(3):
            inner = keyed.mark()
            for i in range(100):
                clock.set(i + 50 * turn)
                keyed.set_current_key(f"key {i % 40}")
                keyed.set_current_namespace(f"space {i % 3}")
                value.update("x" * (i * 11 % 700))
                value.value()
                tags.add("y" * i)
                tags.get()
                seen.put_all({f"{i}": (i, "z"), "other": None})
                assert len(list(seen.items())) >= 2
                del seen["other"]
                total.add(i)
                if i % 7 == 0:
                    for state in (value, tags, seen, total):
                        state.clear()
            keys = [f"key {i % 50}" for i in range(120)]
            value.update_many(keys, [None if i % 5 == 0 else "v" * i for i in range(120)])
            for state in (value, tags):
                state.get_many(keys)
                state.exists_many(keys)
            seen.get_many(keys, keys)
            total.add_many(keys, list(range(120)))
            keyed.store.overlay._check()
            if turn == 1:
                keyed.rollback(inner)
            keyed.release(inner)
        view = keyed._open_view(ExpiredAt())
        keyed.release(outer)
        assert sum(rows.batch.num_rows for section in view.sections() for rows in section.batches) > 0
        view.release()


if __name__ == "__main__":
    main()
