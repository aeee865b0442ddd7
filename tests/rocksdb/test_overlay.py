"""The open batch: what it shows in front of the database, what a rollback takes back, and what it leaves there."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meddling import Meddler
from rocks import CommittedClock, Database, ExpiryRules, Options, WriteBatch, put, rows, texts

from statebackend._core.rocksdb.overlay.keyed_store import KeyedStore, Table
from statebackend._core.rocksdb.overlay.merging_iterator import MergingIterator
from statebackend.errors import UsageError
from statebackend.keys import runs_of_list

pytestmark = pytest.mark.checked

Model = dict[bytes, bytes]


def release(store: KeyedStore, mark: int, *, is_last: bool) -> None:
    store.release(mark)
    if is_last:
        store.flush()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """A store with a table of values, and one of lists whose elements have one byte."""
    lists = ExpiryRules(CommittedClock(), "fixed_list", element_bytes=1)
    families = {"values": Options(), "lists": Options(rules=lists, is_list=True)}
    with Database(tmp_path / "db", Options(), families) as database:
        made = KeyedStore(database, lambda: None)
        yield made
        made.close()


def tables(store: KeyedStore) -> tuple[Table, Table]:
    if not store.tables:
        for number, name in enumerate(("values", "lists")):
            store.add_table(store.database.column_family(name), number)
    values, lists = store.tables
    return values, lists


def contents(store: KeyedStore, table: Table) -> Model:
    return dict(store.rows(table, b""))


def check(store: KeyedStore, expected: dict[str, Model]) -> None:
    store.overlay._check()
    for table, model in zip(tables(store), expected.values(), strict=True):
        assert store.rows(table, b"") == sorted(model.items())
        for prefix in (b"1", b"2", b"no"):
            assert store.rows(table, prefix) == sorted(
                each for each in model.items() if each[0][:2] >= prefix and each[0].startswith(prefix)
            )
        asked = [b"", b"\0", *(b"%d" % i for i in range(0, 300, 3))]
        found, *values = store.get_many(table, *runs_of_list(asked))
        assert found.tolist() == [key in model for key in asked]
        assert texts(values[0], values[1]) == [model.get(key, b"") for key in asked]
        for key in asked[:10]:
            assert store.get_at(table, key) == model.get(key)


def change(store: KeyedStore, chance: random.Random, expected: dict[str, Model]) -> None:
    """One call that writes: to one key, or to several."""
    values, lists = tables(store)
    keys = [b"%d" % chance.randrange(300) for _ in range(chance.choice((1, 1, 1, 20)))]
    keys[0] = chance.choice((b"", b"\0", *keys * 9))
    data = [bytes([chance.randrange(256)]) * chance.randrange(40) for _ in keys]
    what = chance.choice(("put", "delete", "merge", "put list", "delete list"))
    table = values if what in ("put", "delete") else lists
    model = expected["values" if table is values else "lists"]
    if len(keys) > 1 and store.has_marks:
        if "delete" in what:
            store.delete_many(table, *runs_of_list(keys))
        else:
            (store.merge_many if what == "merge" else store.put_many)(
                table, *runs_of_list(keys), *runs_of_list(data)
            )
    else:
        for key, each in zip(keys, data, strict=True):
            if "delete" in what:
                store.delete_at(table, key)
            else:
                (store.merge_at if what == "merge" else store.put_at)(table, key, each)
    for key, each in zip(keys, data, strict=True):
        if "delete" in what:
            model.pop(key, None)
        else:
            model[key] = model.get(key, b"") + each if what == "merge" else each


def copied(expected: dict[str, Model]) -> dict[str, Model]:
    return {name: dict(model) for name, model in expected.items()}


@pytest.mark.parametrize("seed", range(4))
def test_it_does_what_a_dict_of_copies_would_do(store: KeyedStore, seed: int) -> None:
    chance = random.Random(seed)
    expected: dict[str, Model] = {"values": {}, "lists": {}}
    marks: list[tuple[int, dict[str, Model]]] = []
    tables(store)
    store.unmarked_keys = (1, 5, 40, 1000)[seed]  # without marks, all changed keys go into the database then
    for _ in range(600):
        turn = chance.random()
        if turn < 0.75:
            change(store, chance, expected)
        elif turn < 0.84:
            marks.append((store.mark(), copied(expected)))
        elif turn < 0.92 and marks:
            at = chance.randrange(len(marks))
            store.roll_back(marks[at][0])
            del marks[at + 1 :]
            expected = copied(marks[at][1])
        elif marks:
            number, _ = marks.pop(chance.randrange(len(marks)))
            release(store, number, is_last=not marks)
            assert store.has_marks == bool(marks)
        assert marks or len(store.overlay) <= store.unmarked_keys
        if chance.random() < 0.2:
            check(store, expected)
    while marks:
        number, _ = marks.pop()
        release(store, number, is_last=not marks)
    store.flush()
    assert len(store.overlay) == store.overlay.nbytes == 0
    check(store, expected)


def test_a_walk_over_a_copy_sees_its_moment(store: KeyedStore) -> None:
    chance = random.Random(1)
    expected: dict[str, Model] = {"values": {}, "lists": {}}
    for _ in range(300):
        change(store, chance, expected)
    mark = store.mark()
    for _ in range(300):
        change(store, chance, expected)
    walks = [MergingIterator(each.family, store.frozen(each)) for each in tables(store)]
    then = copied(expected)
    for _ in range(100):
        change(store, chance, expected)
    release(store, mark, is_last=True)
    for walk, model in zip(walks, then.values(), strict=True):
        found: list[tuple[bytes, bytes]] = []
        while more := walk.rows(7):
            found += more
        assert found == sorted(model.items())
        walk.close()
    check(store, expected)


def test_a_walk_goes_on_where_the_batch_has_changed(store: KeyedStore) -> None:
    values, _ = tables(store)
    store.mark()
    for key in (b"a", b"c", b"e", b"g"):
        store.put_at(values, key, key)
    with store.walk(values, b"") as walk:
        assert walk.rows(2) == [(b"a", b"a"), (b"c", b"c")]
        store.put_at(values, b"b", b"before")
        store.put_at(values, b"d", b"new")
        store.delete_at(values, b"e")
        assert walk.rows(9) == [(b"d", b"new"), (b"g", b"g")]
        assert walk.rows(9) == []


def test_repeated_writes_of_a_key_take_no_memory(store: KeyedStore) -> None:
    """Also with a mark for each write, as a job has that routes rows which fail."""
    values, lists = tables(store)
    outer = store.mark()
    for i in range(2_000):
        inner = store.mark()
        store.put_at(values, b"k", b"%04d" % i)
        store.merge_at(lists, b"k", bytes([i % 256]))
        store.release(inner)
    assert store.overlay.nbytes <= 2 + 2 * 4 + 2_000
    inner = store.mark()
    store.put_at(values, b"k", b"x")
    store.delete_at(lists, b"k")
    store.roll_back(inner)
    store.overlay._check()
    assert store.get_at(values, b"k") == b"1999"
    assert store.get_at(lists, b"k") == bytes(i % 256 for i in range(2_000))
    store.roll_back(outer)
    assert len(store.overlay) == store.overlay.nbytes == 0


def test_a_rollback_costs_what_it_takes_back(store: KeyedStore) -> None:
    """An index that were made anew would take milliseconds at each of these."""
    values, _ = tables(store)
    store.mark()
    keys = runs_of_list([b"%08d" % i for i in range(300_000)])
    store.put_many(values, *keys, *keys)
    start = time.thread_time()
    for i in range(2_000):
        mark = store.mark()
        store.put_at(values, b"%08d" % (7 * i), b"other")
        store.put_at(values, b"%08d new" % i, b"other")
        store.roll_back(mark)
        store.release(mark)
    assert time.thread_time() - start < 1.0
    assert len(store.overlay) == 300_000
    assert store.get_at(values, b"%08d" % 14) == b"%08d" % 14


def test_marks_that_are_gone_are_refused(store: KeyedStore) -> None:
    first, second = store.mark(), store.mark()
    store.roll_back(first)
    for stale in (second, first + 100, 0):
        with pytest.raises(UsageError) as refused:
            store.roll_back(stale)
        assert refused.value.code == "USAGE.STALE_MARK"
    store.roll_back(first)
    with pytest.raises(UsageError, match="marks to go back to"):
        store.flush()
    release(store, first, is_last=True)
    with pytest.raises(UsageError, match="no such mark"):
        store.release(first)


def test_many_keys_need_a_mark_and_as_many_values(store: KeyedStore) -> None:
    values, _ = tables(store)
    one, two = rows([b"a"]), rows([b"a", b"b"])
    offsets, data = one[0], np.frombuffer(one[1], np.uint8)
    with pytest.raises(UsageError, match="in a batch"):
        store.put_many(values, offsets, data, offsets, data)
    store.mark()
    with pytest.raises(UsageError, match="as many values"):
        store.put_many(values, offsets, data, two[0], np.frombuffer(two[1], np.uint8))
    assert contents(store, values) == {}


def test_values_of_4_gb_are_refused(store: KeyedStore) -> None:
    """RocksDB would cut the length. The zeros are never touched, and so take no memory."""
    values, _ = tables(store)
    for _ in range(2):
        with pytest.raises(UsageError, match="4 GB or longer"):
            store.put_at(values, b"k", bytes(1 << 32))
        store.mark()
    assert contents(store, values) == {}


def test_values_that_are_4_gb_long_with_their_key_are_refused(store: KeyedStore) -> None:
    """RocksDB would take too little memory for the row, and write past it."""
    values, lists = tables(store)
    long = bytes((1 << 32) - 20)
    column = np.array([0, len(long)]), np.frombuffer(long, np.uint8)
    shorter = bytes(len(long) - 100)
    calls = [
        lambda: store.put_at(values, b"k", long),
        lambda: store.merge_at(lists, b"k", long),
        lambda: store.put_at(values, b"k" * 100, shorter),
    ]
    direct = [
        lambda: WriteBatch(store.database).put_many(values.family, *rows([b"k"]), *column),
        lambda: put(store.database, values.family, b"k", long),
    ]
    for call in (*calls, *direct):
        with pytest.raises(UsageError, match="4 GB or longer"):
            call()
    store.mark()
    for call in (*calls, lambda: store.put_many(values, *runs_of_list([b"k"]), *column)):
        with pytest.raises(UsageError, match="4 GB or longer"):
            call()
    assert contents(store, values) == contents(store, lists) == {}


@pytest.mark.parametrize("read", ["many", "walk", "prefixes"])
def test_a_finaliser_may_roll_back_while_the_batch_is_read(store: KeyedStore, read: str) -> None:
    _, lists = tables(store)
    keys = [b"%d" % i for i in range(200)]
    expected = [(key, b"ab") for key in sorted(keys)]
    for key in keys:
        store.merge_at(lists, key, b"a")
    mark = store.mark()

    def write() -> None:
        store.merge_many(lists, *runs_of_list(keys), *runs_of_list([b"b"] * len(keys)))

    def write_again() -> None:
        store.roll_back(mark)
        write()

    write()
    asked = runs_of_list(keys)
    with Meddler(write_again).at_work():
        for _ in range(20):
            if read == "many":
                found, *values = store.get_many(lists, *asked)
                assert found.all()
                assert bytes(values[1]) == b"ab" * len(keys)
            elif read == "walk":
                assert store.rows(lists, b"") == expected
            else:
                assert store.have_rows(lists, *asked).all()
    store.overlay._check()


@pytest.mark.parametrize("calls", ["one by one", "together"])
def test_a_list_that_gets_too_long_for_the_database_is_refused(store: KeyedStore, calls: str) -> None:
    """It is refused before anything is changed, also if marks lie between its parts."""
    _, lists = tables(store)
    store.overlay.longest = 8  # with the key

    def append(key: bytes, elements: bytes) -> None:
        if calls == "one by one":
            store.merge_at(lists, key, elements)
        else:
            store.merge_many(lists, *runs_of_list([key]), *runs_of_list([elements]))

    first = store.mark()
    append(b"1", b"abc")
    second = store.mark()
    append(b"1", b"defg")
    for elements in (b"h", b"hij"):
        with pytest.raises(UsageError, match="4 GB or longer") as error:
            append(b"1", elements)
        assert "several keys" in str(error.value.hint)
        store.overlay._check()
        assert store.get_at(lists, b"1") == b"abcdefg"
    append(b"2", b"hijklmn")
    store.roll_back(second)
    append(b"1", b"xyz")
    release(store, second, is_last=False)
    with pytest.raises(UsageError, match="4 GB or longer"):
        append(b"1", b"12")
    release(store, first, is_last=True)
    assert contents(store, lists) == {b"1": b"abcxyz"}


@pytest.mark.parametrize("rows_first", [0, 2, 7])
def test_a_walk_goes_on_behind_what_was_written_out(store: KeyedStore, rows_first: int) -> None:
    values, _ = tables(store)
    store.unmarked_keys = 10
    for number in range(10):
        store.put_at(values, b"%02d" % number, b"x")
    with store.walk(values, b"") as walk:
        found = walk.rows(rows_first) if rows_first else []
        store.put_at(values, b"zz", b"x")
        assert len(store.overlay) == 1, "the others went into the database"
        found += walk.rows(100)
    assert [key for key, _ in found] == [b"%02d" % number for number in range(10)] + [b"zz"]


def test_two_threads_that_write_out_are_told(store: KeyedStore) -> None:
    values, _ = tables(store)
    store.unmarked_keys = 1000
    refused = [0, 0]

    def write(who: int) -> None:
        for number in range(20_000):
            try:
                store.put_at(values, b"%d-%d" % (who, number * 7919 % 20_000), b"x")
            except UsageError:
                refused[who] += 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (0, 1)))
    assert len(store.rows(values, b"")) == 40_000 - sum(refused)


def test_so_many_bytes_are_written_out_whichever_state_has_them(store: KeyedStore) -> None:
    for number in range(100):
        store.put_at(tables(store)[number % 2], b"%d" % number, bytes(200_000))
    assert store.overlay.nbytes < 5 << 20


def test_a_thread_that_reads_the_batch_without_the_gil_keeps_others_out(store: KeyedStore) -> None:
    """Walks, and copies for snapshots: what they stand on would go, or come to lie elsewhere."""
    values, _ = tables(store)
    gone = runs_of_list([b"%07d" % number for number in range(200_000)])
    mark = store.mark()
    store.put_many(values, *gone, *runs_of_list([b"x"] * 200_000))
    release(store, mark, is_last=True)
    mark = store.mark()
    store.delete_many(values, *gone)  # to look for the first key that is there takes long, without the GIL
    release(store, mark, is_last=True)
    store.mark()
    store.put_many(
        values, *runs_of_list([b"b%05d" % n for n in range(20_000)]), *runs_of_list([b"x"] * 20_000)
    )
    inner = store.mark()
    many = [
        runs_of_list([b"a%02d%06d" % (turn, n * 7919 % 1_000_003) for n in range(20_000)])
        for turn in range(10)
    ]
    done = {"put": 0, "refused": 0}
    is_done = False

    def change() -> None:
        turn = 0
        while not is_done:
            time.sleep(0.003)
            turn += 1
            try:
                store.put_many(values, *many[turn % 10], *runs_of_list([b"x"] * 20_000))
                done["put"] += 1
                time.sleep(0.003)
            except UsageError:
                done["refused"] += 1
            store.roll_back(inner)

    thread = threading.Thread(target=change)
    thread.start()
    walked = copied = 0
    try:
        began = time.monotonic()
        while min(walked, copied, *done.values()) < 5 and time.monotonic() - began < 120:
            with suppress(UsageError), store.walk(values, b"") as walk:
                while walk.rows(5_000):
                    walked += 1
            with suppress(UsageError), MergingIterator(values.family, store.frozen(values)) as walk:
                assert len(walk.rows(100_000)) in (20_000, 40_000)
                copied += 1
            time.sleep(0.001)
    finally:
        is_done = True
        thread.join()
    assert min(walked, copied, *done.values()) > 0
    store.overlay._check()
