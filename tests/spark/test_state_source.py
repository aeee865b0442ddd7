"""State as a data source of Spark, with the names of Spark's own source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_spark import spark

import statebackend as sb
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.spark.state_source import StateDataSource

__all__ = ["spark"]
pytestmark = pytest.mark.spark


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Batches 0 to 2 of a query whose key is ``user``."""
    folder = tmp_path / "state"
    with (
        sb.CheckpointStore(folder, retain=5).open_for_writing(key_type=str, max_parallelism=16) as store,
        sb.create_backend("heap").create_keyed_backend(str, max_parallelism=16) as keyed,
    ):
        total = keyed.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        tags = keyed.get_list_state(sb.ListStateDescriptor("tags", str))
        seen = keyed.get_map_state(sb.MapStateDescriptor("seen", str, "struct<n:int>"))
        for batch in range(3):
            total.add_many(["ann", "bob"], [1, 10 * batch])
            tags.add_many(["ann"], [f"t{batch}"])
            seen.put_many(["ann"], [f"m{batch}"], [{"n": batch}])
            if batch == 2:
                total.clear_many(["bob"])
            keyed.set_current_key("ann")
            keyed.timers.register_processing_time_timer(batch)
            record = BatchRecord(key=("user",)).to_json()
            store.commit(batch, [keyed.snapshot(batch, store).result()], now=batch, batch=record)
            keyed.notify_checkpoint_complete(batch)
    return folder


def read(spark: Any, state: Path, **options: Any) -> list[dict[str, Any]]:
    sb.spark.register(spark)
    frame = spark.read.format("statebackend").options(**options).load(str(state))
    rows = [row.asDict(recursive=True) for row in frame.collect()]
    for row in rows:
        assert isinstance(row.pop("partition_id"), int)
    return sorted(rows, key=repr)


def test_states_have_the_columns_of_spark(spark: Any, state: Path) -> None:
    ann, bob = {"user": "ann"}, {"user": "bob"}
    assert read(spark, state, stateVarName="total") == [{"key": ann, "value": {"value": 3}}]
    assert read(spark, state, stateVarName="total", batchId=1) == [
        {"key": ann, "value": {"value": 2}},
        {"key": bob, "value": {"value": 10}},
    ]
    elements = [{"key": ann, "list_element": {"value": f"t{batch}"}} for batch in range(3)]
    assert read(spark, state, stateVarName="tags") == elements
    (whole,) = read(spark, state, stateVarName="tags", flattenCollectionTypes="false")
    assert whole["list_value"] == ["t0", "t1", "t2"]
    assert read(spark, state, stateVarName="seen")[2] == {
        "key": ann,
        "user_map_key": {"key": "m2"},
        "user_map_value": {"n": 2},
    }
    timers = read(spark, state, readRegisteredTimers="true")
    assert [each["expiration_timestamp_ms"] for each in timers] == [0, 1, 2]
    assert timers[0] == {"key": ann, "expiration_timestamp_ms": 0, "domain": "processing"}


def test_keys_and_filters_select(spark: Any, state: Path) -> None:
    options = {"stateVarName": "total", "batchId": 1}
    (row,) = read(spark, state, **options, keys=json.dumps(["bob"]))
    assert row["value"] == {"value": 10}
    frame = spark.read.format("statebackend").options(**options).load(str(state))
    assert frame.where("key.user = 'bob'").select("value.value").collect() == [(10,)]
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        sb.spark.register(spark)
        pushed = spark.read.format("statebackend").options(**options).load(str(state))
        for where in ("key.user = 'bob'", "key.user in ('bob', 'cy')"):
            assert pushed.where(where).select("value.value").collect() == [(10,)]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def stream(spark: Any, state: Path, folder: Path, **options: Any) -> list[tuple[int, str, str, Any]]:
    """All that a stream of changes has written, after it has taken what there is."""
    sb.spark.register(spark)
    reader = spark.readStream.format("statebackend").option("stateVarName", "total").options(**options)
    frame = reader.option("readChangeFeed", "true").load(str(state))
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(folder / "stream"))
    query = writer.trigger(availableNow=True).start(str(folder / "out"))
    try:
        query.awaitTermination()
    finally:
        query.stop()
    rows = spark.read.parquet(str(folder / "out")).selectExpr(
        "batch_id", "change_type", "key.user", "value.value"
    )
    return sorted(map(tuple, rows.collect()))


def commit_total(state: Path, batches: range) -> None:
    """Batches that add 1 to the total of ann."""
    with sb.CheckpointStore(state, retain=3).open_for_writing() as store:
        restore = store.open_latest()
        with sb.create_backend("heap").create_keyed_backend(
            str, max_parallelism=16, restore=restore
        ) as keyed:
            total = keyed.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
            for batch in batches:
                total.add_many(["ann"], [1])
                record = BatchRecord(key=("user",)).to_json()
                store.commit(batch, [keyed.snapshot(batch, store).result()], batch=record)


def test_stream_goes_on_where_it_was_and_fails_after_a_rewind(
    spark: Any, state: Path, tmp_path: Path
) -> None:
    expected = [
        (1, "update", "ann", 2),
        (1, "update", "bob", 10),
        (2, "delete", "bob", None),
        (2, "update", "ann", 3),
    ]
    assert stream(spark, state, tmp_path) == expected
    commit_total(state, range(3, 5))
    expected += [(3, "update", "ann", 4), (4, "update", "ann", 5)]
    assert stream(spark, state, tmp_path) == expected
    commit_total(state, range(5, 9))
    options = {"path": str(state), "stateVarName": "total"}
    source = StateDataSource({**options, "readChangeFeed": "true"})
    reader = source.streamReader(source.schema())
    gone = {**reader.initialOffset(), "batch": 4}
    with pytest.raises(sb.UsageError, match="after batch 4 are no longer retained") as caught:
        reader.latestOffset(gone, None)
    assert caught.value.code == "CHANGES.GONE"
    start, end = reader.initialOffset(), reader.latestOffset(reader.initialOffset(), None)
    (partition,) = reader.partitions(start, end)
    sb.tools.rewind(state, to=7, checkpoint_location=None)
    for call in (
        lambda: list(reader.read(partition)),
        lambda: reader.partitions(start, end),
        lambda: reader.latestOffset(start, None),
    ):
        with pytest.raises(sb.UsageError, match="rewound or reset since") as caught:
            call()
        assert caught.value.code == "CHANGES.REWOUND"
    with pytest.raises(sb.UsageError, match="streams the change feed only"):
        StateDataSource(options).streamReader(None)


def test_change_feed_has_the_types_of_spark(spark: Any, state: Path) -> None:
    ann, bob = {"user": "ann"}, {"user": "bob"}
    feed = read(spark, state, stateVarName="total", readChangeFeed="true", changeStartBatchId=1)
    assert feed == [
        {"batch_id": 1, "change_type": "update", "key": ann, "value": {"value": 2}},
        {"batch_id": 1, "change_type": "update", "key": bob, "value": {"value": 10}},
        {"batch_id": 2, "change_type": "delete", "key": bob, "value": None},
        {"batch_id": 2, "change_type": "update", "key": ann, "value": {"value": 3}},
    ]
    some = {"readChangeFeed": "true", "changeStartBatchId": 1, "changeEndBatchId": 1}
    assert len(read(spark, state, stateVarName="total", **some)) == 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "USAGE.NO_STATE"),
        ({"stateVarName": "other"}, "USAGE.NO_STATE"),
        ({"stateVarName": "total", "batchId": "7"}, "USAGE.NO_CHECKPOINT"),
        ({"stateVarName": "total", "batchId": "x"}, "USAGE.OPTION"),
        ({"stateVarName": "total", "readChangeFeed": "perhaps"}, "USAGE.OPTION"),
    ],
)
def test_wrong_options_are_refused(spark: Any, state: Path, options: dict[str, str], code: str) -> None:
    with pytest.raises(Exception, match=code):
        read(spark, state, **options)
