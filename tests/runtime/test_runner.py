"""A job on its store: what is committed, what a failure leaves, which batch may come next, who may write."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from host_queries import rows_out
from stateful_functions import Total

import statebackend as sb
from statebackend.runtime import BatchSource, CommittedBatch, Job, Runner
from statebackend.runtime.batch_identity import plan_identity
from statebackend.runtime.batch_progress import Stopwatch, sizes
from statebackend.runtime.start_checks import StartFrom
from statebackend.testing import ManualClock
from statebackend.types import of

SCHEMA = "user string, total bigint"


class Job0:
    """A job on a store in a folder, opened and closed as often as a test likes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open_ones: list[Runner] = []

    def open(self, function: Any = None, **options: Any) -> Runner:
        schema = options.pop("schema", SCHEMA)
        key_type = options.pop("key_type", "string")
        job_options = {
            name: options.pop(name)
            for name in ("max_parallelism", "event_time", "backend", "null_keys")
            if name in options
        }
        store = sb.CheckpointStore(options.pop("folder", self.folder), retain=options.pop("retain", 2))
        job = Job(function or Total(), key="user", schema=schema, **job_options)
        runner = Runner(job, store, of(key_type), **{"query": "q", **options})
        self.open_ones.append(runner)
        return runner

    def close(self) -> None:
        for runner in self.open_ones:
            runner.close()

    def files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job0]:
    made = Job0(tmp_path / "store")
    yield made
    made.close()


def table(*pairs: tuple[Any, Any]) -> pa.Table:
    columns = {"user": [user for user, _ in pairs], "amount": [amount for _, amount in pairs]}
    return pa.table(columns, pa.schema([("user", pa.string()), ("amount", pa.int64())]))


def run(runner: Runner, batch_id: int, *pairs: tuple[Any, Any]) -> CommittedBatch:
    return runner.run(batch_id, BatchSource(lambda: table(*pairs), plan(batch_id)), Stopwatch())


def plan(batch_id: int, time: int = 0) -> dict[str, Any]:
    return plan_identity(time, [{"offset": batch_id}])


def replay(runner: Runner, batch_id: int) -> CommittedBatch:
    return runner.run(batch_id, BatchSource(refuses_to_be_read, plan(batch_id)), Stopwatch())


def refuses_to_be_read() -> pa.Table:
    raise AssertionError("the batch was read")


def test_state_and_output_are_in_one_checkpoint(job: Job0) -> None:
    runner = job.open()
    assert rows_out(run(runner, 0, ("a", 1), ("b", 5), ("a", 2))) == [("a", 1), ("b", 5), ("a", 3)]
    committed = run(runner, 1, ("a", 10))
    assert rows_out(committed) == [("a", 13)]
    assert committed.checkpoint.id == runner.last_id == 1
    committed.checkpoint.verify()
    progress = committed.progress
    assert (progress["numInputRows"], progress["numOutputRows"], progress["numRowsTotal"]) == (1, 1, 2)
    assert progress["memoryUsedBytes"] > 0


class Latest(sb.KeyedProcessFunction):
    """Keeps the largest amount of each user, and how often each amount came; a negative one forgets the user."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.most = ctx.get_aggregating_state(sb.AggregatingStateDescriptor("most", "max", int))
        self.times = ctx.get_map_state(sb.MapStateDescriptor("times", int, int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        if row.amount < 0:
            self.most.clear()
            self.times.clear()
            return
        self.most.add(row.amount)
        self.times[row.amount] = self.times.get(row.amount, 0) + 1
        yield row.user, self.most.get()


@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
def test_progress_counts_the_rows_of_state(job: Job0, backend: str) -> None:
    def counts(committed: CommittedBatch) -> tuple[int, ...]:
        names = ("numRowsTotal", "numRowsUpdated", "numRowsRemoved")
        stored = committed.checkpoint.manifest.progress
        assert all(committed.progress[name] == stored[name] for name in names)
        return tuple(stored[name] for name in names)

    runner = job.open(Latest(), backend=backend)
    assert counts(run(runner, 0, ("a", 1), ("a", 2), ("b", 1), ("a", 1))) == (5, 5, 0)
    assert counts(run(runner, 1)) == (5, 0, 0)
    assert counts(run(runner, 2, ("a", -1), ("b", 7), ("c", 1), ("c", -1))) == (3, 2, 3)
    with pytest.raises(TypeError):
        run(runner, 3, ("a", 5), ("d", 1), ("b", None))
    runner.close()
    assert counts(run(job.open(Latest(), backend=backend), 3, ("b", 7))) == (3, 2, 0)


class Later(sb.KeyedProcessFunction):
    """Gives each user out again when so many milliseconds have passed."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        ctx.timer_service().register_processing_time_timer(ctx.now + row.amount)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ctx.current_key, timestamp


def test_timers_outlive_a_restart_and_are_told_of(job: Job0) -> None:
    clock = ManualClock(100)
    runner = job.open(Later(), clock=clock)
    progress = run(runner, 0, ("a", 20), ("b", 10), ("c", 500)).progress
    assert (progress["numTimersFired"], progress["numTimersPending"]) == (0, 3)
    runner.close()
    clock.set(150)
    committed = run(job.open(Later(), clock=clock), 1, ("d", 1_000))
    assert rows_out(committed) == [("b", 110), ("a", 120)]
    assert (committed.progress["numTimersFired"], committed.progress["numTimersPending"]) == (2, 2)
    assert committed.checkpoint.manifest.progress["numTimersFired"] == 2


class Idle(sb.KeyedProcessFunction):
    """Remembers users for a hundred milliseconds."""

    def open(self, ctx: sb.FunctionContext) -> None:
        ttl = sb.StateTtlConfig(100, cleanup_idle=True)
        self.seen = ctx.get_value_state(sb.ValueStateDescriptor("seen", int).enable_time_to_live(ttl))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        self.seen.update(row.amount)


def test_idle_state_leaves_a_job_with_its_batches(job: Job0) -> None:
    clock = ManualClock(0)
    runner = job.open(Idle(), clock=clock)
    for number in range(10):
        clock.set(number * 25)
        progress = run(runner, number, *((f"{number}-{n}", n) for n in range(50))).progress
        assert progress["states"]["seen"] == min(number + 1, 4) * 50
    runner.close()
    clock.set(290)
    assert run(job.open(Idle(), clock=clock), 10, ("x", 1)).progress["states"]["seen"] == 2 * 50 + 1


@pytest.mark.parametrize("restarts", [False, True])
def test_a_failed_batch_changes_neither_memory_nor_store(job: Job0, restarts: bool) -> None:
    runner = job.open()
    run(runner, 0, ("a", 1))
    before = job.files()
    with pytest.raises(ValueError, match="negative"):
        run(runner, 1, ("a", 10), ("c", -1))
    assert job.files() == before
    if restarts:
        runner.close()
        runner = job.open()
    assert rows_out(run(runner, 1, ("a", 2), ("c", 1))) == [("a", 3), ("c", 1)]


def failing(code: int) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(code, "as told")

    return fail


def test_a_full_disk_while_the_output_is_written_undoes_the_batch_and_the_listener_is_told(
    job: Job0, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = []

    class Listening(Total, sb.CheckpointListener):
        def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
            told.append(f"complete {checkpoint_id}")

        def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
            told.append(f"aborted {checkpoint_id}")
            raise RuntimeError("which nobody minds")

    runner = job.open(Listening())
    run(runner, 0, ("a", 1))
    before = job.files()
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", failing(errno.ENOSPC))
        with pytest.raises(OSError, match="as told"):
            run(runner, 1, ("a", 10))
    assert job.files() == before
    assert rows_out(run(runner, 1, ("a", 2))) == [("a", 3)]
    assert told == ["complete 0", "aborted 1", "complete 1"]
    assert "notify_checkpoint_aborted failed" in caplog.text
    caplog.clear()  # its records keep the tracebacks, and those the state


@pytest.mark.parametrize("was_committed", [False, True])
def test_a_commit_that_fails_closes_the_job_and_the_next_opening_looks(
    job: Job0, monkeypatch: pytest.MonkeyPatch, was_committed: bool
) -> None:
    commit = sb.CheckpointStore.commit

    def commits_and_fails(self: Any, *arguments: Any, **options: Any) -> Any:
        if was_committed:
            commit(self, *arguments, **options)
        raise OSError(errno.EIO, "as told")

    runner = job.open()
    run(runner, 0, ("a", 1))
    with monkeypatch.context() as patch:
        patch.setattr(sb.CheckpointStore, "commit", commits_and_fails)
        with pytest.raises(OSError, match="as told"):
            run(runner, 1, ("a", 10))
    assert not runner.is_open
    with pytest.raises(sb.UsageError, match="closed"):
        run(runner, 1, ("a", 10))
    again = job.open()
    assert rows_out(replay(again, 1) if was_committed else run(again, 1, ("a", 10))) == [("a", 11)]
    assert rows_out(run(again, 2, ("a", 1))) == [("a", 12)]


@pytest.mark.parametrize(
    ("next_id", "code"), [(3, "STATE_BEHIND"), (0, "STREAM_BEHIND"), (7, "STATE_BEHIND")]
)
def test_a_gap_is_an_error_that_says_who_is_behind(job: Job0, next_id: int, code: str) -> None:
    runner = job.open()
    run(runner, 0, ("a", 1))
    run(runner, 1, ("a", 1))
    before = job.files()
    with pytest.raises(sb.BatchGapError) as caught:
        runner.run(next_id, BatchSource(refuses_to_be_read), Stopwatch())
    assert caught.value.code == f"BATCH_GAP.{code}"
    assert caught.value.hint
    assert job.files() == before
    assert rows_out(run(runner, 2, ("a", 1))) == [("a", 3)]


@pytest.mark.parametrize("next_id", [0, 5])
def test_store_begins_with_the_batch_of_a_reset(job: Job0, next_id: int) -> None:
    runner = job.open()
    for batch_id in range(3):
        run(runner, batch_id, ("a", 1))
    runner.close()
    assert sb.tools.reset(job.folder, first_batch=next_id).dropped == [1, 2]
    runner = job.open()
    assert rows_out(run(runner, next_id, ("a", 1))) == [("a", 1)]
    assert rows_out(run(runner, next_id + 1, ("a", 1))) == [("a", 2)]
    runner.close()
    assert rows_out(run(job.open(), next_id + 2, ("a", 1))) == [("a", 3)]


OUTPUTS = {"totals": SCHEMA, "large": "user string"}


class Sorted(Total):
    """Names the users of large amounts in an output of its own."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        if row.amount >= 100:
            ctx.output("large", (row.user,))
        if row.amount:
            yield from super().process_element(row, ctx)


def by_output(committed: CommittedBatch) -> dict[str, list[tuple[Any, ...]]]:
    return {name: rows_out(committed, name) for name in committed.outputs}


def test_several_outputs_are_in_one_checkpoint_and_replayed_together(job: Job0) -> None:
    runner = job.open(Sorted(), schema=OUTPUTS)
    committed = run(runner, 0, ("a", 1), ("b", 100), ("a", 200))
    given = {"totals": [("a", 1), ("b", 100), ("a", 201)], "large": [("b",), ("a",)]}
    assert by_output(committed) == given
    assert (committed.progress["numOutputRows"], committed.progress["outputs"]) == (
        5,
        {"totals": 3, "large": 2},
    )
    runner.close()
    runner = job.open(Sorted(), schema=OUTPUTS)
    again = replay(runner, 0)
    assert again.is_replay
    assert by_output(again) == given
    assert again.progress["numOutputRows"] == 5
    assert by_output(run(runner, 1, ("a", 1))) == {"totals": [("a", 202)]}
    assert by_output(run(runner, 2, ("a", 0))) == {}


@pytest.mark.parametrize(
    ("schema", "delivered", "code"),
    [
        ({"totals": SCHEMA}, None, "USAGE.OTHER_SCHEMA"),
        ({**OUTPUTS, "large": "user string, n int"}, None, "USAGE.OTHER_SCHEMA"),
        (SCHEMA, None, "USAGE.OTHER_SCHEMA"),
        ({**OUTPUTS, "totals": "user string, sum bigint"}, None, "USAGE.OTHER_SCHEMA"),
        ({**OUTPUTS, "totals": "user string"}, None, "USAGE.OTHER_SCHEMA"),
        ({**OUTPUTS, "totals": "user string, total int"}, None, "USAGE.OTHER_SCHEMA"),
        ({**OUTPUTS, "totals": "total bigint, user string"}, None, "USAGE.OTHER_SCHEMA"),
        (OUTPUTS, {"totals": ()}, "USAGE.NO_SINK"),
        (OUTPUTS, {}, "USAGE.NO_SINK"),
    ],
    ids=["less", "schema", "name", "renamed", "removed", "narrower", "order", "a sink less", "no sink"],
)
def test_a_replay_that_cannot_deliver_every_output_is_refused(
    job: Job0, schema: Any, delivered: dict[str, tuple[str, ...]] | None, code: str
) -> None:
    runner = job.open(Sorted(), schema=OUTPUTS)
    run(runner, 0, ("a", 100))
    runner.close()
    with pytest.raises(sb.UsageError) as caught:
        replay(job.open(Sorted(), schema=schema, delivered=delivered), 0)
    job.close()
    assert caught.value.code == code
    assert ("rewind" in str(caught.value)) is (code == "USAGE.OTHER_SCHEMA")
    more = {**OUTPUTS, "more": "n int"}  # nothing was committed for an output that is new
    assert set(by_output(replay(job.open(Sorted(), schema=more), 0))) == set(OUTPUTS)


def test_rows_of_an_output_without_a_sink_fail_before_the_commit(job: Job0) -> None:
    runner = job.open(Sorted(), schema=OUTPUTS, delivered={"totals": ()})
    assert by_output(run(runner, 0, ("a", 1))) == {"totals": [("a", 1)]}
    files = job.files()
    with pytest.raises(sb.UsageError, match="without a sink") as caught:
        run(runner, 1, ("a", 100))
    assert caught.value.code == "USAGE.NO_SINK"
    assert "output 'large'" in str(caught.value.detail)
    assert job.files() == files
    assert runner.last_id == 0


def test_another_use_of_the_store_is_refused_and_harms_nothing(job: Job0, tmp_path: Path) -> None:
    runner = job.open()
    run(runner, 0, ("a", 1))
    before = job.files()
    for options, error in [
        ({"query": "another"}, "USAGE.OTHER_QUERY"),
        ({"key_type": "bigint"}, "STATE_MIGRATION"),
        ({"max_parallelism": 64}, "STATE_MIGRATION"),
        ({}, "USAGE.STORE_IN_USE"),
    ]:
        with pytest.raises(sb.StateBackendError) as caught:
            job.open(**options)
        assert caught.value.code.startswith(error)
    assert job.files() == before
    assert rows_out(run(runner, 1, ("a", 1))) == [("a", 2)]


class Renamed(Total):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "max", "string"))


def test_a_function_whose_state_does_not_fit_is_refused_before_anything_changes(job: Job0) -> None:
    runner = job.open()
    run(runner, 0, ("a", 1))
    runner.close()
    before = {name for name in job.files() if name.startswith("data/")}
    other = job.open(Renamed())
    with pytest.raises(sb.StateMigrationError, match="total"):
        run(other, 1, ("a", 1))
    other.close()
    assert {name for name in job.files() if name.startswith("data/")} == before
    assert rows_out(run(job.open(), 1, ("a", 1))) == [("a", 2)]


def test_a_new_store_begins_with_the_state_of_another(job: Job0, tmp_path: Path) -> None:
    runner = job.open()
    for batch_id in range(3):
        run(runner, batch_id, ("a", 1))
    runner.close()
    new = tmp_path / "new"
    other = job.open(folder=new, query="other", start=StartFrom(job.folder))
    assert rows_out(run(other, 0, ("a", 1))) == [("a", 4)]
    other.close()
    again = job.open(folder=new, query="other", start=StartFrom(job.folder))
    assert rows_out(run(again, 1, ("a", 1))) == [("a", 5)], "what is committed counts, not where it came from"


@pytest.mark.parametrize("is_bootstrapped", [False, True], ids=["savepoint", "table"])
def test_a_new_store_begins_from_a_savepoint_or_a_table(
    job: Job0, tmp_path: Path, is_bootstrapped: bool
) -> None:
    """Time goes on from that of the savepoint; a table has none."""
    total = sb.ReducingStateDescriptor("total", "sum", int)
    path, clock = tmp_path / "savepoint", ManualClock(2**42)
    if is_bootstrapped:
        orders = pa.table({"user": ["a"], "amount": [40]})
        sb.tools.bootstrap(path, orders, key="user", descriptors=[(total, "amount")], clock=clock)
    else:
        with sb.create_backend("heap").create_keyed_backend("string", clock=clock) as keyed:
            keyed.get_state(total).add_many(["a"], [40])
            keyed.savepoint(path)
    runner = job.open(folder=tmp_path / "new", start=StartFrom(path), clock=ManualClock(5))
    committed = run(runner, 0, ("a", 2))
    assert rows_out(committed) == [("a", 42)]
    assert committed.checkpoint.now == (5 if is_bootstrapped else 2**42)


class Timed(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield row.user, ctx.watermark


def test_both_times_are_committed_with_the_state(job: Job0) -> None:
    clock = ManualClock(5000)
    runner = job.open(Timed(), event_time=sb.EventTime("amount", watermark_delay=10), clock=clock)
    committed = run(runner, 0, ("a", 100), ("b", 250))
    assert rows_out(committed) == [("a", None), ("b", None)]
    assert (committed.checkpoint.now, committed.checkpoint.watermark) == (5000, 240)
    runner.close()
    clock.set(6000)
    runner = job.open(Timed(), event_time=sb.EventTime("amount", watermark_delay=10), clock=clock)
    committed = run(runner, 1, ("a", 100))
    assert rows_out(committed) == [("a", 240)]
    assert (committed.checkpoint.now, committed.checkpoint.watermark) == (6000, 240)
    clock.set(1)
    committed = run(runner, 2)
    assert rows_out(committed) == []
    assert (committed.checkpoint.now, committed.checkpoint.watermark) == (6000, 240)


class Wide(sb.BatchProcessFunction):
    """Gives every row out as it is, columns that are nested or have odd names too."""

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        return batch


def test_a_large_output_is_one_file_of_several_row_groups(job: Job0) -> None:
    rows = 360_000
    given = pa.table(
        {
            "user": pa.array(["a", "b", None, "d"] * (rows // 4)),
            "n": pa.array(range(rows), pa.int64()),
            "a.b": pa.array([1, None, -(2**31), 2**31 - 1] * (rows // 4), pa.int32()),
            "s": pa.array([{"x": 1}, None, {"x": 2}, {"x": None}] * (rows // 4)),
            "s.x": pa.array(range(rows), pa.int64()),  # Parquet has another column of this path
            "texts": pa.array([["a long text"], [], None, ["another"]] * (rows // 4)),
        }
    )
    schema = "user string, n bigint, `a.b` int, s struct<x:bigint>, `s.x` bigint, texts array<string>"
    committed = job.open(Wide(), schema=schema, null_keys="drop").run(
        0, BatchSource(lambda: given), Stopwatch()
    )
    (file,) = committed.output
    with committed.checkpoint.open_file(file) as source:
        read = pq.ParquetFile(source)
        assert [read.metadata.row_group(at).num_rows for at in range(2)] == [262_144, 270_000 - 262_144]
        assert read.read().equals(given.filter(pc.is_valid(given["user"])))
        group = read.metadata.row_group(0)
        columns = [group.column(at) for at in range(group.num_columns)]
    encodings = {each.path_in_schema: each.encodings for each in columns}
    assert "DELTA_BINARY_PACKED" in encodings["n"]
    assert "RLE_DICTIONARY" in encodings["texts.list.element"]


def test_memory_of_small_and_large_values_is_counted_once() -> None:
    keyed = sb.create_backend("heap", threads=1).create_keyed_backend(int)
    state = keyed.get_value_state(sb.ValueStateDescriptor("v", str))
    state.update_many(range(20_000), [f"user-{key:010d}" for key in range(20_000)])
    small = sizes(keyed.metrics())["memoryUsedBytes"]
    # An entry has 24 bytes, its text a block of 32, and buckets come to that.
    assert 56 * 20_000 < small < 80 * 20_000
    keyed.set_current_key(1)
    state.update("x" * 3_000_000)
    assert 2_990_000 < sizes(keyed.metrics())["memoryUsedBytes"] - small < 3_100_000
    state.clear_many(range(20_000))
    while keyed.core.advance(1 << 20):
        pass
    assert sizes(keyed.metrics())["memoryUsedBytes"] < 100_000
    keyed.close()
