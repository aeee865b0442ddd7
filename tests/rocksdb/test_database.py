"""A database: what goes in comes out, and nothing is used after its end."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from processes import run
from rocks import (
    PRELUDE,
    ColumnFamily,
    Database,
    Iterator,
    MemoryBudget,
    Options,
    WriteBatch,
    delete,
    merge,
    open_database,
    put,
    rows,
    texts,
)

from statebackend._core.rocksdb.binding import database as database_module, library
from statebackend.errors import ClosedError, StateBackendError, StoreError, UsageError

pytestmark = pytest.mark.checked


def test_scalar_access(db: Database, a: ColumnFamily) -> None:
    entries = {b"": b"", b"\0\xff": bytes(range(256)) * 400, b"k1": b"v", b"k2": b"w"}
    for key, value in entries.items():
        assert db.get(a, key) is None
        put(db, a, key, value)
        assert db.get(a, key) == value
    delete(db, a, b"not there")
    db.delete_range(a, b"k1", b"k2")
    assert [db.get(a, key) for key in (b"", b"k1", b"k2")] == [b"", None, b"w"]
    delete(db, a, b"k2")
    assert db.get(a, b"k2") is None


def test_a_dropped_family_is_refused_and_its_name_is_free(db: Database) -> None:
    b = db.create_column_family("b", Options())
    same = db.column_family("b")
    put(db, b, b"k", b"v")
    iterator = Iterator(b)
    db.drop_column_family(b)
    for use in (lambda: db.get(b, b"k"), lambda: put(db, same, b"k", b"v"), lambda: Iterator(same)):
        with pytest.raises(UsageError, match="dropped") as error:
            use()
        assert error.value.code == "USAGE.COLUMN_FAMILY"
    assert iterator.is_closed
    with pytest.raises(UsageError, match="no such column family"):
        db.column_family("b")
    assert db.get(db.create_column_family("b", Options()), b"k") is None


def test_the_default_family_stays(db: Database) -> None:
    with pytest.raises(UsageError):
        db.drop_column_family(db.column_family("default"))
    assert db.column_families() == ["default", "a"]


def test_families_do_not_grow_with_making_and_dropping(db: Database) -> None:
    before = library.live_counters()["families"]
    for _ in range(50):
        db.drop_column_family(db.create_column_family("b", Options()))
    assert library.live_counters()["families"] == before


def test_a_family_of_another_database_is_refused(db: Database, tmp_path: Path) -> None:
    with open_database(tmp_path / "other") as other:
        family, batch = other.column_family("a"), WriteBatch(db)
        for call in (lambda: db.get(family, b"k"), lambda: batch.put(family, b"k", b"v")):
            with pytest.raises(UsageError, match="of another database"):
                call()


def test_written_values_are_there_after_a_reopen(tmp_path: Path) -> None:
    with open_database(tmp_path / "db", ("a", "b")) as db:
        put(db, db.column_family("b"), b"k", b"v")
    with open_database(tmp_path / "db", ("a", "b")) as db:
        assert db.get(db.column_family("b"), b"k") == b"v"
    with pytest.raises(UsageError, match="was not asked for") as error:
        open_database(tmp_path / "db", ("a",))
    assert error.value.code == "USAGE.COLUMN_FAMILY"
    with Database(tmp_path / "db", Options(), others=Options()) as db:
        assert sorted(db.column_families()) == ["a", "b", "default"]


def test_no_database_is_made_unasked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="RocksDB refuses"):
        Database(tmp_path / "db", Options(), create=False)
    assert not (tmp_path / "db" / "CURRENT").exists()


def test_many_keys_in_one_call(db: Database, a: ColumnFamily, np_rng: np.random.Generator) -> None:
    keys = [b"%d" % i for i in np_rng.permutation(5_000)]
    stored = {key: key * int(n) for key, n in zip(keys, np_rng.integers(0, 9, len(keys)), strict=True)}
    for key in keys[::2]:
        put(db, a, key, stored[key])
    db.flush()
    for key in keys[1::4]:
        put(db, a, key, stored[key])
    offsets, data = rows(keys)
    expected = [db.get(a, key) for key in keys]
    found, value_offsets, values = db.multi_get(a, offsets, data)
    assert found.tolist() == [value is not None for value in expected]
    assert texts(value_offsets, values) == [value or b"" for value in expected]
    in_order = sorted(keys)
    found, value_offsets, values = db.multi_get(a, *rows(in_order), is_sorted=True)
    assert texts(value_offsets, values) == [db.get(a, key) or b"" for key in in_order]


def test_no_keys_in_one_call(db: Database) -> None:
    found, offsets, values = db.multi_get(db.column_family("a"), np.zeros(1, np.int64), b"")
    assert (len(found), offsets.tolist(), len(values)) == (0, [0], 0)
    put(db, db.column_family("a"), b"", b"of the empty key")
    found, offsets, values = db.multi_get(db.column_family("a"), np.zeros(2, np.int64), b"")
    assert values.tobytes() == b"of the empty key"


@pytest.mark.parametrize("offsets", [[], [0, 5], [-1, 2], [2, 1], [0, 3, 2], [0, 2, 5, 4]])
def test_offsets_that_do_not_fit_are_refused(db: Database, offsets: list[int]) -> None:
    with pytest.raises(UsageError, match="offsets"):
        db.multi_get(db.column_family("a"), np.array(offsets, np.int64), b"abcd")


def test_files_and_properties(db: Database, a: ColumnFamily) -> None:
    for i in range(100):
        put(db, a, b"%03d" % i, b"x" * 100)
    delete(db, a, b"050")
    db.flush([a])
    (file,) = db.live_files()
    assert (file["family"], file["smallest"], file["largest"]) == ("a", b"000", b"099")
    assert (file["entries"], file["deletions"]) == (100, 1)
    assert os.path.getsize(os.path.join(db.path, file["name"])) == file["bytes"]
    assert db.statistics(a)["files_by_level"][0] == 1
    assert db.int_property("rocksdb.estimate-num-keys", a) is not None
    assert db.property("rocksdb.nothing-like-it", a) is None
    assert db.int_property("rocksdb.nothing-like-it", a) is None
    assert db.memory()["memtables"] > 0
    db.wait_for_compactions()
    assert db.statistics(a)["background_errors"] == 0


def test_files_of_a_range_go_without_a_compaction(db: Database, a: ColumnFamily) -> None:
    for part in (b"1", b"2"):
        for i in range(100):
            put(db, a, part + b"%03d" % i, b"x")
        db.flush()
        db.compact(a, part, part + b"\xff")
    assert len(db.live_files()) == 2
    db.delete_files_in_range(a, b"1", b"1\xff")
    (left,) = db.live_files()
    assert left["smallest"] == b"2000"
    assert db.get(a, b"1000") is None
    assert db.get(a, b"2000") == b"x"


def test_a_path_that_is_not_ascii(tmp_path: Path) -> None:
    with open_database(tmp_path / "Zürich 東京") as db:
        put(db, db.column_family("a"), b"k", b"v")
        db.create_column_family("Größe", Options())
    with Database(tmp_path / "Zürich 東京", Options(), {"Größe": Options()}, others=Options()) as db:
        assert db.get(db.column_family("a"), b"k") == b"v"


def test_databases_share_one_budget(tmp_path: Path) -> None:
    budget = MemoryBudget(8 << 20)
    databases = [open_database(tmp_path / str(i), budget=budget) for i in range(2)]
    for db in databases:
        a = db.column_family("a")
        keys = [b"%06d" % i for i in range(60_000)]
        batch = WriteBatch(db)
        batch.put_many(a, *rows(keys), *rows(key * 30 for key in keys))
        batch.write(wal=False)
        db.flush()
        for i in range(0, 60_000, 7):
            assert db.get(a, b"%06d" % i)
    usage = budget.usage()
    assert 0.5 * usage["cache_capacity"] < usage["cache"] <= 1.05 * usage["cache_capacity"]
    assert usage["cache_capacity"] + usage["write_buffer_capacity"] // 2 <= 8 << 20
    # Index and filter blocks are in it, too: what tables keep outside is small.
    assert all(db.memory()["table_readers"] < 100_000 for db in databases)
    for db in databases:
        db.close()
    del budget
    with pytest.raises(UsageError, match="too small"):
        MemoryBudget(1 << 20)


def all_calls(db: Database) -> list[Callable[[], object]]:
    a = db.column_family("a")
    batch, iterator = WriteBatch(db), Iterator(a)
    iterator.seek_to_first()
    offsets, keys = rows([b"k"])
    return [
        lambda: db.get(a, b"k"),
        lambda: put(db, a, b"k", b"v"),
        lambda: merge(db, a, b"k", b"v"),
        lambda: delete(db, a, b"k"),
        lambda: db.delete_range(a, b"k", b"l"),
        lambda: db.multi_get(a, offsets, keys),
        lambda: db.flush(),
        lambda: db.flush([]),
        lambda: db.compact(a),
        lambda: db.delete_files_in_range(a),
        lambda: db.checkpoint("nowhere"),
        lambda: db.live_files(),
        lambda: db.wait_for_compactions(),
        lambda: db.property("rocksdb.stats", a),
        lambda: db.int_property("rocksdb.estimate-num-keys", a),
        lambda: db.statistics(a),
        lambda: db.memory(),
        lambda: db.column_family("a"),
        lambda: db.column_families(),
        lambda: db.create_column_family("b", Options()),
        lambda: db.drop_column_family(a),
        lambda: WriteBatch(db),
        lambda: Iterator(a),
        lambda: len(batch),
        lambda: batch.nbytes,
        lambda: batch.put(a, b"k", b"v"),
        lambda: batch.merge(a, b"k", b"v"),
        lambda: batch.delete(a, b"k"),
        lambda: batch.delete_range(a, b"k", b"l"),
        lambda: batch.put_many(a, offsets, keys, offsets, keys),
        lambda: batch.merge_many(a, offsets, keys, offsets, keys),
        lambda: batch.delete_many(a, offsets, keys),
        lambda: batch.clear(),
        lambda: batch.write(),
        lambda: iterator.seek(b"k"),
        lambda: iterator.seek_to_first(),
        lambda: iterator.next(),
        lambda: iterator.key(),
        lambda: iterator.value(),
        lambda: iterator.read_many(1),
        lambda: list(iterator),
    ]


def test_after_closing_everything_raises(db: Database) -> None:
    put(db, db.column_family("a"), b"k", b"v")
    calls = all_calls(db)
    db.close()
    assert db.is_closed
    for i, call in enumerate(calls):
        with pytest.raises(ClosedError) as error:
            call()
        assert error.value.code == "CLOSED", i
    db.close()


def test_objects_close_in_any_order(tmp_path: Path) -> None:
    for order in ("db batch iterator", "iterator db batch", "batch iterator db", "db iterator batch"):
        db = open_database(tmp_path / "db")
        a = db.column_family("a")
        batch = WriteBatch(db)
        batch.put(a, b"k", b"v")
        iterator = Iterator(a)
        iterator.seek_to_first()
        objects = {"db": db, "batch": batch, "iterator": iterator}
        del db, a, batch, iterator
        for name in order.split():
            each = objects.pop(name)
            if name != "batch":
                each.close()  # type: ignore[union-attr]
            del each


def test_an_object_keeps_the_database(tmp_path: Path) -> None:
    iterator = Iterator(open_database(tmp_path / "db").column_family("a"))
    gc.collect()
    assert iterator.seek_to_first() is False
    with pytest.raises(StoreError) as error:
        open_database(tmp_path / "db")
    assert error.value.code == "STORE.DATABASE_LOCKED"
    del iterator
    open_database(tmp_path / "db").close()


def test_a_cycle_that_holds_an_iterator_is_collected(tmp_path: Path) -> None:
    db = open_database(tmp_path / "db")
    cycle: list[object] = [Iterator(db.column_family("a")), WriteBatch(db), db]
    cycle.append(cycle)
    del db, cycle
    gc.collect()
    open_database(tmp_path / "db").close()


def test_closing_waits_for_other_threads(tmp_path: Path) -> None:
    db = open_database(tmp_path / "db")
    a = db.column_family("a")
    for i in range(2_000):
        put(db, a, b"%d" % i, b"x" * 100)
    errors: list[StateBackendError] = []
    ready = threading.Barrier(5)

    def work(call: Callable[[], object]) -> None:
        ready.wait()
        try:
            while True:
                call()
        except StateBackendError as error:
            errors.append(error)

    offsets, keys = rows([b"%d" % i for i in range(2_000)])
    calls: list[Callable[[], object]] = [
        lambda: db.get(a, b"7"),
        lambda: db.multi_get(a, offsets, keys),
        lambda: list(Iterator(a)),
        lambda: db.compact(a),
    ]
    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    ready.wait()
    db.flush()
    db.close()
    for thread in threads:
        thread.join(60)
    assert [error.code for error in errors] == ["CLOSED"] * 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_and_closing_does_not_grow(tmp_path: Path) -> None:
    done = run(
        PRELUDE
        + """
budget = MemoryBudget(8 << 20)
def peak():  # of this program alone: ru_maxrss begins with what the process had from which it was forked
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
for i in range(150):
    with open_database(sys.argv[1], budget=budget) as db:
        a = db.column_family("a")
        put(db, a, b"k", b"v" * 100)
        batch = WriteBatch(db)
        batch.put(a, b"j", b"v")
        batch.write()
        with Iterator(a) as iterator:
            assert len(list(iterator)) == 2
    if i == 50:
        early = peak()
print(peak() - early)
counts = live_counters()
assert counts["databases"] == counts["families"] == counts["iterators"] == counts["pinned"] == 0, counts
""",
        tmp_path / "db",
        timeout=900,
    )
    assert int(done.stdout) < 2_000  # kilobytes


def test_a_setting_of_an_open_family_is_changed(db: Database, a: ColumnFamily) -> None:
    db.set_option(a, "periodic_compaction_seconds", 3600)
    with pytest.raises(UsageError):
        db.set_option(a, "no such setting", 1)
    with pytest.raises(UsageError, match="zero byte"):
        db.set_option(a, "periodic_compaction_seconds", "1\0")


def test_the_families_of_a_folder_are_listed(tmp_path: Path) -> None:
    assert database_module.families_in(tmp_path / "db", Options()) == []
    open_database(tmp_path / "db").close()
    assert database_module.families_in(tmp_path / "db", Options()) == ["default", "a"]


def test_a_zero_byte_in_a_name_is_refused(db: Database, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="zero byte"):
        db.create_column_family("a\0b", Options())
    with pytest.raises(UsageError, match="zero byte"):
        Database(str(tmp_path) + "/a\0b", Options())
