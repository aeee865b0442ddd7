"""Batches: together or not at all, and taken back to where one wants."""

from __future__ import annotations

import numpy as np
import pytest
from rocks import ColumnFamily, Database, Iterator, Options, WriteBatch, put, rows

from statebackend.errors import UsageError

pytestmark = pytest.mark.checked


def contents(db: Database) -> list[tuple[bytes, bytes]]:
    return list(Iterator(db.column_family("a")))


def test_nothing_is_written_before_write(db: Database, a: ColumnFamily) -> None:
    put(db, a, b"old", b"1")
    batch = WriteBatch(db)
    batch.put(a, b"new", b"2")
    batch.delete(a, b"old")
    assert contents(db) == [(b"old", b"1")]
    assert len(batch) == 2
    assert batch.nbytes > 12
    for _ in range(2):
        batch.write()
        assert contents(db) == [(b"new", b"2")]
        assert len(batch) == 0


def test_rows_that_do_not_fit_change_nothing(db: Database, a: ColumnFamily) -> None:
    batch = WriteBatch(db)
    with pytest.raises(UsageError, match="as many values as keys"):
        batch.put_many(a, *rows([b"1", b"2"]), *rows([b"1"]))
    with pytest.raises(UsageError, match="offsets"):
        batch.delete_many(a, np.array([0, 9]), b"1")
    assert len(batch) == 0


def test_a_batch_that_cannot_be_written_is_kept(db: Database, a: ColumnFamily) -> None:
    b = db.create_column_family("b", Options())
    batch = WriteBatch(db)
    batch.put(b, b"1", b"")
    batch.put(a, b"1", b"")
    db.drop_column_family(b)
    with pytest.raises(UsageError) as error:
        batch.write()
    assert error.value.code == "USAGE.COLUMN_FAMILY"
    assert len(batch) == 2
    assert contents(db) == []
