"""Which time a savepoint carries: that of its batch, never that of the machine which writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.runtime import Incoming, Job, Runner
from statebackend.runtime.progress import Stopwatch
from statebackend.testing import ManualClock
from statebackend.types import of

each_backend = pytest.mark.parametrize("backend", BACKENDS)

#: In 2023, in milliseconds.
BATCH = 1_700_000_000_000
COUNT = sb.ValueStateDescriptor("count", int)


def create(backend: str, **options: Any) -> Any:
    return sb.create_backend(backend).create_keyed_backend(int, **options)


@pytest.fixture(params=["checkpoint", "savepoint"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What a batch at `BATCH` left: a value and a timer of key 1."""
    store = sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128)
    with store, create("reference", clock=ManualClock(BATCH)) as keyed:
        keyed.set_current_key(1)
        keyed.get_value_state(COUNT).update(7)
        keyed.timers.register(BATCH + 5)
        if request.param == "savepoint":
            return keyed.savepoint(tmp_path / "stored")
        return store.commit(0, [keyed.snapshot(0, store).result()])


@each_backend
def test_a_backend_that_was_only_restored_writes_the_time_that_it_found(
    tmp_path: Path, backend: str, stored: Any
) -> None:
    for number, clock in enumerate((None, ManualClock(0), ManualClock(BATCH * 2))):
        with create(backend, restore=stored, clock=clock) as keyed:
            assert keyed.savepoint(tmp_path / f"{number}").now == BATCH
            keyed.get_value_state(COUNT)
            keyed.metrics()
            assert list(keyed.keys("count")) == [1]
            assert keyed.savepoint(tmp_path / f"{number} declared").now == BATCH


@each_backend
def test_the_machine_s_time_is_in_no_savepoint(tmp_path: Path, backend: str, stored: Any) -> None:
    ttl = sb.ValueStateDescriptor("aging", int).enable_time_to_live(sb.StateTtlConfig(1000))
    for number, (restore, expected) in enumerate(((stored, BATCH), ((), None))):
        with create(backend, restore=restore) as keyed:
            keyed.set_current_key(2)
            keyed.get_value_state(COUNT).update(8)
            keyed.get_value_state(ttl).update(8)
            keyed.get_value_state(ttl).update_many([3, 4], [1, 1])
            keyed.advance()
            assert keyed.savepoint(tmp_path / f"{number}").now == expected


@each_backend
def test_without_a_clock_it_is_the_time_of_the_checkpoint_that_was_committed_last(
    tmp_path: Path, backend: str
) -> None:
    store = sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128)
    with store, create(backend) as keyed:
        keyed.set_current_key(1)
        keyed.get_value_state(COUNT).update(7)
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        assert keyed.savepoint(tmp_path / "savepoint").now == checkpoint.now


WORK: dict[str, Callable[[Any], Any]] = {
    "a key": lambda keyed: keyed.set_current_key(1),
    "a batch written": lambda keyed: keyed.get_value_state(COUNT).update_many([1], [2]),
    "a batch read": lambda keyed: keyed.get_value_state(COUNT).get_many([1]),
    "a batch looked for": lambda keyed: keyed.get_value_state(COUNT).exists_many([1]),
    "a batch of objects": lambda keyed: keyed.get_list_state(
        sb.ListStateDescriptor("objects", sb.types.PICKLE)
    ).add_many([1], [{}]),
    "a timer": lambda keyed: list(keyed.timers.due(BATCH + 5)),
    "cleanup": lambda keyed: keyed.advance(),
}


@each_backend
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_with_a_clock_it_is_the_time_of_the_last_work(
    tmp_path: Path, backend: str, stored: Any, work: Callable[[Any], Any]
) -> None:
    clock = ManualClock(BATCH + 1000)
    with create(backend, restore=stored, clock=clock) as keyed:
        work(keyed)
        clock.advance(1000)
        assert keyed.savepoint(tmp_path / "later").now == BATCH + 1000
        with create(backend, restore=tmp_path / "later") as again:
            assert again.savepoint(tmp_path / "again").now == BATCH + 1000
        clock.set(BATCH - 1000)  # whoever turns a clock back knows why
        work(keyed)
        again_at = BATCH + 1000 if work is WORK["a timer"] else BATCH - 1000  # it has fired
        assert keyed.savepoint(tmp_path / "back").now == again_at


@each_backend
def test_a_composite_key_counts_as_work(tmp_path: Path, backend: str) -> None:
    clock = ManualClock(BATCH)
    with sb.create_backend(backend).create_keyed_backend("struct<a:int,b:string>", clock=clock) as keyed:
        assert keyed.savepoint(tmp_path / "before").now is None
        keyed.set_current_key((1, "x"))
        assert keyed.savepoint(tmp_path / "after").now == BATCH


def test_operator_state_hands_the_time_on_and_keyed_state_knows_better(tmp_path: Path, stored: Any) -> None:
    operator = sb.create_backend("heap").create_operator_backend(restore=stored)
    operator.get_list_state(sb.ListStateDescriptor("offsets", int)).add(1)
    assert operator.savepoint(tmp_path / "operator").now == BATCH
    again = sb.create_backend("heap").create_operator_backend(restore=tmp_path / "operator")
    assert again.savepoint(tmp_path / "again").now == BATCH
    with create("heap", restore=stored, clock=ManualClock(BATCH - 1)) as keyed:
        keyed.set_current_key(1)
        assert keyed.savepoint(tmp_path / "operator").now == BATCH - 1
    fresh = sb.create_backend("heap").create_operator_backend()
    assert fresh.savepoint(tmp_path / "fresh").now is None


class Reminders(sb.KeyedProcessFunction):
    """Remembers the users of the last hour, and reminds of each ten minutes after its row."""

    def open(self, ctx: sb.FunctionContext) -> None:
        ttl = sb.StateTtlConfig(
            3_600_000, ttl_time_characteristic=sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
        )
        self.seen = ctx.get_value_state(sb.ValueStateDescriptor("seen", int).enable_time_to_live(ttl))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield row.user, "seen" if self.seen.value() is not None else "new", ctx.watermark
        self.seen.update(row.time)
        ctx.timers.register(row.time + 600_000)

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        yield ctx.current_key, "reminder", timestamp


@each_backend
def test_a_job_in_event_time_goes_on_in_the_time_of_its_rows(tmp_path: Path, backend: str) -> None:
    """Its savepoint was made years after those, by a backend that was restored for that alone."""
    job = Job(
        Reminders(),
        key="user",
        schema="user string, what string, at bigint",
        event_time="time",
        backend=backend,
    )

    def run(runner: Runner, batch_id: int, *rows: tuple[str, int]) -> list[tuple[Any, ...]]:
        columns = {"user": [user for user, _ in rows], "time": [time for _, time in rows]}
        committed = runner.run(batch_id, Incoming(lambda: pa.table(columns)), Stopwatch())
        found = []
        for file in committed.output:
            with committed.checkpoint.open_file(file) as source:
                found += [tuple(row.values()) for row in pq.read_table(source).to_pylist()]
        return found

    runner = Runner(job, sb.CheckpointStore(tmp_path / "first"), of("string"))
    try:
        assert run(runner, 0, ("ann", BATCH)) == [("ann", "new", None)]
    finally:
        runner.close()
    checkpoint = sb.CheckpointStore(tmp_path / "first").open(0)
    with sb.create_backend(backend).create_keyed_backend("string", restore=checkpoint) as keyed:
        savepoint: Savepoint = keyed.savepoint(tmp_path / "savepoint")
    runner = Runner(job, sb.CheckpointStore(tmp_path / "second"), of("string"), restore_from=savepoint)
    try:
        later = BATCH + 60_000
        assert run(runner, 0, ("ann", later)) == [("ann", "seen", BATCH)]
        latest = BATCH + 660_000
        assert run(runner, 1, ("bob", latest)) == [
            ("bob", "new", later),
            ("ann", "reminder", BATCH + 600_000),
            ("ann", "reminder", later + 600_000),
        ]
    finally:
        runner.close()
