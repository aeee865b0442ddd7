"""The same rewind completes one whose process was killed, and the query then runs as without the bad batches.

Each cell is a source, a trigger, an operator of Spark above the function, and a sink. With ``--stress`` all cells run,
and each has ten kills or more.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pyarrow.parquet as pq
import pytest
import rewound_process
from any_checkpoint import read_rows
from deltalake import DeltaTable
from local_spark import needs_java, settings
from rewound_process import SINKS
from spark_streams import Stream, numbers

import statebackend as sb

pytestmark = [pytest.mark.spark, pytest.mark.slow, needs_java]

USERS = "abc"
PROVIDER = "org.apache.spark.sql.execution.streaming.state.{}StateStoreProvider"
#: The rows of file ``number``: the user, and a number that `dropDuplicates` sees again in later files.
INPUT = [
    [(user, rng.randrange(20)) for user in rng.choices(USERS, k=8)]
    for rng in (random.Random(number) for number in range(5))
]


class Counts(sb.KeyedProcessFunction):
    """Emits how many rows, or updates of a count, each user had; the wrong one multiplies by ten."""

    def __init__(self, reduction: str, factor: int) -> None:
        self.reduction, self.factor = reduction, factor

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", self.reduction, int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.total.add(row.n * self.factor)
        yield row.user, self.total.get()


class Query(Stream):
    """A query in a folder, which is started again and again."""

    def __init__(self, spark: Any, folder: Path, source: str, trigger: str, operator: str, sink: str) -> None:
        super().__init__(spark, folder)
        self.source, self.is_timed, self.operator, self.kind = source, trigger == "timed", operator, sink
        self.is_aggregated = operator.startswith("aggregation")
        self.sink = SINKS[sink](folder / "out")

    def frame(self) -> Any:
        if self.source == "rate":
            made = self.spark.readStream.format("rate").option("rowsPerSecond", 20).load()
            rows = made.selectExpr("substring('abc', cast(value % 3 + 1 as int), 1) AS user", "value AS n")
        else:
            files = self.spark.readStream.schema("user string, n bigint")
            if self.source == "one file":
                files = files.option("maxFilesPerTrigger", 1)
            rows = files.parquet(str(self.folder / "in"))
        if self.is_aggregated:
            return rows.groupBy("user").count().withColumnRenamed("count", "n")
        rows = rows.dropDuplicates(["user", "n"]) if self.operator == "dropDuplicates" else rows
        return rows.selectExpr("user", "1L AS n")

    def newest(self) -> int:
        latest = sb.CheckpointStore(self.state).latest()
        return -1 if latest is None else latest

    def go_on(self, batches: int, factor: int = 1) -> None:
        """Run the query over so many more batches; a rewound one runs over its later files first."""
        for chunk in [1] * batches if self.source == "files" else [batches]:
            for _ in range(chunk if self.source != "rate" else 0):
                self.add(numbers(*INPUT[self.written]))
            self.session(factor, self.newest() + chunk if self.source == "rate" else -1)

    def session(self, factor: int, until: int) -> None:
        """Run the query to the end of its input; with the rate source, which has none, until a batch."""
        reduction = "max" if self.is_aggregated else "sum"
        state = sb.CheckpointStore(self.state, retain=20)
        batches = self.batches(Counts(reduction, factor), self.sink, state=state)
        writer = self.frame().writeStream.foreachBatch(batches).outputMode("update")
        writer = writer.option("checkpointLocation", str(self.folder / "stream"))
        times = {"processingTime": "0 seconds"} if self.is_timed else {"availableNow": True}
        deadline = time.monotonic() + 120
        try:
            while True:
                query = writer.trigger(**times).start()
                if not self.is_timed:
                    query.awaitTermination()
                elif self.source != "rate":
                    query.processAllAvailable()
                while self.is_timed and self.newest() < until:
                    assert query.isActive
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                query.stop()
                if self.newest() >= until:
                    break
                assert time.monotonic() < deadline
        finally:
            batches.close()

    # --- what it has ---

    def published(self) -> dict[int, list[tuple[Any, ...]]]:
        out, found = self.folder / "out", defaultdict(list)
        if self.kind == "function":
            for path in out.iterdir():
                found[int(path.name.split("-")[0])] += [tuple(row) for row in json.loads(path.read_text())]
            return {batch: sorted(rows) for batch, rows in sorted(found.items())}
        files: list[tuple[int, Path]] = []
        if self.kind == "parquet":
            files = [(int(path.name.split("-")[1]), path) for path in out.glob("*.parquet")]
        elif out.exists():
            kept = {Path(uri).name for uri in DeltaTable(str(out)).file_uris()}
            for log in sorted((out / "_delta_log").glob("*.json")):
                entries = [json.loads(line) for line in log.read_text().splitlines()]
                wrote = [
                    each["commitInfo"].get("statebackend.batch") for each in entries if "commitInfo" in each
                ]
                for path in [out / each["add"]["path"] for each in entries if "add" in each]:
                    if wrote[0] and path.name in kept:
                        files.append((int(wrote[0].split("/")[1]), path))
        for batch, path in files:
            found[batch] += [tuple(row.values()) for row in pq.read_table(path).to_pylist()]
        return {batch: sorted(rows) for batch, rows in sorted(found.items())}

    def files(self) -> dict[str, bytes]:
        """Spark's files, without the files that rewinds have moved."""
        found = {
            path.relative_to(self.folder / "stream"): path for path in (self.folder / "stream").rglob("*")
        }
        return {
            str(name): path.read_bytes()
            for name, path in found.items()
            if path.is_file() and name.parts[0] != ".rewound"
        }

    def moved(self) -> set[str]:
        found = (self.folder / "stream" / ".rewound").glob("*/**/*")
        return {str(path.relative_to(self.folder / "stream")).split("/", 2)[-1] for path in found}

    def outcome(self) -> Any:
        """All that a rewind changes, without the numbers that a store draws."""
        sb.tools.verify(self.state)
        committed = sb.CheckpointStore(self.state).checkpoints()
        state = read_rows(self.state, "total").to_pylist() if committed else []
        return self.files(), self.published(), committed, sorted(map(repr, state))

    # --- what it has to have ---

    def check(self) -> None:
        """The output is that of the right function over all rows: of each batch, or as a whole."""
        found, rows = self.published(), INPUT[: self.written]
        if self.source == "one file":
            assert found == {batch: self.expected(rows, batch) for batch in range(len(rows))}
            return
        outputs: dict[str, list[int]] = defaultdict(list)
        for user, total in (row for batch in found.values() for row in batch):
            outputs[user].append(total)
        wanted = self.counts(rows)
        if self.source == "rate":  # it numbers its rows
            count = sum(map(max, outputs.values()))
            wanted = Counter(USERS[number % 3] for number in range(count))
        assert {user: max(totals) for user, totals in outputs.items()} == wanted
        for totals in outputs.values():
            assert sorted(totals) == (
                sorted({*totals}) if self.is_aggregated else [*range(1, len(totals) + 1)]
            )

    def counts(self, files: list[list[tuple[str, int]]]) -> Counter[str]:
        rows = [row for file in files for row in file]
        return Counter(user for user, _ in ({*rows} if self.operator == "dropDuplicates" else rows))

    def expected(self, files: list[list[tuple[str, int]]], batch: int) -> list[tuple[str, int]]:
        before, after = self.counts(files[:batch]), self.counts(files[: batch + 1])
        if self.is_aggregated:
            return sorted((user, after[user]) for user in {user for user, _ in files[batch]})
        return sorted((user, n) for user in after for n in range(before[user] + 1, after[user] + 1))


@pytest.fixture(scope="module")
def rewinds() -> Iterator[processes.Server]:
    with processes.server(rewound_process) as server:
        yield server


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize(
    "operator", ["none", "dropDuplicates", "aggregation in HDFSBacked", "aggregation in RocksDB"]
)
@pytest.mark.parametrize("trigger", ["available now", "timed"])
@pytest.mark.parametrize("source", ["one file", "files", "rate"])
def test_rewind_that_is_killed_is_completed_by_another(
    spark: Any,
    tmp_path: Path,
    rewinds: processes.Server,
    rng: random.Random,
    request: pytest.FixtureRequest,
    is_stress: bool,
    source: str,
    trigger: str,
    operator: str,
    sink: str,
) -> None:
    folder, saved = tmp_path / "query", tmp_path / "saved"
    folder.mkdir()
    query = Query(spark, folder, source, trigger, operator, sink)
    provider = PROVIDER.format("RocksDB" if "RocksDB" in operator else "HDFSBacked")
    with settings(spark, {"spark.sql.streaming.stateStore.providerClass": provider}):
        query.go_on(2)
        to = rng.choice([query.newest(), query.newest(), None])
        query.go_on(2, factor=10)
        written = query.written
        shutil.copytree(folder, saved)
        before = {*query.files()}

        def rewind(**more: Any) -> Any:
            return rewinds.ask("rewind", folder, to=to, sink=sink, **more)[0]

        def reset() -> None:
            shutil.rmtree(folder)
            shutil.copytree(saved, folder)
            query.written = written

        def place() -> dict[str, int]:
            kind = rng.choice(["changes", "microseconds"])
            return {kind: rng.randrange(min(said[kind], 1_000_000))}  # of a measurement on a busy machine

        said = rewind()["said"][-1]
        whole = query.outcome()
        wanted = max(10, request.config.getoption("kills") // 72) if is_stress else 2
        places: list[dict[str, int]] = []
        goes_on = {0, wanted - 1} if is_stress else {0}
        while len(places) < wanted:
            reset()
            for _ in range(rng.choice([1, 1, 2])):  # the second attempt is killed too
                places.append(place())
                if rewind(**places[-1])["status"] == 0:
                    places.pop()  # it was faster
            if len(places) == 1 and source != "rate":
                error = error_between(query)
                assert not error or re.search(r"BATCH_GAP\.(STREAM_BEHIND|OTHER_ROWS)", error), error
            assert rewind()["status"] == 0, places
            assert query.outcome() == whole, places
            assert before <= {*query.files()} | query.moved(), places
            if goes_on and len(places) > min(goes_on):
                goes_on.remove(min(goes_on))
                query.go_on(1)
                query.check()
        print(f"seed {request.config.option.seed}, to {to}, {len(places)} kills: {places}")


def error_between(query: Query) -> str:
    """Start the query before the rewind is completed; its error, or nothing."""
    try:
        query.session(1, -1)
    except Exception as error:  # noqa: BLE001 - Spark's
        return str(error)
    return ""
