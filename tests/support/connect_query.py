"""A program: queries through Spark Connect over the files in a folder: ``python connect_query.py FOLDER NAME...``.

One after the other, in one session whose settings change the meaning of schemas; an empty name is none. Prints whether
each is done or failed. The queries "encrypted" and "interrupted" have places of their own: the first has an encrypted
store, and the sink of the second raises an exit.
"""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["PYSPARK_PYTHON"] = sys.executable

from ciphers import AesGcm
from connect_session import connect_session

import statebackend as sb


def started(writer: Any) -> Any:
    """The query. Spark gives its worker ten seconds to load all that it needs, too few on a busy machine: once more."""
    for _ in range(9):
        try:
            return writer.start()
        except Exception as error:
            if "worker failed to connect back" not in str(error):
                raise
    return writer.start()


def main() -> None:
    folder, *names = sys.argv[1:]

    class Total(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            self.total.add(row.n)
            total = self.total.get()
            yield row.user, total, datetime.datetime.fromtimestamp(total, datetime.timezone.utc)

    spark = connect_session("local[2]", {})
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # says if there is a zone
    spark.conf.set("spark.sql.ansi.enforceReservedKeywords", "true")
    for name in names:
        place = folder
        checkpoint: Any = f"{place}/state"
        if name == "encrypted":
            place = f"{folder}/{name}"
            checkpoint = sb.CheckpointStore(f"{place}/state", encryption=AesGcm())

        if name == "interrupted":
            place = f"{folder}/{name}"
            checkpoint = f"{place}/state"

        def sink(frame: Any, batch_id: int, place: str = place, name: str = name) -> None:
            if name == "interrupted":
                raise KeyboardInterrupt("as told")
            frame.write.mode("overwrite").parquet(f"{place}/out/batch={batch_id}")

        batches = sb.spark.stateful(
            Total(),
            key="user",
            schema="user string, total bigint, at timestamp",
            checkpoint=checkpoint,
            sink=sink,
            name=name or None,
        )
        rows = spark.readStream.schema("`user` string, n bigint").option("maxFilesPerTrigger", 1)
        try:
            started(
                rows.parquet(f"{folder}/in")
                .writeStream.foreachBatch(batches)
                .option("checkpointLocation", f"{place}/stream")
                .trigger(availableNow=True)
            ).awaitTermination()
            print("done")
        except Exception:  # noqa: BLE001 - the test reads which
            traceback.print_exc()
            print("failed")


if __name__ == "__main__":
    main()
