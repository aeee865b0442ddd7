"""Killed processes, full disks, files that are damaged or lost: an error that says what, or no loss."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from processes import run, started
from rocks import PRELUDE, Database, Iterator, open_database, put

from statebackend.errors import StoreError

WRITING = """
db = open_database(sys.argv[1], settings={"write_buffer_size": 1 << 16, "level0_file_num_compaction_trigger": 2})
a = db.column_family("a")
batch = WriteBatch(db)
n = int(sys.argv[2])
while True:
    for i in range(20):
        batch.put(a, b"%06d-%02d" % (n, i), b"x" * 300)
    batch.write(sync=True)
    print(n, flush=True)
    n += 1
"""


@pytest.mark.slow
def test_synced_writes_survive_sigkill(tmp_path: Path, rng: random.Random) -> None:
    """Batches come whole: all of those that were reported, and at most one more."""
    start = 0
    for _ in range(6):
        with started(PRELUDE + WRITING, tmp_path / "db", start) as process:
            assert process.stdout is not None
            for _ in range(rng.randrange(1, 200)):
                last = int(process.stdout.readline())
            process.kill()
            last = ([last, *map(int, process.stdout.read().split())])[-1]
        with open_database(tmp_path / "db") as db:
            keys = [key for key, _ in Iterator(db.column_family("a"))]
        n, part = divmod(len(keys), 20)
        assert part == 0
        assert n - 1 in (last, last + 1)
        assert keys == [b"%06d-%02d" % (i, j) for i in range(n) for j in range(20)]
        start = n


def test_a_full_disk_is_an_error_with_its_name(tmp_path: Path) -> None:
    done = run(
        PRELUDE
        + """
import resource, signal
from statebackend.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
db = open_database(sys.argv[1])
a = db.column_family("a")
put(db, a, b"k", b"before", sync=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    for i in range(10_000):
        put(db, a, b"%d" % i, b"x" * 1_000)
except StoreError as error:
    print(error.code, error.errno, sys.argv[1] in error.detail)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
written = i
try:
    put(db, a, b"after", b"")
except StoreError as error:
    print(error.code)
db.close()
with open_database(sys.argv[1]) as db:
    a = db.column_family("a")
    assert db.get(a, b"k") == b"before"
    assert all(db.get(a, b"%d" % i) == b"x" * 1_000 for i in range(written))
    put(db, a, b"after", b"")
""",
        tmp_path / "db",
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "STORE.DATABASE_FULL 28 True"
    assert done.stderr == ""


def filled(folder: Path) -> str:
    """Make a database with one file, and return its name."""
    with open_database(folder) as db:
        for i in range(3_000):
            put(db, db.column_family("a"), b"%05d" % i, b"%d" % i * 20)
        db.flush()
        (file,) = db.live_files()
        return str(file["name"])


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    """Also by a compaction, after which nothing is written any more."""
    name = filled(tmp_path / "db")
    flip(tmp_path / "db" / name, 100)
    with open_database(tmp_path / "db") as db:
        a = db.column_family("a")
        for read in (lambda: db.get(a, b"00000"), lambda: list(Iterator(a)), lambda: db.compact(a)):
            with pytest.raises(StoreError) as error:
                read()
            assert error.value.code == "STORE.DATABASE_CORRUPT"
            assert name in str(error.value)
            assert "checkpoint" in str(error.value.hint)
            assert db.get(a, b"02999") is not None
        with pytest.raises(StoreError):
            put(db, a, b"k", b"v")


def test_every_byte_class_of_a_file_is_checked(tmp_path: Path, rng: random.Random) -> None:
    """Whatever byte of a file is flipped: an error, or all is as it was. Nothing is silently empty."""
    name = filled(tmp_path / "db")
    size = (tmp_path / "db" / name).stat().st_size
    expected = [(b"%05d" % i, b"%d" % i * 20) for i in range(3_000)]
    errors = 0
    known = [0, 1, size // 2, *(size - each for each in (1, 8, 30, 53))]
    for at in [*known, *(rng.randrange(size) for _ in range(25))]:
        flip(tmp_path / "db" / name, at)
        try:
            with open_database(tmp_path / "db") as db:
                assert list(Iterator(db.column_family("a"))) == expected
        except StoreError as error:
            errors += 1
            assert (error.code, name in str(error)) == ("STORE.DATABASE_CORRUPT", True)  # noqa: PT017 - or none
        flip(tmp_path / "db" / name, at)
    assert errors > 20
    with open_database(tmp_path / "db") as db:
        assert list(Iterator(db.column_family("a"))) == expected


@pytest.mark.parametrize("what", ["sst", "CURRENT", "MANIFEST"])
def test_a_lost_file_is_named(tmp_path: Path, what: str) -> None:
    name = filled(tmp_path / "db")
    if what != "sst":
        name = next(path.name for path in (tmp_path / "db").glob(f"{what}*"))
    (tmp_path / "db" / name).unlink()
    with pytest.raises(StoreError) as error, open_database(tmp_path / "db") as db:
        list(Iterator(db.column_family("a")))
    assert error.value.code == "STORE.DATABASE_LOST_FILE"
    assert name in str(error.value)
    with pytest.raises(StoreError):  # and none was made in its place
        open_database(tmp_path / "db")


def test_a_database_of_another_process_is_locked(db: Database) -> None:
    done = run(
        PRELUDE
        + """
from statebackend.errors import StoreError
try:
    open_database(sys.argv[1])
except StoreError as error:
    print(error.code, sys.argv[1] in error.detail)
""",
        db.path,
    )
    assert done.stdout == "STORE.DATABASE_LOCKED True\n"
    put(db, db.column_family("a"), b"k", b"v")
