"""Functions of `applyInPandasWithState` give the same through Spark's operator and through ours, batch by batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from group_functions import CASES, GroupPair, GroupQuery, cases_of, out, rows_of, several
from processor_pairs import table

import statebackend as sb
from statebackend.errors import UsageError
from statebackend.testing import Harness

TIMEOUTS = list(CASES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_written_functions_give_the_same(
    spark: Any, tmp_path: Path, rng: random.Random, timeout: str
) -> None:
    query = GroupQuery(spark, tmp_path)
    pair = GroupPair(several(timeout), timeout)
    pair.watermark = None if timeout == "ProcessingTimeTimeout" else "10 seconds"
    query.add(*[rows_of(cases_of(timeout), rng, batch) for batch in range(4)])
    query.compare(pair)
    query.add(rows_of(cases_of(timeout), rng, 4))
    query.compare(pair)  # a restart


def test_rocksdb_gives_the_same(spark: Any, tmp_path: Path, rng: random.Random) -> None:
    query = GroupQuery(spark, tmp_path)
    timeout = "EventTimeTimeout"
    pair = GroupPair(several(timeout), timeout, watermark="10 seconds", options={"backend": "rocksdb"})
    query.add(*[rows_of(cases_of(timeout), rng, batch) for batch in range(3)])
    query.compare(pair)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_keys_of_several_columns_are_the_same(spark: Any, tmp_path: Path, zone: str) -> None:
    """Keys with nulls and of many types, frames of at most two rows, in the order of the columns."""

    def function(key: Any, frames: Any, state: Any) -> Any:
        n = state.get[0] if state.exists else 0
        sizes = []
        for frame in frames:
            sizes.append(len(frame))
            n += int(frame["n"].sum())
        state.update((n,))
        text = repr((key, [type(each).__name__ for each in key], n, max(sizes) <= 2, sum(sizes)))
        yield pd.DataFrame({"text": [text]})

    pair = GroupPair(
        function, key=("s", "g", "at", "x"), output_schema="text string", state_schema="n bigint"
    )
    pair.settings = {
        "spark.sql.session.timeZone": zone,
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2",
        "spark.sql.shuffle.partitions": "5",
    }
    query = GroupQuery(spark, tmp_path)
    rows = [
        {"s": s, "g": g, "at": at, "x": x, "n": n}
        for n, s in enumerate(["a", None])
        for g in (1, None)
        for at in (1_700_000_000.25, None)
        for x in (0.5, None)
    ]
    query.add(table(rows), table(rows * 5))
    given = query.compare(pair)
    assert [sum(each.values()) for each in given.values()] == [16, 16]


# --- without Spark ---


def function_of(function: Any, timeout: str = "NoTimeout", **options: Any) -> Any:
    from statebackend.runtime.arrow_rows import OutputSchema
    from statebackend.spark_functions.group_states import GroupStateFunction

    return GroupStateFunction(
        function,
        key=("k",),
        output_schema=OutputSchema("k string, text string"),
        state_type=OutputSchema("n int").row_type,
        timeout_conf=timeout,
        **options,
    )


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (lambda key: out(key, 1), "UDF_RETURN_TYPE"),
        (lambda key: None, "UDF_RETURN_TYPE"),
        (lambda key: [key], "UDF_RETURN_TYPE"),
        (lambda key: [pd.DataFrame({"k": [1]})], "RESULT_COLUMN_SCHEMA_MISMATCH"),
    ],
)
def test_a_result_that_spark_refuses_is_refused(given: Any, error: str) -> None:
    from pyspark.errors import PySparkException

    function = function_of(lambda key, frames, state: given(key))
    with Harness(function, key=["k"], schema="k string, text string") as harness:
        with pytest.raises(PySparkException) as caught:
            harness.process_batch([{"k": "a"}])
        assert caught.value.getCondition() == error


def test_a_state_that_does_not_fit_fails_the_batch() -> None:
    def function(key: Any, frames: Any, state: Any) -> Any:
        state.update(("text",))
        return []

    harness = Harness(function_of(function), key=["k"], schema="k string, text string")
    with harness, pytest.raises(sb.SerializationError):
        harness.process_batch([{"k": "a"}])


def test_state_and_timeout_are_one_value_and_one_timer() -> None:
    def function(key: Any, frames: Any, state: Any) -> Any:
        if state.hasTimedOut:
            state.remove()
        else:
            state.update((1,))
            state.setTimeoutTimestamp(5_000)
        yield out(key, state.hasTimedOut)

    made = function_of(function, "EventTimeTimeout", event_time=sb.EventTime("at"))
    with Harness(made, key=["k"], schema="k string, text string", event_time="at") as harness:
        assert len(harness.process_batch([{"k": "a", "at": 1}, {"k": "b", "at": 2_000}])) == 2
        harness.process_batch([{"k": "c", "at": 5_000}])
        given = harness.process_batch([{"k": "c", "at": 6_000}])
    assert sorted(row.k for row in given if "True" in row.text) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"func": 1}, "USAGE.FUNCTION"),
        ({"timeout_conf": "Never"}, "USAGE.TIMEOUT_CONF"),
        ({"output_mode": "Some"}, "USAGE.OUTPUT_MODE"),
        ({"state_schema": "int"}, "USAGE.SCHEMA"),
        ({"event_time": sb.EventTime("at", late="drop")}, "USAGE.OPTION"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    options: dict[str, Any] = {
        "func": several("NoTimeout"),
        "key": "k",
        "output_schema": "k string",
        "state_schema": "n int",
        "output_mode": "Update",
        "timeout_conf": "NoTimeout",
        "state": tmp_path,
    }
    with pytest.raises(UsageError) as caught:
        sb.spark.apply_in_pandas_with_state(**{**options, **change})
    assert caught.value.code == code
