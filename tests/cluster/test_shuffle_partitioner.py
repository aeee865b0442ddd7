"""Rows cut by the ranges of hosts: each is where its key belongs, and what tasks have seen adds up to the batch."""

from __future__ import annotations

import datetime
import decimal
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from type_samples import SORTS_OF_KEYS, sample

import statebackend as sb
from statebackend.backends.heap import HeapBackend
from statebackend.cluster.shuffle_partitioner import BatchSurvey, RowPartitioner
from statebackend.errors import SerializationError, StateBackendError, UsageError
from statebackend.functions import map_with_state
from statebackend.keys import key_encoder, range_for
from statebackend.runtime.batch_identity import rows_identity
from statebackend.runtime.batch_rows import Batch
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.job import Job
from statebackend.types import LONG, STRING, TIMESTAMP, of

BEAT = "statebackend_heartbeat"
CLOCK = 1_700_000_000_000


def a_job(key: Any = "key", **options: Any) -> Job:
    return Job(map_with_state(lambda row, n: (None, 1), int), key=key, **options)


def in_batches(rng: random.Random, table: pa.Table) -> Iterator[pa.RecordBatch]:
    """A table in record batches of random sizes, some of them without rows."""
    at = 0
    while at < table.num_rows:
        size = rng.choice([0, 1, 3, 7, 20])
        yield from table.slice(at, size).combine_chunks().to_batches() or [
            pa.RecordBatch.from_pylist([], table.schema)
        ]
        at += size


def times_of(rng: random.Random, rows: int) -> pa.Array:
    """Times around the clock or before 1970, some of them null; some far ahead of it, or none are."""
    clock = rng.choice([CLOCK, CLOCK, -CLOCK])
    ahead = rng.choice([clock, CLOCK + 10**7])
    values = [rng.choice([None, clock + rng.randint(-10_000, 10_000), ahead]) for _ in range(rows)]
    return pa.array(values, pa.int64()).cast(pa.timestamp("ms")).cast(pa.timestamp("us", "UTC"))


def beside(rng: random.Random, keys: pa.Array) -> pa.Table:
    """A batch with these keys, broadcast rows and ticks among it."""
    rows = len(keys)
    beats = pa.array([rng.choice([None] * 5 + [7]) for _ in range(rows)], pa.timestamp("us", "UTC"))
    return pa.table(
        {
            "key": keys,
            "position": range(rows),
            "at": times_of(rng, rows),
            "rule": pa.array([rng.choice([None, False, False, True]) for _ in range(rows)], pa.bool_()),
            BEAT: beats,
        }
    )


@pytest.mark.parametrize("layout", ["plain", "sliced", "large", "other"])
@pytest.mark.parametrize("sort", SORTS_OF_KEYS)
def test_each_row_is_at_the_host_that_serves_its_key(sort: str, layout: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    drawn = [rng.choice(given.values) for _ in range(200)]
    table = beside(rng, given.column(layout, drawn))
    groups = rng.choice([1, 7, 128, 32_768])
    hosts = rng.randint(1, min(groups, 9))
    job = a_job(max_parallelism=groups, broadcast_when="rule", event_time="at")
    cutter = RowPartitioner(job, given.declared, hosts, heartbeat_column=BEAT)

    got: list[list[int]] = [[] for _ in range(hosts)]
    broadcast: list[int] = []
    for rows in in_batches(rng, table):
        cut = cutter.cut(rows)
        assert len(cut.by_host) == hosts
        for host, part in enumerate(cut.by_host):
            if part is not None:
                assert part.num_rows
                assert part.schema.equals(table.schema.remove(table.schema.names.index(BEAT)))
                got[host] += part["position"].to_pylist()
                assert_same(part, table)
        if cut.broadcast is not None:
            assert cut.broadcast.num_rows
            broadcast += cut.broadcast["position"].to_pylist()
            assert_same(cut.broadcast, table)

    encoder = key_encoder(given.declared)
    ranges = [range_for(groups, hosts, host) for host in range(hosts)]
    wanted: list[list[int]] = [[] for _ in range(hosts)]
    all_hosts, nulls, ticks = [], 0, 0
    rules, beats = table["rule"].to_pylist(), table[BEAT].is_valid().to_pylist()
    for position, value in enumerate(drawn):
        if beats[position]:
            ticks += 1
        elif rules[position]:
            all_hosts.append(position)
        elif value is None:
            nulls += 1
        else:
            group = encoder.key_group(value, groups)
            wanted[next(host for host, each in enumerate(ranges) if group in each)].append(position)
    assert got == wanted
    assert broadcast == all_hosts
    survey = cutter.survey
    assert (survey.num_rows, survey.num_broadcast) == (len(drawn) - ticks, len(all_hosts))
    assert (survey.num_nulls, survey.heartbeats) == (nulls, ticks)


def assert_same(part: pa.RecordBatch, table: pa.Table) -> None:
    """Each row is the one of the table that has its position, in all columns."""
    part.validate(full=True)
    wanted = table.drop_columns([BEAT]).take(part["position"])
    # The text is the same where the values are, NaN and -0.0 among them.
    assert str(pa.Table.from_batches([part]).to_pylist()) == str(wanted.to_pylist())


def test_one_instant_in_any_zone_and_every_zero_and_nan_are_one_key() -> None:
    job = a_job(max_parallelism=32_768)
    instants = pa.array([0, 10**15], pa.timestamp("us", "UTC"))
    ways = [instants, instants.cast(pa.timestamp("us", "America/New_York"))]
    assert hosts_of(job, TIMESTAMP, ways[0]) == hosts_of(job, TIMESTAMP, ways[1])
    nans = np.array([0x7FF8_0000_0000_0000, 0x7FF8_0000_0000_0001, 0xFFF8_0000_0000_0000], np.uint64)
    doubles = pa.array(np.concatenate([nans.view(np.float64), [0.0, -0.0]]))
    of_nan, of_nan_too, of_other, of_zero, of_other_zero = hosts_of(job, of("double"), doubles)
    assert of_nan == of_nan_too == of_other
    assert of_zero == of_other_zero
    assert of_nan != of_zero


def hosts_of(job: Job, key_type: Any, keys: pa.Array) -> list[int]:
    rows = pa.record_batch({"key": keys, "position": range(len(keys))})
    cut = RowPartitioner(job, key_type, job.max_parallelism).cut(rows)
    found = {at: host for host, part in enumerate(cut.by_host) if part for at in part["position"].to_pylist()}
    return [found[at] for at in range(len(keys))]


def test_rows_are_not_copied_for_one_host_and_share_one_copy_for_several(np_rng: np.random.Generator) -> None:
    rows = pa.record_batch({"key": np_rng.integers(0, 100, 500)})
    alone = RowPartitioner(a_job(), LONG, 1).cut(rows).by_host[0]
    assert alone is not None
    assert address(alone) == address(rows)
    parts = [part for part in RowPartitioner(a_job(), LONG, 4).cut(rows).by_host if part is not None]
    assert len({address(part) for part in parts}) == 1
    assert address(parts[0]) != address(rows)


def address(rows: pa.RecordBatch) -> int:
    return int(rows["key"].buffers()[1].address)


@pytest.mark.parametrize("attempt", range(40))
def test_surveys_of_any_split_equal_the_whole_batch(attempt: int, rng: random.Random) -> None:
    keys = pa.array(
        [rng.choice([None, "a", "b", "c"]) for _ in range(rng.choice([0, 2, 5, 100]))], pa.string()
    )
    table = beside(rng, keys)
    event_time = sb.EventTime("at", watermark_delay=rng.choice([0, 500]), max_ahead=rng.choice([None, 5000]))
    job = a_job(event_time=event_time, broadcast_when="rule", null_keys="drop")
    watermark = rng.choice([None, None, 0, CLOCK - 2000, CLOCK + 10**8])
    idle = rng.choice([None, CLOCK - 1000])

    whole = table.filter(table[BEAT].is_null()).drop_columns([BEAT])
    batch = Batch(job, whole, watermark=watermark, clock=CLOCK, idle=idle)
    tasks = [
        RowPartitioner(job, STRING, 3, clock=CLOCK, digests=True, heartbeat_column=BEAT)
        for _ in range(rng.randint(1, 5))
    ]
    for rows in in_batches(rng, table):
        rng.choice(tasks).cut(rows)
    surveys = [BatchSurvey.from_json(json.loads(json.dumps(task.survey.to_json()))) for task in tasks]
    assert surveys == [task.survey for task in tasks]
    rng.shuffle(surveys)
    survey = BatchSurvey.of(surveys)

    assert survey.times(event_time, watermark, idle) == (batch.times.after, batch.times.told)
    assert survey.identity() == rows_identity(whole)
    assert survey.num_rows == batch.num_input_rows
    assert survey.num_broadcast == batch.broadcast.num_rows
    assert survey.num_nulls == batch.dropped_rows
    assert survey.heartbeats == table.num_rows - whole.num_rows


def test_a_time_beyond_checkpoints_is_refused_as_in_one_process() -> None:
    job = a_job(event_time=sb.EventTime("at", watermark_delay=10))
    for time in (2**62, -(2**62)):
        table = pa.table({"key": ["a"], "at": [time]})
        with pytest.raises(UsageError, match="further from 1970") as wanted:
            RowTimes.of(job.event_time, table, watermark=None)  # type: ignore[arg-type]
        with pytest.raises(UsageError) as found:
            cut_and_survey(job, STRING, table).times(job.event_time, None)  # type: ignore[arg-type]
        assert str(found.value) == str(wanted.value)
    # Nobody minds a time long ago beside a newer one, whatever task it is in.
    told = [cut_and_survey(job, STRING, pa.table({"key": ["a"], "at": [time]})) for time in (-(2**62), 5)]
    merged = BatchSurvey.of([BatchSurvey(*each) for each in told])
    assert merged.times(sb.EventTime("at"), None) == (5, True)


def cut_and_survey(job: Job, key_type: Any, table: pa.Table) -> BatchSurvey:
    cutter = RowPartitioner(job, key_type, 2)
    for rows in table.to_batches():
        cutter.cut(rows)
    return BatchSurvey.of([cutter.survey])


def test_a_job_without_event_time_or_digests_tells_neither() -> None:
    survey = cut_and_survey(a_job(), STRING, pa.table({"key": ["a"], "at": [5]}))
    assert (survey.newest, survey.digest) == (None, None)
    with pytest.raises(UsageError, match="no digest"):
        survey.identity()
    some = BatchSurvey.of([BatchSurvey(digest="0" * 32), BatchSurvey()])
    assert some.digest is None, "a digest of some tasks is not that of the batch"


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"num_rows": 1},
        {**BatchSurvey().to_json(), "more": 1},
        {**BatchSurvey().to_json(), "num_rows": -1},
        {**BatchSurvey().to_json(), "num_nulls": True},
        {**BatchSurvey().to_json(), "newest": 1.5},
        {**BatchSurvey().to_json(), "digest": "xyz"},
        {**BatchSurvey().to_json(), "digest": 7},
    ],
)
def test_wrong_surveys_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="the report of a task cannot be read"):
        BatchSurvey.from_json(wrong)


def test_null_keys_are_refused_for_the_batch_as_a_whole() -> None:
    table = pa.table({"key": ["a", None, None], "rule": [False, False, True]})
    survey = cut_and_survey(a_job(broadcast_when="rule"), STRING, table)
    with pytest.raises(SerializationError, match=r"column 'key', 1 of 2 rows") as found:
        survey.check(a_job(broadcast_when="rule"))
    assert found.value.code == "SERIALIZATION.NULL_KEY"
    survey.check(a_job(broadcast_when="rule", null_keys="drop"))


@pytest.mark.parametrize(
    ("options", "columns", "key_type"),
    [
        ({"broadcast_when": "rule"}, {"key": ["a"], "rule": [1]}, "string"),
        ({"broadcast_when": "rule"}, {"key": ["a"]}, "string"),
        ({"event_time": "at"}, {"key": ["a"], "at": ["noon"]}, "string"),
        ({}, {"other": ["a"]}, "string"),
        ({}, {"key": pa.array([2**31])}, "int"),
        ({}, {"key": pa.array(["a"])}, "bigint"),
        ({}, {"key": pa.array([decimal.Decimal("0.001")])}, "decimal(10,2)"),
        ({}, {"key": pa.array([datetime.date(2020, 1, 1)])}, "timestamp"),
    ],
    ids=[
        "no flags",
        "no flag column",
        "no times",
        "no key",
        "too great",
        "text",
        "too fine",
        "no timestamps",
    ],
)
def test_rows_that_cannot_be_cut_are_refused_as_in_one_process(
    options: dict[str, Any], columns: dict[str, Any], key_type: str
) -> None:
    job, table = a_job(**options), pa.table(columns)
    backend = HeapBackend().create_keyed_backend(key_type)
    state = backend.get_state(sb.ValueStateDescriptor("n", LONG))
    with pytest.raises((StateBackendError, OverflowError)) as wanted:
        state.update_many(Batch(job, table).keys, pa.array([1] * table.num_rows))
    backend.close()
    cutter = RowPartitioner(job, of(key_type), 2, digests=True)
    before = cutter.survey
    with pytest.raises((StateBackendError, OverflowError)) as found:
        cutter.cut(table.to_batches()[0])
    assert (type(found.value), str(found.value)) == (type(wanted.value), str(wanted.value))
    assert cutter.survey == before, "rows that are refused count for nothing"


def test_columns_are_looked_at_again_where_they_change() -> None:
    cutter = RowPartitioner(a_job(), STRING, 1)
    cutter.cut(pa.record_batch({"key": ["a"]}))
    with pytest.raises(UsageError, match="lacks the column 'key'"):
        cutter.cut(pa.record_batch({"other": ["a"]}))


def test_more_hosts_than_key_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="parallelism is out of range"):
        RowPartitioner(a_job(max_parallelism=2), STRING, 3)
