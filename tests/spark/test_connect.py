"""Through Spark Connect, where the function runs in a process of the server's."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
from pathlib import Path

import connect_query
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

UTC = datetime.timezone.utc


@pytest.fixture(autouse=True)
def needs_java() -> None:
    if shutil.which("java") is None:
        pytest.skip("needs Java 17 or newer")


def run(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    # The server starts its worker with this path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, connect_query.__file__, str(folder), *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.sampled(1, of="connect")
def test_state_lives_from_batch_to_batch_and_from_run_to_run(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for n in range(2):
        path = tmp_path / "in" / f"{n}.parquet"
        pq.write_table(pa.table({"user": ["a", "b"], "n": [n + 1, 10]}), path)
        os.utime(path, (1_700_000_000 + n, 1_700_000_000 + n))  # Spark takes the oldest first
    first = run(tmp_path, "", "mine")
    assert "pass name=" in first.stderr, first.stderr
    assert first.stdout.split() == ["failed", "done"], first.stderr
    pq.write_table(pa.table({"user": ["a"], "n": [100]}), tmp_path / "in" / "2.parquet")
    again = run(tmp_path, "mine", "encrypted", "interrupted")
    assert again.stdout.split() == ["done", "done", "failed"], again.stderr
    assert "KeyboardInterrupt: as told (batch 0 of Total)" in again.stderr
    assert "[USAGE.EXIT]" in again.stderr
    # The output of an encrypted store goes to the sink through the driver.
    for place in (tmp_path, tmp_path / "encrypted"):
        totals = [
            tuple(row.values())
            for batch in range(3)
            for row in pq.read_table(place / "out" / f"batch={batch}", partitioning=None).to_pylist()
        ]
        expected = [("a", 1), ("a", 3), ("a", 103), ("b", 10), ("b", 20)]
        assert sorted(totals) == [(*each, datetime.datetime.fromtimestamp(each[1], UTC)) for each in expected]
    written = [path.read_bytes() for path in tmp_path.glob("encrypted/state/data/*/*") if path.is_file()]
    assert written
    assert not any(b"PAR1" in each or b"ARROW1" in each for each in written)
