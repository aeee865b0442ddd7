"""Flipped bits and cut files, anywhere in a store and at any time: no wrong row is delivered, or counted."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import statebackend as sb
from statebackend.runtime import BatchSource, CommittedBatch, Job, Runner
from statebackend.runtime.batch_identity import plan_identity
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.types import STRING

BATCHES = 3
USERS = [f"user {n}" for n in range(40)]


class Total(sb.KeyedProcessFunction, sb.CheckpointedFunction):
    """Totals of each user, the last words of each, and how many rows there were."""

    rows = 0

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        self.words = ctx.get_list_state(sb.ListStateDescriptor("words", str))

    def initialize_state(self, ctx: Any) -> None:
        self.count = ctx.operator_state_store.get_list_state(sb.ListStateDescriptor("rows", int))
        self.rows = sum(self.count.get())

    def snapshot_state(self, ctx: Any) -> None:
        self.count.update([self.rows])

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.rows += 1
        self.total.add(row.n)
        self.words.add(row.word)
        ctx.timer_service().register_processing_time_timer(ctx.now + 1_000_000_000)
        yield row.user, self.total.get(), ",".join(self.words.get()), self.rows


def job() -> Job:
    return Job(Total(), key="user", schema="user string, total bigint, words string, rows bigint")


def batch(batch_id: int) -> BatchSource:
    rng = random.Random(batch_id)
    users = [rng.choice(USERS) for _ in range(60)]
    words = [f"word {rng.randrange(1000)}" for _ in users]
    table = pa.table({"user": users, "n": [rng.randrange(10**9) for _ in users], "word": words})
    return BatchSource(lambda: table, plan_identity(0, [batch_id]))


def opened(folder: Path) -> Runner:
    return Runner(job(), sb.CheckpointStore(folder, retain=2), STRING, query="q")


def delivered(committed: CommittedBatch) -> list[Any]:
    """What a sink is given, by the same steps."""
    committed.verify_output()
    rows: list[Any] = []
    for file in committed.output:
        rows += pq.read_table(committed.checkpoint.address(file), page_checksum_verification=True).to_pylist()
    return rows


def run(runner: Runner, batch_id: int) -> CommittedBatch:
    return runner.run(batch_id, batch(batch_id), Stopwatch())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose newest batch is still to be delivered."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    runner = opened(folder)
    for batch_id in range(BATCHES):
        run(runner, batch_id)
    runner.close()
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each batch delivers."""
    runner = opened(tmp_path_factory.mktemp("right") / "store")
    rows = [delivered(run(runner, batch_id)) for batch_id in range(BATCHES + 2)]
    runner.close()
    return rows


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(folder: Path, rng: random.Random) -> str:
    """Flip a bit of a file, or cut it; what was done."""
    path = rng.choice([path for path in files_of(folder) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if rng.randrange(5):
        content[at] ^= 1 << rng.randrange(8)
        what = "flipped"
    else:
        del content[at:]
        what = "cut"
    path.write_bytes(content)
    return f"{path.name} {what} at {at}"


def trial(folder: Path, whole: Path, act: Callable[[], None]) -> bool:
    """Whether damage was found; anything else than an error of ours, or right rows, is a failure."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    try:
        act()
    except sb.StateBackendError:
        return True
    return False


def test_damage_is_found_or_does_no_harm(
    tmp_path: Path, whole: Path, right: list[list[Any]], rng: random.Random, is_stress: bool
) -> None:
    """At rest; between commit and sink; and while the job goes on, where it is found by the next opening."""
    trials = 10_000 if is_stress else 100
    folder = tmp_path / "store"
    found = 0
    what = ""

    def at_rest() -> None:
        nonlocal what
        what = "at rest: " + damage(folder, rng)
        with closing(opened(folder)) as runner:
            assert delivered(run(runner, BATCHES - 1)) == right[BATCHES - 1], what
            assert delivered(run(runner, BATCHES)) == right[BATCHES], what

    def before_the_sink() -> None:
        nonlocal what
        with closing(opened(folder)) as runner:
            committed = run(runner, BATCHES)
            what = "before the sink: " + damage(folder, rng)
            assert delivered(committed) == right[BATCHES], what
            assert delivered(run(runner, BATCHES + 1)) == right[BATCHES + 1], what
        with closing(opened(folder)) as runner:
            assert delivered(run(runner, BATCHES + 1)) == right[BATCHES + 1], what

    for number in range(trials):
        found += trial(folder, whole, before_the_sink if number % 2 else at_rest)
    assert found > trials // 4
