"""Files of rows that a database takes in whole."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from rocks import Database, Iterator, Options, put, rows

import statebackend as sb
from statebackend._core.rocksdb.binding.table_files import TableFile, ingest

pytestmark = pytest.mark.checked


def write(path: Path, pairs: dict[bytes, bytes], options: Options | None = None) -> Path:
    keys = sorted(pairs)
    order = np.arange(len(keys))
    file = TableFile(path, options or Options())
    file.add(*rows(keys), *rows([pairs[key] for key in keys]), order)
    file.finish()
    return path


def test_ingested_rows_are_read_and_are_on_the_last_level(db: Database, tmp_path: Path) -> None:
    family = db.column_family("a")
    path = write(tmp_path / "rows.sst", {b"%04d" % n: b"value %d" % n for n in range(5000)})
    ingest(family, path)
    assert db.get(family, b"0042") == b"value 42"
    (file,) = db.live_files()
    assert (file["family"], file["level"], file["entries"]) == ("a", 6, 5000)
    assert not path.exists(), "the database has it now"


def test_an_iterator_goes_on_in_the_database_as_it_was(db: Database, tmp_path: Path) -> None:
    family = db.column_family("a")
    put(db, family, b"a", b"1")
    walk = Iterator(family)
    ingest(family, write(tmp_path / "1.sst", {b"a": b"2", b"b": b"2"}))
    assert list(walk) == [(b"a", b"1")]
    walk.close()


def test_rows_are_added_behind_those_that_are_there(db: Database, tmp_path: Path) -> None:
    file = TableFile(tmp_path / "1.sst", Options())
    assert file.last is None
    file.add(*rows([b"b", b"a"]), *rows([b"2", b"1"]), np.array([1, 0]))
    file.add(*rows([b"c"]), *rows([b"3"]), np.array([], np.int64))
    assert file.last == b"b"
    file.add(*rows([b"x", b"c"]), *rows([b"", b"3"]), np.array([1]))
    file.finish()
    assert file.size > 100
    ingest(db.column_family("a"), file.path)
    assert list(Iterator(db.column_family("a"))) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]


def test_rows_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    file = TableFile(tmp_path / "1.sst", Options())
    with pytest.raises(sb.StateBackendError, match="(?i)order"):
        file.add(*rows([b"b", b"a"]), *rows([b"1", b"2"]), np.array([0, 1]))
    file = TableFile(tmp_path / "2.sst", Options())
    file.add(*rows([b"b"]), *rows([b"1"]), np.array([0]))
    with pytest.raises(sb.StateBackendError, match="(?i)order"):
        file.add(*rows([b"b"]), *rows([b"1"]), np.array([0]))


def test_a_row_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = TableFile(tmp_path / "1.sst", Options())
    for order in ([2], [-1]):
        with pytest.raises(sb.UsageError, match="the order names a row that is not there"):
            file.add(*rows([b"a"]), *rows([b"1"]), np.array(order))
    with pytest.raises(sb.UsageError, match="not as many values as keys"):
        file.add(*rows([b"a"]), *rows([]), np.array([0]))
    assert (file.last, file.size) == (None, 0)


def test_a_file_that_cannot_be_written_or_is_none_is_an_error_that_names_it(
    db: Database, tmp_path: Path
) -> None:
    with pytest.raises(sb.StoreError, match=r"nowhere/1\.sst"):
        write(tmp_path / "nowhere" / "1.sst", {b"a": b"1"})
    with pytest.raises(sb.StoreError, match=r"2\.sst"):
        ingest(db.column_family("a"), tmp_path / "2.sst")
    (tmp_path / "3.sst").write_bytes(b"no file of rows" * 100)
    with pytest.raises(sb.StateBackendError, match=r"3\.sst|not an sstable|magic"):
        ingest(db.column_family("a"), tmp_path / "3.sst")
    assert db.live_files() == []


def test_a_full_disk_is_an_error_with_its_name(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    (tmp_path / "full.sst").symlink_to("/dev/full")
    pairs = {b"%06d" % n: os.urandom(200) for n in range(20_000)}
    with pytest.raises(sb.StoreError, match=r"full\.sst"):
        write(tmp_path / "full.sst", pairs)


def test_a_closed_database_takes_nothing_in(tmp_path: Path) -> None:
    with Database(tmp_path / "db", Options()) as db:
        family = db.column_family("default")
    path = write(tmp_path / "1.sst", {b"a": b"1"})
    with pytest.raises(sb.ClosedError):
        ingest(family, path)
    assert path.exists()
