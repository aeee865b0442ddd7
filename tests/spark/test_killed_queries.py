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


SCHEMA = pa.schema([("user", pa.string()), ("amount", pa.int64()), ("id", pa.int64())])


def write_input(folder: Path, batches: int, *, repeats: bool = False) -> None:
    """A file for each batch; with ``repeats`` it has the rows of the file before it, too."""
    (folder / "in").mkdir()
    before: list[tuple[str, int, int]] = []
    for batch_id in range(batches):
        rows = [(*row, 1000 * batch_id + number) for number, row in enumerate(input_of(batch_id))]
        written = [*before, *rows] if repeats else rows
        table = pa.Table.from_arrays(
            [pa.array([row[at] for row in written], field.type) for at, field in enumerate(SCHEMA)],
            schema=SCHEMA,
        )
        before = rows
        path = folder / "in" / f"{batch_id:05}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_700_000_000 + batch_id, 1_700_000_000 + batch_id))  # Spark takes the oldest first


def run(folder: Path, step: str = "none", batch: int = 0, *options: str) -> bool:
    """Run the query; whether it was killed. It has a process group of its own to die with."""
    done = subprocess.run(
        [sys.executable, killed_query.__file__, str(folder), step, str(batch), *options],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
    return done.returncode != 0


#: Plain, or with state of Spark's above the function.
FRAMES = pytest.mark.parametrize("options", [(), ("dedup",)], ids=["plain", "dedup"])


@FRAMES
def test_killed_at_every_step(
    tmp_path: Path, options: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """One stream, killed in each of its first batches, a step later each time; each frame at every second step."""
    steps = STEPS if request.config.getoption("--stress") else STEPS[bool(options) :: 2]
    # More files than batches that are killed: a batch after a kill may be of several.
    files = 2 * len(steps) + 2
    write_input(tmp_path, files, repeats=bool(options))
    for batch, step in enumerate(steps):
        assert run(tmp_path, step, batch, *options)
    assert not run(tmp_path, "none", 0, *options)
    delivered_again = check_query(tmp_path, files)
    assert delivered_again or "after the sink" not in steps, (
        "a kill right after the sink makes it be called again"
    )


def kill_at_random(folder: Path, rng: random.Random, kills: int, longest: int, *options: str) -> None:
    """One stream, killed up to so many milliseconds after its first batch has begun, again and again."""
    files = 4 * kills
    write_input(folder, files, repeats=bool(options))
    killed = sum(run(folder, str(rng.randrange(longest)), 0, *options) for _ in range(kills))
    assert not run(folder, "none", 0, *options)
    check_query(folder, files)
    assert killed > 0.9 * kills


def test_killed_at_random(tmp_path: Path, rng: random.Random) -> None:
    kill_at_random(tmp_path, rng, 3, 1500)


@pytest.mark.stress
@FRAMES
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step(tmp_path: Path, step: str, options: tuple[str, ...]) -> None:
    write_input(tmp_path, 5, repeats=bool(options))
    for batch in (0, 1, 3):
        assert run(tmp_path, step, batch, *options)
    assert not run(tmp_path, "none", 0, *options)
    check_query(tmp_path, 5)


@pytest.mark.stress
@FRAMES
def test_killed_for_long(
    tmp_path: Path, rng: random.Random, request: pytest.FixtureRequest, options: tuple[str, ...]
) -> None:
    """``--kills`` says how often, half of it for each frame."""
    kill_at_random(tmp_path, rng, request.config.getoption("kills") // 2, 2500, *options)
