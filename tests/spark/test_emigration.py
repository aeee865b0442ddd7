"""A stopped query of Spark's goes on with its history through ours, as if it had stayed."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from group_functions import GroupPair, GroupQuery, cases_of, rows_of, several as several_functions
from house_tools import ROOT, module
from processor_pairs import SETTINGS, Pair, Query, table
from processors import CASES, several

import statebackend as sb
from statebackend.errors import UsageError
from statebackend.spark.session import settings


def move(query: Query, **options: Any) -> Any:
    folder = query.folder
    return sb.tools.from_spark_state(
        query.spark,
        folder / "spark",
        savepoint=folder / "savepoint",
        new_checkpoint_location=folder / "ours",
        **options,
    )


def ttl_of(mode: str) -> dict[str, int]:
    """The time to live of each variable that has one."""
    return {
        f"{name}.{variable}": about[-1]
        for name, (variables, _, _) in CASES[mode].items()
        for variable, about in variables.items()
        if isinstance(about[-1], int) and about[-1]
    }


KINDS = [*CASES, "NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_goes_on_as_if_it_had_stayed(
    spark: Any, tmp_path: Path, rng: random.Random, kind: str
) -> None:
    watermark = "10 seconds" if kind.startswith("Event") else None
    is_processor = kind in CASES
    made = Query if is_processor else GroupQuery
    query = made(spark, tmp_path)
    pair: Any = Pair(several(kind), kind) if is_processor else GroupPair(several_functions(kind), kind)
    pair.watermark = watermark

    def batch(number: int) -> Any:
        return rows_of(CASES[kind] if is_processor else cases_of(kind), rng, number)

    query.add(*[batch(number) for number in range(3)])
    with settings(spark, {**SETTINGS, **pair.settings}):
        query.spark_side(pair)
    ttl = ttl_of(kind) if is_processor else {}
    moved = move(query, ttl=ttl or None)
    assert moved.first_batch == 3
    query.add(*[batch(number) for number in range(3, 6)])
    start = sb.spark.StartFrom(moved.savepoint, first_batch=moved.first_batch)
    query.compare(pair, dataclasses.replace(pair, options={"start": start}))


def totals() -> GroupPair:
    """A count and a sum for each key, by a function with a group state."""

    def function(key: Any, frames: Any, state: Any) -> Any:
        import pandas as pd

        n, total = state.getOption or (0, 0)
        for frame in frames:
            n, total = n + len(frame), total + int(frame["n"].sum())
        state.update((n, total))
        yield pd.DataFrame({"k": [str(key[0])], "text": [f"{n} {total}"]})

    return GroupPair(function, state_schema="n bigint, total bigint")


def query_of(spark: Any, folder: Path) -> Query:
    """A query with two batches, which has stopped."""
    query = GroupQuery(spark, folder)
    query.add(*[table([{"k": key, "n": n} for n, key in enumerate("aab")]) for _ in range(2)])
    return query


def test_a_planned_batch_comes_first(spark: Any, tmp_path: Path) -> None:
    query, pair = query_of(spark, tmp_path), totals()
    with settings(spark, SETTINGS):
        given = query.spark_side(pair)
        (tmp_path / "spark/commits/1").unlink()
        moved = move(query)
        assert moved.first_batch == 1
        assert sorted(path.name for path in (tmp_path / "ours/offsets").glob("[0-9]")) == ["0", "1"]
        assert [path.name for path in (tmp_path / "ours/commits").glob("[0-9]")] == ["0"]
        pair.options = {"start": sb.spark.StartFrom(moved.savepoint, first_batch=1)}
        assert query.our_side(pair) == {1: given[1]}


def test_an_initial_state_goes_on(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Totals(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", "n bigint")
            self.seen = handle.getListState("seen", "n bigint", 3_600_000)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for row in rows:
                self.total.update(((self.total.get() or (0,))[0] + row.n,))
                self.seen.appendValue((row.n,))
            yield Row(k=key[0], text=repr((self.total.get(), list(self.seen.get()))))

        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            self.total.update((initialState.n,))
            self.seen.put([(initialState.n,)])

    query = Query(spark, tmp_path)
    query.add(table([{"k": "a", "n": 1}]))
    initial = spark.createDataFrame([("a", 100), ("b", 200)], "k string, n bigint").groupBy("k")
    pair = Pair(Totals(), "ProcessingTime", initial_state=initial)
    with settings(spark, SETTINGS):
        query.spark_side(pair)
    moved = move(query, ttl="1 hour")
    query.add(table([{"k": "a", "n": 2}, {"k": "b", "n": 3}]))
    start = sb.spark.StartFrom(moved.savepoint, first_batch=moved.first_batch)
    given = query.compare(pair, dataclasses.replace(pair, initial_state=None, options={"start": start}))
    assert sum(given[1].values()) == 2
    assert "200" in repr(given)


def test_a_rate_source_goes_on_where_it_was(spark: Any, tmp_path: Path) -> None:
    """Each number comes once: what ours adds to the sum of a key begins after what Spark has added."""
    pair, sums = totals(), {}

    def run(frame: Any, call: Any, location: str) -> None:
        writer = frame.writeStream.foreachBatch(call).outputMode("update").trigger(processingTime="1 second")
        query = writer.option("checkpointLocation", str(tmp_path / location)).start()
        done = len(sums)
        try:
            while len(sums) < done + 3 and query.isActive:
                query.awaitTermination(0.2)
            if location == "spark":
                with pytest.raises(UsageError, match="it is running"):
                    move(query_at)
        finally:
            query.stop()

    def note(frame: Any, batch_id: int) -> None:
        sums[batch_id] = {row.k: row.text for row in frame.collect()}

    query_at = GroupQuery(spark, tmp_path)
    rate = spark.readStream.format("rate").option("rowsPerSecond", 7).load()
    rows = rate.selectExpr("cast(value % 2 as string) k", "value n")
    with settings(spark, SETTINGS):
        grouped = rows.groupBy("k")
        frame = grouped.applyInPandasWithState(
            pair.function, pair.output_schema, pair.state_schema, "update", pair.timeout
        )
        run(frame, note, "spark")
        moved = move(query_at)
        pair.options = {"start": sb.spark.StartFrom(moved.savepoint, first_batch=moved.first_batch)}
        batches = query_at.callable(pair, note)
        run(rows, batches, "ours")
        batches.close()
    last: dict[str, str] = {}
    for batch_id in sorted(sums):
        last |= sums[batch_id]
    assert moved.first_batch < max(sums)
    for key, text in last.items():
        n, total = map(int, text.split())
        assert total == sum(range(int(key), 2 * n, 2))  # 0, 2, 4 ... or 1, 3, 5 ...


def test_a_move_that_is_refused_leaves_nothing(spark: Any, tmp_path: Path) -> None:
    query, pair = query_of(spark, tmp_path), totals()
    with pytest.raises(UsageError, match="no checkpointLocation") as caught:
        move(query)
    assert caught.value.code == "USAGE.SPARK_STATE"
    with settings(spark, SETTINGS):
        query.spark_side(pair)
    with pytest.raises(UsageError, match="no operator 3 with state"):
        move(query, operator=3)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/metadata").touch()
    with pytest.raises(UsageError, match="not a new folder"):
        move(query)
    shutil.rmtree(tmp_path / "ours")
    (tmp_path / "savepoint/_savepoint").mkdir(parents=True)
    (tmp_path / "savepoint/_savepoint/keyed-0-127.json").touch()
    with pytest.raises(UsageError, match="there is a savepoint already"):
        move(query)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("ours")]
    offsets = tmp_path / "spark/offsets/1"
    offsets.rename(tmp_path / "spark/offsets/5")
    with pytest.raises(UsageError, match="logs do not fit together"):
        move(query)


def test_state_of_another_operator_is_refused(spark: Any, tmp_path: Path) -> None:
    query, pair = query_of(spark, tmp_path), totals()
    rows = query._rows(pair).dropDuplicates(["k"])
    frame = rows.groupBy("k").applyInPandasWithState(
        pair.function, pair.output_schema, pair.state_schema, "update", pair.timeout
    )
    with settings(spark, SETTINGS):
        query._started(frame, lambda frame, batch_id: frame.collect(), "spark", "update")
    with pytest.raises(UsageError, match="another operator of it has state"):
        move(query)


def test_the_example_prints_what_it_promises(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyspark.cloudpickle import register_pickle_by_value

    example = module(ROOT / "examples/spark/from_transform_with_state.py", "from_transform_with_state")
    register_pickle_by_value(example)  # Spark's workers do not see the folder
    with settings(spark, SETTINGS):
        example.run(spark, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("moved 2 states and timers, next batch ")
    assert json.loads(lines[-1]) == {"ann": 42, "bob": 9, "cy": 5}
