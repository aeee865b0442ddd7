"""RocksDB's own Java library in the same process, before ours and after it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from embedded_jvm import find_libjvm
from processes import run

from statebackend.backends.rocksdb import location

pytestmark = pytest.mark.skipif(
    find_libjvm() is None or sys.platform != "linux", reason="needs a JVM's libjvm.so"
)

PROGRAM = """
import sys
from pathlib import Path
from embedded_jvm import JavaRocksDb
import statebackend as sb
jar, folder = Path(sys.argv[1]), Path(sys.argv[2])
def java():
    made = JavaRocksDb(jar, folder)
    for number in range(2000):
        made.put(b"%d" % number, b"x" * 100)
    return made
def ours():
    keyed = sb.create_backend("rocksdb", local_dir=folder).create_keyed_backend(int)
    state = keyed.get_value_state(sb.ValueStateDescriptor("v", str))
    work(keyed, state)
    return keyed, state
def work(keyed, state):
    state.update_many(list(range(2000)), ["x" * 100] * 2000)
    keyed.scratch.database.flush()
    assert state.get_many([1, 1999]).to_pylist() == ["x" * 100] * 2
"""


def run_beside(tmp_path: Path, code: str) -> str:
    jar = location._find_jar([])
    assert jar is not None
    done = run(PROGRAM + code, jar, tmp_path)
    assert done.stderr == ""
    return done.stdout


def test_after_java_ours_is_refused(tmp_path: Path) -> None:
    """Two copies cannot be kept apart, so it says so instead of trying."""
    told = run_beside(
        tmp_path,
        """
java()
print(sb.available_backends()["rocksdb"].reason)
try:
    ours()
except sb.errors.BackendUnavailableError as error:
    print(error.code)
""",
    )
    reason, code = told.splitlines()
    assert "another copy of RocksDB" in reason
    assert code == "BACKEND_UNAVAILABLE.OTHER_LIBRARY"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "ending",
    ["", "theirs.close()", "keyed.close()", "theirs.close(); keyed.close()", "keyed.close(); theirs.close()"],
)
def test_before_java_both_work_and_end_in_any_order(tmp_path: Path, ending: str) -> None:
    code = """
keyed, state = ours()
theirs = java()
work(keyed, state)
theirs.put(b"more", b"x" * 100)
work(keyed, state)
print("both")
"""
    assert run_beside(tmp_path, code + ending) == "both\n"
    assert not list(tmp_path.glob("statebackend-rocksdb-*"))
