"""A job that runs a stream from batch to batch in a process that is killed, for `processes` to serve.

The stream is Spark's part, played by a folder: batch N is to come if N-1 has its file in ``stream/``, which is
written when the sink has returned. The input of a batch is drawn from its number.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from any_checkpoint import read_rows
from processes import JOBS, KillingCalls, serve

import statebackend as sb
from statebackend.checkpoint.files import PosixFiles
from statebackend.runtime import BatchSource, Job, Runner
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.types import STRING

BATCHES = 4
USERS = "abcdefg"


def input_of(batch_id: int) -> list[tuple[str, int]]:
    rng = random.Random(batch_id)
    return [(rng.choice(USERS), rng.randrange(100)) for _ in range(rng.randrange(12))]


def table_of(rows: list[tuple[str, int]]) -> pa.Table:
    columns = {"user": [user for user, _ in rows], "amount": [amount for _, amount in rows]}
    return pa.table(columns, pa.schema([("user", pa.string()), ("amount", pa.int64())]))


def expected(batches: int) -> list[list[tuple[str, int, int]]]:
    """The user, the total and the number of each row that `Numbered` gives for a batch, for so many batches."""
    totals: Counter[str] = Counter()
    numbers = itertools.count(1)
    found = []
    for batch_id in range(batches):
        rows = []
        for user, amount in input_of(batch_id):
            totals[user] += amount
            rows.append((user, totals[user], next(numbers)))
        found.append(rows)
    return found


#: The columns of `Numbered`.
SCHEMA = "user string, total bigint, number bigint, token string"


class Numbered(sb.KeyedProcessFunction, sb.CheckpointedFunction):
    """Totals by key, a number that goes up with every row, and something that is never twice the same."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick
        self.last = 0

    def __deepcopy__(self, memo: Any) -> Numbered:
        return Numbered(self.tick)

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def initialize_state(self, ctx: Any) -> None:
        self.state = ctx.operator_state_store.get_list_state(sb.ListStateDescriptor("last", int))
        if ctx.is_restored:
            (self.last,) = self.state.get()

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.tick()
        self.last += 1
        self.total.add(row.amount)
        yield row.user, self.total.get(), self.last, os.urandom(4).hex()

    def snapshot_state(self, ctx: Any) -> None:
        self.tick()
        self.state.update([self.last])


def backend_in(root: Path, name: str) -> sb.StateBackend:
    """A backend by name, or "native"; what it keeps on a disk of its own lies beside the store."""
    if name not in ("rocksdb", "native"):
        return sb.create_backend(name)
    (root / "local").mkdir(exist_ok=True)
    checkpoints = "native" if name == "native" else "rows"
    return sb.create_backend(
        "rocksdb", local_dir=root / "local", memory_limit=8 << 20, checkpoints=checkpoints
    )


def run_stream(request: dict[str, Any], say: Callable[[object], None]) -> None:
    """Runs what is left of the stream."""
    root = Path(request["root"])
    (root / "stream").mkdir(parents=True, exist_ok=True)
    calls = KillingCalls(request["at"])
    job = Job(Numbered(calls.tick), key="user", schema=SCHEMA, backend=backend_in(root, request["backend"]))
    store = sb.CheckpointStore(root / "state", retain=2, _files=PosixFiles(str(root / "state"), calls))
    runner = Runner(job, store, STRING, query="q")
    done = {int(name) for name in os.listdir(root / "stream")}
    for batch_id in range(max(done, default=-1) + 1, request.get("batches", BATCHES)):
        table = table_of(input_of(batch_id))
        committed = runner.run(batch_id, BatchSource(lambda table=table: table), Stopwatch())
        calls.tick()
        given = []
        for file in committed.output:
            given += pq.read_table(committed.checkpoint.address(file)).to_pylist()
        line = json.dumps({"batch": batch_id, "rows": given}) + "\n"
        with open(root / "sink", "ab", buffering=0) as sink:
            sink.write(line.encode())
        say(["sink", calls.count])
        calls.tick()
        (root / "stream" / str(batch_id)).touch()
        calls.tick()
    runner.close()
    say(["calls", calls.count])


JOBS["stream"] = run_stream


def sink_of(root: Path) -> tuple[list[list[dict[str, Any]]], int]:
    """The rows of each batch, in order and each batch once; and how often a batch came again."""
    given: dict[int, list[Any]] = {}
    again = 0
    for line in (root / "sink").read_text().splitlines():
        call = json.loads(line)
        again += call["batch"] in given
        assert given.setdefault(call["batch"], call["rows"]) == call["rows"], "a replay differs"
    assert sorted(given) == list(range(len(given)))
    return [given[batch_id] for batch_id in range(len(given))], again


def check_nothing_local(root: Path) -> None:
    """What killed processes left of their databases is gone, but for folders that they had just made."""
    left = list((root / "local").iterdir()) if (root / "local").exists() else []
    assert [each for each in left if list(each.iterdir())] == []


def check_stream(root: Path, batches: int = BATCHES) -> int:
    """The sink, without what came twice, is what one run without a fault gives; how many batches came again."""
    check_nothing_local(root)
    given, again = sink_of(root)
    assert [[(row["user"], row["total"], row["number"]) for row in rows] for rows in given] == expected(
        batches
    )
    return again


def check_query(root: Path, files: int) -> int:
    """The same for a real query, where a batch may be of several files: Spark's own log of files may be ahead of its
    log of batches when it is killed. Every row of the input counts once, whichever batch it came in.
    """
    check_nothing_local(root)
    given, again = sink_of(root)
    check_rows(root, itertools.chain.from_iterable(given), files)
    return again


def check_rows(
    root: Path,
    rows: Iterable[dict[str, Any]],
    files: int,
    leaves_out: Callable[[int], bool] = lambda _: False,
) -> None:
    """All rows of all batches, in order, are what one run without a fault gives, and so is state.

    ``leaves_out`` says which rows of the input reach no function: number 7 of file 3 is row 3007.
    """
    totals: dict[str, int] = {}
    counted: Counter[tuple[str, int]] = Counter()
    for number, row in enumerate(rows, 1):
        assert row["number"] == number
        counted[row["user"], row["total"] - totals.get(row["user"], 0)] += 1
        totals[row["user"]] = row["total"]
    wanted = [
        row
        for file in range(files)
        for number, row in enumerate(input_of(file))
        if not leaves_out(1000 * file + number)
    ]
    assert counted == Counter(wanted)
    state = read_rows(root / "state", "total")
    assert dict(zip(state["key"].to_pylist(), state["value"].to_pylist(), strict=True)) == totals


if __name__ == "__main__":
    serve()
