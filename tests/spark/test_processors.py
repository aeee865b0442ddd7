"""Processors of `transformWithState` give the same through Spark's operator and through ours, batch by batch."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processor_pairs import DDL, OUTPUT, SETTINGS, Pair, Query, table
from processors import (
    CASES,
    FrameSizes,
    Initial,
    InitialInPandas,
    Written,
    WrittenInPandas,
    golden_rows,
    golden_timer,
    programme,
    programmed,
    several,
)
from random_processors import random_processors

import statebackend as sb
from statebackend.spark.session import settings

MODES = ("None", "ProcessingTime", "EventTime")


def rows_of(names: Any, rng: random.Random, batch: int, keys: int = 3) -> pa.Table:
    """Some rows for each of these processors."""
    rows = []
    for name in names:
        for key in range(keys):
            rows += [
                {
                    "k": f"{name}:{key}",
                    "g": rng.randrange(3),
                    "n": rng.randrange(1, 7),
                    "x": rng.choice([None, 0.5, -1.0]),
                    "s": rng.choice(["a", "b", "é", None]),
                    "at": 100 + 8 * batch + rng.randrange(-12, 12),
                }
                for _ in range(rng.randrange(4))
            ]
    rng.shuffle(rows)
    return table(rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_pandas", [False, True], ids=["rows", "pandas"])
@pytest.mark.parametrize("mode", MODES)
def test_written_processors_give_the_same(
    spark: Any, tmp_path: Path, rng: random.Random, mode: str, in_pandas: bool
) -> None:
    query = Query(spark, tmp_path)
    pair = Pair(several(mode, in_pandas), mode, in_pandas=in_pandas)
    pair.watermark = "10 seconds" if mode == "EventTime" else None
    query.add(*[rows_of(CASES[mode], rng, batch) for batch in range(3)])
    query.compare(pair)
    query.add(rows_of(CASES[mode], rng, 3))
    query.compare(pair)  # a restart


#: The settings of a session that change how rows reach a processor, but not its results.
MATRIX = {
    f"{partitions} in {zone}": {
        "spark.sql.shuffle.partitions": partitions,
        "spark.sql.session.timeZone": zone,
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2",
    }
    for partitions in ("1", "5")
    for zone in ("UTC", "Asia/Kolkata")
}
SEEDS_OF_PIECE = 25


@pytest.mark.sampled(1)
@pytest.mark.parametrize("piece", range(20))
def test_random_processors_give_the_same(spark: Any, tmp_path: Path, piece: int) -> None:
    """Processors of 25 seeds in one query, with a restart; each piece has other settings, backends and hosts."""
    rng = random.Random(piece)
    seeds = range(SEEDS_OF_PIECE * piece, SEEDS_OF_PIECE * (piece + 1))
    mode, in_pandas = MODES[piece % 3], piece % 2 == 1
    pair = Pair(random_processors(seeds, mode, in_pandas), mode, in_pandas=in_pandas)
    pair.watermark = "10 seconds" if mode == "EventTime" else None
    pair.settings = list(MATRIX.values())[piece // 3 % 4]
    pair.options = {"backend": ("heap", "rocksdb")[piece // 2 % 2]}
    if piece % 10 == 7:
        pair.options["run_on"] = sb.spark.Executors(1)
    query = Query(spark, tmp_path)
    query.add(*[rows_of(seeds, rng, batch) for batch in range(2)])
    query.compare(pair)
    query.add(*[rows_of(seeds, rng, batch) for batch in range(2, 4)])
    query.compare(pair)  # a restart


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mode", MODES)
def test_random_programmes_give_the_same(spark: Any, tmp_path: Path, mode: str, seed: int) -> None:
    rng = random.Random(seed)
    query = Query(spark, tmp_path)
    for _ in range(3):
        keys = [str(key) for key in range(40) if rng.random() < 0.7]
        query.add(table([{"k": key, "s": programme(rng, mode), "at": rng.randrange(9)} for key in keys]))
    pair = Pair(programmed(mode), mode, watermark="1 second" if mode == "EventTime" else None)
    query.compare(pair)


ZONES = {"spark.sql.session.timeZone": "America/New_York", "spark.sql.shuffle.partitions": "5"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_pandas", [False, True], ids=["rows", "pandas"])
@pytest.mark.parametrize("key", [("g",), ("s", "k"), ("x",), ("at",), ("g", "at", "k")], ids=",".join)
def test_keys_of_every_kind_give_the_same(
    spark: Any, tmp_path: Path, rng: random.Random, key: tuple[str, ...], in_pandas: bool
) -> None:
    """Keys of several columns, in any order, null or not, in another zone of the session."""
    made = WrittenInPandas if in_pandas else Written
    query = Query(spark, tmp_path)
    query.add(*[rows_of(["all_kinds"], rng, batch) for batch in range(2)])
    pair = Pair(made(*CASES["None"]["keyed_totals"]), key=key, in_pandas=in_pandas, settings=ZONES)
    pair.output_schema = "k string, text string"
    query.compare(pair)


@pytest.mark.parametrize("in_pandas", [False, True], ids=["rows", "pandas"])
def test_each_row_with_nan_as_key_is_a_call(spark: Any, tmp_path: Path, in_pandas: bool) -> None:
    """And in the mode None, a watermark drops no row."""
    made = WrittenInPandas if in_pandas else Written
    query = Query(spark, tmp_path)
    for at in (500, 0):
        rows = [{"k": "a", "x": x, "n": n, "at": at} for n, x in enumerate([float("nan"), None, 0.5] * 2)]
        query.add(table(rows))
    pair = Pair(made(*CASES["None"]["keyed_totals"]), key=("x",), in_pandas=in_pandas, watermark="1 second")
    given = query.compare(pair)  # of nulls, data frames make NaN
    assert [sum(each.values()) for each in given.values()] == ([5, 5] if in_pandas else [4, 4])


@pytest.mark.parametrize("mode", MODES)
def test_batch_frames_give_the_same(spark: Any, tmp_path: Path, rng: random.Random, mode: str) -> None:
    """Once, with a state of its own; timers by the clock differ by the times of the two calls."""
    names = [name for name in CASES[mode] if name != "times_of_a_batch"]
    pq.write_table(rows_of(names, rng, 0), tmp_path / "rows.parquet")
    frame, given = spark.read.schema(DDL).parquet(str(tmp_path / "rows.parquet")), []
    watermarked = frame.withWatermark("at", "10 seconds") if mode == "EventTime" else frame
    with settings(spark, SETTINGS):
        theirs = watermarked.groupBy("k").transformWithState(
            several(mode, names=names), OUTPUT, "Append", mode
        )
        batches = sb.spark.transform_with_state(
            several(mode, names=names),
            key="k",
            output_schema=OUTPUT,
            time_mode=mode,
            state=tmp_path / "state",
            uid="once",
            event_time="at" if mode == "EventTime" else None,
            sink=lambda rows, batch_id: given.extend(rows.collect()),
        )
        wanted = Counter(map(repr, map(tuple, theirs.collect())))
        batches(watermarked, 0)
        batches.close()
    assert Counter(map(repr, map(tuple, given))) == wanted


def test_frames_are_cut_by_the_settings(spark: Any, tmp_path: Path) -> None:
    query = Query(spark, tmp_path)
    query.add(table([{"k": f"sizes:{n % 2}", "n": n} for n in range(11)]))
    query.compare(
        Pair(FrameSizes(), in_pandas=True, settings={"spark.sql.execution.arrow.maxRecordsPerBatch": "2"})
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_pandas", [False, True], ids=["rows", "pandas"])
def test_initial_state_gives_the_same(spark: Any, tmp_path: Path, in_pandas: bool) -> None:
    initial = spark.createDataFrame([("a", 5), ("a", 6), ("only here", 7)], "k string, start bigint").groupBy(
        "k"
    )
    query = Query(spark, tmp_path)
    query.add(table([{"k": key, "n": 1} for key in "aab"]), table([{"k": key, "n": 2} for key in "ab"]))
    processor = (InitialInPandas if in_pandas else Initial)()
    query.compare(Pair(processor, "ProcessingTime", initial_state=initial, in_pandas=in_pandas))


def test_golden_watermarks(spark: Any, tmp_path: Path) -> None:
    """Rows are late by the watermark of the batch before; timers fire by the one of their batch."""
    query = Query(spark, tmp_path)
    for times in ((20,), (4,), (2, 11, 13, 15)):
        query.add(table([{"k": "a", "n": at, "at": at} for at in times]))
    given = query.compare(Pair(Written({}, golden_rows, golden_timer), "EventTime", watermark="10 seconds"))
    told = [sorted(eval(row)[1] for row in rows) for rows in given.values()]
    assert told == [["0", "20"], ["10000", "4"], ["10000", "11", "13", "15"]]
