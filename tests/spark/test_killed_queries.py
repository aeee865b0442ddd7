"""Real queries whose driver is killed, JVM and all: each batch once, the sink has what one clean run gives."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import killed_query
import pandas as pd
import processes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from killed_query import DUE, MORE_STEPS, STEPS, is_late
from local_spark import needs_java, settings
from processor_pairs import SETTINGS
from pyspark.sql.pandas.types import from_arrow_schema
from stream_process import check_query, check_rows, input_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_java]


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
    done = processes.run(
        killed_query, folder, step, batch, *options, status=None, timeout=300, start_new_session=True
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
    return done.returncode != 0


#: Plain; with state of Spark's above the function; with RocksDB below both, Spark's own and ours; with its files
#: in our checkpoints.
FRAMES = pytest.mark.parametrize(
    "options",
    [(), ("dedup",), ("dedup", "rocksdb"), ("native",)],
    ids=["plain", "dedup", "rocksdb", "native"],
)


@FRAMES
@pytest.mark.sampled(1)
def test_killed_at_every_step(
    tmp_path: Path, options: tuple[str, ...], is_stress: bool, day_rng: random.Random
) -> None:
    """One stream, killed in each of its first batches, a step later each time; without ``--stress`` at one."""
    steps: Sequence[str] = STEPS
    if not is_stress:
        steps = [day_rng.choice(STEPS)]
    # More files than batches that are killed: a batch after a kill may be of several.
    files = 2 * len(steps) + 2
    write_input(tmp_path, files, repeats="dedup" in options)
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
    write_input(folder, files, repeats="dedup" in options)
    killed = sum(run(folder, str(rng.randrange(longest)), 0, *options) for _ in range(kills))
    assert not run(folder, "none", 0, *options)
    check_query(folder, files)
    assert killed > 0.9 * kills


@pytest.mark.sampled(1, of="killed queries")
def test_killed_at_random(tmp_path: Path, rng: random.Random) -> None:
    kill_at_random(tmp_path, rng, 2, 1500)


@pytest.mark.sampled(1, of="killed queries")
def test_a_killed_processor_ends_with_the_state_of_sparks(
    spark: Any, tmp_path: Path, rng: random.Random, is_stress: bool
) -> None:
    """Killed at steps and at moments that the seed chooses; each user's last row shows all of its state."""
    kills = 20 if is_stress else 2
    write_input(tmp_path, 3 * kills)
    places = [step for step in STEPS if step != "in the function"]
    for batch in range(kills):
        step = rng.choice([rng.choice(places), str(rng.randrange(1500))])
        assert run(tmp_path, step, batch, "processor") or step.isdigit()
    assert not run(tmp_path, "none", 0, "processor")
    ours: dict[str, str] = {}
    for line in (tmp_path / "sink").read_text().splitlines():
        ours |= {row["user"]: row["text"] for row in json.loads(line)["rows"]}
    theirs: dict[str, str] = {}

    def collect(frame: Any, batch_id: int) -> None:
        theirs.update({row.user: row.text for row in frame.collect()})

    options = killed_query.PROCESSOR
    with settings(spark, SETTINGS):
        rows = spark.readStream.schema(from_arrow_schema(SCHEMA)).option("maxFilesPerTrigger", 4)
        grouped = rows.parquet(str(tmp_path / "in")).groupBy("user")
        frame = grouped.transformWithState(
            killed_query.processor(), options["output_schema"], "Update", options["time_mode"]
        )
        writer = frame.writeStream.foreachBatch(collect).outputMode("update").trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "spark")).start().awaitTermination()
    assert ours == theirs
    assert ours


#: The sinks of `sb.spark.sinks`, read with what users read them with: pandas, Arrow, Spark and deltalake.
SINKS = pytest.mark.parametrize("kind", ["parquet", "delta", "both"])


def rows_in_sink(folder: Path, kind: str, spark: Any) -> list[dict[str, Any]]:
    """The rows of all batches, in order; what each reader finds is the same."""
    out = folder / "out"
    if kind == "both":
        second = sorted(DeltaTable(str(folder / "second")).to_pandas()["number"])
        rows = rows_in_sink(folder, "parquet", spark)
        assert [number for number in second if number > 0] == [row["number"] for row in rows], (
            "both outputs are of the same batches"
        )
        ids = [row_id for row_id, _, _ in input_rows(folder)]
        on_time = [row_id for row_id in ids if not is_late(row_id)]
        fired = [row_id + DUE for row_id in on_time if row_id + DUE <= max(on_time)]
        assert [-number for number in reversed(second) if number < 0] == sorted(fired), "each timer once"
        late = [
            row["id"]
            for path in sorted((folder / "late").iterdir())
            for row in pq.read_table(path).to_pylist()
        ]
        assert sorted(late) == [row_id for row_id in sorted(ids) if is_late(row_id)], "each late row once"
        return rows
    if kind == "parquet":
        names = sorted(os.listdir(out))
        batches = [int(name.split("-")[1]) for name in names]
        assert batches == sorted(set(batches)), "one file for each batch"
        rows = [row for name in names for row in pq.read_table(out / name).to_pylist()]
        frame = pd.read_parquet(out)
        assert spark.read.parquet(str(out)).toPandas()["number"].sort_values().tolist() == sorted(
            frame["number"]
        )
    else:
        table = DeltaTable(str(out))
        versions = [
            commit["statebackend.batch"] for commit in table.history() if commit["operation"] == "WRITE"
        ]
        assert len(versions) == len(set(versions)), "one commit for each batch"
        rows = sorted(table.to_pyarrow_table().to_pylist(), key=itemgetter("number"))
        frame = table.to_pandas()
    assert sorted(frame["number"]) == [row["number"] for row in rows]
    return rows


def input_rows(folder: Path) -> list[tuple[int, str, int]]:
    """All rows of the input, with their ids."""
    rows = pq.read_table(folder / "in").to_pylist()
    return [(row["id"], row["user"], row["amount"]) for row in rows]


def check_sink(folder: Path, kind: str, files: int, spark: Any) -> None:
    """The sink has what one run without a kill gives."""
    leaves_out = is_late if kind == "both" else lambda _: False
    check_rows(folder, rows_in_sink(folder, kind, spark), files, leaves_out)


@SINKS
@pytest.mark.sampled(1, of="killed queries")
def test_killed_around_a_sink_of_ours(spark: Any, tmp_path: Path, kind: str, is_stress: bool) -> None:
    """Killed within the sink, or between two; with ``--stress`` at every step."""
    steps: Sequence[str] = STEPS if is_stress else ("in the sink",)
    if kind == "both":
        steps = (*STEPS, *MORE_STEPS) if is_stress else MORE_STEPS[:1]
    files = 2 * len(steps) + 2
    write_input(tmp_path, files)
    for batch, step in enumerate(steps):
        assert run(tmp_path, step, batch, kind)
    assert not run(tmp_path, "none", 0, kind)
    check_sink(tmp_path, kind, files, spark)


@pytest.mark.stress
@SINKS
def test_a_sink_of_ours_killed_for_long(
    spark: Any, tmp_path: Path, rng: random.Random, request: pytest.FixtureRequest, kind: str
) -> None:
    """``--kills`` says how often, shared out to the sinks."""
    kills = request.config.getoption("kills") // 3
    files = 4 * kills
    write_input(tmp_path, files)
    killed = sum(run(tmp_path, str(rng.randrange(2500)), 0, kind) for _ in range(kills))
    assert not run(tmp_path, "none", 0, kind)
    assert killed > 0.9 * kills
    check_sink(tmp_path, kind, files, spark)


@pytest.mark.stress
@FRAMES
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step(tmp_path: Path, step: str, options: tuple[str, ...]) -> None:
    write_input(tmp_path, 5, repeats="dedup" in options)
    for batch in (0, 1, 3):
        assert run(tmp_path, step, batch, *options)
    assert not run(tmp_path, "none", 0, *options)
    check_query(tmp_path, 5)


@pytest.mark.stress
@FRAMES
def test_killed_for_long(
    tmp_path: Path, rng: random.Random, request: pytest.FixtureRequest, options: tuple[str, ...]
) -> None:
    """``--kills`` says how often, a quarter of it for each frame."""
    kill_at_random(tmp_path, rng, request.config.getoption("kills") // 4, 2500, *options)
