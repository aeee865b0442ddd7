"""A job as a query: started over the events of a folder, its outputs read, and what batch SQL says they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import statebackend as sb
from examples.nexmark import counts, join, sessions, top, windows, winning
from examples.nexmark.events import DDL
from examples.nexmark.job import Job

JOBS: dict[str, Job] = {
    "join": join.JOB,
    "winning": winning.JOB,
    "windows": windows.JOB,
    "sessions": sessions.JOB,
    "counts": counts.JOB,
    "top": top.JOB,
}


class Run:
    """A job in one form over the files in ``folder/in``; what it leaves lies in a folder of its own beside them."""

    def __init__(self, folder: Path, name: str, form: str, files_a_batch: int = 1) -> None:
        self.job = JOBS[name]
        self.form = form
        self.input = folder / "in"
        self.files_a_batch = files_a_batch
        self.folder = folder / f"{name}-{form}-{files_a_batch}"
        #: The object that Spark calls; it has the progress of the newest batch.
        self.batches: Any = None

    def start(self, spark: Any, **options: Any) -> Any:
        """Start the query, or let it go on where it was; it ends when no file is left."""
        job = self.job
        sinks = {name: sb.spark.sinks.parquet(self.folder / "out" / name) for name in job.outputs}
        self.batches = sb.spark.stateful(
            job.functions[self.form](),
            key=job.keys[self.form],
            schema=job.schema,
            state=self.folder / "state",
            sink=sinks if isinstance(job.schema, dict) else sinks["main"],
            **job.options,
            **options,
        )
        return (
            spark.readStream.schema(DDL)
            .option("maxFilesPerTrigger", self.files_a_batch)
            .parquet(str(self.input))
            .where(job.where)
            .selectExpr(*job.columns)
            .writeStream.foreachBatch(self.batches)
            .option("checkpointLocation", str(self.folder / "stream"))
            .trigger(availableNow=True)
            .start()
        )

    def found(self, output: str) -> pa.Table:
        """All rows of an output, sorted; of those that replace each other, the last."""
        files = sorted((self.folder / "out" / output).glob("batch-*.parquet"))
        if not files:
            return pa.table({})
        table = pa.concat_tables([pq.read_table(path) for path in files])
        if self.job.replaced_by is not None:
            keys = list(self.job.replaced_by)
            place = pa.array(range(table.num_rows))
            last = (
                table.select(keys).append_column("place", place).group_by(keys).aggregate([("place", "max")])
            )
            table = table.take(last["place_max"])
        return in_order(table)

    def expected(self, spark: Any, output: str) -> pa.Table:
        """The same by batch SQL over all events."""
        name = "regexp_extract(input_file_name(), '([^/]+)$', 1) as file"
        spark.read.schema(DDL).parquet(str(self.input)).selectExpr("*", name).createOrReplaceTempView(
            "events"
        )
        spark.createDataFrame(
            list(self.watermarks().items()), "file string, watermark bigint"
        ).createOrReplaceTempView("batches")
        return in_order(spark.sql(self.job.sql[output]).toArrow())

    def watermarks(self) -> dict[str, int | None]:
        """Of each file, the watermark before its batch, found from the files of the batches before."""
        event_time = self.job.options.get("event_time")
        delay = event_time.watermark_delay if isinstance(event_time, sb.EventTime) else 0
        assert isinstance(delay, int)  # EventTime has made milliseconds of it
        found: dict[str, int | None] = {}
        newest: int | None = None
        for files in self._files_of_batches():
            found.update(dict.fromkeys(files, None if newest is None else newest - delay))
            for name in files:
                bids = pq.read_table(self.input / name, columns=["at"], filters=[("kind", "=", "bid")])
                newest = max(
                    (each for each in (pc.max(bids["at"]).as_py(), newest) if each is not None), default=None
                )
        return found

    def _files_of_batches(self) -> list[list[str]]:
        """The names of the files of each batch, from Spark's logs. After a crash a batch may have more of them."""
        place: dict[str, int] = {}
        for path in _log(self.folder / "stream" / "sources" / "0"):
            for line in path.read_text().splitlines()[1:]:
                entry = json.loads(line)
                place[Path(entry["path"]).name] = entry["batchId"]
        batches, before = [], -1
        for path in sorted(_log(self.folder / "stream" / "offsets"), key=lambda path: int(path.name)):
            until = json.loads(path.read_text().splitlines()[-1])["logOffset"]
            batches.append(sorted(name for name, at in place.items() if before < at <= until))
            before = until
        return batches


def _log(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.split(".")[0].isdigit()]


def in_order(table: pa.Table) -> pa.Table:
    """A table sorted by all columns that can be sorted, as one chunk each."""
    names = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    return table.sort_by([(name, "ascending") for name in names]).combine_chunks()


def differences(found: pa.Table, expected: pa.Table) -> str:
    """What is different between two sorted tables, in a line; empty if nothing is."""
    if found.num_rows != expected.num_rows:
        return f"{found.num_rows:,} rows, and not {expected.num_rows:,}"
    for name in found.schema.names:
        if not found[name].equals(expected[name].cast(found[name].type)):
            return f"column {name} has other values"
    return ""
