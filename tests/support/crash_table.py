"""What becomes of a batch, for each point at which it broke off and each thing that Spark may do then: one cell a time.

A cell is a stream of its own. Its batch 0 is done; batch 1, of two files, breaks off at `BEFORE`; then something of
`THEN` happens, and the query is started again. What `cell` gives is ``"exact"``, or the code of the error that it ended
with. In both cases no row may have been lost, doubled or delivered changed, which is checked.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from connect_session import started

import statebackend as sb
from statebackend.runtime import CommittedBatch

#: How far batch 1 came before it broke off: each is the last thing that had happened.
BEFORE = ("nothing", "the function", "files", "the manifest", "the sink", "Spark's log")
#: What Spark, a disk or a person does next.
THEN = (
    "the same plan",
    "another plan",
    "lost offsets",
    "a new location",
    "state above",
    "another schema",
    "another function",
)

FILES = [[("a", 1), ("a", 1)], [("a", 10), ("b", 5)], [("a", 20), ("a", 10)], [("b", 100)]]
SCHEMA = "user string, total bigint"


class BrokenOff(Exception):
    pass


class Total(sb.KeyedProcessFunction):
    """Running totals; ``sign`` tells the outputs of two versions of the function apart."""

    def __init__(self, sign: int = 1, fails_at: int | None = None) -> None:
        self.sign, self.fails_at = sign, fails_at

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.total.add(row.n)
        yield row.user, self.sign * self.total.get()
        if ctx.batch_id == self.fails_at:
            raise BrokenOff


class Sink:
    """Appends what it is given to a file, as a table that takes no row back."""

    def __init__(self, path: Path, fails_at: int | None = None) -> None:
        self.path, self.fails_at = path, fails_at

    def __call__(self, frame: Any, batch_id: int) -> None:
        rows = [list(row) for row in frame.collect()]
        with self.path.open("a") as file:
            file.write(json.dumps({"batch": batch_id, "rows": rows}) + "\n")
        if batch_id == self.fails_at:
            raise BrokenOff


class Breaking:
    """Calls a job, and breaks off in batch 1. Runs where Spark calls it: in another process, through Connect."""

    def __init__(self, batches: Any, before: str) -> None:
        self.batches, self.before = batches, before

    def __call__(self, frame: Any, batch_id: int) -> None:
        if batch_id != 1:
            self.batches(frame, batch_id)
            return
        if self.before == "nothing":
            raise BrokenOff
        broken = {"files": (sb.CheckpointStore, "commit"), "the manifest": (CommittedBatch, "verify_output")}
        if self.before not in broken:
            self.batches(frame, batch_id)
            return
        with mock.patch.object(*broken[self.before], side_effect=BrokenOff):
            self.batches(frame, batch_id)


class Cell:
    """One stream, in a folder of its own."""

    def __init__(self, spark: Any, folder: Path, *, dedups: bool) -> None:
        self.spark, self.folder, self.dedups = spark, folder, dedups
        self.state = folder / "state"
        self.written: list[list[tuple[str, int]]] = []
        (folder / "in").mkdir(parents=True)

    def add(self, rows: list[tuple[str, int]]) -> None:
        path = self.folder / "in" / f"{len(self.written):04}.parquet"
        pq.write_table(pa.table({"user": [user for user, _ in rows], "n": [n for _, n in rows]}), path)
        self.written.append(rows)
        os.utime(path, (1_700_000_000 + len(self.written),) * 2)  # Spark takes the oldest first

    def run(
        self,
        before: str = "",
        *,
        function: Any = None,
        schema: str = SCHEMA,
        location: str = "stream",
        files: int = 2,
    ) -> str:
        """Run the query to its end; "exact", or what it failed with."""
        function = function or Total(fails_at=1 if before == "the function" else None)
        sink = Sink(self.folder / "sink", 1 if before == "the sink" else None)
        batches = sb.spark.stateful(
            function, key="user", schema=schema, state=self.state, sink=sink, uid="mine"
        )
        rows = self.spark.readStream.schema("user string, n bigint").option("maxFilesPerTrigger", files)
        rows = rows.parquet(str(self.folder / "in"))
        if self.dedups:
            rows = rows.dropDuplicates(["user", "n"])
        query = started(
            rows.writeStream.foreachBatch(Breaking(batches, before) if before else batches)
            .option("checkpointLocation", str(self.folder / location))
            .trigger(availableNow=True)
        )
        try:
            query.awaitTermination()
        except Exception as error:
            text = str(error)
            if "BrokenOff" in text:
                return "broken off"
            code = re.search(r"\[((?:[A-Z_]+\.)[A-Z_]+)\]", text)
            if code is None:
                raise
            return code[1]
        finally:
            batches.close()
        return "exact"

    def lose(self, *names: str) -> None:
        """Let Spark's notes on batch 1 be gone."""
        for name in names:
            for path in (self.folder / "stream" / name / "1", self.folder / "stream" / name / ".1.crc"):
                path.unlink(missing_ok=True)

    # --- what must hold ---

    def state_now(self) -> dict[str, int]:
        if sb.CheckpointStore(self.state).latest() is None:
            return {}
        table = sb.tools.state(self.state, "total").to_table()
        return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))

    def wanted(self, files: int) -> Counter[tuple[str, int]]:
        """The rows of the first files, without those that were there before if the frame drops them."""
        rows = Counter(row for file in self.written[:files] for row in file)
        return Counter(dict.fromkeys(rows, 1)) if self.dedups else rows

    def check(self, files: int) -> None:
        """State and what was delivered, each batch once, are those of the first files."""
        totals: Counter[str] = Counter()
        for (user, n), times in self.wanted(files).items():
            totals[user] += n * times
        assert self.state_now() == dict(totals), "state"
        given: dict[int, Any] = {}
        for line in (self.folder / "sink").read_text().splitlines():
            call = json.loads(line)
            assert given.setdefault(call["batch"], call["rows"]) == call["rows"], (
                "a batch came again, changed"
            )
        running: Counter[str] = Counter()
        seen: Counter[tuple[str, int]] = Counter()
        for batch_id in sorted(given):
            for user, total in given[batch_id]:
                seen[user, abs(total) - running[user]] += 1
                running[user] = abs(total)
        assert seen == self.wanted(files), "what was delivered"


def cell(spark: Any, folder: Path, before: str, then: str) -> str:
    """Run one cell, check it, and say what became of the batch."""
    made = Cell(spark, folder, dedups=then == "state above")
    made.add(FILES[0])
    assert made.run() == "exact"
    made.add(FILES[1])
    made.add(FILES[2])
    assert made.run(before) == ("exact" if before == "Spark's log" else "broken off")
    is_committed = before in BEFORE[3:]
    state = made.state_now()
    delivered = (folder / "sink").read_bytes()
    options: dict[str, Any] = {}
    if then == "another plan":
        made.lose("offsets", "sources/0", "commits")
        options["files"] = 1
    elif then == "lost offsets":
        made.lose("offsets", "commits")
    elif then == "a new location":
        options["location"] = "elsewhere"
    elif then == "another schema":
        options["schema"] = "user string, sum bigint"
    elif then == "another function":
        options["function"] = Total(sign=-1)
    became = made.run(**options)
    if became == "exact":
        made.check(3)
        # And on it goes.
        made.add(FILES[3])
        assert made.run(**options) == "exact"
        made.check(4)
    else:
        assert made.state_now() == state, "a refusal changes nothing"
        assert (folder / "sink").read_bytes() == delivered, "a refusal delivers nothing"
        assert sb.CheckpointStore(made.state).latest() == (1 if is_committed else 0)
        sb.CheckpointStore(made.state).open_latest().verify()
    return became


def table_of(outcome: Callable[[str, str], str]) -> str:
    """The table as the page has it."""
    lines = ["| broke off after | " + " | ".join(THEN) + " |", "|---|" + "---|" * len(THEN)]
    for before in BEFORE:
        cells = [outcome(before, then) for then in THEN]
        lines.append(f"| {before} | " + " | ".join(shown(each) for each in cells) + " |")
    return "\n".join(lines)


def shown(outcome: str) -> str:
    return outcome if outcome == "exact" else f"`{outcome.rpartition('.')[2]}`"


def cells_of(page: str) -> dict[tuple[str, str], str]:
    """What the page says of each cell in the classic API."""
    rows = re.search(r"(?:^\|.*\n)+", page.partition("## What becomes of a batch")[2], re.M)
    lines = [[each.strip() for each in line.strip("|\n").split("|")] for line in rows[0].splitlines()]
    heads = lines[0][1:]
    return {(line[0], head): each for line in lines[2:] for head, each in zip(heads, line[1:], strict=True)}
