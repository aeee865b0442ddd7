"""Which batch a committed one is taken for: by its plan, by its rows, by its stream; and how a job may begin."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.checkpoint import Manifest
from statebackend.checkpoint.files import PosixFiles
from statebackend.runtime import Batch, BatchSource, CommittedBatch, Job, Runner
from statebackend.runtime.batch_identity import BatchRecord, plan_identity
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.runtime.start_checks import StartFrom
from statebackend.types import STRING


class Total(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.total.add(row.n)
        yield row.user, self.total.get()


class Opening:
    """Opens a job on one store, as often as a test likes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.retain = 2
        self.opened: list[Runner] = []

    def close(self) -> None:
        for runner in self.opened:
            runner.close()

    def store(self) -> sb.CheckpointStore:
        return sb.CheckpointStore(self.folder, retain=self.retain)

    def __call__(self, **options: Any) -> Runner:
        self.close()
        job = Job(Total(), key="user", schema="user string, total bigint")
        self.opened.append(Runner(job, self.store(), STRING, query="q", **options))
        return self.opened[-1]


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Opening]:
    made = Opening(tmp_path / "store")
    yield made
    made.close()


def rows(*pairs: tuple[str, int]) -> pa.Table:
    return pa.table({"user": [user for user, _ in pairs], "n": [n for _, n in pairs]})


def plan(batch_id: int, at: int = 0) -> dict[str, Any]:
    return plan_identity(at, [{"logOffset": batch_id}])


def run(
    runner: Runner, batch_id: int, table: pa.Table, planned: dict[str, Any] | None = None, execute: Any = None
) -> CommittedBatch:
    return runner.run(batch_id, BatchSource(lambda: table, planned, execute), Stopwatch())


def code_of(runner: Runner, *arguments: Any) -> str:
    with pytest.raises(sb.BatchGapError) as caught:
        run(runner, *arguments)
    return caught.value.code


def total(opening: Opening) -> int | None:
    if sb.CheckpointStore(opening.folder).latest() is None:
        return None
    return sb.tools.state(opening.folder, "total").to_table()["value"].to_pylist()[0]


def test_a_plan_is_compared_whole(opening: Opening) -> None:
    run(opening(), 0, rows(("a", 1)), plan(0))
    for other in (plan(1), plan(0, 1), plan_identity(0, []), None):
        assert code_of(opening(), 0, rows(("a", 1)), other) == "BATCH_GAP.OTHER_ROWS"
    executed: list[int] = []
    assert run(opening(), 0, rows(), plan(0), lambda: executed.append(1)).is_replay
    assert executed == [1]
    assert total(opening) == 1


def test_rows_are_compared_without_a_plan(opening: Opening) -> None:
    run(opening(), 0, rows(("a", 1), ("a", 2)))
    again = run(opening(), 0, rows(("a", 2), ("a", 1)), None, lambda: pytest.fail("it was read already"))
    assert again.is_replay
    for other in (rows(("a", 1)), rows(("a", 1), ("a", 3)), rows(("a", 1), ("a", 2), ("a", 2)), rows()):
        assert code_of(opening(), 0, other) == "BATCH_GAP.OTHER_ROWS"
    # Also where there is a plan now, as after a change from Spark Connect to the classic API.
    assert run(opening(), 0, rows(("a", 1), ("a", 2)), plan(0)).is_replay
    assert code_of(opening(), 0, rows(("a", 1)), plan(0)) == "BATCH_GAP.OTHER_ROWS"
    assert total(opening) == 3


def test_a_refusal_says_where_to_go_back_to(opening: Opening) -> None:
    run(opening(), 0, rows(("a", 1)), plan(0))
    with pytest.raises(sb.BatchGapError, match=r"rewind\(store, to=None, checkpoint_location=None\)"):
        run(opening(), 0, rows(("a", 1)), plan(5))
    run(opening(), 1, rows(("a", 1)), plan(1))
    with pytest.raises(sb.BatchGapError, match=r"rewind\(store, to=0, checkpoint_location=None\)"):
        run(opening(), 1, rows(("a", 1)), plan(5))
    opening.retain = 1
    run(opening(), 2, rows(("a", 1)), plan(2))
    with pytest.raises(sb.BatchGapError, match="checkpoint 1, which is not retained"):
        run(opening(), 2, rows(("a", 1)), plan(5))


def test_offsets_do_not_show(opening: Opening) -> None:
    run(opening(), 0, rows(("a", 1)), plan_identity(1, [{"token": "SECRET"}]))
    with pytest.raises(sb.BatchGapError) as caught:
        run(opening(), 0, rows(("a", 1)), plan_identity(2, [{"token": "SECRET"}]))
    assert "SECRET" not in str(caught.value)


def test_the_right_number_of_another_stream_is_refused(opening: Opening) -> None:
    """Two queries with one ``uid=``, of which the second has come as far with another sink."""
    run(opening(stream="1", location="file:/one"), 0, rows(("a", 1)), plan(0))
    runner = opening(stream="2", location="file:/two")
    with pytest.raises(sb.BatchGapError, match="another stream") as caught:
        run(runner, 1, rows(("a", 1)), plan(1))
    assert caught.value.code == "BATCH_GAP.OTHER_ROWS"
    assert "file:/one" in str(caught.value.detail)
    assert "file:/two" in str(caught.value.detail)
    with pytest.raises(sb.BatchGapError, match="another stream"):  # and what a rewind would not help
        run(opening(stream="2", location="file:/two"), 0, rows(("a", 1)), plan(0, 1))
    run(opening(stream="1", location="file:/moved"), 1, rows(("a", 1)), plan(1))
    run(opening(), 2, rows(("a", 1)), plan(2))  # where the engine does not tell
    assert total(opening) == 3


@pytest.mark.parametrize("first_batch", [None, 0, 5])
def test_an_empty_store_takes_the_batch_that_it_is_told(
    opening: Opening, tmp_path: Path, first_batch: int | None
) -> None:
    """A reset takes the place of the start for good, until a rewind to before the first batch."""
    empty = tmp_path / "savepoint"
    with sb.create_backend("heap").create_keyed_backend("string") as keyed:
        keyed.savepoint(empty)
    options = {"start": StartFrom(empty, first_batch=first_batch)}
    wanted = first_batch or 0
    for other in {0, 4, 5, 6} - {wanted}:
        assert code_of(opening(**options), other, rows(("a", 1))) == "BATCH_GAP.NO_STATE"
    run(opening(**options), wanted, rows(("a", 1)))
    run(opening(**options), wanted + 1, rows(("a", 1)))
    assert code_of(opening(**options), wanted + 3, rows(("a", 1))) == "BATCH_GAP.STATE_BEHIND"
    assert total(opening) == 2
    opening.close()
    there = sb.tools.reset(opening.folder, first_batch=4, dry_run=True)
    assert total(opening) == 2
    assert sb.tools.reset(opening.folder, first_batch=4) == there
    for other in (0, 3, 5):
        with pytest.raises(sb.BatchGapError, match="is to begin with batch 4") as caught:
            run(opening(**options), other, rows(("a", 1)))
        assert f"sb.tools.reset(store, first_batch={other})" in str(caught.value.hint)
    run(opening(**options), 4, rows(("a", 1)))
    assert total(opening) == 1


def test_reset_that_is_cut_off_takes_effect_and_asks_for_its_batch(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for batch_id in range(3):
        run(opening(), batch_id, rows(("a", 1)), plan(batch_id))

    def fails(*arguments: Any) -> None:
        raise OSError(errno.EIO, "as told")

    opening.close()
    with monkeypatch.context() as patch:
        patch.setattr(PosixFiles, "retire", fails)
        with pytest.raises(OSError, match="as told"):
            sb.tools.reset(opening.folder, first_batch=9)
    caplog.clear()  # its records hold errors, and these the state of the job
    assert len(list(opening.folder.glob("data/*/*"))) > 0, "the files of before are still there"
    assert sb.CheckpointStore(opening.folder).latest() is None
    # Another batch is another gap.
    assert code_of(opening(), 8, rows(("a", 10)), plan(8)) == "BATCH_GAP.NO_STATE"
    run(opening(), 9, rows(("a", 10)), plan(9))
    assert total(opening) == 10
    for batch_id, planned, code in ((9, plan(8), "OTHER_ROWS"), (0, plan(0), "STREAM_BEHIND")):
        again = opening()
        assert code_of(again, batch_id, rows(("a", 10)), planned) == f"BATCH_GAP.{code}"


def reset(opening: Opening, first_batch: int) -> None:
    opening().close()
    sb.tools.reset(opening.folder, first_batch=first_batch)


def test_a_crash_after_a_reset_begins_there_again(opening: Opening) -> None:
    def fails() -> pa.Table:
        raise RuntimeError("as told")

    reset(opening, 7)
    runner = opening()
    with pytest.raises(RuntimeError, match="as told"):
        runner.run(7, BatchSource(fails), Stopwatch())
    assert code_of(opening(), 8, rows(("a", 1))) == "BATCH_GAP.NO_STATE"
    run(opening(), 7, rows(("a", 1)))
    assert total(opening) == 1
    assert len(sb.CheckpointStore(opening.folder).records()) == 1


def test_a_rewind_to_before_the_first_begins_as_at_first(opening: Opening) -> None:
    reset(opening, 7)
    run(opening(), 7, rows(("a", 1)), plan(7))
    opening.close()
    sb.tools.rewind(opening.folder, to=None, checkpoint_location=None)
    run(opening(), 7, rows(("a", 5)), plan(7, 1))
    assert total(opening) == 5


def test_batches_after_a_rewind_have_another_incarnation(opening: Opening) -> None:
    first = run(opening(), 0, rows(("a", 1)), plan(0))
    second = run(opening(), 1, rows(("a", 1)), plan(1))
    assert first.incarnation == second.incarnation
    opening.close()
    sb.tools.rewind(opening.folder, to=0, checkpoint_location=None)
    assert run(opening(), 0, rows(("a", 1)), plan(0)).incarnation == first.incarnation
    again = run(opening(), 1, rows(("a", 1)), plan(1))
    assert again.incarnation != first.incarnation
    assert run(opening(), 1, rows(("a", 1)), plan(1)).incarnation == again.incarnation


def test_batch_of_an_older_version_is_replayed_by_its_number(
    opening: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    runner = opening()
    store = runner._store
    task = runner._execution.task
    now = time.time_ns() // 1_000_000
    task.run(0, Batch(runner._job, rows(("a", 1))), now)
    store.commit(
        0, [each.result() for each in task.snapshot(0, store)], now=now, progress={"numInputRows": 1}
    )
    task.committed(0)
    executed: list[int] = []
    replay = run(opening(), 0, rows(("b", 9)), plan(0), lambda: executed.append(1))
    assert replay.is_replay
    assert executed == [1]
    assert "taken for the same by its number" in caplog.text
    assert replay.incarnation == replay.checkpoint.manifest.store
    assert run(opening(), 1, rows(("a", 1)), plan(1)).incarnation == replay.incarnation


def test_progress_does_not_show_the_origin(opening: Opening) -> None:
    committed = run(opening(), 0, rows(("a", 1)), plan(0))
    assert "origin" not in committed.progress
    assert BatchRecord.of(committed.checkpoint.manifest).identity == plan(0)
    assert "origin" not in run(opening(), 0, rows(("a", 1)), plan(0)).progress


@pytest.mark.parametrize(
    "origin",
    [
        {"identity": "x"},
        {"identity": {}},
        {"identity": {"kind": "plan"}},
        {"identity": {"kind": "later", "time": 1, "offsets": []}},
        {"identity": {"kind": ["plan"]}},
        {"key": 3},
        {"key": "user"},
        {"key": [1]},
        {"incarnation": 1},
        {"location": {}},
        {"time": 7},
    ],
)
def test_an_origin_of_another_version_is_never_believed(origin: Any) -> None:
    with pytest.raises(sb.CorruptCheckpointError) as caught:
        BatchRecord.of(Manifest(7, 3, "0" * 32, batch=origin, sequence=9))
    assert caught.value.code == "CORRUPT_CHECKPOINT.VERSION"


def test_a_batch_whose_output_has_been_dropped_is_not_taken_for_one_without(opening: Opening) -> None:
    """After a rewind by more than one batch, into a stream that delivers the one before once more."""
    opening.retain = 5
    for batch_id in range(4):
        run(opening(), batch_id, rows(("a", 1)), plan(batch_id))
    opening.close()
    sb.tools.rewind(opening.folder, to=1, checkpoint_location=None)
    with pytest.raises(sb.UsageError, match="has been dropped") as caught:
        run(opening(), 1, rows(("a", 1)), plan(1))
    assert "rewind(store, to=0, checkpoint_location=None)" in str(caught.value.hint)
    assert run(opening(), 2, rows(("a", 1)), plan(2)).output
    assert total(opening) == 3
