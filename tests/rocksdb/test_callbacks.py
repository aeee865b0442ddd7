"""The compaction filter and the merge operator, in real compactions: what has expired goes, and nothing else."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from rocks import (
    ColumnFamily,
    CommittedClock,
    Database,
    ExpiryRules,
    Iterator,
    Options,
    delete,
    element,
    elements,
    merge,
    open_database,
    put,
)

from statebackend.errors import StoreError

pytestmark = pytest.mark.checked


def timestamped(timestamp: int, text: bytes = b"", offset: int = 0) -> bytes:
    return bytes(offset) + struct.pack("<q", timestamp) + text


def in_files(db: Database, family: str = "a") -> int:
    """How many entries the files of a column family have; nothing is read for it."""
    return sum(each["entries"] for each in db.live_files() if each["family"] == family)


def compacted(db: Database) -> None:
    db.flush()
    db.compact(db.column_family("a"))


@pytest.fixture
def clock() -> CommittedClock:
    return CommittedClock()


@pytest.fixture
def make(tmp_path: Path, clock: CommittedClock) -> Iterable[object]:
    """Makes a database with rules for its family `a`, and that; it is closed in the end."""
    made: list[Database] = []

    def make(kind: str, **options: int) -> tuple[Database, ColumnFamily, ExpiryRules]:
        rules = ExpiryRules(clock, kind, **options)
        made.append(open_database(tmp_path / "db", rules=rules, is_list=kind.endswith("list")))
        return made[-1], made[-1].column_family("a"), rules

    yield make
    made.pop().close()


Make = Callable[..., tuple[Database, ColumnFamily, ExpiryRules]]


@pytest.mark.parametrize(
    ("timestamp", "now", "goes"),
    [
        (0, 99, False),
        (0, 100, True),
        (-50, 49, False),
        (-50, 50, True),
        (2**63 - 50, 2**63 - 2, False),
        (7, -(2**63), False),
        (-(2**62), None, False),  # at first nothing has expired
    ],
)
def test_the_moment_of_expiry(
    make: Make, clock: CommittedClock, timestamp: int, now: int | None, goes: bool
) -> None:
    db, a, _ = make("value", ttl=100)
    put(db, a, b"k", timestamped(timestamp))
    if now is None:
        assert clock.now == -(2**63)
    else:
        clock.now = now
    compacted(db)
    assert (in_files(db) == 0) is goes


def test_without_a_time_to_live_only_empty_lists_go(make: Make, clock: CommittedClock) -> None:
    db, a, rules = make("variable_list")
    put(db, a, b"full", element(0, b"x"))
    put(db, a, b"empty", b"")
    clock.now = 2**62
    compacted(db)
    assert dict(Iterator(a)) == {b"full": element(0, b"x")}
    assert in_files(db) == 1
    assert rules.counters()["dropped_elements"] == 0


@pytest.mark.parametrize(
    "broken", [b"short", struct.pack("<I", 99) + bytes(20), element(1, b"x")[:-1], bytes(4)]
)
def test_unreadable_values_are_kept_and_counted(make: Make, clock: CommittedClock, broken: bytes) -> None:
    db, a, rules = make("variable_list", ttl=1)
    put(db, a, b"k", broken)
    clock.now = 2**62
    compacted(db)
    assert db.get(a, b"k") == broken
    assert rules.counters()["unreadable"] == 1


def test_a_value_too_short_for_its_timestamp_is_kept(make: Make, clock: CommittedClock) -> None:
    db, a, rules = make("value", ttl=1, timestamp_offset=3)
    put(db, a, b"k", bytes(10))
    put(db, a, b"long enough", bytes(11))
    clock.now = 2**62
    compacted(db)
    assert dict(Iterator(a)) == {b"k": bytes(10)}
    assert rules.counters()["unreadable"] == 1


def test_failed_merge_is_an_error_and_loses_nothing(make: Make, clock: CommittedClock) -> None:
    db, a, rules = make("variable_list", ttl=1)
    merge(db, a, b"k", b"no element")
    with pytest.raises(StoreError) as error:
        db.get(a, b"k")
    assert error.value.code == "STORE.DATABASE_CORRUPT"
    assert "Merge operator failed" in str(error.value) or "merge" in str(error.value).lower()
    rules.configure("variable_list")  # without a time to live, bytes are bytes
    assert db.get(a, b"k") == b"no element"


def test_rules_change_while_the_database_is_open(make: Make, clock: CommittedClock) -> None:
    db, a, rules = make("value")
    for i in range(100):
        put(db, a, b"%d" % i, timestamped(i, offset=2))
    clock.now = 150
    compacted(db)
    assert in_files(db) == 100
    rules.configure("value", ttl=100, timestamp_offset=2)
    compacted(db)
    assert in_files(db) == 49
    rules.configure("value", ttl=60, timestamp_offset=2)
    compacted(db)
    assert in_files(db) == 9


def test_the_time_is_read_again_while_a_compaction_runs(make: Make, clock: CommittedClock) -> None:
    """A filter that would read the time once keeps everything; one that reads it again drops the rest."""
    db, a, rules = make("value", ttl=1, query_every=10)
    for i in range(60_000):
        put(db, a, b"%06d" % i, timestamped(0, b"x" * 20), wal=False)
    db.flush()
    dropped = 0
    for _ in range(200):  # until the time changes before a compaction has seen everything
        begun = rules.counters()["seen"]
        thread = threading.Thread(target=db.compact, args=(a,))
        thread.start()
        while rules.counters()["seen"] < begun + 100:
            pass
        clock.now = 10
        thread.join()
        dropped = rules.counters()["dropped_values"]
        assert in_files(db) == 60_000 - dropped
        if dropped:
            break
        clock.now = 0
    assert 0 < dropped < 60_000


def test_compactions_use_their_rules_after_python_has_dropped_them(tmp_path: Path) -> None:
    clock = CommittedClock()
    db = open_database(tmp_path, rules=ExpiryRules(clock, "value", ttl=1))
    for i in range(100):
        put(db, db.column_family("a"), b"%d" % i, timestamped(0))
    clock.now = 5
    del clock
    compacted(db)
    assert in_files(db) == 0
    db.close()


def test_each_family_has_its_own_rules(tmp_path: Path) -> None:
    clock = CommittedClock()
    rules = {name: ExpiryRules(clock, "value", ttl=ttl) for name, ttl in (("a", 10), ("b", 1_000))}
    with Database(tmp_path, Options(), {name: Options(rules=each) for name, each in rules.items()}) as db:
        for name in rules:
            put(db, db.column_family(name), b"k", timestamped(0))
        clock.now = 100
        db.flush()
        for name in rules:
            db.compact(db.column_family(name))
        assert (in_files(db, "a"), in_files(db, "b")) == (0, 1)
    assert {name: each.counters()["dropped_values"] for name, each in rules.items()} == {"a": 1, "b": 0}


@pytest.mark.parametrize("kind", ["variable_list", "fixed_list"])
def test_any_sequence_of_lists_agrees_with_a_model(
    make: Make, clock: CommittedClock, rng: random.Random, kind: str
) -> None:
    db, a, _ = make(
        kind, ttl=50, element_bytes=12 if kind == "fixed_list" else 0, query_every=rng.randrange(1, 9)
    )
    model: dict[bytes, list[tuple[int, bytes]]] = {}
    now = 0
    clock.now = now

    def encode(part: tuple[int, bytes]) -> bytes:
        return element(*part) if kind == "variable_list" else timestamped(*part)

    def decode(data: bytes | None) -> list[tuple[int, bytes]]:
        if kind == "variable_list":
            return elements(data)
        return [
            (*struct.unpack("<q", data[at : at + 8]), data[at + 8 : at + 12])
            for at in range(0, len(data or b""), 12)
        ]

    for _ in range(2_000):
        key = b"%d" % rng.randrange(8)
        action = rng.choices(("merge", "put", "delete", "time", "flush", "compact"), (60, 5, 5, 20, 3, 1))[0]
        part = (now, b"%04d" % rng.randrange(10_000))
        if action == "merge":
            merge(db, a, key, encode(part))
            model.setdefault(key, []).append(part)
        elif action == "put":
            put(db, a, key, encode(part))
            model[key] = [part]
        elif action == "delete":
            delete(db, a, key)
            model.pop(key, None)
        elif action == "time":
            now += rng.randrange(10)
            clock.now = now
        elif action == "flush":
            db.flush()
        else:
            compacted(db)
        live = [part for part in model.get(key, []) if part[0] + 50 > now]
        # What has expired may be there or not; what has not is there, in order.
        assert [part for part in decode(db.get(a, key)) if part[0] + 50 > now] == live
    compacted(db)
    db.compact(a)
    expected = {k: [part for part in parts if part[0] + 50 > now] for k, parts in model.items()}
    assert {k: decode(v) for k, v in Iterator(a)} == {k: parts for k, parts in expected.items() if parts}
