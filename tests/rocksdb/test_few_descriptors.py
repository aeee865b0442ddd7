"""Processes that may open few files: the database closes files it does not need, or an error says what helps."""

from __future__ import annotations

from pathlib import Path

from processes import run

WRITING = """
import os, resource, sys
import numpy, pyarrow
import statebackend as sb
from statebackend.errors import StoreError

root, limit, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STATES = [sb.ValueStateDescriptor(f"state {number}", bytes) for number in range(8)]
KEYS = list(range(100))
store = sb.CheckpointStore(root + "/store").open_for_writing(key_type=int, max_parallelism=128)
backend = sb.create_backend("rocksdb", local_dir=root, memory_limit=8 << 20, compression="none")
before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
keyed = backend.create_keyed_backend(int)
states = [keyed.get_state(each) for each in STATES]
for state in states:
    state.update_many(KEYS, [b"committed"] * 100)
store.commit(0, [keyed.snapshot(0, store).result()])
keyed.notify_checkpoint_complete(0)
row = [os.urandom(3000)] * 100
try:
    for batch in range(batches):
        for state in states:
            state.update_many(range(100 * batch, 100 * batch + 100), row)
    found = [len(list(keyed.keys(each.name))) for each in STATES]
    print("written", set(found) == {100 * batches})
except StoreError as error:
    print(error.code, error.errno, error.hint)
keyed.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
with backend.create_keyed_backend(int, restore=store.open_latest()) as keyed:
    for each in STATES:
        assert keyed.get_state(each).get_many(KEYS).to_pylist() == [b"committed"] * 100
print("restored")
"""


def test_an_error_says_what_helps_when_files_run_out(tmp_path: Path) -> None:
    done = run(WRITING, tmp_path, 40, 40)
    assert done.stdout.splitlines() == [
        "STORE.DATABASE_OPEN_FILES 24 raise the limit (ulimit -n), then restore the state from a checkpoint",
        "restored",
    ]


def test_a_database_has_no_more_files_open_than_the_process_may_have(tmp_path: Path) -> None:
    done = run(WRITING, tmp_path, 100, 200)
    assert done.stdout.splitlines() == ["written True", "restored"]
