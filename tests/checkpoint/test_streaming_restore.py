"""A restore reads rows from their files as states are declared: memory holds the state, and little beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from all_backends import BACKENDS
from processes import run, run_command

import statebackend as sb

COUNT = sb.ValueStateDescriptor("count", int)
TAGS = sb.ListStateDescriptor("tags", str)

RESTORE = """
import sys
import statebackend as sb

def memory(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

count = sb.ValueStateDescriptor("count", int)
source = sb.CheckpointStore(sys.argv[1]).open_latest() if sys.argv[2] == "checkpoint" else sys.argv[1]
warm = sb.create_backend("heap").create_keyed_backend(int)
warm.get_state(count).update_many([1, 2], [3, 4])
warm.close()
before = memory("VmRSS")
keyed = sb.create_backend("heap").create_keyed_backend(int, restore=source)
keyed.get_state(count)
print(before, memory("VmRSS"), memory("VmHWM"), keyed.num_entries())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", ["checkpoint", "savepoint"])
def test_memory_at_the_peak_of_a_restore(tmp_path: Path, source: str) -> None:
    """Beside the state, only a batch at a time: rows held as a whole would take 24 bytes an entry more, or 50."""
    n = 2_000_000
    most = {"checkpoint": 70, "savepoint": 90}[source]
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        state = keyed.get_value_state(COUNT)
        numbers = np.random.default_rng(1).integers(-(2**62), 2**62, n)
        for start in range(0, n, 500_000):
            state.update_many(np.arange(start, start + 500_000), numbers[start : start + 500_000])
        if source == "savepoint":
            keyed.savepoint(tmp_path / "it")
        else:
            with sb.CheckpointStore(tmp_path / "it").open_for_writing(key_type=int) as store:
                store.commit(0, [keyed.snapshot(0, store).result()])
    done = run(RESTORE, tmp_path / "it", source)
    before, after, peak, entries = map(int, done.stdout.split())
    assert entries == n
    assert after - before <= most * n
    assert peak <= 1.15 * after


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_that_are_declared_late_outlive_their_files(tmp_path: Path, backend: str) -> None:
    """The backend itself commits, and retention removes what it was restored from."""
    factory = sb.create_backend(backend)
    with sb.CheckpointStore(tmp_path, retain=1).open_for_writing(key_type=int) as store:
        with factory.create_keyed_backend(int) as keyed:
            keyed.get_value_state(COUNT).update_many([1, 2, 3], [10, 20, 30])
            keyed.get_list_state(TAGS).add_many([1, 1, 2], ["a", "b", "c"])
            checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        with factory.create_keyed_backend(int, restore=checkpoint) as keyed:
            before = set(checkpoint.files)
            keyed.get_value_state(COUNT).update_many([4], [40])
            for checkpoint_id in (1, 2, 3):
                pending = keyed.snapshot(checkpoint_id, store, incremental=False)
                checkpoint = store.commit(checkpoint_id, [pending.result()])
            assert not any((tmp_path / name).exists() for name in before)
            assert keyed.undeclared_states() == ["tags"]
            assert keyed.get_list_state(TAGS).get_many([1, 2, 3]).to_pylist() == [["a", "b"], ["c"], []]
            with factory.create_keyed_backend(int, restore=checkpoint) as again:
                assert again.get_list_state(TAGS).get_many([1, 2]).to_pylist() == [["a", "b"], ["c"]]
                assert again.get_value_state(COUNT).get_many([1, 4]).to_pylist() == [10, 40]


GROUPS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]  # of both versions of cgroups


@pytest.mark.stress
def test_a_large_restore_under_a_limit(tmp_path: Path) -> None:
    """50 million entries, in a group of processes that may have 1.3 times the memory of the state."""
    files = {"memory.limit_in_bytes": "memory.max_usage_in_bytes", "memory.max": "memory.peak"}
    n = 50_000_000
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        state = keyed.get_value_state(COUNT)
        rng = np.random.default_rng(1)
        for start in range(0, n, 1_000_000):
            state.update_many(np.arange(start, start + 1_000_000), rng.integers(-(2**62), 2**62, 1_000_000))
        of_state = keyed.metrics()["used_bytes"]
        with sb.CheckpointStore(tmp_path / "it").open_for_writing(key_type=int) as store:
            store.commit(0, [keyed.snapshot(0, store).result()])
    group = next((each for each in GROUPS if os.access(each / "cgroup.procs", os.W_OK)), None)
    if group is None:
        pytest.skip("no group of processes can be made here")
    group = group / f"statebackend-{os.getpid()}"
    group.mkdir()
    try:
        limit = next(name for name in files if (group / name).exists())
        (group / limit).write_text(str(int(1.3 * of_state)))
        command = 'echo $$ > $1 && shift && exec "$@"'
        restore = [sys.executable, "-c", RESTORE, str(tmp_path / "it"), "checkpoint"]
        done = run_command("sh", "-c", command, "sh", group / "cgroup.procs", *restore, timeout=None)
        assert int(done.stdout.split()[3]) == n
        assert int((group / files[limit]).read_text()) < 1.3 * of_state
    finally:
        group.rmdir()
