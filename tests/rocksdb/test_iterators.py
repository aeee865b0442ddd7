"""Iterators: in order, and never outside of their bounds."""

from __future__ import annotations

import pytest
from rocks import ColumnFamily, Database, Iterator, put, texts

from statebackend._core.rocksdb.binding.iterators import successor
from statebackend.errors import UsageError

pytestmark = pytest.mark.checked


def test_successors() -> None:
    assert [successor(each) for each in (b"a", b"a\xff", b"\xff\xff", b"", b"\0")] == [
        b"b",
        b"b",
        None,
        None,
        b"\1",
    ]


def test_an_iterator_sees_its_moment(db: Database, a: ColumnFamily) -> None:
    put(db, a, b"1", b"old")
    iterator = Iterator(a)
    put(db, a, b"1", b"new")
    put(db, a, b"2", b"new")
    assert list(iterator) == [(b"1", b"old")]


def test_standing_nowhere(db: Database) -> None:
    iterator = Iterator(db.column_family("a"))
    assert not iterator.is_valid
    assert iterator.next() is iterator.seek_to_first() is False
    for read in (iterator.key, iterator.value):
        with pytest.raises(UsageError, match="stands on no entry"):
            read()
    offsets, keys, value_offsets, values = iterator.read_many(10)
    assert (offsets.tolist(), len(keys), value_offsets.tolist(), len(values)) == ([0], 0, [0], 0)


def test_many_at_once(db: Database, a: ColumnFamily) -> None:
    for i in range(1_000):
        put(db, a, b"1%03d" % i, b"x" * (i % 7))
        put(db, a, b"2%03d" % i, b"")
    iterator = Iterator(a, prefix=b"1")
    iterator.seek_to_first()
    found: list[tuple[bytes, bytes]] = []
    calls = 0
    while True:
        offsets, keys, value_offsets, values = iterator.read_many(300, 1_500)
        if len(offsets) == 1:
            break
        calls += 1
        found += zip(texts(offsets, keys), texts(value_offsets, values), strict=True)
    assert found == [(b"1%03d" % i, b"x" * (i % 7)) for i in range(1_000)]
    assert calls > 4
