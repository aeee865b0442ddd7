"""The six jobs of ``examples/nexmark``: equal to batch SQL, in any batches, and killed on the way."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nexmark_driver
import processes
import pyarrow as pa
import pytest
from house_tools import ROOT
from local_spark import needs_java
from processes import started

import statebackend as sb

sys.path.insert(0, str(ROOT))
from examples.nexmark.counts import TTL
from examples.nexmark.events import generate
from examples.nexmark.job import COLUMNS, FORMS, ROWS
from examples.nexmark.query import JOBS, Run, differences

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_java]

FILES = 20
#: Files a batch.
CUTS = (1, 7, FILES)


def check(spark: Any, runs: list[Run]) -> None:
    """Compare outputs with batch SQL; it is asked once for runs that it knows to be equal."""
    answers: dict[Any, pa.Table] = {}
    for run in runs:
        late = run.watermarks() if "late" in run.job.outputs else {}
        for output in run.job.outputs:
            question = (run.job.title, output, *late.values())
            if question not in answers:
                answers[question] = run.expected(spark, output)
            assert differences(run.found(output), answers[question]) == "", f"{run.folder.name}, {output}"


def finish(spark: Any, runs: list[Run]) -> None:
    """Run queries at once, each to its end."""
    try:
        for query in [run.start(spark) for run in runs]:
            query.awaitTermination()
    finally:
        for run in runs:
            run.batches.close()


def state_of(run: Run) -> dict[str, list[str]]:
    """The rows of each state, sorted; without those that have expired and are not yet cleaned up."""
    progress, shown = run.batches.last_progress, {}
    for name in progress["states"]:
        rows = sb.tools.state(run.folder / "state", name).to_table().to_pylist()
        if rows and "timestamp" in rows[0]:
            rows = [row for row in rows if row["timestamp"] > progress["watermark"] - TTL]
        shown[name] = sorted(map(repr, rows))
    return shown


@pytest.mark.sampled(1, of="nexmark")
def test_any_cut_gives_what_batch_sql_gives(spark: Any, tmp_path: Path, is_stress: bool) -> None:
    """Both forms of every job, with 1, 7 and 20 files a batch; in the short run 7 by row, and 20 over columns."""
    generate(tmp_path, files=FILES, rows=500)
    ways = [(form, files) for form in FORMS for files in CUTS]
    if not is_stress:
        ways = [(ROWS, 7), (COLUMNS, FILES)]
    runs = [Run(tmp_path, name, form, files) for name in JOBS for form, files in ways]
    finish(spark, runs)
    check(spark, runs)
    for run in runs:
        assert run.batches.last_progress["batchId"] == -(-FILES // run.files_a_batch) - 1
    check_equal_to_each_other(runs)


def check_equal_to_each_other(runs: list[Run]) -> None:
    """Every cut and form of a job has the same output, and every cut the same state.

    Only of windows that is not so: what comes late depends on the cut. There, windows without late rows are compared.
    """
    for name, job in JOBS.items():
        mine = [run for run in runs if run.job is job]
        late = {row for run in mine if name == "windows" for row in late_windows(run)}
        main = job.outputs[0]
        outputs = [[row for row in rows_of(run, main) if not late or row[:2] not in late] for run in mine]
        assert outputs[0], name
        assert all(rows == outputs[0] for rows in outputs), name
        for form in FORMS if name != "windows" else ():
            states = [state_of(run) for run in mine if run.form == form]
            assert any(states[0].values()), name
            assert all(state == states[0] for state in states), name
        assert bool(late) == (name == "windows")


def rows_of(run: Run, output: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in run.found(output).to_pylist()]


def late_windows(run: Run) -> set[tuple[int, int]]:
    rows: pa.Table = run.found("late")
    return {(row["auction"], row["at"] - row["at"] % 10_000) for row in rows.to_pylist()}


def program(folder: Path, runs: list[Run], files: int) -> list[Any]:
    """The driver of some runs."""
    return [nexmark_driver, folder, files, *(run.folder.name.rpartition("-")[0] for run in runs)]


def begun(runs: list[Run]) -> int:
    """How many batches Spark has begun; grows whichever query goes on."""
    folders = [run.folder / "stream" / "offsets" for run in runs]
    return sum(len(list(folder.iterdir())) for folder in folders if folder.exists())


def kill_on_the_way(folder: Path, runs: list[Run], files: int, rng: random.Random) -> None:
    """Let the driver do some batches, and kill it, JVM and all, at a random moment soon after."""
    before = begun(runs)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with started(*program(folder, runs, files), start_new_session=True, **pipes) as driver:
        try:
            wanted = before + rng.randrange(2, 4 * len(runs))
            while driver.poll() is None and begun(runs) < wanted:
                time.sleep(0.01)
            time.sleep(rng.random() / 2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            _, errors = driver.communicate(timeout=60)
    assert driver.returncode == -signal.SIGKILL, f"it ended before it was killed: {errors[-4000:]}"


def run_with_kills(
    spark: Any, folder: Path, runs: list[Run], files: int, rng: random.Random, kills: int
) -> None:
    for _ in range(kills):
        kill_on_the_way(folder, runs, files, rng)
    processes.run(*program(folder, runs, files), timeout=600)
    check(spark, runs)


@pytest.mark.sampled(1, of="nexmark")
def test_killed_on_the_way(spark: Any, tmp_path: Path, rng: random.Random, is_stress: bool) -> None:
    """All six jobs in one driver, three row by row and three over columns, in 10 batches, killed once; or 20, twice."""
    kills = 2 if is_stress else 1
    generate(tmp_path, files=10 * kills, rows=500)
    runs = [Run(tmp_path, name, FORMS[number % 2]) for number, name in enumerate(JOBS)]
    run_with_kills(spark, tmp_path, runs, 1, rng, kills)


@pytest.mark.stress
@pytest.mark.parametrize("files", [1, 7])
@pytest.mark.parametrize("form", [ROWS, COLUMNS])
@pytest.mark.parametrize("name", list(JOBS))
def test_one_job_killed_again_and_again(
    spark: Any, tmp_path: Path, rng: random.Random, name: str, form: str, files: int
) -> None:
    """Alone in its driver, so that a kill hits any step of a batch; 20 batches of one file or of seven."""
    generate(tmp_path, files=FILES * files, rows=200)
    run_with_kills(spark, tmp_path, [Run(tmp_path, name, form, files)], files, rng, 4)
