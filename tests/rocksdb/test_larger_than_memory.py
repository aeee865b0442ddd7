"""State far larger than memory: the process keeps to its limit, and finds everything again."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import environment, run_command

PROGRAM = """
import os, sys, time
import numpy as np
import pyarrow as pa
import statebackend as sb
from statebackend._core.rocksdb.overlay.composite_keys import group_prefix, parts_of

folder, total, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
WIDTH, ROWS = 1000, 5000
rng = np.random.default_rng(1)
windows = np.lib.stride_tricks.sliding_window_view(rng.integers(0, 256, 1 << 20, dtype=np.uint8), WIDTH)

def memory(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) << 10

FACTOR = 2_654_435_761
INVERSE = pow(FACTOR, -1, 1 << 40)

def keys_of(numbers):
    return numbers * FACTOR % (1 << 40)  # what passes 64 bits does not count


def values_of(keys, version=0):
    data = windows[(keys * 7919 + version) % len(windows)]
    data[:, :8] = (keys * 2 + version).view(np.uint8).reshape(-1, 8)
    offsets = np.arange(0, (len(keys) + 1) * WIDTH, WIDTH, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(keys), [None, pa.py_buffer(offsets), pa.py_buffer(data.reshape(-1))])

began = time.monotonic()
def reached(what):
    print(f"{time.monotonic() - began:.0f} s: {what}, {memory('VmRSS') >> 20} MB resident", flush=True)

before = memory("VmRSS")
backend = sb.create_backend("rocksdb", local_dir=folder, memory_limit=limit, compression="none")
with backend.create_keyed_backend(int) as keyed:
    state = keyed.get_value_state(sb.ValueStateDescriptor("v", bytes))
    rows = total // WIDTH // ROWS * ROWS
    budget, most = keyed.scratch.budget, 0
    for start in range(0, rows, ROWS):
        keys = keys_of(np.arange(start, start + ROWS))
        state.update_many(keys, values_of(keys))
        most = max(most, budget.usage()["write_buffers"])
        if start % (100 * ROWS) == 0:
            reached(f"written {start * WIDTH / 1e9:.1f} GB")
    again = keys_of(np.arange(0, rows, 97))  # some are written a second time, and some are removed
    gone = keys_of(np.arange(1, rows, 97))
    for at in range(0, len(again), ROWS):
        state.update_many(again[at:at + ROWS], values_of(again[at:at + ROWS], 1))
        state.clear_many(gone[at:at + ROWS])
    reached("written again and removed")

    def check(keys, numbers, found):
        is_gone = pa.array(numbers % 97 == 1)
        assert found.is_null() == is_gone, "what was removed is gone, and nothing else"
        for version in (0, 1):
            own = np.flatnonzero((numbers % 97 == 0) == version)
            own = own[numbers[own] % 97 != 1]
            assert found.take(pa.array(own)).equals(values_of(keys[own], version)), "other values than were written"

    # A sample: each read of a key that is not in memory looks into one file on each level, on the disk.
    for turn in range(20):
        numbers = rng.integers(0, rows, 1000)
        check(keys_of(numbers), numbers, state.get_many(keys_of(numbers)))
    reached("20,000 keys read, anywhere")
    for group in rng.integers(0, 128, 20).tolist():
        found = keyed.store.rows(state.table, group_prefix(group), None, 1000)
        keys = np.array([parts_of(key, True)[1] for key, _ in found])
        numbers = keys * INVERSE % (1 << 40)
        assert len(found) == 1000 and (numbers < rows).all() and (numbers % 97 != 1).all()
        check(keys, numbers, pa.array([value for _, value in found], pa.binary()))
    reached("20,000 rows read, in their order")
    metrics = keyed.metrics()
    size = sum(each.stat().st_size for each in os.scandir(os.path.join(keyed.scratch.folder, "db")))
    cache = metrics["memory"]["cache"]
    print("figures", rows * WIDTH, size, before, memory("VmHWM"), cache, most, metrics["states"]["v"]["stalls"])
"""

#: Memory control groups, of both versions: where they are, and the file with the limit.
GROUPS = [(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")]


@pytest.fixture
def group() -> Iterator[tuple[Path, str] | None]:
    """A control group of its own, and its file for the limit; None if none can be made here."""
    for root, limit in GROUPS:
        folder = root / f"statebackend-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists() and os.access(folder / "cgroup.procs", os.W_OK):
            yield folder, limit
            folder.rmdir()
            return
        folder.rmdir()
    yield None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("total", "limit"), [(256 << 20, 16 << 20), pytest.param(20 << 30, 512 << 20, marks=pytest.mark.stress)]
)
def test_a_process_keeps_to_its_limit(
    tmp_path: Path, group: tuple[Path, str] | None, total: int, limit: int
) -> None:
    """The state is many times the limit; the kernel holds the whole process, with its page cache, to little more."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer keeps what was freed, and counts against the limit")
    free = shutil.disk_usage(tmp_path).free
    if free < 2.5 * total:
        pytest.skip(f"needs {2.5 * total / 1e9:.0f} GB of disk, and {free / 1e9:.0f} are free")
    # Python with Arrow, a batch with its writes, and its index.
    most = limit + (300 << 20)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(total), str(limit)]
    if group is not None:
        folder, name = group
        (folder / name).write_text(str(most))
        joining = 'echo $$ > $1 && shift && exec "$@"'
        command = ["sh", "-c", joining, "sh", str(folder / "cgroup.procs"), *command]
    done = run_command(*command, env=environment(), timeout=None)
    print(done.stdout)
    figures = next(line for line in done.stdout.splitlines() if line.startswith("figures"))
    written, on_disk, before, peak, cache, buffers = map(int, figures.split()[1:7])
    assert written > 0.95 * total
    assert on_disk > 0.9 * total
    # Blocks come and go in the cache, of all sizes: malloc has holes in between, in proportion to the cache.
    assert peak - before < 1.25 * limit + (150 << 20)
    assert buffers < limit // 2 + (1 << 20), "batches did not wait for flushes"
    assert cache < 1.05 * limit
    assert list(tmp_path.iterdir()) == []
