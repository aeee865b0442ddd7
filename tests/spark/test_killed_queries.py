"""Real queries whose driver is killed, JVM and all: each batch once, the sink has what one clean run gives."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import killed_query
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from killed_query import STEPS
from stream_process import check_query, input_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(autouse=True)
def needs_spark() -> None:
    if shutil.which("java") is None:
        pytest.skip("needs Java 17 or newer")


def write_input(folder: Path, batches: int) -> None:
    (folder / "in").mkdir()
    for batch_id in range(batches):
        rows = input_of(batch_id)
        columns = {"user": [user for user, _ in rows], "amount": [amount for _, amount in rows]}
        table = pa.table(columns, pa.schema([("user", pa.string()), ("amount", pa.int64())]))
        path = folder / "in" / f"{batch_id:05}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_700_000_000 + batch_id, 1_700_000_000 + batch_id))  # Spark takes the oldest first


def run(folder: Path, step: str = "none", batch: int = 0) -> bool:
    """Run the query; whether it was killed. It has a process group of its own to die with."""
    done = subprocess.run(
        [sys.executable, killed_query.__file__, str(folder), step, str(batch)],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
    return done.returncode != 0


def test_killed_at_every_step(tmp_path: Path) -> None:
    """One stream, killed in each of its first batches, a step later each time."""
    # More files than batches that are killed: a batch after a kill may be of several.
    files = 2 * len(STEPS) + 2
    write_input(tmp_path, files)
    for batch, step in enumerate(STEPS):
        assert run(tmp_path, step, batch)
    assert not run(tmp_path)
    assert check_query(tmp_path, files) >= 1, "a kill right after the sink makes it be called again"


def kill_at_random(folder: Path, rng: random.Random, kills: int, longest: int) -> None:
    """One stream, killed up to so many milliseconds after its first batch has begun, again and again."""
    files = 4 * kills
    write_input(folder, files)
    killed = sum(run(folder, str(rng.randrange(longest))) for _ in range(kills))
    assert not run(folder)
    check_query(folder, files)
    assert killed > 0.9 * kills


def test_killed_at_random(tmp_path: Path, rng: random.Random) -> None:
    kill_at_random(tmp_path, rng, 9, 1500)


@pytest.mark.stress
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step(tmp_path: Path, step: str) -> None:
    write_input(tmp_path, 5)
    for batch in (0, 1, 3):
        assert run(tmp_path, step, batch)
    assert not run(tmp_path)
    check_query(tmp_path, 5)


@pytest.mark.stress
def test_killed_for_long(tmp_path: Path, rng: random.Random, request: pytest.FixtureRequest) -> None:
    """``--kills`` says how often."""
    kill_at_random(tmp_path, rng, request.config.getoption("kills"), 2500)
