"""The library: one for a process, none after a fork, and silence at the end; what it complains about has a code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import run
from rocks import PRELUDE, find_library, open_database

from statebackend._core.rocksdb.binding import library
from statebackend.errors import BackendUnavailableError, ClosedError, StoreError, UsageError

pytestmark = pytest.mark.checked


def test_another_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="another RocksDB library") as error:
        library.load(tmp_path / "librocksdb.so")
    assert error.value.code == "BACKEND_UNAVAILABLE.OTHER_LIBRARY"


@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_a_process_that_has_mapped_another_copy_is_refused(tmp_path: Path, mode: str) -> None:
    name = "librocksdbjni7.so" if mode == "RTLD_LOCAL" else "something.so"
    shutil.copy(find_library().path, tmp_path / name)
    done = run(
        f"""
import ctypes, os, sys
other = ctypes.CDLL(sys.argv[1], mode=ctypes.{mode})
from statebackend._core.rocksdb.binding import library
from statebackend.errors import BackendUnavailableError
try:
    library.load(sys.argv[2])
except BackendUnavailableError as error:
    print(error.code, error.detail)
""",
        tmp_path / name,
        find_library().path,
    )
    where = str(tmp_path / name) if mode == "RTLD_LOCAL" else "its symbols are global"
    assert done.stdout == f"BACKEND_UNAVAILABLE.OTHER_LIBRARY {where}\n"


def test_nothing_works_before_a_library_is_loaded_and_no_other_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "librocksdb.so").write_bytes(b"no library")
    done = run(
        """
import math, sys
from statebackend._core.rocksdb.binding import library
from statebackend._core.rocksdb.binding import database_options
from statebackend.errors import BackendUnavailableError, UsageError
for call in (library.version, database_options.Options, lambda: database_options.MemoryBudget(1 << 30)):
    try:
        call()
    except UsageError as error:
        print(error.message)
for path in (sys.argv[1], sys.argv[1] + ".missing", math.__file__):
    try:
        library.load(path)
    except BackendUnavailableError as error:
        print(error.code, path in error.detail, "rocksdb_writebatch_put_cf" in error.detail)
print(library.loaded_path(), library.mapped_copies())
""",
        tmp_path / "librocksdb.so",
    )
    assert done.stdout.splitlines() == [
        *["the library of RocksDB is not loaded"] * 3,
        "BACKEND_UNAVAILABLE.LIBRARY_FILE True False",
        "BACKEND_UNAVAILABLE.LIBRARY_FILE True False",
        "BACKEND_UNAVAILABLE.LIBRARY_VERSION True True",
        "None []",
    ]


OPEN = """
import contextlib, os, threading
from statebackend.errors import ClosedError
clock = CommittedClock()
budget = MemoryBudget(16 << 20)
db = open_database(sys.argv[1], budget=budget, rules=ExpiryRules(clock, "value", ttl=1))
a = db.column_family("a")
for i in range(20_000):
    put(db, a, b"%06d" % i, bytes(8) + b"x" * 100, wal=False)
batch = WriteBatch(db)
batch.put(a, b"in the batch", b"")
iterator = Iterator(a)
iterator.seek_to_first()
def compact(db=db, a=a):
    with contextlib.suppress(ClosedError):  # which is what a call meets that comes too late
        db.compact(a)
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "ending",
    [
        "",
        "sys.kept = [db, a, batch, iterator]",
        "del db, compact; sys.kept = iterator",
        "threading.Thread(target=compact, daemon=True).start()",
        "threading.Thread(target=lambda: [compact() for _ in range(5)]).start()",
        "clock.now = 100; db.flush(); threading.Thread(target=compact, daemon=True).start()",
        "import gc; cycle = [iterator]; cycle.append(cycle); del cycle, iterator, batch, db, a, compact; gc.disable()",
        "raise SystemExit(0)",
    ],
)
def test_an_interpreter_ends_with_open_handles(tmp_path: Path, ending: str) -> None:
    done = run(PRELUDE + OPEN + ending, tmp_path / "db")
    assert (done.stdout, done.stderr) == ("", "")
    with open_database(tmp_path / "db") as db:  # closing has flushed what was written without a log
        assert db.get(db.column_family("a"), b"019999") == bytes(8) + b"x" * 100 or "clock" in ending


FORKED = """
from statebackend.errors import UsageError
def refused():
    calls = [lambda: db.get(a, b"k"), lambda: put(db, a, b"k", b"v"), iterator.next, iterator.key, db.flush,
             batch.write, lambda: WriteBatch(db), lambda: Iterator(a), budget.usage,
             lambda: db.column_family("a"), lambda: Options(), lambda: open_database(sys.argv[1] + "2"),
             lambda: load(find_library().path), lambda: batch.put(a, b"k", b"v"), lambda: list(iterator)]
    codes = set()
    for call in calls:
        try:
            call()
        except UsageError as error:
            codes.add(error.code)
        else:
            codes.add("nothing")
    return codes
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(0)",
        "os._exit(0)",
        "db.close(); sys.exit(0)",
        "del iterator, batch, a, db, compact; sys.exit(0)",
    ],
)
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path, ending: str) -> None:
    code = f"""
flushing = threading.Thread(target=lambda: [db.flush() for _ in range(20)])
flushing.start()
pid = os.fork()
if pid == 0:
    if refused() != {{"USAGE.FORKED"}}:
        os._exit(7)
    assert db.is_closed
    {ending}
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
flushing.join()
assert db.get(a, b"000001") is not None
assert iterator.next()
batch.write()
assert db.get(a, b"in the batch") == b""
db.close()
"""
    done = run(
        PRELUDE + "import warnings; warnings.simplefilter('ignore')\n" + OPEN + FORKED + code, tmp_path / "db"
    )
    assert (done.stdout, done.stderr) == ("", "")


#: Where RocksDB's own message has this code.
MESSAGES = {
    "STORE.DATABASE_CORRUPT": ["Corruption: block checksum mismatch: stored = 1  in /d/000008.sst offset 0"],
    "STORE.DATABASE_LOST_FILE": [
        "Corruption: IO error: No such file or directory: while stat a file: /d/9.sst",
        "IO error: No such file or directory: While open a file: /d/9.sst",
    ],
    "STORE.DATABASE_FULL": ["IO error: No space left on device: While appending to file: /d/9.log"],
    "STORE.DATABASE_OPEN_FILES": ["IO error: While lock file: /d/LOCK: Too many open files"],
    "STORE.DATABASE_LOCKED": [
        "IO error: While lock file: /d/LOCK: Resource temporarily unavailable",
        "IO error: lock hold by current process: /d/LOCK: No locks available",
    ],
    "STORE.DATABASE_BUSY": ["Result incomplete: Write stall", "Resource busy: "],
    "STORE.DATABASE": ["IO error: Input/output error: While pread", "NotFound: ", "what nobody has heard of"],
    "USAGE.DATABASE_OPTION": ["Invalid argument: Could not find option: x", "Not implemented: Not supported"],
    "USAGE.COLUMN_FAMILY": ["Invalid argument: Column family not found"],
    "CLOSED": ["Shutdown in progress: "],
}


@pytest.mark.parametrize(("code", "text"), [(code, each) for code in MESSAGES for each in MESSAGES[code]])
def test_messages_have_codes(code: str, text: str) -> None:
    error = library.error_of(text, "reading, database /d")
    kinds = {"STORE": StoreError, "USAGE": UsageError, "CLOSED": ClosedError}
    assert type(error) is kinds[code.partition(".")[0]]
    assert error.code == code
    assert error.detail is not None
    assert error.detail.startswith("reading, database /d: ")
    if isinstance(error, StoreError):
        assert error.errno
