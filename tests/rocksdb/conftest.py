"""Fixtures of the tests of the RocksDB binding: the library, a database, and a look at what is left."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from left_alive import left_alive

from statebackend._core.rocksdb.binding import library
from statebackend._core.rocksdb.binding.database import ColumnFamily, Database
from statebackend._core.rocksdb.binding.database_options import Options
from statebackend.backends.rocksdb.library_location import find_library

HAS_LIBRARY = importlib.util.find_spec("pyspark") is not None


@pytest.fixture(autouse=True)
def _nothing_of_rocksdb_is_left() -> Iterator[None]:
    """After each test, whatever holds memory of RocksDB is gone."""
    if not HAS_LIBRARY:
        pytest.skip("the library of RocksDB comes with pyspark, which is not installed")
    library.load(find_library().path)
    before = library.live_counters()
    yield
    left = left_alive(library.live_counters, before)
    assert left == {}, f"left by this test (or by one that failed before it): {left}"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    """An empty database with the column families "default" and "a"."""
    with Database(tmp_path / "db", Options(), {"a": Options()}) as database:
        yield database


@pytest.fixture
def a(db: Database) -> ColumnFamily:
    return db.column_family("a")
