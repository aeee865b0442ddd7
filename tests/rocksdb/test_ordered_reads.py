"""Reads of many keys, in any order and number, from a column family that they are much of, or little."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from rocks import CommittedClock, Database, ExpiryRules, WriteBatch, merge, open_database, rows, texts

from statebackend._core.rocksdb.overlay.keyed_store import KeyedStore
from statebackend._core.rocksdb.overlay.ordered_reads import read_many
from statebackend.errors import ClosedError, StoreError

pytestmark = pytest.mark.checked


def fill(db: Database, model: dict[bytes, bytes]) -> None:
    batch = WriteBatch(db)
    batch.put_many(db.column_family("a"), *rows(model), *rows(model.values()))
    batch.write()


def check(db: Database, model: dict[bytes, bytes], asked: list[bytes]) -> None:
    offsets, data = rows(asked)
    found, *values = read_many(db.column_family("a"), offsets, np.frombuffer(data, np.uint8))
    assert found.tolist() == [key in model for key in asked]
    assert texts(*values) == [model.get(key, b"") for key in asked]


@pytest.mark.parametrize("held", [0, 3_000, 30_000])
@pytest.mark.parametrize("asked", [0, 1, 63, 64, 1_999, 2_000, 9_000])
@pytest.mark.parametrize("order", ["random", "ascending", "several times"])
def test_every_key_is_found_where_it_is(
    db: Database, rng: random.Random, held: int, asked: int, order: str
) -> None:
    model = {b"%d" % rng.randrange(10**7): b"v" * rng.randrange(4) for _ in range(held)}
    fill(db, model)
    if rng.random() < 0.5:
        db.flush()
    known = list(model) or [b"none"]
    keys = [rng.choice(known) if rng.random() < 0.7 else b"%d" % rng.randrange(10**7) for _ in range(asked)]
    if order == "ascending":
        keys = sorted(set(keys))
    if order == "several times":
        keys = [*keys, *keys[: asked // 2], b"", b"\xff"]
    check(db, model, keys)


def test_gaps_that_an_iterator_does_not_walk_over(db: Database) -> None:
    model = {b"%06d" % i: b"%d" % i for i in range(12_000)}
    fill(db, model)
    near = [b"%06d" % i for i in range(2_500)]
    check(db, model, [*near, b"005000", b"009999", b"011998x", b"011999", b"9"])


def test_appended_values_are_joined(tmp_path: Path) -> None:
    rules = ExpiryRules(CommittedClock(), "fixed_list", element_bytes=1)
    with open_database(tmp_path / "db", rules=rules, is_list=True) as db:
        keys = [b"%05d" % i for i in range(3_000)]
        fill(db, dict.fromkeys(keys, b"a"))
        for key in keys[::3]:
            merge(db, db.column_family("a"), key, b"b")
        check(db, {key: b"ab" if i % 3 == 0 else b"a" for i, key in enumerate(keys)}, keys)


def test_a_closed_database_is_refused(db: Database) -> None:
    fill(db, {b"%05d" % i: b"" for i in range(3_000)})
    a = db.column_family("a")
    offsets, data = rows(b"%05d" % i for i in range(3_000))
    db.close()
    with pytest.raises(ClosedError):
        read_many(a, offsets, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(("held", "changed"), [(0, 30), (30, 3_000), (3_000, 0), (3_000, 30), (3_000, 3_000)])
def test_prefixes_that_have_a_row(db: Database, rng: random.Random, held: int, changed: int) -> None:
    """In the database, or in an open batch, or that had some until the batch removed them, all or but the last."""

    def some(n: int) -> set[bytes]:
        return {b"%04d:%d" % (rng.randrange(1_000), rng.randrange(6)) for _ in range(n)}

    store = KeyedStore(db, AssertionError)
    table = store.add_table(db.column_family("a"), -1)
    model = dict.fromkeys(some(held), b"v")
    fill(db, model)
    mark = store.mark()
    for key in (key for key in list(model) if rng.random() < 0.5):
        store.delete_at(table, key)
        del model[key]
    for key in some(changed):
        store.put_at(table, key, b"w")
        model[key] = b"w"
    there = {key[:5] for key in model}

    def has(prefix: bytes) -> bool:
        return prefix in there if len(prefix) == 5 else any(key.startswith(prefix) for key in model)

    asked = [b"%04d:" % rng.randrange(1_000) for _ in range(2_000)]
    nested = [b"", b"00", b"0001", b"0001:", b"0001:3", b"9", b"\xff"]
    for prefixes in (asked, sorted(asked), asked[:1], [], nested):
        offsets, data = rows(prefixes)
        found = store.have_rows(table, offsets, np.frombuffer(data, np.uint8))
        assert found.tolist() == [has(prefix) for prefix in prefixes]
    store.release(mark)
    store.close()


@pytest.mark.parametrize("later", [[], [b"z"], [b"z", b"zz"]])
def test_damaged_file_is_not_taken_for_an_empty_file(tmp_path: Path, later: list[bytes]) -> None:
    """Whatever an open batch has behind the damage."""
    path = tmp_path / "db"
    with open_database(path) as db:
        fill(db, {b"a%04d" % i: os.urandom(200) for i in range(500)})
        db.flush()
        (damaged,) = path.glob("*.sst")
        fill(db, {b"m%04d" % i: b"" for i in range(500)})
        db.flush()
    data = bytearray(damaged.read_bytes())
    for at in range(0, len(data) * 2 // 3, 50):
        data[at] ^= 0xFF
    damaged.write_bytes(data)
    with open_database(path) as db:
        store = KeyedStore(db, AssertionError)
        table = store.add_table(db.column_family("a"), -1)
        mark = store.mark()
        for key in later:
            store.put_at(table, key, b"")
        for prefixes in ([b"a"], [b"a", b"m"], [b"a", b"a0001", b"m", b"z"]):
            offsets, found = rows(prefixes)
            with pytest.raises(StoreError):
                store.have_rows(table, offsets, np.frombuffer(found, np.uint8))
        store.release(mark)
        store.close()
